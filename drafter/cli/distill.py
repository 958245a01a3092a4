"""`drafter distill` and `drafter data inspect`: training data made, and looked at. Wiring and print-out only."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.cli.data import columns_of
from drafter.engine.loading import Dtype, load_drafter, load_target

if TYPE_CHECKING:
    from drafter.distill.endpoint import Endpoint
    from drafter.distill.local import EngineAnswerer
    from drafter.distill.ray_answers import RayAnswerer


def distill(
    *,
    out: Path,
    target: str | None = None,
    prompts: str | None = None,
    num_prompts: int | None = None,
    max_new_tokens: int = 256,
    temperature: tuple[float, ...] = (0.0,),
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    num_answers: int = 1,
    seed: int = 0,
    shard: str = "1/1",
    format: str | None = None,
    column: list[str] | None = None,
    exclude: str | None = None,
    drafter: str | None = None,
    batch_size: int = 64,
    batch_tokens: int = 65536,
    endpoint: str | None = None,
    model: str | None = None,
    concurrency: int = 16,
    retries: int = 6,
    ray: str | None = None,
    ray_workers: int = 1,
    ray_gpus: float = 0.0,
    ray_cpus: float = 1.0,
    dtype: Dtype = "auto",
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Let the target answer prompts: training data for its drafter.

    Answers are appended to --out as they are finished; started again, the command goes on where it was broken off.

    Args:
        out: .jsonl file of the answers
        target: alias, hub id, folder or .gguf file of the language model
        prompts: file of prompts, hub data set, or `magpie`: the target invents its own (default: about 100 prompts
            that come with the package)
        num_prompts: how many prompts magpie invents (all of them before the first is answered), or at most so many of
            the file
        max_new_tokens: longest answer in tokens
        temperature: 0 is greedy; several, such as 0,0.7, are used in turn
        top_k: sample among the k likeliest tokens; 0 is off
        top_p: sample among the likeliest tokens that make up this probability; 1 is off
        min_p: sample among tokens at least this likely relative to the likeliest; 0 is off
        num_answers: answers to each prompt
        seed: of sampling
        shard: which part of the prompts to answer, such as 3/8; every part needs its own --out
        format: messages, sharegpt, alpaca, prompt, turns or text (default: recognised by a row's keys)
        column: OURS=THEIRS, such as prompt=question, where a file calls a key otherwise; may be repeated
        exclude: file of prompts that must not be answered: an evaluation's own
        drafter: folder of an exported drafter; the same answers, sooner
        batch_size: prompts answered at the same time
        batch_tokens: most cached tokens at the same time: long prompts are answered in smaller batches
        endpoint: address of an OpenAI-compatible server that serves the target, instead of running it here
        model: name of the target on that server; its key is read from OPENAI_API_KEY
        concurrency: requests at the same time
        retries: further attempts after a request that failed
        ray: answer on a Ray cluster: its address, `auto` for the one this machine belongs to, `local` for a new one
            here; target and drafter must be found under the same names on every machine
        ray_workers: engines on the cluster, one for each GPU say
        ray_gpus: GPUs that each engine takes
        ray_cpus: processor cores that each engine takes
        dtype: number format of the model (auto: bfloat16 on CUDA, else float32)
        device: auto, cpu, cuda or cuda:1
        revision: hub revision of the target
        trust_remote_code: run code that a hub model brings along
    """
    server = _endpoint(endpoint, model, concurrency, retries)
    if target is None and server is None:
        raise ValueError("who is to answer? Give --target, or --endpoint with --model")
    if drafter is not None and target is None:
        raise ValueError("--drafter needs --target: with --endpoint it is the server that decodes")

    from drafter.distill.local import distill as run
    from drafter.utils.provenance import write_run_record

    loaded, head, cluster = None, None, None
    if ray is not None:
        if target is None:
            raise ValueError("--ray needs --target: it says where the target runs")
        make = partial(
            engine_answerer, target, drafter, dtype=dtype, device=device, revision=revision,
            trust_remote_code=trust_remote_code, batch_size=batch_size, batch_tokens=batch_tokens,
        )  # fmt: skip
        cluster = _cluster(make, ray, ray_workers, ray_gpus, ray_cpus, batch_size)
    elif target is not None:
        loaded = load_target(target, dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code)
        head = load_drafter(drafter, loaded) if drafter is not None else None
    out.parent.mkdir(parents=True, exist_ok=True)
    report = run(
        loaded, prompts, out, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, num_answers=num_answers, seed=seed, shard=shard, num_prompts=num_prompts, format=format,
        columns=columns_of(column), exclude=exclude, drafter=head, batch_size=batch_size, batch_tokens=batch_tokens,
        endpoint=server, answerer=cluster,
    )  # fmt: skip
    if report.num_new:
        write_run_record(out, seed=seed, settings=vars(report))
    for line in report.lines():
        print(line)


def engine_answerer(
    target: str, drafter: str | None, *, batch_size: int, batch_tokens: int, **how: Any
) -> "EngineAnswerer":
    """An engine of its own for each worker of a cluster; ``how``: as for :func:`load_target`."""
    from drafter.distill.local import EngineAnswerer

    loaded = load_target(target, **how)
    head = load_drafter(drafter, loaded) if drafter is not None else None
    return EngineAnswerer(loaded, head, batch_size=batch_size, batch_tokens=batch_tokens)


def _cluster(
    make: "Callable[[], EngineAnswerer]", address: str, workers: int, gpus: float, cpus: float, batch_size: int
) -> "RayAnswerer":
    from drafter.distill.ray_answers import RayAnswerer, RayOptions

    return RayAnswerer(make, RayOptions(address, workers, gpus, cpus, batch_size))


def _endpoint(url: str | None, model: str | None, concurrency: int, retries: int) -> "Endpoint | None":
    if url is None:
        return None
    from drafter.distill.endpoint import Endpoint

    return Endpoint(url, model or "", concurrency=concurrency, retries=retries)
