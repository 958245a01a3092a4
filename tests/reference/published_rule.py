"""The published acceptance of ReDrafter's beams (arXiv 2403.09919, section 4), to show that the tests of exactness can
fail.

Each token of a beam is accepted with probability min(1, p / q), the beam with the longest accepted prefix wins, and the
next token is drawn from norm(max(0, p - q)), or from p after a whole beam. A beam-searched token is no sample of q.
"""

import numpy as np
import torch

from drafter.reference import draft_tree, path_to


def beams_of(q: np.ndarray, root: int, width: int, length: int) -> list[list[int]]:
    """The tokens of each beam that a search of a drafter q[token, next] ends with."""
    log_q = torch.from_numpy(q).log()
    nodes = draft_tree(
        lambda *given: (None, log_q[given[2]]), lambda _, logits: logits, width, length, None, None, root
    )
    ends = (i for i, node in enumerate(nodes) if node.depth == length)
    return [[nodes[j].token for j in path_to(nodes, i)[1:]] for i in ends]


def published_step(
    p: np.ndarray, q: np.ndarray, root: int, beams: list[list[int]], generator: np.random.Generator
) -> list[int]:
    """Tokens of one step for a target p[token, next] and a drafter q[token, next], both of order 1."""
    best: list[int] = []
    rejected_at: tuple[int, ...] | None = None
    for beam in beams:
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
    p: np.ndarray, q: np.ndarray, num_tokens: int, num_answers: int, width: int, length: int
) -> np.ndarray:
    """[num_answers, num_tokens] token ids, behind the token 0."""
    generator = np.random.default_rng(0)
    beams = [beams_of(q, token, width, length) for token in range(len(q))]
    answers = np.empty((num_answers, num_tokens), dtype=np.int64)
    for row in answers:
        tokens = [0]
        while len(tokens) <= num_tokens:
            tokens += published_step(p, q, tokens[-1], beams[tokens[-1]], generator)
        row[:] = tokens[1 : num_tokens + 1]
    return answers
