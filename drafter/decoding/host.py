"""Trees of a few rows as plain lists: on a CPU, small tensor operations take longer than their arithmetic.

Every function computes the same result as its tensor form in :mod:`drafter.decoding.tree` and
:mod:`drafter.decoding.verify`, up to rounding of the scores.

Shapes: B rows · M drafted nodes of a list · N tree nodes · L draft length.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafter.decoding.tree import Candidates, NodeList

FEW_ROWS = 8  # with more rows the tensor form is faster


def is_few(tensor_B: Tensor) -> bool:
    """Whether a step of these rows uses lists: few rows on a CPU."""
    return tensor_B.device.type == "cpu" and len(tensor_B) <= FEW_ROWS


class NodeLists(NamedTuple):
    """The drafted nodes of one row without the root, in order of depth (see :class:`NodeList`).

    Attributes:
        tokens: token of each node.
        parents: index of each node's parent in the lists; -1 = the root.
        depths: depth of each node; the children of the root have depth 1.
        scores: cumulative log-probability of each node.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scores: list[float]

    def add(self, token: int, parent: int, score: float) -> int:
        """Append a node and return its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        self.scores.append(score)
        return len(self.tokens) - 1


def no_nodes() -> NodeLists:
    """Empty lists."""
    return NodeLists([], [], [], [])


def read_nodes(nodes: NodeList) -> list[NodeLists]:
    """The nodes of every row, without the places that hold no node."""
    rows = []
    columns = (nodes.token_BM.tolist(), nodes.parent_BM.tolist(), nodes.score_BM.tolist())
    for tokens, parents, scores in zip(*columns, strict=True):
        row, place = no_nodes(), {-1: -1}
        for index, (token, parent, score) in enumerate(zip(tokens, parents, scores, strict=True)):
            if score > -math.inf:
                place[index] = row.add(token, place[parent], score)
        rows.append(row)
    return rows


def pack(roots: Sequence[int], lists: Sequence[NodeLists], num_nodes: int) -> Candidates:
    """Trees of the ``num_nodes - 1`` best nodes of every row (see :func:`drafter.decoding.tree.pack_nodes`)."""
    packed = [_pack_row(root, nodes, num_nodes) for root, nodes in zip(roots, lists, strict=True)]
    token_BN, parent_BN, depth_BN, is_node_BN = torch.tensor(packed).unbind(1)
    return Candidates(token_BN, parent_BN, depth_BN, is_node_BN.bool())


def _pack_row(root: int, nodes: NodeLists, num_nodes: int) -> list[list[int]]:
    scores = nodes.scores
    best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: num_nodes - 1]  # stable
    best.sort()  # back into order of depth
    place = {-1: 0} | {index: node for node, index in enumerate(best, start=1)}
    padding = range(len(best) + 1, num_nodes)
    zeros = [0] * len(padding)
    return [
        [root, *(nodes.tokens[index] for index in best), *zeros],
        [0, *(place[nodes.parents[index]] for index in best), *padding],
        [0, *(nodes.depths[index] for index in best), *zeros],
        [1, *[1] * len(best), *zeros],
    ]


def ancestors(parents: Sequence[Sequence[int]]) -> Tensor:
    """The ancestor masks of packed trees, bool [B, N, N] (see :func:`drafter.decoding.tree.ancestors`)."""
    masks = []
    for row in parents:
        mask: list[list[bool]] = []
        for node, parent in enumerate(row):
            line = [False] * len(row) if parent == node else mask[parent].copy()
            line[node] = True
            mask.append(line)
        masks.append(mask)
    return torch.tensor(masks)


def walk(tokens: Sequence[int], parents: Sequence[int], is_node: Sequence[bool], picks: Sequence[int]) -> list[int]:
    """The accepted path of one packed tree, root included (see :func:`drafter.decoding.verify.accept_picks`)."""
    path = [0]
    for node in range(1, len(tokens)):  # parents stand before their children
        if parents[node] == path[-1] and is_node[node] and tokens[node] == picks[path[-1]]:
            path.append(node)
    return path
