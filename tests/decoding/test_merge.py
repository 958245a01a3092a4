"""Node lists: merged like sets of paths, and packed into trees that the verification can trust."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.decoding.tree import NodeList, merge_equal
from tests.reference.merge_loop import Node, merge_loop, paths_of


def random_list(generator: random.Random, num_rows: int) -> NodeList:
    """Levels of random sizes over an alphabet of three tokens, with places that hold no node."""
    sizes = tuple(generator.randint(1, 4) for _ in range(generator.randint(1, 4)))
    rows = []
    for _ in range(num_rows):
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        start = 0
        for level, size in enumerate(sizes):
            above = range(start - sizes[level - 1], start) if level else range(-1, 0)
            start += size
            for _ in range(size):
                parents.append(generator.choice(above))
                tokens.append(generator.randrange(3))
                top = scores[parents[-1]] if level else 0.0
                scores.append(-math.inf if generator.random() < 0.2 else top - generator.choice((0.0, 0.5, 1.25)))
        rows.append((tokens, parents, scores))
    token_BM, parent_BM, score_BM = (torch.tensor([row[i] for row in rows]) for i in range(3))
    return NodeList(token_BM, parent_BM, score_BM.float(), sizes)


def nodes_of(nodes: NodeList, row: int) -> list[Node]:
    return paths_of(nodes.token_BM[row].tolist(), nodes.parent_BM[row].tolist(), nodes.score_BM[row].tolist())


def test_worked_example() -> None:
    inf = math.inf
    nodes = NodeList(
        torch.tensor([[7, 7, 9, 8]]), torch.tensor([[-1, -1, 0, 1]]), torch.tensor([[-2.0, -1, -4, -3]]), (2, 2)
    )
    merged = merge_equal(nodes)
    assert merged.token_BM.tolist() == [[7, 7, 9, 8]]
    assert merged.parent_BM.tolist() == [[-1, -1, 0, 0]]
    assert merged.score_BM.tolist() == [[-1, -inf, -4, -3]]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_merging_equals_the_loop(seed: int) -> None:
    nodes = random_list(random.Random(seed), 2)
    merged = merge_equal(nodes)
    for row in range(2):
        listed = nodes_of(nodes, row)
        found = nodes_of(merged, row)
        assert len({node.path for node in found}) == len(found)
        assert {node.path: pytest.approx(node.score) for node in found} == merge_loop(listed)
