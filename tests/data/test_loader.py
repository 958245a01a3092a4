"""Batches: padding, token budget, determinism, resumption."""

from dataclasses import replace
from itertools import chain, islice, repeat

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.data.loader import TrainLoader, ValLoader, plan_epoch, plan_in_order
from drafter.data.rows import TokenRows
from tests.data.tiny import token_rows

LENGTHS = [24, 72, 8, 32, 32, 56, 16, 64, 40, 48, 8, 72, 24]


def rows_with(lengths: list[int]) -> TokenRows:
    """Row r holds the token r + 1, trained on from its second place."""
    return token_rows(([row + 1] * n, [i > 0 for i in range(n)]) for row, n in enumerate(lengths))


def loader_of(lengths: list[int] = LENGTHS, **options) -> TrainLoader:
    return TrainLoader(rows_with(lengths), **{"batch_tokens": 96, "seed": 5, **options})


def rows_of(batch) -> list[int]:
    return (batch.token_BT[:, 0] - 1).tolist()


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    batch_tokens=st.integers(32, 90),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 3),
)
def test_an_epoch_holds_every_row_once_under_the_budget(lengths: list[int], batch_tokens: int, **options: int) -> None:
    length_X, all_rows = torch.tensor(lengths), rows_with(lengths)
    plan = plan_epoch(length_X, batch_tokens=batch_tokens, **options)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    padded = [all_rows.batch(rows).token_BT for rows in plan]
    assert max(token_BT.numel() for token_BT in padded) <= batch_tokens
    assert {token_BT.shape[1] % 8 for token_BT in padded} == {0}
    batch = all_rows.batch(plan[0])
    in_row_BT = torch.arange(batch.token_BT.shape[1])[None] < length_X[plan[0]][:, None]
    assert batch.token_BT.dtype == torch.int64 and torch.equal(batch.token_BT > 0, in_row_BT)
    in_row_BT[:, 0] = False
    assert torch.equal(batch.loss_mask_BT, in_row_BT)
    assert plan == plan_epoch(length_X, batch_tokens=batch_tokens, **options)


def test_seed_and_epoch_change_the_order_and_validation_has_none() -> None:
    length_X = torch.tensor(LENGTHS * 4)
    plans = [plan_epoch(length_X, batch_tokens=160, seed=s, epoch=e) for s, e in ((0, 0), (0, 1), (1, 0))]
    assert plans[0] != plans[1] != plans[2] != plans[0]
    assert plan_in_order(torch.tensor([30, 10, 20, 40]), batch_tokens=50) == [[1, 2], [0], [3]]
    assert plan_in_order(torch.tensor([30, 10, 20, 40]), batch_tokens=46) == [[1], [2], [0], [3]]


@pytest.mark.parametrize("num_before", [0, 4, 25])
def test_resumption_continues_at_the_same_batch(num_before: int) -> None:
    def take(loader: TrainLoader, count: int) -> list[list[int]]:
        return [rows_of(batch) for batch in islice(chain.from_iterable(repeat(loader)), count)]

    whole = take(loader_of(), 40)
    first = loader_of()
    before = take(first, num_before)
    second = loader_of()
    second.load_state_dict(first.state_dict())
    assert before + take(second, 40 - num_before) == whole


def test_ranks_share_an_epoch() -> None:
    loaders = [loader_of(rank=rank, world_size=2) for rank in range(2)]
    taken = [[rows_of(batch) for batch in loader] for loader in loaders]
    assert len(taken[0]) == len(taken[1]) == len(loaders[0])
    rows = [row for rank in taken for batch in rank for row in batch]
    assert len(rows) == len(set(rows)) and len(rows) >= len(LENGTHS) - 4
    with pytest.raises(ValueError, match="fewer than the 64 devices"):
        loader_of(world_size=64)


def test_a_position_in_another_stream_is_refused() -> None:
    with pytest.raises(ValueError, match=r"another --data.batch_tokens \(96 then, 160 now\)"):
        loader_of(batch_tokens=160).load_state_dict(loader_of().state_dict())
    with pytest.raises(ValueError, match="another training data, so"):
        loader_of(LENGTHS[:-1]).load_state_dict(loader_of().state_dict())


@pytest.mark.parametrize("world_size", [1, 3, 50])
def test_val_loader_gives_every_rank_as_many_batches(world_size: int) -> None:
    rows = rows_with(LENGTHS)
    loaders = [ValLoader(rows, batch_tokens=240, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert len({len(loader) for loader in loaders}) == 1 and len(loaders[0]) > 0
    seen, again = ([row for loader in loaders for batch in loader for row in rows_of(batch)] for _ in range(2))
    assert seen == again and set(seen) == set(range(len(LENGTHS)))
    assert len(seen) == max(len(LENGTHS), world_size)  # once each, where the rows are enough


def test_rows() -> None:
    rows = token_rows([([1, 1], [False, True]), ([2], [False]), ([1, 1, 1], [False, True, True])])
    assert rows.length_X.tolist() == [2, 1, 3] and rows.num_trained_tokens == 3
    assert [token_T.tolist() for token_T, _ in rows.select([2, 0]).take([0, 1])] == [[1, 1, 1], [1, 1]]
    assert len(rows.select([])) == 0 and rows.token_counts(3).tolist() == [0, 3, 0]
    everything = replace(rows, everything=True)
    digests = [part.digest() for part in (rows, rows.select([0, 2, 1]), everything)]
    assert len(set(digests)) == 3 and rows.select([0, 1, 2]).digest() == digests[0]
    cropped = replace(rows, start_X=torch.tensor([0, 0, 2]))
    assert cropped.length_X.tolist() == [2, 1, 1] and cropped.row(2)[1].tolist() == [True]
    assert everything.row(2)[1].tolist() == [False, True, True]
