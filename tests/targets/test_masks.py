"""Masks of chunks and trees: the docstrings' examples, and loops that say the same token by token."""

import pytest
import torch

from drafter.decoding.tree import ancestors
from drafter.targets.masks import causal_mask, slots_mask, tree_mask
from drafter.targets.slots import Slots


def random_parents(num_nodes: int, generator: torch.Generator) -> list[int]:
    """Parents of nodes 0 .. N-1; the root is its own, and a parent stands before its children."""
    return [0] + [int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, num_nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to ``node``, both included."""
    return [0] if node == 0 else [*path_to(parents, parents[node]), node]


def test_examples() -> None:
    chunk = causal_mask(torch.tensor([[1, 2]]), 4)
    assert chunk.dtype == torch.bool and chunk[0, 0].int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    ancestor = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    tree = tree_mask(torch.tensor([1]), ancestor, 5)
    assert tree.dtype == torch.bool and tree.shape == (1, 1, 3, 5)
    assert tree[0, 0].int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0]]
    slots = Slots(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 2]]), ancestor, num_visible=5)
    assert torch.equal(slots_mask(slots), tree)
    # Padding rows stand at length 0 while others need more slots, and a row may stand at the very end.
    tree = tree_mask(torch.tensor([0, 3]), torch.eye(2, dtype=torch.bool).expand(2, -1, -1), 4)
    assert tree[:, 0].int().tolist() == [[[1, 0, 0, 0], [0, 1, 0, 0]], [[1, 1, 1, 1], [1, 1, 1, 0]]]


@pytest.mark.parametrize("seed", range(6))
def test_masks_agree_with_loops(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_nodes = 1 + seed
    parents = [random_parents(num_nodes, generator) for _ in range(3)]
    length_B = torch.randint(0, 7, (3,), generator=generator)
    num_slots = int(length_B.max()) + num_nodes + seed % 3
    tree = tree_mask(length_B, ancestors(torch.tensor(parents), num_nodes), num_slots)
    position_BT = length_B[:, None] + torch.arange(num_nodes)
    chunk = causal_mask(position_BT, num_slots)
    for row, length in enumerate(length_B.tolist()):
        for node in range(num_nodes):
            wanted = {*range(length), *(length + ancestor for ancestor in path_to(parents[row], node))}
            assert tree[row, 0, node].tolist() == [slot in wanted for slot in range(num_slots)]
            assert chunk[row, 0, node].tolist() == [slot <= length + node for slot in range(num_slots)]
