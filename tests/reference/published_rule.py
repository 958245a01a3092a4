"""The published acceptance of ReDrafter's beams, kept only to show that the tests of exactness can fail.

The beam search of the drafter proposes; each token of a beam is accepted with probability min(1, p / q), the beam with
the longest accepted prefix wins (the first among equals), and the next token is drawn from norm(max(0, p - q)) at the
first rejection, or from p after a whole beam. A beam-searched token is no sample of q, so this is not a draw from p.
(arXiv 2403.09919, section 4: "might not give the exact distribution match".)
"""

import math
from itertools import pairwise, product

import numpy as np

from tests.reference.loops import beam_search, final_beams


def published_step(
    p: np.ndarray, q: np.ndarray, root: int, width: int, length: int, generator: np.random.Generator
) -> list[int]:
    """Tokens of one step for a target p[token, next] and a drafter q[token, next], both of order 1."""
    log_q = np.log(q)
    drafted = beam_search(lambda path: list(log_q[path[-1] if path else root]), width, length)
    best: list[int] = []
    rejected_at: tuple[int, ...] | None = None
    for beam in final_beams(drafted, length):
        before, accepted = root, 0
        for token in beam:
            if generator.random() >= p[before, token] / q[before, token]:
                break
            before, accepted = token, accepted + 1
        if rejected_at is None or accepted > len(best):
            best = beam[:accepted]
            rejected_at = tuple(beam[accepted : accepted + 1])
    last = best[-1] if best else root
    weights = np.maximum(0.0, p[last] - q[last]) if rejected_at else p[last]
    return [*best, int(generator.choice(len(weights), p=weights / weights.sum()))]


def published_answers(
    p: np.ndarray, q: np.ndarray, root: int, num_tokens: int, num_answers: int, width: int, length: int, seed: int = 0
) -> np.ndarray:
    """[num_answers, num_tokens] token ids."""
    generator = np.random.default_rng(seed)
    answers = np.empty((num_answers, num_tokens), dtype=np.int64)
    for row in answers:
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            last = tokens[-1] if tokens else root
            tokens += published_step(p, q, last, width, length, generator)
        row[:] = tokens[:num_tokens]
    return answers


def markov_distribution(p: np.ndarray, root: int, num_tokens: int) -> dict[tuple[int, ...], float]:
    """Probability of every answer of a target p[token, next] of order 1."""
    return {
        answer: math.prod(p[last, token] for last, token in pairwise((root, *answer)))
        for answer in product(range(len(p)), repeat=num_tokens)
    }
