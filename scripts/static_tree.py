"""Tokens per step of the decoder's trees, and of one fixed tree of ranks, at the same positions of the same answers.

    python scripts/static_tree.py PROMPTS.jsonl OUT.jsonl

The target answers greedily with the drafter's beam search. At every position of these answers the drafter's ranks of
the true tokens are computed along the true path. The fixed tree is the best one for these very positions (`fixed`), or
the best one for the other half of the answers (`fixed_held_out`).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from drafter.decoding.params import SamplingParams
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Completion, Engine
from drafter.engine.loading import load_drafter, load_target
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target
from drafter.training.metrics import NUM_RANKS, AnswerRanks, DepthCounts, best_tree

_TREES = ((8, 4, 24), (12, 5, 61))  # W, L, N


@torch.inference_mode()
def ranks_along(target: Target, drafter: RecurrentDrafter, answer: Completion, depth: int) -> Tensor:
    """Ranks [T, depth] of the tokens that follow each root; NUM_RANKS where the draft vocabulary has no such token."""
    text_T = torch.tensor([*answer.prompt_ids, *answer.token_ids])
    first, num_roots = len(answer.prompt_ids) - 1, len(answer.token_ids)
    hidden_1TH = target.forward(text_T[None], context_layers=drafter.config.context_layers).context_BTC
    start_1C = hidden_1TH.new_zeros(1, drafter.config.context_size)
    context_TC = drafter.read(start_1C, hidden_1TH, target.embed(text_T[None]))[0][first - 1 : -2]
    text_T = torch.cat([text_T, torch.full((depth,), -1)])
    window_TK = text_T[first:].unfold(0, depth + 1, 1)[:num_roots]
    draft_id_V = torch.full((target.vocab_size,), -1)
    draft_id_V[drafter.draft_token_ids_R] = torch.arange(len(drafter.draft_token_ids_R))
    ranks = []
    for context_XC, window_XK in zip(context_TC.split(16), window_TK.split(16), strict=True):
        logits_XKR = drafter(context_XC, target.embed(window_XK[:, :-1].clamp_min(0)))
        true_XK = torch.where(window_XK[:, 1:] >= 0, draft_id_V[window_XK[:, 1:].clamp_min(0)], -1)
        own_XK1 = logits_XKR.gather(2, true_XK.clamp_min(0)[..., None])
        rank_XK = (logits_XKR > own_XK1).sum(2).clamp_max(NUM_RANKS)
        ranks.append(torch.where(true_XK >= 0, rank_XK, NUM_RANKS))
    return torch.cat(ranks)


def tokens_per_step(ranks: Sequence[Tensor], tree: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Tokens and steps of writing the answers with a fixed tree of ranks, from the same roots as the decoder."""
    tokens = steps = 0
    for rank_TK in ranks:
        # One more position in front: the walk takes the first token of a text from the prompt's forward.
        start_N = torch.arange(len(rank_TK))
        is_answer_BT = torch.tensor([[False, *[True] * (len(rank_TK) + 1)]])
        walked = AnswerRanks.of(rank_TK, start_N, is_answer_BT).walk(tree)
        tokens, steps = tokens + walked[0], steps + walked[1]
    return tokens, steps


def shares(ranks: Sequence[Tensor]) -> list[list[float]]:
    """The share of each rank at each depth."""
    rank_NK = torch.cat(list(ranks))
    return DepthCounts.of(rank_NK, torch.ones_like(rank_NK, dtype=torch.bool)).rank_shares()


def main() -> None:
    """Measure every tree and append a record each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--num-prompts", type=int, default=20)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    prompts = [row["prompt"] for row in rows[:: max(1, len(rows) // args.num_prompts)]][: args.num_prompts]
    target = load_target(args.target, dtype="float32", device="cpu", pack=False)
    drafter = load_drafter(args.target, target)
    for width, length, size in _TREES:
        config = EngineConfig(max_num_seqs=4, beam_width=width, draft_length=length, tree_size=size)
        answers = Engine(target, drafter, config).generate(prompts, SamplingParams(max_new_tokens=64), progress=True)
        ranks = [ranks_along(target, drafter, answer, length) for answer in answers]
        num_tokens = sum(len(answer.token_ids) for answer in answers)
        num_forwards = sum(answer.num_target_forwards for answer in answers)
        fixed = tokens_per_step(ranks, best_tree(shares(ranks), size - 1, width))
        halves = [
            tokens_per_step(ranks[half::2], best_tree(shares(ranks[1 - half :: 2]), size - 1, width)) for half in (0, 1)
        ]
        held_out = [sum(numbers) for numbers in zip(*halves, strict=True)]
        assert fixed[0] == held_out[0] == num_tokens, "the same positions"
        record = {
            "target": args.target,
            "prompts": args.prompts.name,
            "num_prompts": len(prompts),
            "num_tokens": num_tokens,
            "tree": {"beam_width": width, "draft_length": length, "tree_size": size},
            "decoded": round(num_tokens / num_forwards, 4),
            "fixed": round(num_tokens / fixed[1], 4),
            "fixed_held_out": round(num_tokens / held_out[1], 4),
        }
        with args.out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
