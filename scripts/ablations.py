#!/usr/bin/env python3
"""The architecture study of docs/notebook.md: train every variant of `VARIANTS` for as many steps over the same
batches, decode prompts with each drafter, write a row of JSON for each, and print the table.

    scripts/ablations.py --answers answers.jsonl --prompts prompts.jsonl --steps 64

Runs that are in the results already are not repeated. The target's hidden states are computed once: the first run
makes a cache with the layers of the fused context, which serves the others too.
"""

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch

from drafter import EngineConfig, SamplingParams, Target
from drafter.cli.decode import read_prompts
from drafter.engine.request import Prompt
from drafter.models.drafter import RecurrentDrafter
from drafter.training.callbacks import decode_answers, mean_tokens_per_step
from drafter.training.checkpoint import drafter_of_checkpoint, read_checkpoint
from drafter.training.run import main_train
from drafter.utils.tables import format_table

ROOT = Path(__file__).resolve().parent.parent
WIDTH, LENGTH, SIZE = 8, 4, 24
# Settings of `drafter train` that all runs have in common, and the settings that each variant changes.
BASE: dict[str, Any] = {
    "trainer.precision": "bf16-mixed",
    "trainer.gradient_clip_val": 1.0,
    "trainer.check_val_every_n_epoch": "null",
    "trainer.num_sanity_val_steps": 0,
    "trainer.log_every_n_steps": 16,
    "trainer.enable_progress_bar": "false",
    "model.target_dtype": "bfloat16",
    "model.drafter.draft_vocab_size": 8192,
    "model.objective.depth_rates": [1.0, 0.7, 0.5, 0.4],
    "model.optim.lr": 2e-3,
    "model.optim.warmup_steps": 10,
    "model.optim.schedule": "cosine",
    "data.val": 0.03,
    "data.max_length": 384,
    "data.batch_tokens": 1024,
}
LENGTHS = {
    f"length-{length}": {
        "model.drafter.draft_length": length,
        "model.objective.depth_rates": [1.0, 0.7, 0.5, 0.4, 0.3, 0.3, 0.2, 0.2][:length],
    }
    for length in (5, 6, 8)
}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "blocks-1": {"model.drafter.num_res_blocks": 1},
    "blocks-3": {"model.drafter.num_res_blocks": 3},
    "context-fused": {"model.drafter.context": "fused", "model.drafter.context_layers": [10, 20, 30]},
    "head-full": {"model.drafter.head": "full"},
    **LENGTHS,
    "loss-ce": {"model.objective.kl": 0.0, "model.objective.cross_entropy": 1.0},
    "loss-kl-ce": {"model.objective.kl": 0.5, "model.objective.cross_entropy": 0.5},
    # The published recipe: own output matrix over the whole vocabulary, cross-entropy, five depths.
    "published": {
        "model.drafter.head": "full",
        "model.drafter.draft_vocab_size": "null",
        "model.drafter.draft_length": 5,
        "model.objective.kl": 0.0,
        "model.objective.cross_entropy": 1.0,
        "model.objective.depth_rates": "null",
    },
}
KEPT = ("loss", "_d1", "_d2")  # ends of the names of metrics


def main() -> None:
    args = arguments()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    done = read_rows(args.results)
    target = Target.load(args.target, dtype="bfloat16")
    prompts: list[Prompt] = [prompt.value for prompt in read_prompts((), str(args.prompts), raw=False)]
    prompts = prompts[:: max(1, len(prompts) // args.num_prompts)][: args.num_prompts]
    for name in args.only or VARIANTS:
        if name in done:
            continue
        row = run(name, args, target, prompts)
        with args.results.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        gc.collect()  # a trainer and what hangs on it refer to each other
    print_table(list(read_rows(args.results).values()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True, help="the target's answers (drafter distill)")
    parser.add_argument("--prompts", type=Path, required=True, help="prompts to decode, held out")
    parser.add_argument("--steps", type=int, default=64, help="optimizer steps of every run (default: 64)")
    parser.add_argument("--num-prompts", type=int, default=10, help="prompts to decode (default: 10)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens for each (default: 64)")
    parser.add_argument("--target", default="smollm2-135m", help="target of all runs (default: smollm2-135m)")
    parser.add_argument("--work", type=Path, default=Path("runs/ablations"), help="folder for checkpoints and states")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results" / "ablations.jsonl")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, help="names of variants (default: all)")
    return parser.parse_args()


def run(name: str, args: argparse.Namespace, target: Target, prompts: list[Prompt]) -> dict[str, Any]:
    """Train and measure one variant: a row of the results."""
    states = args.work / "states"
    settings = (
        BASE
        | VARIANTS[name]
        | {
            "model.target": args.target,
            "data.train": args.answers,
            "data.cache_hidden_states": states,
            "trainer.max_steps": args.steps,
            "trainer.val_check_interval": args.steps,
            "trainer.default_root_dir": args.work / name,
            "ckpt_path": "last",
        }
    )
    if not states.exists():  # one step of the run that wants the most of the states
        most = VARIANTS["context-fused"] | VARIANTS["length-8"]
        once = {"trainer.max_steps": 1, "trainer.limit_val_batches": 0, "trainer.default_root_dir": args.work / "first"}
        main_train(words_of(settings | most | once))
    start = time.process_time()
    if main_train(words_of(settings)):
        raise SystemExit(f"{name}: training failed")
    seconds = time.process_time() - start
    path = args.work / name / "checkpoints" / "last.ckpt"
    checkpoint = read_checkpoint(path)
    drafter: Any = drafter_of_checkpoint(path)
    drafter = drafter.to(target.dtype).eval().bind(target)
    num_parameters = sum(drafter.num_parameters_by_part().values())
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    rates = {}
    for length in sorted({LENGTH, drafter.config.draft_length}):
        config = EngineConfig(max_num_seqs=len(prompts), beam_width=WIDTH, draft_length=length, tree_size=SIZE)
        answers = decode_answers(target, drafter, prompts, config, params)
        rates[f"W{WIDTH} L{length} N{SIZE}"] = round(mean_tokens_per_step(answers), 3)
    return {
        "name": name,
        "positions": checkpoint["num_positions"],
        "steps": args.steps,
        "tokens_per_step": rates,
        "num_prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens,
        "parameters": num_parameters,
        "megabytes": round(2 * num_parameters / 1e6, 1),
        "train_cpu_s": round(seconds, 1),
        "draft_cpu_ms": round(draft_time(drafter, target), 1),
        "metrics": {key: round(value, 4) for key, value in checkpoint["metrics"].items() if key.endswith(KEPT)},
    }


def words_of(settings: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]


@torch.inference_mode()
def draft_time(drafter: RecurrentDrafter, target: Target) -> float:
    """CPU milliseconds of the drafter's arithmetic for one tree of one row: LENGTH steps of WIDTH beams."""
    context = torch.zeros(1, 1, drafter.config.context_size, dtype=target.dtype, device=target.device)
    embedding = target.embed(torch.zeros(1, WIDTH, dtype=torch.int64, device=target.device))
    times = []
    for _ in range(20):
        start = time.process_time()
        state = drafter.init_state(context).expand(1, WIDTH, -1)
        for _ in range(LENGTH):
            state = drafter.step(context.expand(1, WIDTH, -1), state, embedding)
            drafter.logits(context, state)
        times.append(time.process_time() - start)
    return 1e3 * sorted(times)[len(times) // 2]


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["name"]: row for row in rows}


def print_table(rows: list[dict[str, Any]]) -> None:
    """The table of the notebook."""
    tree = f"W{WIDTH} L{LENGTH} N{SIZE}"
    columns = ["variant", "positions", "tokens/step", "with L = T", "top-1, depth 1", "draft, CPU ms"]
    cells = []
    for row in sorted(rows, key=lambda row: (row["name"] != "base", row["name"])):
        rates = dict(row["tokens_per_step"])
        own = f"{rates.pop(tree):.2f}"
        other = ", ".join(f"{rate:.2f} ({name.split()[1]})" for name, rate in rates.items())
        top = f"{row['metrics']['val/top1_d1']:.3f}"
        figures = (f"{row['draft_cpu_ms']:.1f}", f"{row['train_cpu_s']:.0f}", f"{row['megabytes']:.1f}")
        cells.append([row["name"], f"{row['positions'] / 1000:.0f}k", own, other, top, *figures])
    print(format_table([*columns, "training, CPU s", "MB"], cells))


if __name__ == "__main__":
    main()
