"""Random trees, as lists of parents, for the tests of masks, caches and forwards."""

from collections.abc import Sequence

import torch
from torch import Tensor


def random_parents(num_nodes: int, generator: torch.Generator) -> list[int]:
    """Parents of nodes 0 .. N-1; the root is its own, and a parent stands before its children."""
    return [0] + [int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, num_nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to ``node``, both included."""
    return [0] if node == 0 else [*path_to(parents, parents[node]), node]


def stacked_ancestors(trees: Sequence[list[int]]) -> Tensor:
    """bool [B, N, N]: [b, i, j] where j is i or an ancestor of i in tree b."""
    found = [
        [[j in path_to(parents, i) for j in range(len(parents))] for i in range(len(parents))] for parents in trees
    ]
    return torch.tensor(found)


def stacked_depths(trees: Sequence[list[int]]) -> Tensor:
    """int64 [B, N]: steps from the root."""
    return torch.tensor([[len(path_to(parents, node)) - 1 for node in range(len(parents))] for parents in trees])
