#!/usr/bin/env python3
"""The architecture study of docs/notebook.md: train every variant for as many steps over the same batches.

    scripts/ablations.py --answers answers.jsonl --steps 64
    scripts/acceptance.py --prompts prompts.jsonl runs/ablations/{base,head-full,loss-ce}/checkpoints/last.ckpt

The second command decodes with the drafters. An interrupted study goes on, and a finished variant is not trained again.
Variants of the same length and context share a cache of the target's hidden states.
"""

import argparse
import gc
from pathlib import Path
from typing import Any

from drafter.training.run import train

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


def main() -> None:
    args = arguments()
    common = {
        "model.target": args.target,
        "data.train": args.answers,
        "data.cache_hidden_states": args.work / "states",
        "trainer.max_steps": args.steps,
        "trainer.val_check_interval": args.steps,
        "ckpt_path": "last",
    }
    for name in args.only or VARIANTS:
        print(name, flush=True)
        train(words_of(BASE | VARIANTS[name] | common | {"trainer.default_root_dir": args.work / name}))
        gc.collect()  # a trainer and what hangs on it refer to each other


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True, help="the target's answers (drafter distill)")
    parser.add_argument("--steps", type=int, default=64, help="optimizer steps of every run (default: 64)")
    parser.add_argument("--target", default="smollm2-135m", help="target of all runs (default: smollm2-135m)")
    parser.add_argument("--work", type=Path, default=Path("runs/ablations"), help="folder for checkpoints and states")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, help="names of variants (default: all)")
    return parser.parse_args()


def words_of(settings: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]


if __name__ == "__main__":
    main()
