#!/usr/bin/env python3
"""Tokens per step of drafters on the same prompts, with the standard error of each difference from the first drafter.

    scripts/acceptance.py --prompts mtbench.jsonl drafter/assets/smollm2-135m runs/new/checkpoints/last.ckpt

Drafting changes no token, so all drafters write the same answers. The target writes the greedy answers once and reads
them once; each drafter then drafts along them, and the target's own tokens decide what a step accepts, as in decoding.
The error of a difference is that of a ratio of sums over prompts, paired prompt by prompt. Rows of JSON go to
--results; --card writes the last drafter's table into the README.md of an exported drafter.

Shapes: A answers · T tokens of a text · N nodes of a tree · C context size.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafter import Engine, EngineConfig, SamplingParams, Target
from drafter.cli.decode import read_prompts
from drafter.decoding.proposer import RowState
from drafter.decoding.sampling import make_warp
from drafter.decoding.verify import accept_picks
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers.table import contexts_of, make_proposer
from drafter.training.checkpoint import drafter_of_checkpoint

BEGIN, END = "<!-- acceptance: begin -->", "<!-- acceptance: end -->"


class Answer(NamedTuple):
    """A prompt's token ids with the target's greedy answer behind them."""

    token_ids: list[int]
    num_prompt: int


def main() -> None:
    args = arguments()
    target = Target.load(args.target, dtype=args.dtype, device=args.device, quantization=args.quantization)
    answers = read_answers(target, args)
    first: dict[str, tuple[Tensor, Tensor]] = {}
    rows = []
    for name in args.drafters:
        drafter: Any = drafter_of_checkpoint(name).to(target.device, target.dtype).bind(target)
        contexts = contexts_of_answers(target, drafter, answers)
        for tree, copying in product(args.tree, args.copying):
            width, length, size = (int(part[1:]) for part in tree.split())
            sizes: Any = {"beam_width": width, "draft_length": length, "tree_size": size}
            config = EngineConfig(method="drafter", copying=copying == "on", **sizes)
            counts = walk(target, drafter, config, answers, contexts)
            rate, gap, error = compare(*counts, *first.setdefault(tree, counts))
            row = {"drafter": name, "copying": copying, **sizes}
            row |= {"tokens_per_step": round(rate, 3), "difference": round(gap, 3), "error": round(error, 3)}
            row |= {"prompts": args.prompts.name, "num_prompts": len(answers), "max_new_tokens": args.max_new_tokens}
            rows.append(row | {"dtype": args.dtype, "quantization": args.quantization})
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
    parser.add_argument(
        "--copying", nargs="+", default=["on"], choices=["off", "on"],
        help="copies from the text; the first drafter with the first of several is compared with (default: on)",
    )  # fmt: skip
    parser.add_argument("--num-prompts", type=int, default=80, help="first prompts of the file (default: 80)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens for each (default: 128)")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts at the same time (default: 8)")
    parser.add_argument("--answers", type=Path, help="file of the target's answers: read if there is one, else written")
    parser.add_argument("--target", default="smollm2-135m", help="(default: smollm2-135m)")
    parser.add_argument("--dtype", default="float32", help="of target and drafter (default: float32)")
    parser.add_argument("--quantization", default="none", help="of the target: none or int8 (default: none)")
    parser.add_argument("--device", default="cpu", help="(default: cpu)")
    parser.add_argument("--results", type=Path, help="append rows of JSON")
    parser.add_argument("--card", type=Path, help="exported drafter whose README.md gets the last drafter's table")
    return parser.parse_args()


def compare(
    tokens_A: Tensor, steps_A: Tensor, base_tokens_A: Tensor, base_steps_A: Tensor
) -> tuple[float, float, float]:
    """Tokens per step, the difference from the base, and the standard error of the difference.

    Linearised: each prompt's share in the error of a ratio of sums is (tokens - ratio * steps) / sum of steps.
    """
    rate, base = (float(a.sum() / b.sum()) for a, b in ((tokens_A, steps_A), (base_tokens_A, base_steps_A)))
    share_A = (tokens_A - rate * steps_A) / steps_A.sum() - (base_tokens_A - base * base_steps_A) / base_steps_A.sum()
    return rate, rate - base, float(share_A.square().sum().sqrt())


def read_answers(target: Target, args: argparse.Namespace) -> list[Answer]:
    """The target's greedy answers: of the file --answers if there is one, else decoded, and written there."""
    if args.answers and args.answers.is_file():
        return [Answer(*json.loads(line)) for line in args.answers.read_text(encoding="utf-8").splitlines()]
    prompts = [prompt.value for prompt in read_prompts((), str(args.prompts), raw=False)][: args.num_prompts]
    engine = Engine(target, config=EngineConfig(method="none", max_num_seqs=args.batch_size))
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=args.max_new_tokens))
    answers = [Answer([*each.prompt_ids, *each.token_ids], len(each.prompt_ids)) for each in completions]
    if args.answers:
        args.answers.write_text("".join(json.dumps(answer) + "\n" for answer in answers), encoding="utf-8")
    return answers


@torch.inference_mode()
def contexts_of_answers(target: Target, drafter: RecurrentDrafter, answers: list[Answer]) -> list[Tensor]:
    """What the drafter reads of the target before each token of each text, [T, C]; zeros before the first."""
    contexts = contexts_of(EngineConfig(method="drafter"), target, drafter)
    found = []
    for answer in answers:
        token_1T = torch.tensor([answer.token_ids], device=target.device)
        context_1TC = target.forward(token_1T, context_layers=contexts.layers).context_BTC
        start_1C = context_1TC.new_zeros(1, contexts.size)
        if contexts.read is not None:
            context_1TC = contexts.read(start_1C, context_1TC, token_1T)
        found.append(torch.cat([start_1C, context_1TC[0, :-1]]))
    return found


@torch.inference_mode()
def walk(
    target: Target, drafter: RecurrentDrafter, config: EngineConfig, answers: list[Answer], contexts: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Tokens and steps of each answer, float64 [A]: every step drafts a tree at the last token of the one before it."""
    proposer = make_proposer(config, target, drafter, None)
    device, length = target.device, proposer.max_depth
    ends = [len(answer.token_ids) - 1 for answer in answers]
    # Behind an answer no draft is right.
    ids_AT = torch.full((len(answers), max(ends) + length + 2), -1, device=device)
    for row, answer in enumerate(answers):
        ids_AT[row, : len(answer.token_ids)] = torch.tensor(answer.token_ids, device=device)
    root_A = torch.tensor([answer.num_prompt - 1 for answer in answers], device=device)
    end_A, steps_A = torch.tensor(ends, device=device), torch.zeros(len(answers), dtype=torch.float64)
    while len(running := (root_A < end_A).nonzero()[:, 0]):
        position_B, ids_BT = root_A[running], ids_AT[running]
        rows = RowState(
            root_B=ids_BT.gather(1, position_B[:, None])[:, 0],
            length_B=position_B,
            context_BC=torch.stack([contexts[row][root_A[row]] for row in running.tolist()]),
            history_BS=ids_BT,
            seed_B=torch.zeros_like(position_B),
            is_active_B=torch.ones_like(position_B, dtype=torch.bool),
            warp=make_warp([SamplingParams()] * len(running), device),
            num_visible=ids_BT.shape[1],
        )
        tree = proposer.propose(rows, None)
        pick_BN = ids_BT.gather(1, position_B[:, None] + tree.depth_BN + 1)
        accepted = accept_picks(tree, pick_BN, tree.ancestors(length), length)
        root_A[running] += accepted.num_accepted_B + 1
        steps_A[running.cpu()] += 1
    num_tokens = [len(answer.token_ids) - answer.num_prompt for answer in answers]
    return torch.tensor(num_tokens, dtype=torch.float64), steps_A


def write_card(path: Path, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Replace the table between the markers, or add one."""
    lines = [BEGIN, f"Greedy, {args.dtype}, {rows[0]['num_prompts']} prompts of {args.prompts.name} x "]
    lines[-1] += f"{args.max_new_tokens} tokens, the drafter alone:\n"
    lines += ["| W | L | N | copies | tokens per step |", "|---|---|---|---|---|"]
    for row in rows:
        sizes = (row["beam_width"], row["draft_length"], row["tree_size"], row["copying"])
        sizes += (f"{row['tokens_per_step']:.2f}",)
        lines.append("| " + " | ".join(str(value) for value in sizes) + " |")
    table = "\n".join([*lines, END])
    text = path.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    after = rest.partition(END)[2] if found else ""
    path.write_text((before if found else text + "\n") + table + (after or "\n"), encoding="utf-8")


if __name__ == "__main__":
    main()
