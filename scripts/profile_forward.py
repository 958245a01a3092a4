"""Time of the target's forward with logits, in torch and in OpenVINO, for several numbers of rows and tokens.

    python scripts/profile_forward.py --target smollm2-135m --dtype bfloat16 --out docs/results/forward-runtimes.jsonl

Shapes: B rows · N tokens of a row · S visible slots.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from drafter.targets.masks import chunk_mask
from drafter.targets.target import Target
from drafter.utils.io import append
from drafter.utils.provenance import run_record

SHAPES = ((1, 1), (1, 8), (1, 24), (1, 64), (8, 1), (8, 8))
NUM_SLOTS = 256


def forward_of(target: Target, num_rows: int, num_tokens: int) -> Callable[[], object]:
    """One forward over a cache whose last slots are free."""
    cache = target.new_cache(num_rows, NUM_SLOTS)
    start = NUM_SLOTS - num_tokens
    token_BN = torch.randint(target.vocab_size, (num_rows, num_tokens))
    position_BN = (start + torch.arange(num_tokens)).expand(num_rows, -1)
    mask = chunk_mask(torch.full((num_rows,), start), num_tokens, NUM_SLOTS)

    def run() -> object:
        cache.plan(position_BN)
        inputs: dict[str, Any] = {"position_BT": position_BN, "mask": mask, "cache": cache}
        return target.logits(target.forward(token_BN, **inputs).hidden_BTD)

    return run


def milliseconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Duration of one call."""
    start = clock()
    call()
    return 1e3 * (clock() - start)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cpu-time", action="store_true", help="time of the processor: for a machine that is not idle")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    calls: dict[tuple[str, int, int], Callable[[], object]] = {}
    prepared = {}
    for runtime in ("torch", "openvino"):
        memory, start = psutil.Process().memory_info().rss, time.perf_counter()
        target = Target.load(args.target, dtype=args.dtype, device="cpu", runtime=runtime)
        target.fold_attention()
        for rows, tokens in SHAPES:
            calls[runtime, rows, tokens] = forward_of(target, rows, tokens)
            calls[runtime, rows, tokens]()
        grown = psutil.Process().memory_info().rss - memory
        prepared[runtime] = {"seconds": time.perf_counter() - start, "bytes": grown}
    weight = torch.ones(target.num_parameters * target.dtype.itemsize // 8, dtype=torch.int64)
    calls["read weights", 1, 1] = weight.sum
    times: dict[tuple[str, int, int], list[float]] = {key: [] for key in calls}
    for _ in range(args.rounds):  # in turn, so that all meet the same load
        for key, call in calls.items():
            times[key].append(milliseconds(call, clock))
    made_by = run_record(seed=0)
    for (runtime, rows, tokens), series in times.items():
        record = {
            "target": args.target, "dtype": args.dtype, "runtime": runtime, "rows": rows, "tokens": tokens,
            "slots": NUM_SLOTS, "threads": torch.get_num_threads(), "clock": "cpu" if args.cpu_time else "wall",
            "median_ms": median(series), "min_ms": min(series), "prepared": prepared.get(runtime), "run": made_by,
        }  # fmt: skip
        print(f"{runtime:>12} {rows} x {tokens:<3} {median(series):7.1f} ms, at best {min(series):.1f} ms")
        append(args.out, json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
