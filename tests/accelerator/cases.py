"""The cases of an accelerator that refuses, run as ``python -m tests.accelerator.cases``: one line of JSON for each.

A case builds the parts on the CPU, replaces their weights by tensors of :mod:`tests.accelerator.device`, and runs them.
Its line holds the result, or the error.
"""

import asyncio
import copy
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from drafter.decoding.params import SamplingParams
from drafter.engine import runner
from drafter.engine.engine import Engine
from drafter.engine.request import RequestOptions, Update
from drafter.engine.settings import Plan
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.serving.answers import Answer, Model
from drafter.serving.metrics import Metrics
from drafter.serving.protocol import CompletionRequest
from drafter.serving.worker import Worker
from drafter.targets.capabilities import decoder_of
from drafter.targets.target import Target
from drafter.training.module import DrafterModule
from tests.accelerator.device import Refuser
from tests.accelerator.training import module_of, train_step, validate
from tests.data.tiny import tiny_tokenizer

GREEDY = SamplingParams(max_new_tokens=32, ignore_eos=True)
FILTERED = SamplingParams(max_new_tokens=32, temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, seed=1, ignore_eos=True)
_SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
# A window of 8 tokens is shorter than the visible slots, so every forward has a mask for each kind of layer.
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "gemma": {"model_type": "gemma2", "sliding_window": 8, "query_pre_attn_scalar": 16},
    "windows": {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "deep": {"model_type": "llama", "num_hidden_layers": 32, "dtype": "bfloat16"},  # kernels of Llama 3.1 8B
}
refuser = Refuser()


@cache
def cpu_target(kind: str) -> Target:
    """A small target on the CPU. It answers the questions of :mod:`drafter.targets.capabilities` there."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**_SIZES | _MODELS[kind])
    return Target.from_model(AutoModelForCausalLM.from_config(config), name=kind)


def target_of(kind: str) -> Target:
    """The target of :func:`cpu_target` with weights on the device; what it can do is known."""
    on_cpu = cpu_target(kind)
    model = refuser.put(lambda: copy.deepcopy(on_cpu.model))
    capabilities = on_cpu.capabilities._replace(decoder=decoder_of(model))
    target = Target(model, tiny_tokenizer(), capabilities, name=kind, plain_fingerprint="x")
    # The library of quantised weights would ask these tensors, which are of no plain type, for their numbers.
    target.embedding_weight_VD = model.get_input_embeddings().weight.detach()
    target.output_weight_VD = model.get_output_embeddings().weight.detach()
    return target


def drafter_of(target: Target, **shape: Any) -> RecurrentDrafter:
    """A drafter of the target, on its device."""
    fields = {"head": "tied", "num_res_blocks": 1, "draft_vocab_size": target.vocab_size // 2, **shape}
    config = DrafterConfig(vocab_size=target.vocab_size, hidden_size=target.hidden_size, **fields)
    return refuser.put(lambda: RecurrentDrafter(config).eval().to(target.dtype)).bind(target)


def unpack_outside() -> None:
    """The results of a step are unpacked on the CPU, where tensors have numbers."""
    unpack = runner._unpack

    def unpacked(words_X: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with unset_fake_temporarily():
            return unpack(words_X, [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in like])

    runner._unpack = unpacked


def engine_of(target: Target, shape: Mapping[str, Any] | None = None, **settings: Any) -> Engine:
    """An engine of the target with a drafter of the shape, unless the settings name another method."""
    fields = {"method": "drafter", "max_num_seqs": 8, "beam_width": 4, "draft_length": 4, "tree_size": 12}
    config = Plan(**{**fields, **settings})
    drafter = drafter_of(target, **shape or {}) if config.method == "drafter" else None
    draft_model = target_of("llama") if config.method == "draft-model" else None
    return Engine(target, drafter, config, draft_model=draft_model)


def settled(engine: Engine, num_rows: int, params: SamplingParams, options: RequestOptions | None = None) -> Engine:
    """The engine with rows that have all been decoding."""
    engine.reserve(128)
    for row in range(num_rows):
        engine.add(list(range(3, 20 + row)), params, options)
    engine.step()
    engine.step()
    return engine


def step(
    engine: Engine, num_rows: int, params: SamplingParams, options: RequestOptions | None = None
) -> dict[str, int]:
    """Copies of one step of rows that have all been decoding."""
    settled(engine, num_rows, params, options)
    refuser.clear()
    assert len(engine.step()) == num_rows
    return refuser.copies


class Kernels(TorchDispatchMode):
    """Counts operators that write memory; views are free.

    Attributes:
        found: numbers of the target's forward (``target``) and of all else (``rest``).
    """

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.found, self._part = Counter[str](), "rest"
        target.forward, target.logits = self._of_target(target.forward), self._of_target(target.logits)

    def _of_target(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            self._part = "target"
            result = function(*args, **kwargs)
            self._part = "rest"
            return result

        return inner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (
            {item.untyped_storage()._cdata for item in tree_leaves(tree) if isinstance(item, torch.Tensor)}
            for tree in ((args, kwargs), result)
        )
        self.found[self._part] += func._schema.is_mutable or bool(made - given)
        return result


def kernels(num_nodes: int, beam_width: int, draft_length: int) -> dict[str, int]:
    """Kernels of an eager greedy step of one row."""
    tree = {"beam_width": beam_width, "draft_length": draft_length, "tree_size": num_nodes}
    method = "drafter" if num_nodes > 1 else "none"
    shape = {"num_res_blocks": 2, "block_rank": 16}
    engine = settled(engine_of(target_of("deep"), shape, method=method, max_num_seqs=1, **tree), 1, GREEDY)
    with Kernels(engine.target) as count:
        engine.step()
    return count.found


def reads_of_prefixes() -> int:
    """Reads of steps that fill prompts in, in chunks, while no row decodes; and reads, beyond its own, of a step in
    which requests share the prompts of finished and of running ones.
    """
    engine = engine_of(target_of("windows"), enable_prefix_caching=True, prefill_chunk=16)
    engine.reserve(128)
    prompt = list(range(50))
    first, second = engine.add(prompt, GREEDY), engine.add(prompt[::-1], GREEDY)
    refuser.clear()
    assert engine.step() == [] == engine.step()
    num_reads = refuser.copies["read"]
    while not engine.step():
        pass
    engine.abort(first.request_id)
    new = [engine.add([*start, 5, 6], FILTERED) for start in (prompt, prompt, prompt[::-1])]
    refuser.clear()
    assert engine.step()
    assert all(request.num_shared >= 40 for request in new), (new, second)
    return num_reads + refuser.copies["read"] - 1


class _OnDevice(Worker):
    """A worker whose thread has the device too."""

    def _run(self) -> None:
        with refuser.on():
            super()._run()


async def _serve(engine: Engine) -> int:
    """Reads of a worker's thread beyond one for each step that decodes, from its first tokens on."""
    num_steps = 0
    step = engine.step

    def counted() -> list[Update]:
        nonlocal num_steps
        updates = step()
        num_steps += bool(updates)
        return updates

    engine.step = counted  # type: ignore[method-assign]
    worker = _OnDevice(engine, max_queue=4, metrics=Metrics())
    model = Model("llama", "", engine.target.tokenizer)
    await worker.start()
    for params, logprobs in ((GREEDY, None), (FILTERED, 2)):
        body = CompletionRequest(
            model="llama", prompt="x", stream=True, logprobs=logprobs, details=logprobs is not None
        )
        params = replace(params, max_new_tokens=6)
        options = RequestOptions(num_logprobs=logprobs, want_tree=logprobs is not None)
        requests = [engine.make_request(list(range(start, start + 40)), params, options) for start in (0, 5)]
        answer = Answer(model, body, requests, asyncio.get_running_loop().time() + 600)
        worker.submit(answer)
        assert [entry async for entry in answer.entries()]
    await worker.stop()
    assert num_steps > 4
    return refuser.copies["read"] - num_steps


def reads_of_the_worker() -> int:
    """The server's thread: warm-up, prefill, shared prefixes, answers with and without log-probabilities and trees."""
    with refuser.on():
        engine = engine_of(target_of("llama"), enable_prefix_caching=True, max_model_len=128)
    return asyncio.run(_serve(engine))


def training(
    run: Callable[[DrafterModule], None] = train_step, *, is_logged: bool = False, **objective: Any
) -> dict[str, int]:
    """Copies of a training step, or of a validation of two batches."""
    target = target_of("llama")
    module = module_of(target, drafter_of(target), is_logged=is_logged, **objective)
    refuser.clear()
    run(module)
    return refuser.copies


def _cases_of_steps() -> dict[str, Callable[[], Any]]:
    cases: dict[str, Callable[[], Any]] = {}
    samplings = {"greedy": GREEDY, "sampled": FILTERED}
    for kind, num_rows, word in product(("llama", "gemma", "windows"), (1, 8), samplings):
        cases[f"step-{kind}-{num_rows}-{word}"] = lambda k=kind, n=num_rows, w=word: step(
            engine_of(target_of(k)), n, samplings[w]
        )
    for method, word in product(("none", "lookup", "draft-model"), samplings):
        cases[f"step-{method}-{word}"] = lambda m=method, w=word: step(
            engine_of(target_of("llama"), method=m), 2, samplings[w]
        )
    cases["step-rejection-rule"] = lambda: step(
        engine_of(target_of("llama"), method="draft-model", verify="rejection"), 2, FILTERED
    )
    asked = RequestOptions(num_logprobs=3, want_tree=True)
    cases["step-with-logprobs-and-trees"] = lambda: step(engine_of(target_of("llama")), 8, FILTERED, asked)
    return cases


def _refusals() -> dict[str, Callable[[], Any]]:
    """Programs that the device must refuse; without these cases the others would prove nothing."""
    x = refuser.numberless(8)
    return {
        "refused-item": lambda: x.sum().item(),
        "refused-bool": lambda: bool((x > 0).any()),
        "refused-tolist": lambda: x.tolist(),
        "refused-numpy": lambda: x.numpy(),
        "refused-nonzero": lambda: x.nonzero(),
        "refused-mask": lambda: x[x > 0],
        "refused-unique": lambda: x.unique(),
        "refused-repeat": lambda: x.repeat_interleave(x.long()),
        "refused-two-devices": lambda: x + torch.zeros(8),
        "refused-index-of-the-host": lambda: torch.zeros(8)[x.long()],
        "counted-read": lambda: (x.cpu(), x.to("cpu"), torch.zeros(8).copy_(x), refuser.copies)[-1],
        "counted-sent": lambda: (torch.tensor([1], device=x.device), torch.zeros(8).to(x.device), refuser.copies)[-1],
    }


CASES: dict[str, Callable[[], Any]] = {
    **_cases_of_steps(),
    "kernels-1": lambda: kernels(1, 1, 1),
    "kernels-8": lambda: kernels(8, 4, 3),
    "kernels-24": lambda: kernels(24, 8, 4),
    "kernels-64": lambda: kernels(64, 16, 5),
    "reads-of-prefixes": reads_of_prefixes,
    "reads-of-the-worker": reads_of_the_worker,
    "train-kl": training,
    "train-cross-entropy": lambda: training(kl=0.0, cross_entropy=1.0),
    "train-sampled": lambda: training(shared_tokens=64),
    "train-logged": lambda: training(is_logged=True),
    "train-validation": lambda: training(validate),
    **_refusals(),
}


def main(starts: Sequence[str]) -> None:
    """Run the cases whose names start so, or all."""
    unpack_outside()
    for kind in _MODELS:
        cpu_target(kind)
    for name, case in CASES.items():
        if starts and not name.startswith(tuple(starts)):
            continue
        refuser.clear()
        try:
            # The worker's thread switches the device on itself.
            with refuser.on() if name != "reads-of-the-worker" else nullcontext():
                found = {"name": name, "found": case()}
        except Exception as error:
            found = {"name": name, "error": type(error).__name__, "text": traceback.format_exc()[-2000:]}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
