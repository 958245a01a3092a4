"""Iterables of batches for the trainer: deterministic, and resumable at the exact batch.

Shapes: X rows.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from drafter.data.rows import PAD_MULTIPLE, ChatBatch, TokenRows

# Rows are sorted by length within a pool, so that a batch has little padding and an epoch is still shuffled.
_POOL_ROWS = 8192


class TrainLoader:
    """An endless stream of batches, handed out one epoch's worth per ``iter``.

    The order depends on (seed, epoch) and the data alone. Under data parallelism rank r takes every ``world_size``-th
    batch from the r-th on, and the last batches that do not reach all ranks are left out. A new loader with the
    ``state_dict`` of k batches continues with batch k + 1; the next ``iter`` continues where an unfinished one stopped.
    """

    def __init__(self, rows: TokenRows, *, batch_tokens: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self._rows = rows
        self._identity = {"fingerprint": rows.digest(), "batch_tokens": batch_tokens, "seed": seed}
        self._rank, self._world_size = rank, world_size
        self._go_to(0, 0)
        self._length = len(self._plan) // world_size
        if self._length == 0:
            raise ValueError(
                f"the training data make {len(self._plan)} batch(es), fewer than the {world_size} devices: "
                f"lower --data.batch_tokens {batch_tokens} or give more rows"
            )

    def __len__(self) -> int:
        """Number of batches of this rank in an epoch, and of every ``iter``."""
        return self._length

    def __iter__(self) -> Iterator[ChatBatch]:
        for _ in range(self._length):
            if (self._position + 1) * self._world_size > len(self._plan):
                self._go_to(self._epoch + 1, 0)
            rows = self._plan[self._position * self._world_size + self._rank]
            self._position += 1
            yield self._rows.batch(rows)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, and the settings that the position depends on."""
        return {"epoch": self._epoch, "position": self._position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; ValueError if the position belongs to other data or settings."""
        for name, value in self._identity.items():
            if state.get(name) != value:
                setting = f"--data.{name} ({state.get(name)} then, {value} now)"
                what = "training data" if name == "fingerprint" else setting
                raise ValueError(
                    f"the checkpoint was written with another {what}, so its position in the data means nothing here: "
                    "restore it to resume, or start a new run from the checkpoint's weights"
                )
        self._go_to(int(state["epoch"]), int(state["position"]))

    def _go_to(self, epoch: int, position: int) -> None:
        """``position``: batches of this rank handed out in this epoch. ``epoch``: complete passes over the data."""
        settings: dict[str, Any] = {name: self._identity[name] for name in ("batch_tokens", "seed")}
        self._epoch, self._position = epoch, position
        self._plan = plan_epoch(self._rows.length_X, epoch=epoch, **settings)


class ValLoader:
    """The same batches in the same order at every ``iter``; rank r takes every ``world_size``-th.

    All ranks get the same number of batches, since they meet in every forward: the largest batches are cut in two. Rows
    are repeated only if there are fewer rows than ranks.
    """

    def __init__(self, rows: TokenRows, *, batch_tokens: int, rank: int = 0, world_size: int = 1) -> None:
        self._rows = rows
        batches = plan_in_order(rows.length_X, batch_tokens=batch_tokens)
        while len(batches) % world_size:
            place = max(range(len(batches)), key=lambda index: len(batches[index]))
            whole, half = batches[place], len(batches[place]) // 2
            batches[place : place + 1] = [whole[:half] or whole, whole[half:]]
        self._batches = batches[rank::world_size]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[ChatBatch]:
        return map(self._rows.batch, self._batches)


def plan_epoch(length_X: Tensor, *, batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Which rows form each batch of an epoch: every row once, shuffled by (seed, epoch) alone, batches in random order.

    A batch holds as many rows of similar length as fit ``rows x longest row <= batch_tokens`` (one row if that row
    alone is longer), where the longest row counts with its padding.
    """
    # A hash of the whole key: neighbouring epochs and seeds do not share their streams.
    digest = hashlib.blake2b(repr(("epoch", seed, epoch)).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    order_X = torch.randperm(len(length_X), generator=generator)
    batches: list[list[int]] = []
    for pool_X in order_X.split(_POOL_ROWS):
        pool_X = pool_X[length_X[pool_X].argsort(stable=True)]
        batches += _cut(pool_X.tolist(), length_X[pool_X].tolist(), batch_tokens)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def plan_in_order(length_X: Tensor, *, batch_tokens: int) -> list[list[int]]:
    """Batches for validation: rows sorted by length, the same ones every time."""
    order_X = length_X.argsort(stable=True)
    return _cut(order_X.tolist(), length_X[order_X].tolist(), batch_tokens)


def _cut(rows: list[int], lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Cut rows of ascending length into batches under the budget."""
    batches: list[list[int]] = [[]] if rows else []
    for row, length in zip(rows, lengths, strict=True):
        padded = length + -length % PAD_MULTIPLE
        if batches[-1] and (len(batches[-1]) + 1) * padded > batch_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches
