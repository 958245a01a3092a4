"""Calls: one client's request on the way to the engine, and the deltas of its answers on the way back.

An answer passes five kinds of objects: a :class:`Call` (whose subclasses write the responses), the engine's ``Request``
and ``Update``, and :class:`Delta` with its :class:`Piece`.

An answer's text is held back while the text may become part of a stop string or ends within a character
(:class:`IncrementalText`). The tokens of held text are held back with the text, so that the tokens that a client reads
never run ahead of the text.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Literal, NamedTuple

from drafter.decoding.params import SamplingParams
from drafter.engine.outputs import StepTree, TokenLogprob, Update
from drafter.engine.request import Request, RequestOptions
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


class Delta(NamedTuple):
    """The new part of one answer after a step.

    Attributes:
        place: index of the answer in its call.
        text: new text that no stop string can take back.
        pieces: tokens of the new text, if the call asks for pieces.
        tree: draft tree of the step, if the call asks for trees.
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


class Call:
    """One client's request: one or more answers to each of its prompts, and one queue of their deltas.

    The engine's thread reads the attributes; only the event loop calls the methods.

    Args:
        prompts: token ids of each prompt.
        params: sampling parameters of each answer. The answers to one prompt stand next to each other.
        options: the engine's further options, the same for all answers.
        wants_pieces: whether the deltas hold pieces.
        may_record: whether a server that records may record the answers.

    Attributes:
        num_open: answers whose last delta has not come.
        arrived: time of the construction, by ``time.perf_counter``.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        options: RequestOptions | None = None,
        *,
        wants_pieces: bool = False,
        may_record: bool = True,
    ) -> None:
        assert prompts and len(params) % len(prompts) == 0
        self.prompts = list(prompts)
        self.params = list(params)
        self.num_choices = len(params) // len(prompts)
        self.options = options or RequestOptions()
        self.wants_pieces = wants_pieces
        self.may_record = may_record
        self.num_open = len(self.params)
        self.arrived = time.perf_counter()
        self._deltas: asyncio.Queue[Delta | ApiError] = asyncio.Queue()
        self._is_decided = asyncio.Event()
        self._error: ApiError | None = None

    def accept(self) -> None:
        """Note that the engine has taken all answers. They may still wait for rows."""
        self._is_decided.set()

    def put(self, delta: Delta) -> None:
        """Add a delta to the queue."""
        self.num_open -= delta.finish_reason is not None
        self._deltas.put_nowait(delta)

    def fail(self, error: ApiError) -> None:
        """End all open answers by an error."""
        self.num_open = 0
        self._error = error
        self._is_decided.set()
        self._deltas.put_nowait(error)

    async def accepted(self) -> None:
        """Wait until the engine has taken all answers (ApiError when the engine refused one)."""
        await self._is_decided.wait()
        if self._error is not None:
            raise self._error

    async def deltas(self, idle_seconds: float | None = None) -> AsyncIterator[Delta | None]:
        """The deltas of all answers until the last answer ends; None after ``idle_seconds`` without a delta.

        Raises:
            ApiError: an answer failed. The call's other answers are given up.
        """
        num_left = len(self.params)
        while num_left:
            try:
                # Not wait_for: before Python 3.12 it loses a cancellation that meets a result.
                async with asyncio.timeout(idle_seconds):
                    delta = await self._deltas.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(delta, ApiError):
                raise delta
            num_left -= delta.finish_reason is not None
            yield delta


class Feed:
    """Makes the deltas of one running answer from the engine's updates. Only the engine's thread uses a feed.

    Attributes:
        call: the call of the answer.
        place: index of the answer in the call.
        request: the engine's request; it must have a text.
    """

    def __init__(self, call: Call, place: int, request: Request) -> None:
        assert request.text is not None
        self.call = call
        self.place = place
        self.request = request
        self._text = request.text
        self._shown = ""
        self._tokens: list[tuple[int, bool, TokenLogprob | None]] = []
        self._num_released = 0

    def take(self, update: Update) -> Delta:
        """The delta of a step: the text that may be shown now, with its pieces if the call wants pieces."""
        request = self.request
        reason = request.finish_reason
        assert reason != "abort"
        fresh = self._text.take()
        return Delta(
            self.place,
            fresh,
            self._pieces(update, fresh) if self.call.wants_pieces else [],
            update.tree,
            reason,
            num_tokens=len(request.token_ids),
            num_forwards=request.num_forwards,
            num_shared=request.num_shared,
            token_ids=request.token_ids if reason is not None else [],
        )

    def _pieces(self, update: Update, fresh: str) -> list[Piece]:
        """Add the tokens of a step and its new text; the pieces that may be shown now."""
        num_drafted = self.request.num_accepted[-1]
        for place, token_id in enumerate(update.token_ids):
            logprob = None if update.logprobs is None else update.logprobs[place]
            self._tokens.append((token_id, place < num_drafted, logprob))
        self._shown += fresh
        stop = self._last_certain()
        ends = [0, *self._text.ends]
        pieces = []
        for place in range(self._num_released, stop):
            token_id, is_drafted, logprob = self._tokens[place]
            text = self._shown[ends[place] : ends[place + 1]]
            pieces.append(Piece(token_id, text, is_drafted, logprob))
        self._num_released = max(self._num_released, stop)
        return pieces

    def _last_certain(self) -> int:
        """Number of tokens that may be shown: all up to the last token whose whole text is shown.

        A stop token has no entry in ``ends``. Tokens without text at the end may begin a character of a stop string.
        These tokens wait for the next token with text, or for the end of the answer.
        """
        ends = self._text.ends
        shown = len(self._shown)
        if self.request.is_finished:
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
