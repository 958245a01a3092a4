"""What a proposer drafted for one row, as nodes of :mod:`drafter.reference`."""

import math

from torch import Tensor

from drafter.reference import Node, path_to


def nodes_of(root: int, token_M: Tensor, parent_M: Tensor, depth_M: Tensor, score_M: Tensor) -> list[Node]:
    """The root and the nodes that a proposer lists, step after step; there the root is parent -1, here node 0."""
    drafted = zip(*(column.tolist() for column in (token_M, parent_M, depth_M, score_M)), strict=True)
    return [Node(root, 0, 0, 0.0), *(Node(token, parent + 1, *more) for token, parent, *more in drafted)]


def paths_of(nodes: list[Node]) -> dict[tuple[int, ...], float]:
    """The tokens from the root's child to each node of probability above 0, with the node's score."""
    numbers = [i for i, node in enumerate(nodes) if i > 0 and node.score > -math.inf]
    paths = {tuple(nodes[j].token for j in path_to(nodes, i)[1:]): nodes[i].score for i in numbers}
    assert len(paths) == len(numbers), "two nodes with one path"
    return paths
