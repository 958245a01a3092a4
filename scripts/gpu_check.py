"""What is to be known of a machine with a GPU, one stage a process; scripts/gpu_check.sh runs all stages in order.

Every row is a line of JSON in --out, written when it is measured. What fails gives a row with the error, and the rest
goes on. Needs no network: targets have random weights, but for SmolLM2-135M, where the machine has it.

python scripts/gpu_check.py STAGE --out gpu-check.jsonl [--shapes 1b 8b] [--device cpu] [--small]
"""

import argparse
import gc
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.loading import load_drafter, shipped_drafter
from drafter.engine.request import Request, RequestOptions
from drafter.engine.settings import EngineConfig
from drafter.engine.tuned import PLAIN, Sizer, Tree
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.runtimes.loading import load_target, wrap_model
from drafter.targets.catalog import home_folder
from drafter.targets.target import Target
from drafter.utils import ASSETS
from drafter.utils.io import first_line
from drafter.utils.provenance import run_record

# hidden, intermediate, layers, heads, key/value heads, vocabulary, output matrix is the embedding
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 256, True),
    "1b": (2048, 8192, 16, 32, 8, 128256, True),
    "8b": (4096, 14336, 32, 32, 8, 128256, False),
}
REAL = "smollm2-135m"
TREES = (PLAIN, Tree(4, 3, 8), Tree(8, 4, 24), Tree(16, 5, 64))
GREEDY = SamplingParams(max_new_tokens=128, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=128, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True)
_MOST_TOKENS = 12  # of a step: depths of the largest tree, copies included, and one more
KINDS = {"greedy": GREEDY, "sampled": SAMPLED}


class Check:
    """The options of this process, and its rows.

    Attributes:
        given: words of the command line.
        rows, trees, num_steps, prompt_length: of the measured steps.
        compile: settings of engines, those without graphs first, which need no warm-up.
        has_failed: there is a row with an error.
    """

    def __init__(self, stage: str, given: argparse.Namespace) -> None:
        self.stage, self.given = stage, given
        small = given.small
        self.rows, self.trees = ((1, 2), TREES[:2]) if small else ((1, 8, 32), TREES)
        self.num_steps, self.prompt_length = (2, 24) if small else (8, 512)
        self.is_cuda = given.device != "cpu"
        self.compile = (False, None) if self.is_cuda and not given.eager else (False,)
        self.has_failed = False
        self.write(run=run_record())

    def write(self, **row: Any) -> None:
        """One more row, in the file and on the screen."""
        with self.given.out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"stage": self.stage, **row}, default=str) + "\n")
        if "run" not in row:
            print(self.stage, *(f"{name}={value}" for name, value in row.items() if value is not None), flush=True)

    @contextmanager
    def trying(self, **row: Any) -> Iterator[None]:
        """What fails in here becomes a row."""
        try:
            yield
        except Exception as error:
            self.has_failed = True
            self.write(**row, error=f"{type(error).__name__}: {first_line(error)}")

    def targets(self, *, dtype: str | None = None, has_random: bool = True) -> Iterator[tuple[str, Any]]:
        """The name of each target, and a function that makes it on a device (default: the measured one)."""

        def loader(name: str) -> Callable[..., Target]:
            def load(device: str = self.given.device) -> Target:
                kind = dtype or self.given.dtype
                if name in SHAPES:
                    return random_target(name, device, getattr(torch, kind))
                return load_target(name, runtime="torch", dtype=kind, device=device)

            return load

        if (home_folder() / "targets" / REAL).is_dir() and not self.given.no_real:
            yield REAL, loader(REAL)
        for shape in self.given.shapes if has_random else ():
            yield shape, loader(shape)


def random_target(shape: str, device: str, dtype: torch.dtype) -> Target:
    """A Llama of that shape with random weights, made on the device; float32 weights are the same on every device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, layers, heads, kv_heads, vocabulary, is_tied = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=8192,
        tie_word_embeddings=is_tied, dtype=dtype,
    )  # fmt: skip
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    with torch.device("cpu" if dtype == torch.float32 else device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return wrap_model(model.to(device), name=f"llama-{shape}-random")


def drafter_of(name: str, target: Target) -> RecurrentDrafter:
    """The package's drafter of the target, or one with random weights."""
    if shipped_drafter(name):
        return load_drafter(name, target)
    rank = 1024 if target.hidden_size >= 2048 else None
    sizes = {"vocab_size": target.vocab_size, "draft_vocab_size": min(32768, target.vocab_size // 2)}
    config = DrafterConfig(hidden_size=target.hidden_size, head="tied", block_rank=rank, **sizes)
    torch.manual_seed(1)
    drafter = RecurrentDrafter(config).to(target.device, target.dtype)  # type: ignore[arg-type, unused-ignore]
    return drafter.eval().bind(target)


def prompts_of(target: Target, number: int, length: int) -> list[list[int]]:
    """Prompts of the package for a target with a tokenizer, else random tokens."""
    if target.tokenizer is None:
        return torch.randint(target.vocab_size, (number, length), generator=torch.Generator().manual_seed(2)).tolist()
    lines = (ASSETS / "evaluation-prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[:number]]
    return [target.encode_chat([{"role": "user", "content": text}]) for text in texts]


class Steered(Sizer):
    """A sizer whose caller sets the next tree."""

    def __init__(self, trees: Sequence[Tree]) -> None:
        super().__init__(())
        self.trees, self.tree = list(trees), PLAIN

    def choose(self, num_rows: int) -> Tree:
        return self.tree


def engine_of(check: Check, name: str, target: Target, length: int, **settings: Any) -> Engine:
    """An engine with room for ``length`` tokens a row, warm; its warm-up is a row. Earlier engines must be gone."""
    gc.collect()
    if check.is_cuda:
        torch.cuda.empty_cache()
    sizer, is_compiled = settings.pop("sizer", None), settings.get("compile")
    settings = {"max_num_seqs": max(check.rows), "max_model_len": length, "tuned": "none", **settings}
    engine = Engine(target, drafter_of(name, target), EngineConfig(method="drafter", **settings), sizer=sizer)
    start = time.perf_counter()
    engine.reserve(length + max(tree.tree_size for tree in TREES))
    if is_compiled is not False:
        check.write(target=name, what="warm-up", seconds=round(time.perf_counter() - start, 1), **memory(check))
    return engine


def memory(check: Check) -> dict[str, float]:
    """Peak GiB on the device since the last call."""
    if not check.is_cuda:
        return {}
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return {"peak_gib": round(peak, 2)}


def answer(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, *, speculate: bool = True
) -> list[Request]:
    """The finished requests of token ids; ``speculate`` False: plain decoding."""
    options = RequestOptions(speculate=speculate)
    engine.forget()
    requests = [engine.add(engine.make_request(ids, params, options, want_text=False)) for ids in prompts]
    while engine.has_work:
        engine.step()
    return requests


def identity(check: Check) -> None:
    """In float32: texts of the device against plain decoding on the CPU, for every way to decode."""
    params = [replace(each, max_new_tokens=8 if check.given.small else 40) for each in KINDS.values()]
    loaders = [("tiny", lambda device=check.given.device: random_target("tiny", device, torch.float32))]
    cases = []
    for name, load in [*loaders, *check.targets(dtype="float32", has_random=False)]:
        on_cpu = load("cpu")
        prompts = prompts_of(on_cpu, 2 if check.given.small else 8, 24)
        plain = Engine(on_cpu, None, EngineConfig(method="none"))
        expected = [[each.token_ids for each in plain.generate(prompts, one)] for one in params]
        cases.append((name, load(), prompts, params, expected))
    for is_compiled, (name, *case) in product(check.compile, cases):
        with check.trying(target=name, is_compiled=is_compiled is None):
            compare_texts(check, name, *case, is_compiled)


def compare_texts(
    check: Check,
    name: str,
    target: Target,
    prompts: list[list[int]],
    params: list[SamplingParams],
    expected: list[list[list[int]]],
    is_compiled: bool | None,
) -> None:
    """A row for each way to decode: how many texts are the expected ones."""
    engine = engine_of(check, name, target, 1024, compile=is_compiled, max_num_seqs=len(prompts))
    kinds = zip(KINDS, params, expected, strict=True)
    for (kind, one, texts), speculate, rows in product(kinds, (False, True), (1, len(prompts))):
        parts = (prompts[start : start + rows] for start in range(0, len(prompts), rows))
        found = [request.token_ids for part in parts for request in answer(engine, part, one, speculate=speculate)]
        check.write(
            target=name, is_compiled=engine.plan.compile, is_drafted=speculate, kind=kind, rows=rows,
            equal_texts=sum(map(list.__eq__, found, texts)), texts=len(texts),
        )  # fmt: skip


def steps(check: Check) -> None:
    """Milliseconds of a step with each tree; steps without graphs first, which need no warm-up."""
    for is_compiled, (name, load) in product(check.compile, check.targets()):
        with check.trying(target=name, is_compiled=is_compiled is None):
            sizer = Steered(check.trees)
            length = check.prompt_length + _MOST_TOKENS * (2 + check.num_steps) * len(check.trees)
            engine = engine_of(check, name, load(), length, compile=is_compiled, sizer=sizer)
            for (kind, params), rows in product(KINDS.items(), check.rows):
                time_steps(check, engine, sizer, rows, params, check.prompt_length, target=name, kind=kind)
            del engine


def time_steps(
    check: Check, engine: Engine, sizer: Steered, rows: int, params: SamplingParams, length: int, **about: Any
) -> None:
    """A row for each tree, over the same running requests."""
    prompts = torch.randint(engine.target.vocab_size, (rows, length)).tolist()
    engine.drop()
    sizer.tree = PLAIN
    params = replace(params, max_new_tokens=10**6)
    requests = [engine.add(engine.make_request(ids, params, want_text=False)) for ids in prompts]
    while not all(request.is_prefilled for request in requests):
        engine.step()
    for tree in sizer.trees:
        sizer.tree, times, tokens = tree, [], []
        for _ in range(2 + check.num_steps):
            engine.forget()  # drafts of random weights are all in vain
            start = time.perf_counter()
            updates = engine.step()
            times.append(time.perf_counter() - start)
            tokens += [len(update.token_ids) for update in updates]
        about |= {"is_compiled": engine.plan.compile, "rows": rows, "length": length, "tree": tree.tree_size}
        each = round(sum(tokens) / len(tokens), 2)
        check.write(**about, ms=round(1e3 * median(times[2:]), 3), tokens_per_step=each, **memory(check))
    engine.drop()


def prefill(check: Check) -> None:
    """Tokens per second of prompts until their first token, a long one alone and eight together, by size of a chunk."""
    (name, load) = list(check.targets())[-1]
    target, lengths = load(), ((1, 64), (8, 32)) if check.given.small else ((1, 4096), (8, 512))
    one = SamplingParams(max_new_tokens=1, ignore_eos=True)
    for chunk in (256, 1024, 4096):
        with check.trying(target=name, chunk=chunk):
            settings = {"compile": False, "prefill_chunk": chunk, "max_num_seqs": 8}
            engine = engine_of(check, name, target, lengths[0][1] + 64, **settings)
            for rows, length in lengths:
                prompts = torch.randint(target.vocab_size, (rows, length)).tolist()
                times = []
                for _ in range(5):
                    start = time.perf_counter()
                    answer(engine, prompts, one, speculate=False)
                    times.append(time.perf_counter() - start)
                speed = round(rows * length / median(times[2:]))
                check.write(target=name, chunk=chunk, rows=rows, length=length, tokens_per_s=speed, **memory(check))
            del engine


def answers(check: Check) -> None:
    """Whole answers, plain and drafted, in the same engine."""
    for name, load in check.targets():
        with check.trying(target=name):
            target = load()
            engine = engine_of(check, name, target, check.prompt_length + 512, compile=check.compile[-1])
            prompts = prompts_of(target, max(check.rows), check.prompt_length)
            for rows, (kind, params) in product(check.rows, KINDS.items()):
                short = replace(params, max_new_tokens=4)
                params, texts = short if check.given.small else params, []
                for speculate in (False, True):
                    answer(engine, prompts[:rows], short, speculate=speculate)  # records the steps
                    start = time.perf_counter()
                    done = answer(engine, prompts[:rows], params, speculate=speculate)
                    seconds = time.perf_counter() - start
                    texts.append([request.token_ids for request in done])
                    check.write(
                        target=name, is_compiled=engine.plan.compile, kind=kind, rows=rows, is_drafted=speculate,
                        tokens_per_s=round(sum(map(len, texts[-1])) / seconds, 1),
                        equal_texts=sum(map(list.__eq__, *texts)) if speculate else None, **memory(check),
                    )  # fmt: skip
            del engine


def train(check: Check) -> None:
    """Tokens per second and memory of training steps by Lightning's own loop, with both losses."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Callback
    from torch.utils.data import DataLoader

    from drafter.data.rows import collate
    from drafter.models.config import DrafterConfig
    from drafter.models.drafter import RecurrentDrafter
    from drafter.training.module import DrafterModule, Teacher
    from drafter.training.options import Objective, OptimOptions

    class Clock(Callback):
        """When each step ended. In between, torch warns of every wait for the device."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_start(self, *args: Any) -> None:
            if check.is_cuda:
                torch.cuda.set_sync_debug_mode("warn")

        def on_train_batch_end(self, *args: Any) -> None:
            if check.is_cuda:
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    num_rows, width = (2, 64) if check.given.small else (16, 1024)
    num_steps = 4 if check.given.small else 10
    losses = {
        "exact": Objective(memory_mib=2048),
        "sampled": Objective(memory_mib=2048, shared_tokens=2048, depth_rates=(1.0, 0.4, 0.2, 0.1, 0.05)),
    }
    for name, load in check.targets():
        target = load()
        for kind, objective in losses.items():
            with check.trying(target=name, loss=kind):
                num_draft = min(32768, target.vocab_size // 2)
                rank = 1024 if target.hidden_size >= 2048 else None
                config = DrafterConfig(
                    vocab_size=target.vocab_size, hidden_size=target.hidden_size, head="tied", draft_length=5,
                    draft_vocab_size=num_draft, block_rank=rank,
                )  # fmt: skip
                drafter = RecurrentDrafter(config).to(target.device).bind(target)
                ids = torch.randint(num_draft, (num_steps, num_rows, width))
                batches = [collate([(row, torch.arange(width) >= width // 3) for row in batch]) for batch in ids]
                module = DrafterModule(drafter, Teacher(target, drafter, torch.bfloat16), objective, OptimOptions())
                clock = Clock()
                memory(check)
                trainer = Trainer(
                    max_steps=num_steps, accelerator="gpu" if check.is_cuda else "cpu", devices=1,
                    precision="bf16-mixed", gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
                )  # fmt: skip
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type, unused-ignore]
                waits = [str(each.message) for each in warned if "called a synchronizing" in str(each.message)]
                seconds = median(map(float.__sub__, clock.ends[2:], clock.ends[1:]))
                check.write(
                    target=name, loss=kind, rows=num_rows, width=width, tokens_per_s=round(num_rows * width / seconds),
                    waits_per_step=len(waits) / num_steps, **memory(check),
                )  # fmt: skip


STAGES = {each.__name__: each for each in (identity, steps, answers, train, prefill)}


def main(argv: list[str] | None = None) -> int:
    """Run one stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines to add to")
    parser.add_argument("--shapes", nargs="*", default=["1b", "8b"], choices=SHAPES, help="random targets")
    parser.add_argument("--no-real", action="store_true", help=f"leave {REAL} out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--small", action="store_true", help="few rows, trees and steps, to try the stages")
    given = parser.parse_args(argv)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu_check: there is no CUDA device; --device cpu measures the CPU", file=sys.stderr)
        return 2
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    check = Check(given.stage, given)
    with check.trying():
        STAGES[given.stage](check)
    return int(check.has_failed)


if __name__ == "__main__":
    sys.exit(main())
