"""Answers of engines on a Ray cluster.

Ray Data runs one engine per worker and sends batches to free workers; another worker answers the batch of a lost one.
A seed depends on the prompt's id and the answer's number, so every worker makes the same answer.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from drafter.distill.prompts import AnswerStream, WantedAnswer
from drafter.utils.validate import within

if TYPE_CHECKING:
    from drafter.distill.run import EngineAnswerer


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """A Ray cluster that answers instead of this machine.

    Attributes:
        ray: address of the cluster, such as ray://head:10001; auto: the cluster of this machine; local: a new cluster
            on this machine. Target and drafter must have the same names on every machine
        ray_workers: engines on the cluster, such as one for each GPU
        ray_gpus: GPUs of each engine
        ray_cpus: processor cores of each engine
    """

    ray: str | None = None
    ray_workers: int = within(1, low=1)
    ray_gpus: float = within(0.0, low=0.0)
    ray_cpus: float = within(1.0, low=0.0)


@dataclass
class RayAnswerer:
    """Answers by engines on a Ray cluster.

    ``make`` makes a worker's engine, on the worker's machine, where target and drafter must exist. A lost batch of
    ``batch_size`` prompts is answered again as a whole.
    """

    make: "Callable[[], EngineAnswerer]"
    options: ClusterOptions
    batch_size: int = 64

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The settings that determine the answers, from an engine on the cluster."""
        with self._cluster() as ray:
            worker = ray.remote(num_gpus=self.options.ray_gpus, num_cpus=self.options.ray_cpus)
            found: dict[str, Any] = ray.get(worker(lambda make: make().identity).remote(self.make))
            return found

    def answer(self, wanted: Sequence[WantedAnswer]) -> AnswerStream:
        """Answers in the order in which batches return; see :class:`drafter.distill.run.Answerer`."""
        if not wanted:
            return
        wanted = sorted(wanted, key=lambda item: len(str(item.prompt.messages)))  # alike in length: little padding
        with self._cluster() as ray:
            ray.data.DataContext.get_current().enable_progress_bars = False
            batches = ray.data.range(len(wanted), override_num_blocks=math.ceil(len(wanted) / self.batch_size))
            answered = batches.map_batches(
                _RayEngine, fn_constructor_args=(self.make, wanted), batch_size=self.batch_size,
                concurrency=self.options.ray_workers, num_gpus=self.options.ray_gpus or None,
                num_cpus=self.options.ray_cpus,
            )  # fmt: skip
            for row in answered.iter_rows():
                yield json.loads(row["answer"])

    @contextmanager
    def _cluster(self) -> Iterator[Any]:
        """The package `ray`, connected; within the block the failure of a worker is a ValueError or an OSError."""
        import ray
        import ray.data

        address = None if self.options.ray == "local" else self.options.ray or "auto"
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise OSError(
                f"--ray {self.options.ray}: no cluster answers there ({_last_line(error)}); start one with "
                "`ray start --head`, or give --ray local"
            ) from error
        try:
            yield ray
        except ray.exceptions.RayError as error:
            if isinstance(cause := getattr(error, "cause", None), ValueError | OSError):
                raise cause from error
            raise OSError(f"--ray: a worker failed: {_last_line(error)}") from error


class _RayEngine:
    """The engine of one worker; a batch holds indices of the wanted answers."""

    def __init__(self, make: "Callable[[], EngineAnswerer]", wanted: Sequence[WantedAnswer]) -> None:
        self._answerer, self._wanted = make(), wanted

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        rows = self._answerer.answer([self._wanted[index] for index in batch["id"]])
        return {"answer": [json.dumps(row) for row in rows]}


def _last_line(error: BaseException) -> str:
    return str(error).strip().rpartition("\n")[2].strip() or type(error).__name__
