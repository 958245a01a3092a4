"""Worker: the engine on its own thread. Jobs join and leave between steps; events go back to the event loop.

Only the engine's thread uses the engine. The event loop sends commands through a queue and counts open answers. The
engine's thread posts all events of a step in one callback.
"""

import asyncio
import gc
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.outputs import Update
from drafter.engine.request import Request
from drafter.serving.calls import Accepted, Call, CallEvent, Delta, Failure, Job, PieceFeed, Release
from drafter.serving.protocol import ApiError
from drafter.utils.io import first_line

State = Literal["starting", "ready", "draining", "dead"]

_log = logging.getLogger("drafter.serving")
_RECOVERY_SECONDS = 30.0  # from running out of memory until the worker tries twice the rows
_LONGEST_RETRY = 600  # largest number of seconds in a Retry-After header
_WARM_UP = SamplingParams(max_new_tokens=4, ignore_eos=True)
_WARM_UP_PROMPT = 40  # tokens: more than a step has, so that the program for prompts runs as well

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_STEP_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16)

OUTCOMES = ("completed", "refused", "unauthorized", "overloaded", "hung_up", "timed_out", "failed")


class Metrics:
    """Counters and histograms for ``/metrics``; thread-safe. Each server has a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests for generation by outcome", "outcome")
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.answers = self._counter("answers", "Finished answers by finish reason", "finish_reason")
        self.queue_depth = self._gauge("queue_depth", "Answers that wait for a row")
        self.active_rows = self._gauge("active_rows", "Rows in use")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answers that got a row")
        self.shared_tokens = self._counter("shared_prompt_tokens", "Prompt tokens that the prefix cache held")
        self.tokens = self._counter("generated_tokens", "Generated tokens")
        self.drafted_tokens = self._counter("accepted_draft_tokens", "Generated tokens that were drafted and accepted")
        self.target_forwards = self._counter("target_forwards", "Target forwards for tokens, summed over rows")
        self.steps = self._counter("steps", "Steps of the engine")
        self.failed_steps = self._counter("failed_steps", "Steps that raised", "cause")
        self.tokens_per_step = self._histogram("tokens_per_step", "Tokens of a row in one step", _TOKENS)
        self.step_seconds = self._histogram("step_seconds", "Time of a step", _STEP_SECONDS)
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _SECONDS
        )
        self.token_seconds = self._histogram(
            "time_per_output_token_seconds",
            "Time of each token after the first, mean of an answer",
            _STEP_SECONDS,
        )
        self.answer_seconds = self._histogram("answer_seconds", "From arrival to the last token", _SECONDS)
        ProcessCollector(registry=self.registry)

    def render(self) -> bytes:
        """The metrics in the text format of Prometheus."""
        return generate_latest(self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"drafter_{name}", about, labels, registry=self.registry)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(f"drafter_{name}", about, registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"drafter_{name}", about, buckets=buckets, registry=self.registry)


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
    """End the thread; open answers fail with this error."""

    error: ApiError


class Worker:
    """Runs an engine for many clients.

    Args:
        engine: the engine; no other thread may use the engine.
        max_queue: answers that may wait for a row; the worker refuses further answers.
        metrics: counters of the server.

    Attributes:
        state: ``starting`` until the engine has generated its first tokens, ``draining`` when the worker takes no new
            calls, ``dead`` when the engine's thread has ended by an error.
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
        """Start the thread; return when the engine has generated its first tokens. Events go to the loop of this call.

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
        """Number of answers that were accepted and are not finished."""
        return self._num_open

    def submit(self, jobs: list[Job]) -> Call:
        """Accept all jobs as one call, or refuse all.

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
        """Check that the worker would accept a call of ``num_jobs`` answers now.

        Raises:
            ApiError: 429 when the queue is full, 503 when the server stops or its engine has failed, 400 when the call
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
        """Free the rows of a call whose client has left. A finished call needs no change."""
        if call.num_open:
            self._num_open -= call.num_open
            call.num_open = 0
            self._commands.put(_Abandon(call))

    def drain(self) -> None:
        """Refuse new calls; open calls go on."""
        if self.state in ("starting", "ready"):
            self.state = "draining"

    async def stop(self) -> None:
        """End the thread. Open calls fail."""
        if self.state != "dead":
            self.state = "draining"
        error = ApiError(503, "the server was shut down before the answer was finished", kind="server_error")
        self._commands.put(_Stop(error))
        await asyncio.to_thread(self._thread.join)

    def _seconds_to_wait(self, num_jobs: int) -> int:
        """Estimated seconds until ``num_jobs`` further answers get rows, from the durations of the last answers.

        Before the first answer is finished, the estimate uses the time since the engine got work.
        """
        if self._durations:
            mean = sum(self._durations) / len(self._durations)
        else:
            mean = max(1.0, time.perf_counter() - self._busy_since)
        num_rounds = (self._num_open + num_jobs) / self.engine.config.max_rows - 1.0
        return max(1, min(_LONGEST_RETRY, math.ceil(mean * num_rounds)))

    def _deliver(self, batch: list[tuple[Call, CallEvent]]) -> None:
        for call, event in batch:
            is_last = isinstance(event, Failure) or (isinstance(event, Delta) and event.finish_reason is not None)
            if call.num_open:  # otherwise the call was abandoned
                if is_last:
                    call.num_open -= 1
                    self._num_open -= 1
                call.put(event)

    def _end(self, error: ApiError) -> None:
        """Fail all answers in the engine and in the queue, because the thread has ended.

        The thread sets the state before it posts this callback, so no call can follow.
        """
        events: list[tuple[Call, CallEvent]] = [
            (item.call, Failure(item.place, error)) for item in self._tickets.values()
        ]
        self._tickets.clear()
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Add):
                events += [(command.call, Failure(place, error)) for place in range(len(command.call.jobs))]
        self._deliver(events)
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
        """Generate short answers: the cache is allocated and kernels are loaded before the first client.

        A runtime that compiles programs for its steps compiles them here, for every number of rows.
        """
        assert self._loop is not None
        config, target = self.engine.config, self.engine.target
        room = (config.max_length or target.max_length) - _WARM_UP.max_new_tokens
        prompt = [0] * max(1, min(_WARM_UP_PROMPT, room))
        try:
            most = 1 if target.runtime is None else config.max_rows
            for num_rows in sorted({min(1 << power, most) for power in range(most.bit_length() + 1)}):
                self.engine.generate([prompt] * num_rows, _WARM_UP)
            self.engine.forget()
            if self.state == "starting":
                self.state = "ready"
        except Exception as error:
            # `start` reports any error of the engine.
            self._failure, self.state = error, "dead"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._is_warm.set)
        return self._failure is None

    def _obey(self) -> _Stop | None:
        """Carry out the waiting commands; wait for a command when the engine has no work."""
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
            events = [self._delta(update) for update in updates]
        except Exception as error:
            if self.engine.lockstep.is_on:
                raise  # the other processes have ended or continued: the steps of this process would differ
            # Any error of a step may fail only the requests of that step.
            self._recover(error)
            return
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe(time.perf_counter() - started)
        self._count_rows()
        self._post(events)

    def _delta(self, update: Update) -> tuple[Call, CallEvent]:
        """The call of an update, and the delta for its client."""
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
        ids = request.token_ids if reason is not None else []
        numbers = len(request.token_ids), request.num_forwards, request.num_shared, ids
        return ticket.call, Delta(ticket.place, release.text, release.pieces, update.tree, reason, *numbers)

    def _recover(self, error: Exception) -> None:
        """Fail the requests of a failed step, or their later half when memory ran out, and go on."""
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
        if not failed:  # the step failed before any row changed: the waiting requests would fail the next step too
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
        """Limit the rows in use. The limit doubles after `_RECOVERY_SECONDS` until all rows are allowed again."""
        most = self.engine.config.max_rows
        self._num_rows_allowed = min(num_rows, most)
        self.engine.limit_rows(self._num_rows_allowed)
        is_bound = self._num_rows_allowed < most
        self._retry_rows_at = time.perf_counter() + _RECOVERY_SECONDS if is_bound else math.inf

    def _post(self, batch: list[tuple[Call, CallEvent]]) -> None:
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
    """The API's error code of a refused prompt; None for errors without a code."""
    return "context_length_exceeded" if "context" in str(error) else None
