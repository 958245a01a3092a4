"""Random trees, as lists of parents, for the tests of masks, caches and forwards."""

import torch
from torch import Tensor


def random_parents(num_nodes: int, generator: torch.Generator) -> list[int]:
    """Parents of nodes 0 .. N-1; the root is its own, and a parent stands before its children."""
    return [0] + [int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, num_nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to ``node``, both included."""
    path = [node]
    while path[-1] != 0:
        path.append(parents[path[-1]])
    return path[::-1]


def ancestors_of(parents: list[int]) -> Tensor:
    """bool [N, N]: [i, j] where j is i or an ancestor of i."""
    ancestor_NN = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        ancestor_NN[node, path_to(parents, node)] = True
    return ancestor_NN


def depths_of(parents: list[int]) -> Tensor:
    """int64 [N]: steps from the root."""
    return torch.tensor([len(path_to(parents, node)) - 1 for node in range(len(parents))])
