import math

import pytest
import torch

from drafter.training.metrics import NUM_RANKS, TOP_K, AnswerRanks, DepthCounts, best_tree
from tests.training.loops import best_chance, conditional_hits, walk

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
        total, hits = conditional_hits(rank.tolist(), valid.tolist(), depth, NUM_RANKS)
        assert counts.rank_KW[depth].sum() == total and counts.rank_KW[depth, :-1].sum() == hits


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


@pytest.mark.parametrize("num_nodes", [0, 1, 3, 7, 20, 200])
def test_best_tree_against_all_trees(num_nodes: int) -> None:
    shares = [[0.5, 0.1, 0.2], [0.6, 0.2, 0.05], [0.4, 0.3, 0.1], [0.3, 0.1, 0.1]]
    tree = best_tree(shares, num_nodes, 200)
    assert len(set(tree)) == len(tree) == min(num_nodes, 3 + 9 + 27 + 81)
    assert all(path[:-1] in tree[:place] for place, path in enumerate(tree) if len(path) > 1)
    chances = [math.prod(shares[d][rank] for d, rank in enumerate(path)) for path in tree]
    assert sum(chances) == pytest.approx(best_chance(shares, num_nodes))
    narrow = best_tree(shares, num_nodes, 2)
    assert all(sum(len(path) == depth for path in narrow) <= 2 for depth in range(1, 5))


@pytest.mark.parametrize("seed", range(4))
def test_walk_against_the_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rank_BTK = torch.randint(0, 4, (5, 30, K), generator=generator)
    is_answer_BT = torch.rand(5, 30, generator=generator) < 0.8
    start_N = torch.randperm(150, generator=generator)[:100]
    ranks = AnswerRanks.of(rank_BTK.flatten(0, 1)[start_N], start_N, is_answer_BT)
    lost = torch.ones(150, dtype=torch.bool)
    lost[start_N] = False
    rank_BTK[lost.view(5, 30)] = 50
    tree = best_tree([[0.4, 0.3, 0.2]] * K, 12, 8)
    assert ranks.walk(tree) == walk(rank_BTK.tolist(), is_answer_BT.tolist(), tree)


def test_walk_skips_what_a_step_has_written() -> None:
    """Six answer tokens at 2 .. 7: one from the prompt's forward; then a step keeps two and adds one; two are left."""
    rank_TK = torch.full((8, 2), 50)
    rank_TK[1] = torch.tensor([0, 0])
    rank_TK[2] = torch.tensor([0, 0])  # never visited
    rank_TK[4] = torch.tensor([1, 0])  # not in the tree
    ranks = AnswerRanks.of(rank_TK, torch.arange(8), torch.tensor([[False] * 2 + [True] * 6]))
    assert ranks.walk([(0,), (0, 0)]) == (5, 3)
    assert ranks.walk([(0,), (0, 0), (1,)]) == (5, 2)
    assert ranks.walk([]) == (5, 5)
