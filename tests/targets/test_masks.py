"""Masks of chunks and trees: the docstrings' examples, and loops that say the same token by token."""

import pytest
import torch

from drafter.targets.masks import chunk_mask, tree_mask
from tests.targets.trees import ancestors_of, random_parents


def test_chunk_mask_example() -> None:
    mask = chunk_mask(torch.tensor([1]), 2, 4)
    assert mask.dtype == torch.bool
    assert mask[0, 0].int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]


def test_tree_mask_example() -> None:
    ancestor = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    mask = tree_mask(torch.tensor([1]), ancestor, 5)
    assert mask.dtype == torch.bool and mask.shape == (1, 1, 3, 5)
    assert mask[0, 0].int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0]]


@pytest.mark.parametrize("seed", range(5))
def test_chunk_mask_agrees_with_a_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start_B = torch.randint(0, 9, (4,), generator=generator)
    num_tokens, num_slots = 1 + seed, 14
    mask = chunk_mask(start_B, num_tokens, num_slots)
    for row, start in enumerate(start_B.tolist()):
        for token in range(num_tokens):
            assert mask[row, 0, token].tolist() == [slot <= start + token for slot in range(num_slots)]


@pytest.mark.parametrize("seed", range(8))
def test_tree_mask_agrees_with_a_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_nodes = 1 + seed
    parents = [random_parents(num_nodes, generator) for _ in range(3)]
    ancestor_BNN = torch.stack([ancestors_of(line) for line in parents])
    length_B = torch.randint(0, 7, (3,), generator=generator)
    num_slots = int(length_B.max()) + num_nodes + seed % 3
    mask = tree_mask(length_B, ancestor_BNN, num_slots)
    for row, length in enumerate(length_B.tolist()):
        for node in range(num_nodes):
            seen = [bool(mask[row, 0, node, slot]) for slot in range(num_slots)]
            climber, wanted = node, set(range(length))
            while True:
                wanted.add(length + climber)
                if climber == 0:
                    break
                climber = parents[row][climber]
            assert seen == [slot in wanted for slot in range(num_slots)]


def test_tree_may_reach_behind_the_visible_slots() -> None:
    """Padding rows stand at length 0 while others need more slots, and a row may stand at the very end."""
    mask = tree_mask(torch.tensor([0, 3]), torch.eye(2, dtype=torch.bool).expand(2, -1, -1), 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert mask[1, 0].int().tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
