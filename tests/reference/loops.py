"""Loop twins of drafting and acceptance: one row, Python lists and floats, no tensors and no state carried along.

Drafted nodes are listed as production lists them: step after step, `parent` an index into the list, -1 = the root.
Packed trees have the root at index 0, and the root and padding are their own parents.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from tests.reference.warpers import softmax, warp


class Drafted(NamedTuple):
    """A node of a beam search."""

    token: int
    parent: int
    depth: int
    score: float


class Packed(NamedTuple):
    """A packed tree of N nodes."""

    token: list[int]
    parent: list[int]
    depth: list[int]
    is_node: list[bool]


def rank_children(
    logits: list[float],
    noise: list[float] | None,
    tau: float,
    noise_weight: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> list[float]:
    """Log-probability of every child: log softmax((warped logits + weight * noise) / tau); no noise at 0."""
    ranks = warp(logits, temperature, top_k, top_p, min_p)
    if noise is not None and temperature > 0:
        ranks = [x + noise_weight * g for x, g in zip(ranks, noise, strict=True)]
    probs = softmax([x / tau for x in ranks])
    return [math.log(p) if p > 0 else -math.inf for p in probs]


def beam_search(score_children: Callable[[list[int]], list[float]], width: int, length: int) -> list[Drafted]:
    """Each step keeps the `width` best of all (beam, token) pairs.

    score_children(path) gives the log-probability of every token after the drafted tokens `path`; it starts from the
    root each time. Children of probability 0 are never drafted.
    """
    drafted: list[Drafted] = []
    beams: list[tuple[int, list[int], float]] = [(-1, [], 0.0)]
    for depth in range(1, length + 1):
        pairs = []
        for number, path, total in beams:
            for token, score in enumerate(score_children(path)):
                if score > -math.inf:
                    pairs.append((total + score, number, path, token))
        pairs.sort(key=lambda pair: -pair[0])
        beams = []
        for total, number, path, token in pairs[:width]:
            beams.append((len(drafted), [*path, token], total))
            drafted.append(Drafted(token, number, depth, total))
    return drafted


def drafted_path(drafted: list[Drafted], number: int) -> list[int]:
    """Tokens from the root's child down to a node."""
    path: list[int] = []
    while number >= 0:
        path.insert(0, drafted[number].token)
        number = drafted[number].parent
    return path


def final_beams(drafted: list[Drafted], length: int) -> list[list[int]]:
    """Policy final-beams: the beams of full length as token lists, not merged."""
    return [drafted_path(drafted, i) for i, node in enumerate(drafted) if node.depth == length]


def packed_paths(packed: Packed) -> set[tuple[int, ...]]:
    """The tree as a set of token paths from the root's child to each node."""
    paths = set()
    for i in range(1, len(packed.token)):
        path, node = [], i
        while packed.is_node[i] and node != 0:
            path.insert(0, packed.token[node])
            node = packed.parent[node]
        if path:
            paths.add(tuple(path))
    return paths
