"""Loop twins of the training room: one number at a time, plain Python."""

import math
from typing import NamedTuple

from tests.reference.warpers import softmax


class Pair(NamedTuple):
    """Start and teacher as indices row * width + position; label as draft index; depth from 0."""

    start: int
    depth: int
    teacher: int
    label: int


def list_pairs(tokens: list[list[int]], masks: list[list[bool]], draft_ids: list[int], num_depths: int) -> list[Pair]:
    """Every pair (t, k) that decoding can come to: x_{t+2} .. x_{t+1+k} are trained on and can be drafted."""
    pairs = []
    width = len(tokens[0])
    for row, (token_T, mask_T) in enumerate(zip(tokens, masks, strict=True)):
        for t in range(width - 1):
            for k in range(1, num_depths + 1):
                predicted = t + 1 + k
                if predicted >= width or not mask_T[predicted]:
                    break
                if token_T[predicted] not in draft_ids:
                    break
                label = draft_ids.index(token_T[predicted])
                pairs.append(Pair(row * width + t, k - 1, row * width + t + k, label))
    return pairs


def losses(z: list[float], teacher: list[float], label: int) -> tuple[float, float]:
    """Cross-entropy and forward KL of one pair."""
    q, p = softmax(z), softmax(teacher)
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return -math.log(q[label]), kl
