"""Times of a step's parts on this machine, as a table and JSON. Needs no network: targets are random but for --target.

python scripts/gpu_check.py --out gpu-check.json [--target FOLDER] [--shapes 1b,8b] [--seconds 420]
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from drafter.bench.measure import PeakMemory
from drafter.bench.step_times import StepClock, copy_bandwidth, weight_bytes
from drafter.engine.settings import EngineConfig
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target
from drafter.utils.io import write_atomic
from drafter.utils.provenance import run_record
from drafter.utils.tables import markdown_table

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


def check(target: Target, batch_size: int, tree_sizes: list[int], end: float, *, compile: bool) -> dict[str, Any]:
    """Times of plain steps, of steps with trees and of the parts of a step, in milliseconds, and the floor."""
    num_bytes = copy_bandwidth(target.device, 2**30 if target.device.type == "cuda" else 2**27)
    config = EngineConfig(max_num_seqs=batch_size, beam_width=8, draft_length=4, compile=compile)
    with PeakMemory(target.device) as memory:
        clock = StepClock(target, random_drafter(target), config, tree_sizes)
        times = {"step_ms": {str(size): ms for size, ms in clock.steps(end).items()}, "parts_ms": clock.parts()}
    return {
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "compile": compile,
        "batch_size": batch_size,
        "weight_bytes": weight_bytes(target),
        "copy_bytes_per_second": round(num_bytes),
        "floor_ms": round(1e3 * weight_bytes(target) / num_bytes, 4),
        **times,
        "peak_bytes": memory.num_bytes,
        "peak_of": memory.kind,
    }


def table(records: list[dict[str, Any]]) -> str:
    """The records as a Markdown table."""
    sizes = list(dict.fromkeys(size for record in records for size in record["step_ms"]))
    parts = list(dict.fromkeys(part for record in records for part in record["parts_ms"]))
    columns = ["target", "mode", "rows", "floor ms", *(f"N = {size} ms" for size in sizes)]
    rows = []
    for record in records:
        times = [record["step_ms"].get(size) for size in sizes] + [record["parts_ms"].get(part) for part in parts]
        first = [f"{record['target']} {record['dtype']}", "compiled" if record["compile"] else "eager"]
        first += [str(record["batch_size"]), f"{record['floor_ms']:.2f}"]
        rows.append(
            [*first, *("-" if ms is None else f"{ms:.2f}" for ms in times), f"{record['peak_bytes'] / 2**30:.2f}"]
        )
    return markdown_table([*columns, *(f"{part} ms" for part in parts), "peak GiB"], rows)


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
    batch_sizes = [int(number) for number in given.batch_sizes.split(",")]
    tree_sizes = [int(number) for number in given.tree_sizes.split(",")]
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        records.append(record)
        made_by = run_record(settings={"tree_sizes": tree_sizes})
        write_atomic(given.out, json.dumps({"records": records, **made_by}, indent=1) + "\n")
        print(f"{record['target']}, {record['batch_size']} rows: done", file=sys.stderr)

    end = time.perf_counter() + given.seconds
    for compile in (False,) if given.no_compile else (False, True):
        for target in targets(given.target, shapes, given.device, getattr(torch, given.dtype)):
            for batch_size in batch_sizes:
                if time.perf_counter() < end:
                    keep(check(target, batch_size, tree_sizes, end, compile=compile))
    print(table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
