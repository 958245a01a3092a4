"""Loop twins of drafter.decoding.tree: one row, Python lists, no tensors."""

import math
from typing import NamedTuple


class Node(NamedTuple):
    """A drafted node: its tokens from the root's child down to itself, and its score."""

    path: tuple[int, ...]
    score: float


def paths_of(tokens: list[int], parents: list[int], scores: list[float]) -> list[Node]:
    """The nodes of one row as paths; places without a node (score -inf) are left out."""
    nodes = []
    for token, parent, score in zip(tokens, parents, scores, strict=True):
        path = [token]
        while parent >= 0:
            path.append(tokens[parent])
            parent = parents[parent]
        if score > -math.inf:
            nodes.append(Node(tuple(reversed(path)), score))
    return nodes


def merge_loop(nodes: list[Node]) -> dict[tuple[int, ...], float]:
    """Every path once, with the best score that any equal node has."""
    best: dict[tuple[int, ...], float] = {}
    for node in nodes:
        best[node.path] = max(node.score, best.get(node.path, -math.inf))
    return best
