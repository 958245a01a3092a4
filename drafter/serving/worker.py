"""Worker: the engine on its own thread. Calls join and leave between steps; deltas go back to the event loop.

Only the engine's thread uses the engine. The event loop sends commands through a queue and counts open answers. The
engine's thread posts all deltas of a step in one callback.
"""

import asyncio
import gc
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.outputs import Update
from drafter.engine.request import Request
from drafter.models.drafter import RecurrentDrafter
from drafter.serving.calls import Call, Delta, Feed
from drafter.serving.metrics import Metrics
from drafter.serving.protocol import ApiError
from drafter.serving.record import TrafficLog
from drafter.utils.io import first_line

State = Literal["starting", "ready", "draining", "dead"]

_log = logging.getLogger("drafter.serving")
_RECOVERY_SECONDS = 30.0  # from running out of memory until the worker tries twice the rows
_LONGEST_RETRY = 600  # largest number of seconds in a Retry-After header
_WARM_UP = SamplingParams(max_new_tokens=4, ignore_eos=True)
_WARM_UP_PROMPT = 40  # tokens: more than a step has, so that the program for prompts runs as well


class Worker:
    """Runs an engine for many clients.

    Args:
        engine: the engine; no other thread may use the engine.
        max_queue: answers that may wait for a row; the worker refuses further answers.
        metrics: counters of the server.
        traffic: records the finished answers; None: no recording.

    Attributes:
        state: ``starting`` until the engine has generated its first tokens, ``draining`` when the worker takes no new
            calls, ``dead`` when the engine's thread has ended by an error.
        ended: set when the thread has ended.
    """

    def __init__(self, engine: Engine, *, max_queue: int, metrics: Metrics, traffic: TrafficLog | None = None) -> None:
        self.engine = engine
        self.state: State = "starting"
        self.capacity = engine.plan.max_num_seqs + max_queue
        self._metrics = metrics
        self._traffic = traffic
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._calls: set[Call] = set()  # calls with open answers; event loop only
        self._swaps: set[asyncio.Future[None]] = set()  # event loop only
        self._busy_since = 0.0  # event loop only
        self._feeds: dict[int, Feed] = {}  # by request id; engine's thread only
        self._stop_error: ApiError | None = None  # engine's thread only
        self._durations: deque[float] = deque(maxlen=32)  # seconds of the last answers
        self._num_rows_allowed = engine.plan.max_num_seqs
        self._retry_rows_at = math.inf
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_warm = asyncio.Event()
        self._failure: Exception | None = None
        self.ended = asyncio.Event()

    # -- on the event loop -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the thread; return when the engine has generated its first tokens. Deltas go to the loop of this call.

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
        return sum(call.num_open for call in self._calls)

    def submit(self, call: Call) -> None:
        """Accept all answers of a call, or refuse all.

        Raises:
            ApiError: see :meth:`check`.
        """
        self.check(call.num_open)
        if not self._calls:
            self._busy_since = time.perf_counter()
        self._calls.add(call)
        self._commands.put(partial(self._add, call))

    def check(self, num_answers: int) -> None:
        """Check that the worker would accept a call of ``num_answers`` answers now.

        Raises:
            ApiError: 429 when the queue is full, 503 when the server stops or its engine has failed, 400 when the call
                alone is larger than the queue.
        """
        if self.state in ("draining", "dead"):
            what = "is shutting down" if self.state == "draining" else "has lost its engine"
            raise ApiError(503, f"the server {what}: try again later", kind="server_error", retry_after=5)
        if num_answers > self.capacity:
            raise ApiError(
                400, f"{num_answers} answers were asked for at once, this server takes {self.capacity}", param="n"
            )
        if self.num_open + num_answers > self.capacity:
            raise ApiError(
                429,
                "all rows are busy and the queue is full: try again later",
                kind="rate_limit_error",
                code="queue_full",
                retry_after=self._seconds_to_wait(num_answers),
            )

    def abandon(self, call: Call) -> None:
        """Free the rows of a call whose client has left. A finished call needs no change."""
        if call in self._calls:
            self._calls.remove(call)
            self._commands.put(partial(self._drop_calls, {call}))

    async def replace_drafter(self, drafter: RecurrentDrafter) -> None:
        """Draft with another drafter from the next step on; running answers go on with the same tokens.

        Raises:
            ValueError: the drafter does not fit, or the thread has ended. The old drafter stays.
        """
        assert self._loop is not None
        done: asyncio.Future[None] = self._loop.create_future()
        self._commands.put(partial(self._replace_drafter, drafter, done))
        if self.ended.is_set():
            raise ValueError("the engine has ended")
        self._swaps.add(done)
        await done

    def drain(self) -> None:
        """Refuse new calls; open calls go on."""
        if self.state in ("starting", "ready"):
            self.state = "draining"

    async def stop(self) -> None:
        """End the thread. Open calls fail."""
        if self.state != "dead":
            self.state = "draining"
        error = ApiError(503, "the server was shut down before the answer was finished", kind="server_error")
        self._commands.put(partial(setattr, self, "_stop_error", error))
        await asyncio.to_thread(self._thread.join)

    def _seconds_to_wait(self, num_answers: int) -> int:
        """Estimated seconds until ``num_answers`` further answers get rows, from the durations of the last answers.

        Before the first answer is finished, the estimate uses the time since the engine got work.
        """
        if self._durations:
            mean = sum(self._durations) / len(self._durations)
        else:
            mean = max(1.0, time.perf_counter() - self._busy_since)
        num_rounds = (self.num_open + num_answers) / self.engine.plan.max_num_seqs - 1.0
        return max(1, min(_LONGEST_RETRY, math.ceil(mean * num_rounds)))

    def _deliver(self, deltas: list[tuple[Call, Delta]]) -> None:
        for call, delta in deltas:
            if call in self._calls:  # otherwise the call was abandoned
                call.put(delta)
                if not call.num_open:
                    self._calls.remove(call)

    def _fail(self, calls: set[Call], error: ApiError) -> None:
        for call in calls & self._calls:
            self._calls.remove(call)
            call.fail(error)

    def _end(self, error: ApiError) -> None:
        """Fail all open calls, because the thread has ended.

        The thread sets the state before it posts this callback, so no call can follow.
        """
        self._fail(set(self._calls), error)
        for done in set(self._swaps):
            self._settle(done, ValueError("the engine has ended"))
        self.ended.set()

    def _settle(self, done: "asyncio.Future[None]", error: ValueError | None = None) -> None:
        self._swaps.discard(done)
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    # -- on the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if not self._warm_up():
                return
            while self._stop_error is None:
                self._obey()
                self._count_rows()
                if self._stop_error is None and self.engine.has_work:
                    self._step()
        finally:
            if self._stop_error is None:
                self.state = "dead"
            broken = ApiError(500, "the engine has ended by an error", kind="server_error")
            self._post(self._end, self._stop_error or broken)

    def _warm_up(self) -> bool:
        """Generate short answers: the cache is allocated and kernels are loaded before the first client.

        A runtime that compiles programs for its steps compiles them here, for every number of rows.
        """
        plan, target = self.engine.plan, self.engine.target
        room = (plan.max_model_len or target.max_length) - _WARM_UP.max_new_tokens
        prompt = [0] * max(1, min(_WARM_UP_PROMPT, room))
        try:
            most = 1 if target.runtime is None else plan.max_num_seqs
            for num_rows in sorted({min(1 << power, most) for power in range(most.bit_length() + 1)}):
                self.engine.generate([prompt] * num_rows, _WARM_UP)
            self.engine.forget()
            if self.state == "starting":
                self.state = "ready"
        except Exception as error:
            # `start` reports any error of the engine.
            self._failure, self.state = error, "dead"
        self._post(self._is_warm.set)
        return self._failure is None

    def _obey(self) -> None:
        """Carry out the waiting commands; wait for a command when the engine has no work."""
        is_idle = not self.engine.has_work
        while self._stop_error is None and (is_idle or not self._commands.empty()):
            command = self._commands.get()
            command()
            is_idle = False

    def _add(self, call: Call) -> None:
        added: list[Request] = []
        try:
            for place, params in enumerate(call.params):
                prompt_ids = call.prompts[place // call.num_choices]
                added.append(self.engine.add(prompt_ids, params, call.options))
        except ValueError as error:
            for request in added:
                self.engine.abort(request.request_id)
            self._post(self._fail, {call}, ApiError(400, str(error), code=_code_of(error)))
            return
        for place, request in enumerate(added):
            self._feeds[request.request_id] = Feed(call, place, request)
        self._post(call.accept)

    def _replace_drafter(self, drafter: RecurrentDrafter, done: "asyncio.Future[None]") -> None:
        try:
            self.engine.replace_drafter(drafter)
        except Exception as error:
            # Whatever the drafter raises in its first steps: the engine still has the old one.
            refusal = error if isinstance(error, ValueError) else ValueError(f"its first step failed: {error}")
            self._post(self._settle, done, refusal)
        else:
            self._post(self._settle, done)

    def _drop_calls(self, calls: set[Call]) -> None:
        for request_id in [key for key, feed in self._feeds.items() if feed.call in calls]:
            self.engine.abort(request_id)
            del self._feeds[request_id]

    def _step(self) -> None:
        started = time.perf_counter()
        if started >= self._retry_rows_at:
            self._allow_rows(self._num_rows_allowed * 2)
        try:
            deltas = [self._delta(update) for update in self.engine.step()]
        except Exception as error:
            # Any error of a step may fail only the requests of that step.
            self._recover(error)
            return
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe(time.perf_counter() - started)
        self._count_rows()
        self._post(self._deliver, deltas)

    def _delta(self, update: Update) -> tuple[Call, Delta]:
        """The call of an update, and the delta for its client."""
        request_id = update.request.request_id
        feed = self._feeds[request_id]
        self._count(feed.call, update)
        if update.request.is_finished:
            del self._feeds[request_id]
            if self._traffic is not None and feed.call.may_record:
                self._traffic.add(update.request)
        return feed.call, feed.take(update)

    def _recover(self, error: Exception) -> None:
        """Fail the calls of a failed step, or their later half when memory ran out, and go on."""
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
        dropped = {request.request_id for request in self.engine.drop(keep)}
        if not dropped:  # the step failed before any row changed: the waiting requests would fail the next step too
            dropped = set(self._feeds)
        failed = {self._feeds[request_id].call for request_id in dropped & self._feeds.keys()}
        self._drop_calls(failed)
        self._post(self._fail, failed, failure)
        if is_memory:
            self._allow_rows(max(keep, 1))
            # The traceback holds the frames of the step and with them its tensors.
            error.__traceback__ = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _allow_rows(self, num_rows: int) -> None:
        """Limit the rows in use. The limit doubles after `_RECOVERY_SECONDS` until all rows are allowed again."""
        most = self.engine.plan.max_num_seqs
        self._num_rows_allowed = min(num_rows, most)
        self.engine.limit_rows(self._num_rows_allowed)
        is_bound = self._num_rows_allowed < most
        self._retry_rows_at = time.perf_counter() + _RECOVERY_SECONDS if is_bound else math.inf

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        """Run a function on the event loop."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    # -- counting --------------------------------------------------------------------------------------------------

    def _count(self, call: Call, update: Update) -> None:
        metrics, request = self._metrics, update.request
        num_tokens = len(update.token_ids)
        metrics.target_forwards.inc()
        metrics.tokens.inc(num_tokens)
        metrics.tokens_per_step.observe(num_tokens)
        metrics.drafted_tokens.inc(request.num_accepted[-1])
        now = time.perf_counter()
        if request.num_forwards == 1:
            metrics.first_token_seconds.observe(now - call.arrived)
            metrics.prompt_tokens.inc(len(request.prompt_ids))
            metrics.shared_tokens.inc(request.num_shared)
        if request.finish_reason is not None:
            metrics.answers.labels(request.finish_reason).inc()
            metrics.answer_seconds.observe(now - call.arrived)
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
