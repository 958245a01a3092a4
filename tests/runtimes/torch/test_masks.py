"""Masks of chunks and trees: the docstring's examples, and loops that say the same token by token."""

import pytest
import torch
from torch import Tensor

from drafter.decoding.tree import ancestors
from drafter.targets.slots import Slots, Window, slot_positions, slots_mask


def random_parents(num_nodes: int, generator: torch.Generator) -> list[int]:
    """Parents of nodes 0 .. N-1; the root is its own, and a parent stands before its children."""
    return [0] + [int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, num_nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to ``node``, both included."""
    return [0] if node == 0 else [*path_to(parents, parents[node]), node]


def mask_of(position_BT: Tensor, ancestor_BTT: Tensor | None, num_visible: int) -> list[list[list[int]]]:
    """The mask of tokens whose slots are of no account: [B, T, S]."""
    mask = slots_mask(Slots(torch.zeros_like(position_BT), position_BT, ancestor_BTT, num_visible=num_visible))
    assert mask.dtype == torch.bool and mask.shape == (*position_BT.shape[:1], 1, position_BT.shape[1], num_visible)
    return mask[:, 0].int().tolist()


def test_examples() -> None:
    assert mask_of(torch.tensor([[1, 2]]), None, 4) == [[[1, 1, 0, 0], [1, 1, 1, 0]]]
    ancestor = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    tree = mask_of(torch.tensor([[1, 2, 2]]), ancestor, 5)
    assert tree == [[[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0]]]
    # Padding rows stand at length 0 while others need more slots, and a row may stand at the very end.
    tree = mask_of(torch.tensor([[0, 1], [3, 4]]), torch.eye(2, dtype=torch.bool).expand(2, -1, -1), 4)
    assert tree == [[[1, 0, 0, 0], [0, 1, 0, 0]], [[1, 1, 1, 1], [1, 1, 1, 0]]]


def test_examples_of_windows() -> None:
    slots = Slots(torch.tensor([[2, 3, 4]]), torch.tensor([[2, 3, 3]]), None, num_visible=5)
    assert slot_positions(slots).tolist() == [[0, 1, 2, 3, 3]]
    slots = Slots(torch.tensor([[2, 9]]), torch.tensor([[2, 3]]), None, num_visible=4)
    assert slot_positions(slots).tolist() == [[0, 1, 2, 3]]
    query_BT, key_BS = torch.tensor([[1, 3]]), torch.arange(4)[None]
    assert Window("sliding", 2).mask(query_BT, key_BS)[0, 0].int().tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert Window("chunked", 2).mask(query_BT, key_BS)[0, 0].int().tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert Window("chunked", 3).mask(query_BT, key_BS)[0, 0].int().tolist() == [[1, 1, 1, 1], [0, 0, 0, 1]]


@pytest.mark.parametrize("seed", range(6))
def test_masks_agree_with_loops(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_nodes = 1 + seed
    parents = [random_parents(num_nodes, generator) for _ in range(3)]
    length_B = torch.randint(0, 7, (3,), generator=generator)
    num_slots = int(length_B.max()) + num_nodes + seed % 3
    position_BT = length_B[:, None] + torch.arange(num_nodes)
    tree = mask_of(position_BT, ancestors(torch.tensor(parents), num_nodes), num_slots)
    chunk = mask_of(position_BT, None, num_slots)
    for row, length in enumerate(length_B.tolist()):
        for node in range(num_nodes):
            wanted = {*range(length), *(length + ancestor for ancestor in path_to(parents[row], node))}
            assert tree[row][node] == [slot in wanted for slot in range(num_slots)]
            assert chunk[row][node] == [slot <= length + node for slot in range(num_slots)]
