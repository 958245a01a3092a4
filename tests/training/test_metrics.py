import math

import pytest
import torch

from drafter.training.metrics import TOP_K, DepthCounts
from tests.training.loops import conditional_hits

N, K = 60, 4


def random_counts(seed: int) -> tuple[torch.Tensor, torch.Tensor, DepthCounts]:
    generator = torch.Generator().manual_seed(seed)
    rank = torch.randint(0, 20, (N, K), generator=generator) // torch.randint(1, 9, (N, K), generator=generator)
    valid = torch.rand(N, K, generator=generator) < 0.85
    return rank, valid, DepthCounts.of(rank, valid)


@pytest.mark.parametrize("seed", range(3))
def test_counts_against_the_loop(seed: int) -> None:
    rank, valid, counts = random_counts(seed)
    for depth in range(K):
        assert counts.total_K[depth] == valid[:, depth].sum()
        for q, top in enumerate(TOP_K):
            assert counts.hits_KQ[depth, q] == ((rank[:, depth] < top) & valid[:, depth]).sum()
            total, hits = conditional_hits(rank.tolist(), valid.tolist(), depth, top)
            assert (counts.conditional_total_KQ[depth, q], counts.conditional_hits_KQ[depth, q]) == (total, hits)


def test_counts_add_up() -> None:
    rank, valid, counts = random_counts(0)
    halves = [DepthCounts.of(rank[part], valid[part]) for part in (slice(0, 25), slice(25, N))]
    for whole, sum_of_halves in zip(counts, halves[0].plus(halves[1]), strict=True):
        assert torch.equal(whole, sum_of_halves)


def test_accuracies_are_named_by_depth() -> None:
    counts = DepthCounts.of(torch.tensor([[0, 0], [0, 1], [5, 0]]), torch.tensor([[True, True]] * 3))
    found = counts.accuracies()
    assert found["top1_d1"] == pytest.approx(2 / 3) and found["top8_d1"] == 1
    assert found["top1_d2"] == pytest.approx(2 / 3) and found["cond1_d2"] == 0.5
    empty = DepthCounts.of(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[False]]))
    assert math.isnan(empty.accuracies()["top1_d1"])
