"""Are the answers the oracle's, token for token; and where not, how close was the target's choice?

Shapes: T tokens of one text · V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from drafter.bench.contest import Answer
from drafter.targets.target import Target

_MAX_MARGINS = 16  # one forward of the target for each


class Turn(NamedTuple):
    """One turn of a conversation: what was asked, with everything before it, and what came."""

    prompt_ids: list[int]
    answer: Answer


Transcript = list[list[Turn]]  # conversation by conversation, turn by turn


class Difference(NamedTuple):
    """Where a conversation leaves the oracle's.

    Attributes:
        index: of the conversation.
        turn: of the conversation, from 0 on.
        position: of the answer's token.
        token_ids: the oracle's token and the other; None where a text has ended.
    """

    index: int  # type: ignore[assignment]  # a field named like tuple.index, which nobody calls
    turn: int
    position: int
    token_ids: tuple[int | None, int | None]


def first_differences(oracle: Transcript, other: Transcript) -> list[Difference]:
    """The first difference of every conversation that has one; later ones follow from it."""
    found = []
    for index, (expected, given) in enumerate(zip(oracle, other, strict=True)):
        for turn, (one, two) in enumerate(zip(expected, given, strict=True)):
            if one.answer.token_ids != two.answer.token_ids:
                position = _first_difference(one.answer.token_ids, two.answer.token_ids)
                tokens = (_at(one.answer.token_ids, position), _at(two.answer.token_ids, position))
                found.append(Difference(index, turn, position, tokens))
                break
    return found


def compare(target: Target, oracle: Transcript, other: Transcript) -> dict[str, Any]:
    """What a record says of a method's texts.

    Returns:
        num_prompts, num_identical; and for the first texts that differ ``margins``: by how much the target's logit of
        the oracle's token exceeds that of the other one (one plain forward; nats; negative where it prefers the other).
    """
    differences = first_differences(oracle, other)
    margins = []
    for difference in differences[:_MAX_MARGINS]:
        margin = _margin(target, oracle[difference.index][difference.turn], difference)
        if margin is not None:
            margins.append(margin)
    return {
        "num_prompts": len(oracle),
        "num_identical": len(oracle) - len(differences),
        "first_positions": [difference.position for difference in differences],
        "margins": [round(margin, 6) for margin in margins],
    }


@torch.inference_mode()
def _margin(target: Target, turn: Turn, difference: Difference) -> float | None:
    expected, given = difference.token_ids
    if expected is None or given is None:
        return None
    text = turn.prompt_ids + turn.answer.token_ids[: difference.position]
    hidden_BTD = target.forward(torch.tensor([text], device=target.device)).hidden_BTD
    logits_V = target.logits(hidden_BTD[:, -1:])[0, 0].float()
    margin = float(logits_V[expected] - logits_V[given])
    return margin if math.isfinite(margin) else None


def _first_difference(one: Sequence[int], two: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _at(token_ids: Sequence[int], position: int) -> int | None:
    return token_ids[position] if position < len(token_ids) else None
