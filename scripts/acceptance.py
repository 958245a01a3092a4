#!/usr/bin/env python3
"""Tokens per step of drafters on the same prompts, and the difference from the first drafter, with standard errors.

    scripts/acceptance.py --prompts mtbench.jsonl drafter/assets/smollm2-135m runs/new/checkpoints/last.ckpt

Answers are greedy. The prompts are the sample: the error of a figure tells how far other prompts would move the figure,
the error of a difference is paired prompt by prompt. Rows of JSON go to --results.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

from drafter import Engine, SamplingParams
from drafter.bench.workload import read_prompt_set
from drafter.decoding.acceptance import Rate, error_of, tokens_per_step
from drafter.engine.settings import Plan
from drafter.models.checkpoint import drafter_of_checkpoint
from drafter.runtimes.loading import load_target
from drafter.utils.io import append


def main() -> None:
    args = arguments()
    target = load_target(args.target, dtype=args.dtype, device=args.device, quantization=args.quantization)
    prompts = read_prompt_set(args.prompts).take(args.num_prompts).encode(target)
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    first: dict[str, Rate] = {}
    for name in args.drafters:
        drafter: Any = drafter_of_checkpoint(name).to(target.device, target.dtype).bind(target)
        if not target.traits.is_trainable:
            drafter.pack()
        for tree, copying in product(args.tree, args.copying):
            width, length, size = (int(part[1:]) for part in tree.split())
            sizes: Any = {"beam_width": width, "draft_length": length, "tree_size": size}
            plan = Plan.of("drafter", copying=copying == "on", max_num_seqs=args.batch_size, **sizes)
            answers = Engine(target, drafter, plan).generate(prompts, params)
            found = tokens_per_step([(len(each.token_ids), each.num_target_forwards) for each in answers])
            base = first.setdefault(tree, found)
            differences = [mine - other for mine, other in zip(found.shares, base.shares, strict=True)]
            row = {"drafter": name, "copying": copying, **sizes}
            row |= {"tokens_per_step": round(found.value, 3), "standard_error": round(error_of(found.shares), 3)}
            row |= {"difference": round(found.value - base.value, 3), "error": round(error_of(differences), 3)}
            row |= {"prompts": Path(args.prompts).name, "num_prompts": len(answers)}
            row |= {"max_new_tokens": args.max_new_tokens, "dtype": target.traits.number_format}
            row |= {"quantization": args.quantization}
            print(json.dumps(row), flush=True)
            if args.results:
                append(args.results, json.dumps(row) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", help="exported folders or checkpoints; the first is compared with")
    parser.add_argument("--prompts", default="evaluation", help="prompts that no drafter was trained on")
    parser.add_argument("--tree", nargs="+", default=["W4 L3 N8", "W8 L4 N24"], help="trees to decode with")
    parser.add_argument("--copying", nargs="+", default=["on"], choices=["off", "on"], help="copies from the text")
    parser.add_argument("--num-prompts", type=int, default=80, help="of all categories alike (default: 80)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens for each (default: 128)")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts at the same time (default: 8)")
    parser.add_argument("--target", default="smollm2-135m", help="(default: smollm2-135m)")
    parser.add_argument("--dtype", default="auto", help="of the target (default: auto, as it decodes here)")
    parser.add_argument("--quantization", default="none", help="of the target: none or int8 (default: none)")
    parser.add_argument("--device", default="cpu", help="(default: cpu)")
    parser.add_argument("--results", type=Path, help="append rows of JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
