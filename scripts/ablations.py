#!/usr/bin/env python3
"""The study of docs/notebook.md: variants of the package's recipe learn the same answers, in the same order.

    scripts/ablations.py --answers answers.jsonl --start drafter/assets/smollm2-135m --only base context-fused
    scripts/acceptance.py --prompts prompts.jsonl runs/ablations/{base,context-fused}/checkpoints/last.ckpt

The second command decodes with the drafters. An interrupted study goes on, and a finished variant is not trained again.
With --start, a variant goes on from that drafter's weights, and what the variant adds changes no output at first.
Variants of the same length and context share a cache of the target's hidden states.
"""

import argparse
import gc
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from drafter.models.checkpoint import drafter_of_checkpoint
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.training.options import DrafterOptions
from drafter.training.run import train

# Settings of `drafter train` that all runs have in common, and the settings that each variant changes.
RECIPE = Path(__file__).parent.parent / "drafter" / "configs" / "train" / "smollm2-135m.yaml"
BASE: dict[str, Any] = {
    "config": RECIPE,
    "trainer.callbacks": "null",
    "trainer.enable_progress_bar": "false",
    "data.train_on": "everything",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "blocks-1": {"model.drafter.num_res_blocks": 1},
    "blocks-3": {"model.drafter.num_res_blocks": 3},
    "context-fused": {"model.drafter.context": "fused", "model.drafter.context_layers": [10, 24, 30]},
    "vocab-16k": {"model.drafter.draft_vocab_size": 16384},
    "rates-flat": {"model.objective.depth_rates": [1.0, 0.6, 0.4, 0.3, 0.2]},
    "rates-steep": {"model.objective.depth_rates": [1.0, 0.3, 0.1, 0.05, 0.02]},
    "head-full": {"model.drafter.head": "full", "model.objective.shared_tokens": 0},
    "loss-ce": {"model.objective.kl": 0.0, "model.objective.cross_entropy": 1.0},
    # The published recipe: own output matrix over the whole vocabulary, cross-entropy, five depths.
    "published": {
        "model.drafter.head": "full",
        "model.drafter.draft_vocab_size": "null",
        "model.objective.kl": 0.0,
        "model.objective.cross_entropy": 1.0,
        "model.objective.shared_tokens": 0,
        "model.objective.depth_rates": "null",
    },
}


def main() -> None:
    args = arguments()
    common = {
        "model.target": args.target,
        "data.train": args.answers,
        "data.cache_hidden_states": args.work / "states",
        "trainer.max_epochs": args.epochs,
        "seed_everything": args.seed,
        "ckpt_path": "last",
    }
    for name in args.only or VARIANTS:
        print(name, flush=True)
        folder = args.work / (f"{name}-{args.seed}" if args.seed else name)
        start = {"model.init_from": grown(args.start, VARIANTS[name], folder / "start")} if args.start else {}
        train(words_of(BASE | VARIANTS[name] | common | start | {"trainer.default_root_dir": folder}))
        gc.collect()  # a trainer and what hangs on it refer to each other


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True, help="the target's answers (drafter distill)")
    parser.add_argument("--start", help="drafter whose weights all variants go on from (default: new weights)")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the answers of every run (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and samples (default: 0)")
    parser.add_argument("--target", default="smollm2-135m", help="target of all runs (default: smollm2-135m)")
    parser.add_argument("--work", type=Path, default=Path("runs/ablations"), help="folder for checkpoints and states")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, help="names of variants (default: all)")
    return parser.parse_args()


@torch.no_grad()
def grown(start: str, settings: dict[str, Any], out: Path) -> Path:
    """A drafter of the variant's shape with the weights of ``start``; new blocks add zero, new layers of the context
    have the weight zero. RuntimeError, naming the part, for a variant that cannot go on from these weights."""
    old = drafter_of_checkpoint(start).float()
    shape = {
        item.name: settings.get(f"model.drafter.{item.name}", getattr(old.config, item.name))
        for item in fields(DrafterOptions)
        if item.name != "draft_vocab_size"  # the run chooses other draft tokens itself
    }
    config = {name: getattr(old.config, name) for name in DrafterConfig.__annotations__} | shape
    new = RecurrentDrafter(DrafterConfig(**config))
    for block in new.blocks[len(old.blocks) :]:
        for weight in block.parameters():
            weight.zero_()
    found = new.load_state_dict(old.state_dict(), strict=False)
    if found.unexpected_keys:
        raise RuntimeError(f"this variant has no place for {found.unexpected_keys[0]} of {start}")
    new.save_pretrained(out)
    return out


def words_of(settings: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]


if __name__ == "__main__":
    main()
