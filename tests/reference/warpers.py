"""Loop twins of the rules, of the logit warpers and of the pick: plain Python floats, one node at a time."""

import math
from collections.abc import Sequence

from drafter.decoding.params import SamplingParams


def softmax(logits: list[float]) -> list[float]:
    """Probabilities of logits, some of which may be -inf."""
    largest = max(logits)
    weights = [math.exp(x - largest) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def keep_top_k(logits: list[float], k: int) -> list[float]:
    """The k largest, and whatever equals the smallest of them."""
    if k == 0:
        return logits
    threshold = sorted(logits, reverse=True)[min(k, len(logits)) - 1]
    return [x if x >= threshold else -math.inf for x in logits]


def keep_top_p(logits: list[float], p: float) -> list[float]:
    """Tokens that have less than p of the mass above them, and whatever equals the last of them."""
    if p == 1:
        return logits
    probs = softmax(logits)
    above, threshold = 0.0, math.inf
    for prob, logit in sorted(zip(probs, logits, strict=True), reverse=True):
        if above >= p:
            break
        threshold = logit
        above += prob
    return [x if x >= threshold else -math.inf for x in logits]


def keep_min_p(logits: list[float], p: float) -> list[float]:
    """Tokens at least p times as likely as the most likely one."""
    if p == 0:
        return logits
    return [x if x >= max(logits) + math.log(p) else -math.inf for x in logits]


def warp(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Temperature, then the filters in their order."""
    if temperature == 0:
        return logits
    scaled = [x / temperature for x in logits]
    return keep_min_p(keep_top_p(keep_top_k(scaled, top_k), top_p), min_p)


def rule(logits: list[float], prompt: Sequence[int], answer: Sequence[int], params: SamplingParams) -> list[float]:
    """Bias, then the penalties of the tokens of prompt and answer, as vLLM documents them."""
    ruled = []
    for token, logit in enumerate(logits):
        logit += params.logit_bias.get(token, 0.0)
        if token in prompt or token in answer:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        count = list(answer).count(token)
        ruled.append(logit - params.frequency_penalty * count - params.presence_penalty * (count > 0))
    return ruled


def pick(logits: list[float], noise: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """Gumbel-max; at temperature 0 the first of the largest logits."""
    warped = warp(logits, temperature, top_k, top_p, min_p)
    scores = warped if temperature == 0 else [x + g for x, g in zip(warped, noise, strict=True)]
    return scores.index(max(scores))
