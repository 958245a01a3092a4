"""Messages between the event loop and the engine's thread: jobs go in, events come out.

An answer's text is held back while the text may become part of a stop string or ends within a character
(:class:`IncrementalText`). The tokens of held text are held back with the text, so that the tokens that a client reads
never run ahead of the text.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from drafter.decoding.params import SamplingParams
from drafter.engine.config import RequestOptions
from drafter.engine.outputs import StepTree, TokenLogprob, Update
from drafter.engine.text import IncrementalText
from drafter.serving.protocol import ApiError


class Piece(NamedTuple):
    """A token of an answer.

    Attributes:
        token_id: id of the token.
        text: text that the token adds; empty where a later token completes the character.
        is_drafted: True for an accepted draft token, False for the target's own pick.
        logprob: log-probability of the token; None unless the client asks for log-probabilities.
    """

    token_id: int
    text: str
    is_drafted: bool
    logprob: TokenLogprob | None


@dataclass(frozen=True)
class Job:
    """One answer for the engine to generate."""

    prompt_ids: list[int]
    params: SamplingParams
    options: RequestOptions = field(default_factory=RequestOptions)
    wants_pieces: bool = False


class Accepted(NamedTuple):
    """The engine has taken a job. The job may still wait for a row."""

    place: int


class Delta(NamedTuple):
    """The new part of one answer after a step.

    Attributes:
        place: index of the job in its call.
        text: new text that no stop string can take back.
        pieces: tokens of the new text, if the job asks for pieces.
        tree: draft tree of the step, if the job asks for trees.
        finish_reason: reason why the answer ends; None before the last delta.
        num_tokens: tokens generated so far, stop token included.
        num_forwards: target forwards that generated these tokens.
        num_shared: prompt tokens that the prefix cache held.
        token_ids: all tokens of the answer; empty before the last delta.
    """

    place: int
    text: str
    pieces: list[Piece]
    tree: StepTree | None
    finish_reason: Literal["stop", "length"] | None
    num_tokens: int
    num_forwards: int
    num_shared: int
    token_ids: list[int]


class Failure(NamedTuple):
    """The end of an answer by an error."""

    place: int
    error: ApiError


CallEvent = Accepted | Delta | Failure


class Call:
    """One client's request: several jobs and one queue of events. Only the event loop uses a call.

    Attributes:
        jobs: the answers to generate.
        num_open: jobs whose last event has not come.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = list(jobs)
        self.num_open = len(self.jobs)
        self._events: asyncio.Queue[CallEvent] = asyncio.Queue()
        self._first: list[Delta] = []

    def put(self, event: CallEvent) -> None:
        """Add an event to the queue."""
        self._events.put_nowait(event)

    async def accepted(self) -> None:
        """Wait until the engine has taken all jobs.

        Raises:
            ApiError: the engine refused a job.
        """
        num_waiting = len(self.jobs)
        while num_waiting:
            event = await self._events.get()
            if isinstance(event, Failure):
                raise event.error
            if isinstance(event, Accepted):
                num_waiting -= 1
            else:
                self._first.append(event)

    async def deltas(self, idle_seconds: float | None = None) -> AsyncIterator[Delta | None]:
        """The deltas of all jobs until the last job ends; None after ``idle_seconds`` without a delta.

        Raises:
            ApiError: an answer failed. The call's other answers are given up.
        """
        num_left = len(self.jobs)
        while num_left:
            if self._first:
                event: CallEvent = self._first.pop(0)
            else:
                try:
                    # Not wait_for: before Python 3.12 it loses a cancellation that meets a result.
                    async with asyncio.timeout(idle_seconds):
                        event = await self._events.get()
                except TimeoutError:
                    yield None
                    continue
            if isinstance(event, Failure):
                raise event.error
            if isinstance(event, Delta):
                num_left -= event.finish_reason is not None
                yield event


class Release(NamedTuple):
    """Text and tokens that may be shown after a step."""

    text: str
    pieces: list[Piece]


class PieceFeed:
    """Releases the pieces of one answer together with their text."""

    def __init__(self, text: IncrementalText) -> None:
        self._text = text
        self._shown = ""
        self._tokens: list[tuple[int, bool, TokenLogprob | None]] = []
        self._num_released = 0

    def take(self, update: Update) -> Release:
        """Add the tokens of a step; return the text and the pieces that may be shown now."""
        num_drafted = update.request.num_accepted[-1]
        for place, token_id in enumerate(update.token_ids):
            logprob = None if update.logprobs is None else update.logprobs[place]
            self._tokens.append((token_id, place < num_drafted, logprob))
        fresh = self._text.take()
        self._shown += fresh
        stop = self._last_certain(is_finished=update.request.is_finished)
        ends = [0, *self._text.ends]
        pieces = []
        for place in range(self._num_released, stop):
            token_id, is_drafted, logprob = self._tokens[place]
            text = self._shown[ends[place] : ends[place + 1]]
            pieces.append(Piece(token_id, text, is_drafted, logprob))
        self._num_released = max(self._num_released, stop)
        return Release(fresh, pieces)

    def _last_certain(self, *, is_finished: bool) -> int:
        """Number of tokens that may be shown: all up to the last token whose whole text is shown.

        A stop token has no entry in ``ends``. Tokens without text at the end may begin a character of a stop string.
        These tokens wait for the next token with text, or for the end of the answer.
        """
        ends = self._text.ends
        shown = len(self._shown)
        if is_finished:
            if not self._text.is_stopped:
                return len(ends)
            # A stop string cut the text, perhaps within the last token; later tokens are no part of the answer.
            return sum(start < shown for start in [0, *ends][: len(ends)])
        count = self._num_released
        for place in range(self._num_released, len(ends)):
            start = ends[place - 1] if place else 0
            if ends[place] > shown:
                break
            if ends[place] > start:
                count = place + 1
        return count
