"""Iterables of batches for the trainer: deterministic, and resumable at the exact batch."""

from collections.abc import Iterator
from typing import Any

from drafter.data.batch import ChatBatch, StateReader, gather, plan_epoch, plan_in_order
from drafter.data.rows import TokenRows


class TrainLoader:
    """An endless stream of batches, handed out one epoch's worth per ``iter``.

    The order depends on (seed, epoch) and the data alone. Under data parallelism rank r takes every ``world_size``-th
    batch from the r-th on. The last batches of an epoch that do not reach all ranks are left out, so that all ranks
    make as many steps. A new loader with the ``state_dict`` of k batches continues with batch k + 1. The next ``iter``
    continues where an unfinished one stopped, so that a shortened epoch skips no data.
    """

    def __init__(
        self,
        rows: TokenRows,
        states: StateReader | None = None,
        *,
        batch_tokens: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        fingerprint: str = "",
    ) -> None:
        self._rows = rows
        self._states = states
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._fingerprint = fingerprint
        self._epoch = 0  # passes over the data that are complete
        self._position = 0  # batches of this rank handed out in this epoch
        self._planned: tuple[int, list[list[int]]] | None = None
        self._length = len(self._plan(0)) // world_size
        if self._length == 0:
            raise ValueError(
                f"the training data make {len(self._plan(0))} batch(es), fewer than the {world_size} devices: "
                f"lower --data.batch_tokens {batch_tokens} or give more rows"
            )

    def __len__(self) -> int:
        """Number of batches of this rank in an epoch, and of every ``iter``."""
        return self._length

    def __iter__(self) -> Iterator[ChatBatch]:
        for _ in range(self._length):
            if (self._position + 1) * self._world_size > len(self._plan(self._epoch)):
                self._epoch, self._position = self._epoch + 1, 0
            rows = self._plan(self._epoch)[self._position * self._world_size + self._rank]
            self._position += 1
            yield gather(self._rows, rows, states=self._states)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, and the settings that the position depends on."""
        position = {"epoch": self._epoch, "position": self._position, "world_size": self._world_size}
        return {**position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; ValueError if the position belongs to other data or settings."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                what = "training data" if name == "fingerprint" else f"--data.{name}"
                shown = "" if name == "fingerprint" else f" ({state.get(name)} then, {value} now)"
                raise ValueError(
                    f"the checkpoint was written with another {what}{shown}, so its position in the data means nothing "
                    "here: restore it to resume, or start a new run from the checkpoint's weights"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {"fingerprint": self._fingerprint, "batch_tokens": self._batch_tokens, "seed": self._seed}

    def _plan(self, epoch: int) -> list[list[int]]:
        if self._planned is None or self._planned[0] != epoch:
            lengths, size = self._rows.length_R, self._batch_tokens
            self._planned = epoch, plan_epoch(lengths, batch_tokens=size, seed=self._seed, epoch=epoch)
        return self._planned[1]


class ValLoader:
    """The same batches in the same order at every ``iter``; rank r takes every ``world_size``-th.

    All ranks get the same number of batches, since they meet in every forward.
    """

    def __init__(
        self,
        rows: TokenRows,
        states: StateReader | None = None,
        *,
        batch_tokens: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._rows, self._states = rows, states
        plan = plan_in_order(rows.length_R, batch_tokens=batch_tokens)
        self._batches = _divisible(plan, world_size)[rank::world_size]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[ChatBatch]:
        return (gather(self._rows, batch, states=self._states) for batch in self._batches)


def _divisible(batches: list[list[int]], num_ranks: int) -> list[list[int]]:
    """The same rows in a number of batches that the ranks share evenly: the largest batches are cut in two.

    So the loss of a validation does not depend on the number of processes. Rows are repeated only if every batch is a
    single row and the number still does not fit.
    """
    batches = list(batches)
    while len(batches) % num_ranks:
        largest = max(range(len(batches)), key=lambda index: len(batches[index]))
        rows = batches[largest]
        if len(rows) == 1:
            batches.append(batches[len(batches) % num_ranks - 1])
            continue
        half = len(rows) // 2
        batches[largest : largest + 1] = [rows[:half], rows[half:]]
    return batches
