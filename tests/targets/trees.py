"""Random trees, as lists of parents, for the tests of masks, caches and forwards."""

import torch


def random_parents(num_nodes: int, generator: torch.Generator) -> list[int]:
    """Parents of nodes 0 .. N-1; the root is its own, and a parent stands before its children."""
    return [0] + [int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, num_nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to ``node``, both included."""
    return [0] if node == 0 else [*path_to(parents, parents[node]), node]
