"""Iterables of batches for the trainer: deterministic, and resumable at the exact batch."""

from collections.abc import Iterator
from typing import Any

from drafter.data.batch import ChatBatch, plan_epoch, plan_in_order
from drafter.data.rows import TokenRows


class TrainLoader:
    """An endless stream of batches, handed out one epoch's worth per ``iter``.

    The order depends on (seed, epoch) and the data alone. Under data parallelism rank r takes every ``world_size``-th
    batch from the r-th on. The last batches of an epoch that do not reach all ranks are left out, so that all ranks
    make as many steps. A new loader with the ``state_dict`` of k batches continues with batch k + 1. The next ``iter``
    continues where an unfinished one stopped, so that a shortened epoch skips no data.
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

    All ranks get the same number of batches, since they meet in every forward: the largest batches are cut in two. So
    the loss of a validation does not depend on the number of processes. Rows are repeated only if there are fewer rows
    than ranks.
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
