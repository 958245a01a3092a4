"""Worker: the engine on its own thread. Jobs join and leave between steps; news go back to the event loop.

Only the engine's thread touches the engine. The event loop sends commands through a queue and counts what is open; the
engine's thread posts all news of a step in one callback.
"""

import asyncio
import gc
import logging
import math
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import torch

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.outputs import Update
from drafter.engine.request import Request
from drafter.serving.calls import Accepted, Call, Delta, Failure, Job, News
from drafter.serving.metrics import Metrics
from drafter.serving.pieces import PieceFeed, Release
from drafter.serving.protocol import ApiError
from drafter.utils.io import first_line

State = Literal["starting", "ready", "draining", "dead"]

_log = logging.getLogger("drafter.serving")
_RECOVERY_SECONDS = 30.0  # after running out of memory, so long until twice the rows are tried again
_LONGEST_RETRY = 600  # seconds that a client is asked to wait at most
_WARM_UP = SamplingParams(max_new_tokens=4, ignore_eos=True)


@dataclass
class _Ticket:
    """A job that the engine works on."""

    call: Call
    place: int
    request: Request
    feed: PieceFeed | None
    arrived: float


@dataclass(frozen=True)
class _Add:
    call: Call
    arrived: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class _Abandon:
    call: Call


@dataclass(frozen=True)
class _Stop:
    """End the thread; what is still open fails with this error."""

    error: ApiError


class Worker:
    """Runs an engine for many clients.

    Args:
        engine: nobody else may use it.
        max_queue: answers that may wait for a row; more are turned away.
        metrics: where to count.

    Attributes:
        state: ``starting`` until the engine has made its first tokens, ``draining`` when no new calls are taken,
            ``dead`` when its thread has ended by an error.
        ended: set when the thread has ended.
    """

    def __init__(self, engine: Engine, *, max_queue: int, metrics: Metrics) -> None:
        self.engine = engine
        self.state: State = "starting"
        self.capacity = engine.config.max_rows + max_queue
        self._metrics = metrics
        self._commands: queue.SimpleQueue[_Add | _Abandon | _Stop] = queue.SimpleQueue()
        self._tickets: dict[int, _Ticket] = {}
        self._num_open = 0  # event loop only
        self._busy_since = 0.0  # event loop only
        self._durations: deque[float] = deque(maxlen=32)  # seconds of the last answers
        self._num_rows_allowed = engine.config.max_rows
        self._retry_rows_at = math.inf
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_warm = asyncio.Event()
        self._failure: Exception | None = None
        self.ended = asyncio.Event()

    # -- on the event loop -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the thread, and return when the engine has made its first tokens; news go to the loop of this call.

        Raises:
            ValueError: the engine failed at its first tokens.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()
        await self._is_warm.wait()
        if self._failure is not None:
            raise ValueError(
                f"the engine failed at its first tokens: {type(self._failure).__name__}: {first_line(self._failure)}"
            ) from self._failure

    @property
    def num_open(self) -> int:
        """Answers promised and not finished."""
        return self._num_open

    def submit(self, jobs: list[Job]) -> Call:
        """Take a call, whole or not at all.

        Raises:
            ApiError: see :meth:`check`.
        """
        self.check(len(jobs))
        if not self._num_open:
            self._busy_since = time.perf_counter()
        self._num_open += len(jobs)
        call = Call(jobs)
        self._commands.put(_Add(call))
        return call

    def check(self, num_jobs: int) -> None:
        """Find out whether a call of so many answers would be taken now.

        Raises:
            ApiError: 429 when the queue is full, 503 when the server is about to stop or broken, 400 when the call
                alone is larger than the queue.
        """
        if self.state in ("draining", "dead"):
            what = "is shutting down" if self.state == "draining" else "has lost its engine"
            raise ApiError(503, f"the server {what}: try again later", kind="server_error", retry_after=5)
        if num_jobs > self.capacity:
            raise ApiError(
                400, f"{num_jobs} answers were asked for at once, this server takes {self.capacity}", param="n"
            )
        if self._num_open + num_jobs > self.capacity:
            raise ApiError(
                429,
                "all rows are busy and the queue is full: try again later",
                kind="rate_limit_error",
                code="queue_full",
                retry_after=self._seconds_to_wait(num_jobs),
            )

    def abandon(self, call: Call) -> None:
        """Nobody listens any more: free its rows. Does nothing for a call that is finished."""
        if call.num_open:
            self._num_open -= call.num_open
            call.num_open = 0
            self._commands.put(_Abandon(call))

    def drain(self) -> None:
        """Take no new calls; open ones go on."""
        if self.state in ("starting", "ready"):
            self.state = "draining"

    async def stop(self) -> None:
        """End the thread; open calls fail."""
        if self.state != "dead":
            self.state = "draining"
        error = ApiError(503, "the server was shut down before the answer was finished", kind="server_error")
        self._commands.put(_Stop(error))
        await asyncio.to_thread(self._thread.join)

    def _seconds_to_wait(self, num_jobs: int) -> int:
        """Seconds until a call of so many answers may get its rows: those in front of it, at the pace of the last ones.

        Before any answer is finished, the oldest open one has taken at least so long.
        """
        if self._durations:
            mean = sum(self._durations) / len(self._durations)
        else:
            mean = max(1.0, time.perf_counter() - self._busy_since)
        num_rounds = (self._num_open + num_jobs) / self.engine.config.max_rows - 1.0
        return max(1, min(_LONGEST_RETRY, math.ceil(mean * num_rounds)))

    def _deliver(self, batch: list[tuple[Call, News]]) -> None:
        for call, news in batch:
            is_last = isinstance(news, Failure) or (isinstance(news, Delta) and news.finish_reason is not None)
            if call.num_open:  # else abandoned: nobody listens
                if is_last:
                    call.num_open -= 1
                    self._num_open -= 1
                call.put(news)

    def _end(self, error: ApiError) -> None:
        """The thread has ended: whoever still waits, in the engine or in the queue, gets an answer.

        The state was set before this was posted, so that no call can come behind it.
        """
        news: list[tuple[Call, News]] = [(item.call, Failure(item.place, error)) for item in self._tickets.values()]
        self._tickets.clear()
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Add):
                news += [(command.call, Failure(place, error)) for place in range(len(command.call.jobs))]
        self._deliver(news)
        self.ended.set()

    # -- on the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        stop = None
        try:
            if not self._warm_up():
                return
            while stop is None:
                stop = self._obey()
                self._count_rows()
                if stop is None and self.engine.has_work:
                    self._step()
        finally:
            if stop is None:
                self.state = "dead"
            broken = ApiError(500, "the engine has ended by an error", kind="server_error")
            self._post_end(stop.error if stop else broken)

    def _warm_up(self) -> bool:
        """Make one whole answer, which allocates the cache and loads every kernel, before a client waits for one."""
        assert self._loop is not None
        try:
            self.engine.generate([[0]], _WARM_UP)
            if self.state == "starting":
                self.state = "ready"
        except Exception as error:
            # Whatever the engine trips over, the process that waits for the first tokens reports it.
            self._failure, self.state = error, "dead"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._is_warm.set)
        return self._failure is None

    def _obey(self) -> _Stop | None:
        """Carry out the commands that have come; wait for one when there is nothing else to do."""
        is_idle = not self.engine.has_work
        while is_idle or not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Stop):
                return command
            if isinstance(command, _Add):
                self._add(command)
            else:
                self._drop_call(command.call)
            is_idle = False
        return None

    def _add(self, command: _Add) -> None:
        call = command.call
        added: list[Request] = []
        try:
            for job in call.jobs:
                added.append(self.engine.add(job.prompt_ids, job.params, job.options))
        except ValueError as error:
            for request in added:
                self.engine.abort(request.request_id)
            refusal = ApiError(400, str(error), code=_code_of(error))
            self._post([(call, Failure(place, refusal)) for place in range(len(call.jobs))])
            return
        for place, (job, request) in enumerate(zip(call.jobs, added, strict=True)):
            feed = PieceFeed(request.text) if job.wants_pieces and request.text is not None else None
            self._tickets[request.request_id] = _Ticket(call, place, request, feed, command.arrived)
        self._post([(call, Accepted(place)) for place in range(len(added))])

    def _drop_call(self, call: Call) -> None:
        for request_id in [key for key, ticket in self._tickets.items() if ticket.call is call]:
            self.engine.abort(request_id)
            del self._tickets[request_id]

    def _step(self) -> None:
        started = time.perf_counter()
        if started >= self._retry_rows_at:
            self._allow_rows(self._num_rows_allowed * 2)
        try:
            updates = self.engine.step()
            news = [self._news(update) for update in updates]
        except Exception as error:
            if self.engine.lockstep.is_on:
                raise  # the other processes are gone or have gone on: no step of this one can be right
            # The one place where any error is caught: whatever a step trips over, only its own requests may fail.
            self._recover(error)
            return
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe(time.perf_counter() - started)
        self._count_rows()
        self._post(news)

    def _news(self, update: Update) -> tuple[Call, News]:
        """What to tell the client of an update."""
        request = update.request
        ticket = self._tickets[request.request_id]
        if ticket.feed is not None:
            release = ticket.feed.take(update)
        else:
            release = Release(request.text.take() if request.text is not None else "", [])
        self._count(ticket, update)
        reason = request.finish_reason
        assert reason != "abort"
        if reason is not None:
            del self._tickets[request.request_id]
        numbers = len(request.token_ids), request.num_forwards, request.num_shared
        return ticket.call, Delta(ticket.place, release.text, release.pieces, update.tree, reason, *numbers)

    def _recover(self, error: Exception) -> None:
        """Fail the requests of a broken step, or the later half of them when memory ran out, and go on."""
        is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        num_running = self.engine.num_running
        keep = num_running // 2 if is_memory else 0
        if is_memory:
            _log.warning("out of memory with %d rows; going on with %d", num_running, max(keep, 1), exc_info=error)
            failure = ApiError(
                503,
                "the server ran out of memory: try again later",
                kind="server_error",
                code="out_of_memory",
                retry_after=5,
            )
        else:
            _log.error("a step with %d rows failed", num_running, exc_info=error)
            failure = ApiError(500, "an internal error ended this answer", kind="server_error")
        self._metrics.failed_steps.labels("memory" if is_memory else "error").inc()
        failed = {request.request_id for request in self.engine.drop(keep)}
        if not failed:  # it broke before any row was touched: whoever waits would only break it again
            failed = set(self._tickets)
            for request_id in failed:
                self.engine.abort(request_id)
        tickets = [self._tickets.pop(request_id) for request_id in failed & self._tickets.keys()]
        self._post([(ticket.call, Failure(ticket.place, failure)) for ticket in tickets])
        if is_memory:
            self._allow_rows(max(keep, 1))
            # The traceback holds the frames of the step and with them its tensors.
            error.__traceback__ = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _allow_rows(self, num_rows: int) -> None:
        """Bound the rows in use; a bound is doubled after a while until it is none any more."""
        most = self.engine.config.max_rows
        self._num_rows_allowed = min(num_rows, most)
        self.engine.limit_rows(self._num_rows_allowed)
        is_bound = self._num_rows_allowed < most
        self._retry_rows_at = time.perf_counter() + _RECOVERY_SECONDS if is_bound else math.inf

    def _post(self, batch: list[tuple[Call, News]]) -> None:
        assert self._loop is not None
        if batch and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, batch)

    def _post_end(self, error: ApiError) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end, error)

    # -- counting --------------------------------------------------------------------------------------------------

    def _count(self, ticket: _Ticket, update: Update) -> None:
        metrics, request = self._metrics, update.request
        num_tokens = len(update.token_ids)
        metrics.target_forwards.inc()
        metrics.tokens.inc(num_tokens)
        metrics.tokens_per_step.observe(num_tokens)
        metrics.drafted_tokens.inc(request.num_accepted[-1])
        now = time.perf_counter()
        if request.num_forwards == 1:
            metrics.first_token_seconds.observe(now - ticket.arrived)
            metrics.prompt_tokens.inc(len(request.prompt_ids))
            metrics.shared_tokens.inc(request.num_shared)
        if request.finish_reason is not None:
            metrics.answers.labels(request.finish_reason).inc()
            metrics.answer_seconds.observe(now - ticket.arrived)
            self._durations.append(request.seconds)
            num_further = len(request.token_ids) - num_tokens
            if request.first_token is not None and num_further > 0:
                metrics.token_seconds.observe((now - request.first_token) / num_further)

    def _count_rows(self) -> None:
        self._metrics.active_rows.set(self.engine.num_running)
        self._metrics.queue_depth.set(self.engine.num_waiting)


def _code_of(error: ValueError) -> str | None:
    """The API's code for a prompt that does not fit."""
    return "context_length_exceeded" if "context" in str(error) else None
