#!/usr/bin/env python3
"""Tokens per step of drafters on the same prompts, with the standard error of each difference from the first drafter.

    scripts/acceptance.py --prompts mtbench.jsonl drafter/assets/smollm2-135m runs/new/checkpoints/last.ckpt

The engine decodes the prompts greedily with each drafter and tree; drafting changes no token, so all drafters write the
same answers. The error of a difference is that of a ratio of sums over prompts, paired prompt by prompt. Rows of JSON
go to --results; --card writes the last drafter's table into the README.md of an exported drafter.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from drafter import Engine, EngineConfig, SamplingParams, Target
from drafter.cli.decode import read_prompts
from drafter.training.checkpoint import drafter_of_checkpoint

BEGIN, END = "<!-- acceptance: begin -->", "<!-- acceptance: end -->"


def main() -> None:
    args = arguments()
    target = Target.load(args.target, dtype=args.dtype, device=args.device)
    prompts = [prompt.value for prompt in read_prompts((), str(args.prompts), raw=False)][: args.num_prompts]
    first: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
    rows = []
    for name in args.drafters:
        for tree in args.tree:
            width, length, size = (int(part[1:]) for part in tree.split())
            counts = steps_of(name, target, prompts, (width, length, size), args)
            rate, gap, error = compare(*counts, *first.setdefault(tree, counts))
            row = {"drafter": name, "beam_width": width, "draft_length": length, "tree_size": size}
            row |= {"tokens_per_step": round(rate, 3), "difference": round(gap, 3), "error": round(error, 3)}
            row |= {"prompts": args.prompts.name, "num_prompts": len(prompts), "max_new_tokens": args.max_new_tokens}
            rows.append(row | {"dtype": args.dtype})
            print(json.dumps(rows[-1]), flush=True)
    if args.results:
        with args.results.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
    if args.card:
        write_card(args.card / "README.md", [row for row in rows if row["drafter"] == args.drafters[-1]], args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", help="exported folders or checkpoints; the first is compared with")
    parser.add_argument("--prompts", type=Path, required=True, help="prompts that no drafter was trained on")
    parser.add_argument("--tree", nargs="+", default=["W4 L3 N8", "W8 L4 N24"], help="trees to decode with")
    parser.add_argument("--num-prompts", type=int, default=80, help="first prompts of the file (default: 80)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens for each (default: 128)")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts at the same time (default: 8)")
    parser.add_argument("--target", default="smollm2-135m", help="(default: smollm2-135m)")
    parser.add_argument("--dtype", default="float32", help="of target and drafter (default: float32)")
    parser.add_argument("--device", default="cpu", help="(default: cpu)")
    parser.add_argument("--results", type=Path, help="append rows of JSON")
    parser.add_argument("--card", type=Path, help="exported drafter whose README.md gets the last drafter's table")
    return parser.parse_args()


def compare(
    tokens_A: torch.Tensor, steps_A: torch.Tensor, base_tokens_A: torch.Tensor, base_steps_A: torch.Tensor
) -> tuple[float, float, float]:
    """Tokens per step, the difference from the base, and the standard error of the difference.

    Linearised: each prompt's share in the error of a ratio of sums is (tokens - ratio * steps) / sum of steps.
    """
    rate, base = (float(a.sum() / b.sum()) for a, b in ((tokens_A, steps_A), (base_tokens_A, base_steps_A)))
    share_A = (tokens_A - rate * steps_A) / steps_A.sum() - (base_tokens_A - base * base_steps_A) / base_steps_A.sum()
    return rate, rate - base, float(share_A.square().sum().sqrt())


def steps_of(
    name: str, target: Target, prompts: list[Any], tree: tuple[int, ...], args: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generated tokens and target forwards of each prompt (float64) with a tree (W, L, N)."""
    width, length, size = tree
    drafter: Any = drafter_of_checkpoint(name).to(target.device, target.dtype).bind(target)
    config = EngineConfig(
        method="redrafter", max_rows=args.batch_size, beam_width=width, draft_length=length, tree_size=size
    )
    completions = Engine(target, drafter, config).generate(prompts, SamplingParams(max_new_tokens=args.max_new_tokens))
    counts = [[len(each.token_ids), each.num_target_forwards] for each in completions]
    tokens_A, steps_A = torch.tensor(counts, dtype=torch.float64).unbind(dim=1)
    return tokens_A, steps_A


def write_card(path: Path, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Replace the table between the markers, or add one."""
    lines = [BEGIN, f"Greedy, {args.dtype}, {rows[0]['num_prompts']} prompts of {args.prompts.name} x "]
    lines[-1] += f"{args.max_new_tokens} tokens, the drafter alone:\n"
    lines += ["| W | L | N | tokens per step |", "|---|---|---|---|"]
    for row in rows:
        sizes = (row["beam_width"], row["draft_length"], row["tree_size"], f"{row['tokens_per_step']:.2f}")
        lines.append("| " + " | ".join(str(value) for value in sizes) + " |")
    table = "\n".join([*lines, END])
    text = path.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    after = rest.partition(END)[2] if found else ""
    path.write_text((before if found else text + "\n") + table + (after or "\n"), encoding="utf-8")


if __name__ == "__main__":
    main()
