"""What passes between the event loop and the engine's thread: jobs go in, news come out."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from drafter.decoding.params import SamplingParams
from drafter.engine.config import RequestOptions
from drafter.engine.outputs import StepTree
from drafter.serving.pieces import Piece
from drafter.serving.protocol import ApiError


@dataclass(frozen=True)
class Job:
    """One answer to make."""

    prompt_ids: list[int]
    params: SamplingParams
    options: RequestOptions = field(default_factory=RequestOptions)
    wants_pieces: bool = False


class Accepted(NamedTuple):
    """The engine took a job; it may still have to wait for a row."""

    place: int


class Delta(NamedTuple):
    """What a step brought for one answer.

    Attributes:
        place: which of the call's jobs.
        text: the text that became certain.
        pieces: its tokens, if asked for.
        tree: the step's tree, if asked for.
        finish_reason: set with the last delta.
        num_tokens: tokens generated so far, stop token included.
        num_forwards: target forwards that generated them.
        num_shared: prompt tokens that needed no computing.
    """

    place: int
    text: str
    pieces: list[Piece]
    tree: StepTree | None
    finish_reason: Literal["stop", "length"] | None
    num_tokens: int
    num_forwards: int
    num_shared: int


class Failure(NamedTuple):
    """An answer ends here, with an error."""

    place: int
    error: ApiError


News = Accepted | Delta | Failure


class Call:
    """One client's request: several jobs, one stream of news. Belongs to the event loop; the engine only posts to it.

    Attributes:
        jobs: what is to be answered.
        num_open: jobs whose last news has not come.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = list(jobs)
        self.num_open = len(self.jobs)
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._first: list[Delta] = []

    def put(self, news: News) -> None:
        """Deliver (on the event loop)."""
        self._news.put_nowait(news)

    async def accepted(self) -> None:
        """Wait until the engine has taken all jobs.

        Raises:
            ApiError: it refused one.
        """
        num_waiting = len(self.jobs)
        while num_waiting:
            news = await self._news.get()
            if isinstance(news, Failure):
                raise news.error
            if isinstance(news, Accepted):
                num_waiting -= 1
            else:
                self._first.append(news)

    async def deltas(self, idle_seconds: float | None = None) -> AsyncIterator[Delta | None]:
        """The news of all jobs until the last one ends; None after ``idle_seconds`` without any.

        Raises:
            ApiError: an answer failed; the others are of no use to the client then.
        """
        num_left = len(self.jobs)
        while num_left:
            if self._first:
                news: News = self._first.pop(0)
            else:
                try:
                    # Not wait_for: before Python 3.12 it loses a cancellation that meets a result.
                    async with asyncio.timeout(idle_seconds):
                        news = await self._news.get()
                except TimeoutError:
                    yield None
                    continue
            if isinstance(news, Failure):
                raise news.error
            if isinstance(news, Delta):
                num_left -= news.finish_reason is not None
                yield news
