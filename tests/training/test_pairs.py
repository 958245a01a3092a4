from typing import NamedTuple

import pytest
import torch

from drafter.training.pairs import Pairs, draft_index_of, select_pairs

V, R = 12, 8


class Pair(NamedTuple):
    """Start and teacher as indices row * width + position; label as draft index; depth from 0."""

    start: int
    depth: int
    teacher: int
    label: int


def list_pairs(tokens: list[list[int]], masks: list[list[bool]], draft_ids: list[int], num_depths: int) -> list[Pair]:
    """Every pair (t, k) that decoding can come to: x_{t+2} .. x_{t+1+k} are trained on and can be drafted."""
    pairs = []
    width = len(tokens[0])
    for row, (token_T, mask_T) in enumerate(zip(tokens, masks, strict=True)):
        for t in range(width - 1):
            for k in range(1, num_depths + 1):
                predicted = t + 1 + k
                if predicted >= width or not mask_T[predicted] or token_T[predicted] not in draft_ids:
                    break
                label = draft_ids.index(token_T[predicted])
                pairs.append(Pair(row * width + t, k - 1, row * width + t + k, label))
    return pairs


def valid_pairs(pairs: Pairs) -> list[Pair]:
    start_P = torch.cat([pairs.start_A[:n] for n in pairs.num_starts])
    depth_P = torch.arange(len(pairs.num_starts)).repeat_interleave(torch.tensor(pairs.num_starts))
    columns = (start_P, depth_P, pairs.position_M[pairs.teacher_P], pairs.label_P)
    return sorted(Pair(*row) for row in zip(*(column.tolist() for column in columns), strict=True))


def test_worked_example() -> None:
    """Prompt 5 6, answer 7 8 9, padding 0. The prompt's last token, at 1, is the first start: the root is 7."""
    tokens = torch.tensor([[5, 6, 7, 8, 9, 0]])
    mask = torch.tensor([[False, False, True, True, True, False]])
    pairs = select_pairs(tokens, mask, torch.arange(V), (1.0, 1.0))
    # (start, depth, teacher, label): the context at 0 and tokens 6, 7 lead to 7 and 8, and so on.
    expected = [(0, 0, 1, 7), (0, 1, 2, 8), (1, 0, 2, 8), (1, 1, 3, 9), (2, 0, 3, 9)]
    assert valid_pairs(pairs) == [Pair(*numbers) for numbers in expected]
    assert pairs.num_starts == (3, 2) and pairs.start_A.tolist() == [0, 1, 2]
    assert pairs.position_M.tolist() == [1, 2, 3]


@pytest.mark.parametrize("seed", range(20))
def test_against_the_loop(seed: int) -> None:
    """Random masks with holes, padding, and a draft vocabulary of two thirds."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, width, num_depths = 1 + seed % 4, 2 + seed, 1 + seed % 5
    tokens = torch.randint(0, V, (num_rows, width), generator=generator)
    mask = torch.rand(num_rows, width, generator=generator) < (0.6 if seed else 0)  # nothing to train on at first
    ids = torch.randperm(V, generator=generator)[:R].sort().values
    pairs = select_pairs(tokens, mask, draft_index_of(ids, V), (1.0,) * num_depths)
    assert valid_pairs(pairs) == sorted(list_pairs(tokens.tolist(), mask.tolist(), ids.tolist(), num_depths))
    assert list(pairs.num_starts) == sorted(pairs.num_starts, reverse=True)
    assert len(pairs.teacher_P) == sum(pairs.num_starts) and pairs.position_M.diff().gt(0).all()


def test_rates_thin_out_depths_and_stay_nested() -> None:
    tokens = torch.randint(0, V, (4, 500))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    rates = (0.9, 0.5, 0.2)

    def select(seed: int) -> Pairs:
        return select_pairs(tokens, mask, torch.arange(V), rates, torch.Generator().manual_seed(seed))

    pairs = select(0)
    for number, rate in zip(pairs.num_starts, rates, strict=True):
        assert number / 2000 == pytest.approx(rate, abs=0.05)
    chosen = valid_pairs(pairs)
    every = set(valid_pairs(select_pairs(tokens, mask, torch.arange(V), (1.0,) * 3)))
    assert set(chosen) < every
    assert {(pair.start, pair.depth - 1) for pair in chosen if pair.depth} <= {(p.start, p.depth) for p in chosen}
    assert valid_pairs(select(0)) == chosen != valid_pairs(select(1))
