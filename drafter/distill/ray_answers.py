"""Answers made on many machines: prompts go out to engines on a Ray cluster, answers come back to one journal.

Ray Data runs one engine per GPU (or per so many cores) and feeds them batches as they become free. A batch whose worker
is lost is answered again by another. Rows are written by this process alone, each once, as their batch comes back; a
seed follows from prompt and answer number, so that it does not matter who answers.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from drafter.distill.jobs import Answer, AnswerSettings, Job

if TYPE_CHECKING:
    from drafter.distill.local import EngineAnswerer


@dataclass(frozen=True)
class RayOptions:
    """Where the cluster is, and what an engine takes of it.

    Attributes:
        address: of the cluster, such as ``ray://head:10001``; ``auto``: the one that this machine belongs to;
            ``local``: a new one on this machine.
        num_workers: engines.
        num_gpus, num_cpus: of each engine.
        batch_size: prompts that are sent to an engine at once, and answered again together if it is lost.

    Raises:
        ValueError: a value out of range.
    """

    address: str = "auto"
    num_workers: int = 1
    num_gpus: float = 0.0
    num_cpus: float = 1.0
    batch_size: int = 64

    def __post_init__(self) -> None:
        for name in ("num_workers", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--ray: {name.replace('_', ' ')} is {getattr(self, name)} but must be at least 1")
        for name in ("num_gpus", "num_cpus"):
            if getattr(self, name) < 0:
                raise ValueError(f"--ray: {name.replace('_', ' ')} is {getattr(self, name)} but must not be negative")


class RayAnswerer:
    """Answers jobs with engines on a cluster.

    Args:
        make: makes a worker's engine; called on the workers, so that what it loads must be there.
        options: where, and how many.
    """

    def __init__(self, make: "Callable[[], EngineAnswerer]", options: RayOptions) -> None:
        self._make = make
        self._options = options
        self._identity: dict[str, Any] | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What beside prompts and settings decides about the answers: asked of an engine on the cluster, once."""
        if self._identity is None:
            ray = self._connect()
            ask = ray.remote(num_gpus=self._options.num_gpus, num_cpus=self._options.num_cpus)(_identity_of)
            self._identity = _get(ray, ask.remote(self._make))
        return self._identity

    def answer(self, jobs: Sequence[Job], settings: AnswerSettings) -> Iterator[tuple[Job, Answer | None]]:
        """Answer jobs in the order in which batches come back; see :class:`drafter.distill.local.Answerer`."""
        if not jobs:
            return
        self._connect()
        import ray.data

        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        options = self._options
        # Batches of prompts of similar length waste the least.
        items = [{"job": json.dumps(_plain(job))} for job in sorted(jobs, key=_num_characters)]
        batches = ray.data.from_items(items, override_num_blocks=math.ceil(len(items) / options.batch_size))
        answered = batches.map_batches(
            _Worker,
            fn_constructor_args=(self._make, settings),
            batch_size=options.batch_size,
            concurrency=options.num_workers,
            num_gpus=options.num_gpus or None,
            num_cpus=options.num_cpus,
        )
        wanted = {job.key: job for job in jobs}
        try:
            for row in answered.iter_rows():
                found = json.loads(row["answer"])
                job = wanted.pop((found["id"], found["answer"]), None)
                if job is not None:  # a batch that was answered twice after all counts once
                    yield job, None if found["result"] is None else Answer(*found["result"])
        except ray.exceptions.RayError as error:
            raise OSError(f"--ray: a worker failed: {_last_line(error)}") from error

    def _connect(self) -> Any:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ValueError("--ray needs the package ray: in the repository, pip install -e '.[cluster]'") from error
        if not ray.is_initialized():
            address = None if self._options.address == "local" else self._options.address
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise OSError(
                    f"--ray {self._options.address}: no cluster answers there ({_last_line(error)}); start one with "
                    "`ray start --head`, or give --ray local"
                ) from error
        return ray


class _Worker:
    """One engine of the cluster."""

    def __init__(self, make: "Callable[[], EngineAnswerer]", settings: AnswerSettings) -> None:
        self._answerer = make()
        self._settings = settings

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        jobs = [_job(json.loads(text)) for text in batch["job"]]
        return {
            "answer": [
                json.dumps({"id": job.prompt.id, "answer": job.answer, "result": answer})
                for job, answer in self._answerer.answer(jobs, self._settings)
            ]
        }


def _identity_of(make: "Callable[[], EngineAnswerer]") -> dict[str, Any]:
    return make().identity


def _get(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ValueError | OSError):
            raise cause from error
        raise OSError(f"--ray: a worker failed: {_last_line(error)}") from error


def _plain(job: Job) -> dict[str, Any]:
    return asdict(job)


def _job(found: dict[str, Any]) -> Job:
    from drafter.distill.prompts import Prompt

    prompt = found.pop("prompt")
    return Job(Prompt(prompt["id"], tuple(prompt["messages"]), prompt["source"]), **found)


def _num_characters(job: Job) -> int:
    return sum(len(message["content"]) for message in job.prompt.messages)


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
