"""Times of a step's parts on this machine, as a table and JSON. Needs no network: targets are random but for --target.

python scripts/gpu_check.py --out gpu-check.json [--target FOLDER] [--shapes 1b,8b] [--seconds 420]
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from drafter.bench.hardware import CheckSettings, check_table, check_target
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target
from drafter.utils.io import write_atomic
from drafter.utils.provenance import run_record

# hidden, intermediate, layers, heads, key/value heads, vocabulary, output matrix is the embedding
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 256, True),
    "1b": (2048, 8192, 16, 32, 8, 128256, True),
    "8b": (4096, 14336, 32, 32, 8, 128256, False),
}
_DRAFT_VOCABULARY = 32768


def random_target(shape: str, device: str, dtype: torch.dtype) -> Target:
    """A Llama of that shape with random weights, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, layers, heads, kv_heads, vocabulary, is_tied = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=8192,
        tie_word_embeddings=is_tied, dtype=dtype,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return Target.from_model(model, name=f"llama-{shape}-random")


def random_drafter(target: Target) -> RecurrentDrafter:
    """An untrained drafter with a tied head, on the target's device."""
    config = DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        head="tied",
        draft_vocab_size=min(_DRAFT_VOCABULARY, target.vocab_size // 2),
    )
    drafter = RecurrentDrafter(config)
    drafter.to(device=target.device, dtype=target.dtype)  # type: ignore[call-arg, arg-type]
    return drafter.eval().bind(target)


def targets(folder: str | None, shapes: list[str], device: str, dtype: torch.dtype) -> Iterator[Target]:
    """The given target, then the random ones, one in memory at a time."""
    if folder:
        yield Target.load(folder, dtype=str(dtype).removeprefix("torch."), device=device)
    for shape in shapes:
        yield random_target(shape, device, dtype)


def main(argv: list[str] | None = None) -> int:
    """Measure eager steps of all targets, then compiled ones while the time lasts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--target", help="folder of a real target to measure first")
    parser.add_argument("--shapes", default="1b,8b", help=f"random targets, of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-sizes", default="1,8,32")
    parser.add_argument("--tree-sizes", default="16,32,64,128")
    parser.add_argument("--seconds", type=float, default=420.0, help="no measurement begins after that time")
    parser.add_argument("--no-compile", action="store_true", help="eager steps only")
    given = parser.parse_args(argv)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu_check: there is no CUDA device; --device cpu measures the CPU", file=sys.stderr)
        return 2
    shapes = [name for name in given.shapes.split(",") if name]
    unknown = [name for name in shapes if name not in SHAPES]
    if unknown:
        print(f"gpu_check: unknown shape {unknown[0]!r}; shapes are {', '.join(SHAPES)}", file=sys.stderr)
        return 2
    settings = replace(
        CheckSettings(),
        batch_sizes=tuple(int(number) for number in given.batch_sizes.split(",")),
        tree_sizes=tuple(int(number) for number in given.tree_sizes.split(",")),
        copy_bytes=2**30 if given.device.startswith("cuda") else 2**27,
    )
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        records.append(record)
        made_by = run_record(settings=vars(settings))
        write_atomic(given.out, json.dumps({"records": records, **made_by}, indent=1) + "\n")
        print(f"{record['target']}, {record['batch_size']} rows: done", file=sys.stderr)

    end = time.perf_counter() + given.seconds
    for compile in (False,) if given.no_compile else (False, True):
        for target in targets(given.target, shapes, given.device, getattr(torch, given.dtype)):
            if time.perf_counter() < end:
                check_target(target, random_drafter(target), settings, end, compile=compile, on_record=keep)
    print(check_table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
