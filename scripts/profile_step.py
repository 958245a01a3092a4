"""Profile of a decoding step: milliseconds of the target's forward and of every part around the forward.

Prints a table of medians and minima, and appends one line to a results file:

    python scripts/profile_step.py --dtype bfloat16 --rows 1 --tree-size 8

``--ops`` also prints the most expensive operators outside the forward, as counted by torch's profiler.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from drafter.decoding.params import SamplingParams
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.loading import load_drafter, load_target
from drafter.utils.provenance import run_record

PROMPTS = Path(__file__).with_name("quickstart-prompts.jsonl")
AROUND = ("propose", "accept", "commit", "hand out", "engine")


class Stopwatch:
    """Seconds of each part of the steps, from the marks that the engine's runner sets.

    Attributes:
        seconds: part -> seconds of each step.
    """

    def __init__(self, device: torch.device, *, is_cpu_time: bool = False) -> None:
        self._device = device
        self._clock = time.thread_time if is_cpu_time else time.perf_counter
        self._last = 0.0
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def mark(self, part: str) -> None:
        """``part`` is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = self._clock()
        self.seconds["engine" if part == "begin" else part].append(now - self._last)
        self._last = now


def profile(engine: Engine, watch: Stopwatch, prompts: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of the parts of ``args.steps`` steps in which all rows decode, prefill left out."""
    params = SamplingParams(
        max_new_tokens=8 * (args.steps + args.warm_up), temperature=args.temperature, ignore_eos=True
    )
    for row in range(args.rows):
        engine.add(engine.encode(prompts[row % len(prompts)]), params, want_text=False)
    for _ in range(args.warm_up):
        engine.step()
    watch.seconds.clear()
    num_tokens = 0
    for _ in range(args.steps):
        num_tokens += sum(len(update.token_ids) for update in engine.step())
    parts = {part: [1e3 * second for second in seconds[1:]] for part, seconds in watch.seconds.items()}
    parts["around"] = [sum(step) for step in zip(*(parts[part] for part in AROUND), strict=True)]
    return {
        "median_ms": {part: round(median(times), 3) for part, times in parts.items()},
        "min_ms": {part: round(min(times), 3) for part, times in parts.items()},
        "tokens_per_step": round(num_tokens / args.steps / args.rows, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--runtime", default="auto", choices=("auto", "torch", "openvino"))
    parser.add_argument("--method", default="drafter")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--beam-width", type=int, default=4)
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--tree-size", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread: for a busy machine")
    parser.add_argument("--ops", type=int, default=0, help="print so many operators")
    parser.add_argument("--output", type=Path, default=Path("docs/results/step-profile.jsonl"))
    args = parser.parse_args()
    target = load_target(args.target, dtype=args.dtype, device=args.device, runtime=args.runtime)
    drafter = load_drafter(args.drafter, target)
    config = EngineConfig(
        method=args.method,
        max_num_seqs=args.rows,
        beam_width=args.beam_width,
        draft_length=args.draft_length,
        tree_size=args.tree_size,
        max_model_len=1024,
        compile=False,
    )
    watch = Stopwatch(target.device, is_cpu_time=args.cpu_time)
    engine = Engine(target, drafter, config, on_part=watch.mark)
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    found = profile(engine, watch, prompts, args)
    print(f"{args.method}, {args.dtype}, {args.rows} rows, N = {args.tree_size}, {torch.get_num_threads()} threads")
    print(f"{'part':12}{'median ms':>12}{'minimum ms':>12}")
    for part, value in found["median_ms"].items():
        print(f"{part:12}{value:12.2f}{found['min_ms'][part]:12.2f}")
    settings = {key: value for key, value in vars(args).items() if key not in ("output", "ops")}
    spin_count = os.environ.get("GOMP_SPINCOUNT")
    record = run_record(settings={**settings, "threads": torch.get_num_threads(), "spin_count": spin_count})
    with args.output.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**found, **record}) + "\n")
    if args.ops:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(10):
                engine.step()
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=args.ops))


if __name__ == "__main__":
    main()
