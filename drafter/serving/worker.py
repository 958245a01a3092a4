"""Worker: the engine on its own thread. Answers join and leave between steps; their tokens go back to the event loop.

The event loop makes requests, and sends commands through a queue; all else of the engine is for the engine's thread.
The thread posts what a step brought in one callback, in which the event loop makes the text and entries of answers.
"""

import asyncio
import contextlib
import gc
import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Literal

import torch

from drafter.engine.engine import Engine
from drafter.engine.request import Request, Update
from drafter.engine.runner import is_out_of_memory
from drafter.models.drafter import RecurrentDrafter
from drafter.serving.answers import Answer, Choice
from drafter.serving.metrics import Metrics
from drafter.serving.protocol import TRY_LATER, ApiError
from drafter.serving.record import Recorder, traffic_row

State = Literal["ready", "draining", "dead"]

_log = logging.getLogger("drafter.serving")


class Worker:
    """Runs an engine for many clients; ``max_queue`` texts may wait for a row.

    Attributes:
        state: ``draining`` when the worker takes no new answers, ``dead`` when an error has ended the engine's thread.
        ended: is done when the engine's thread has ended and every open answer has failed.
    """

    ended: asyncio.Task[None]

    def __init__(self, engine: Engine, *, max_queue: int, metrics: Metrics, recorder: Recorder | None = None) -> None:
        self.engine, self._metrics, self._recorder = engine, metrics, recorder
        self.state: State = "ready"
        self.capacity = engine.plan.max_num_seqs + max_queue
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._num_held = 0  # places of texts that are still encoded; event loop only
        self._choices: dict[int, Choice] = {}  # unfinished texts whose clients wait, by request id; event loop only
        self._requests: list[Request] = []  # unfinished requests; engine's thread only
        self._is_stopping = False

    # -- on the event loop -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. Steps go to the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.create_task(self._work())

    @property
    def num_open(self) -> int:
        """Number of texts that were accepted and are not finished."""
        return self._num_held + len(self._choices)

    @contextlib.contextmanager
    def hold(self, num_texts: int) -> Iterator[None]:
        """Take places in the queue while the prompts of so many texts are encoded (errors as of :meth:`check`)."""
        self.check(num_texts)
        self._num_held += num_texts
        try:
            yield
        finally:
            self._num_held -= num_texts

    def submit(self, answer: Answer) -> None:
        """Accept all texts of an answer, or refuse all (ApiError, see :meth:`check`)."""
        self.check(len(answer.choices))
        for choice in answer.choices:
            self._choices[choice.request.request_id] = choice
            self._commands.put(partial(self._add, choice.request))

    def check(self, num_texts: int) -> None:
        """ApiError unless an answer of so many texts would be accepted now: 429 when the queue is full, 503 when the
        server stops or its engine has failed, 400 when the answer alone is larger than the queue.
        """
        if self.state != "ready":
            what = "is shutting down" if self.state == "draining" else "has lost its engine"
            raise ApiError(503, f"the server {what}: try again later", headers=TRY_LATER)
        if num_texts > self.capacity:
            message = f"{num_texts} answers were asked for at once, this server takes {self.capacity}"
            raise ApiError(400, message, param="n")
        if self.num_open + num_texts > self.capacity:
            message = "all rows are busy and the queue is full: try again later"
            raise ApiError(429, message, code="queue_full", headers=TRY_LATER)

    def abandon(self, answer: Answer) -> None:
        """Give up an answer whose client has left, or has all texts. Its rows are free at the next step."""
        for choice in answer.choices:
            if self._choices.pop(choice.request.request_id, None) is not None:
                self._commands.put(partial(choice.request.finish, "abort"))

    async def replace_drafter(self, drafter: RecurrentDrafter) -> None:
        """Draft with another drafter from the next step on; running answers go on with the same tokens. The old drafter
        stays after a ValueError (the other does not fit, or the thread has ended) or any error of the first steps.
        """
        done = Future[None]()

        def replace() -> None:
            try:
                self.engine.replace_drafter(drafter)
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        self._commands.put(replace)
        swap = asyncio.wrap_future(done)
        await asyncio.wait((swap, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if not swap.done():
            raise ValueError("the engine has ended")
        swap.result()

    def drain(self) -> None:
        """Refuse new answers; open answers go on."""
        if self.state == "ready":
            self.state = "draining"

    async def stop(self) -> None:
        """End the thread. Open answers fail."""
        self.drain()
        self._is_stopping = True
        self._commands.put(lambda: None)  # an idle thread waits for a command
        await self.ended

    async def _work(self) -> None:
        """Run the engine until the end, and fail the answers that are open then."""
        error = ApiError(503, "the server was shut down before the answer was finished")
        try:
            await asyncio.to_thread(self._run)
        except Exception:
            _log.exception("the engine has ended by an error")
            self.state = "dead"
            error = ApiError(500, "the engine has ended by an error")
        self._fail([choice.request for choice in self._choices.values()], error)

    def _deliver(self, updates: Sequence[Update]) -> None:
        """Count a step, and make its entries for clients who wait."""
        for update in updates:
            request = update.request
            if (choice := self._choices.get(request.request_id)) is None:
                continue
            self._count(choice, update)
            if update.finish_reason == "abort":
                self._fail([request], ApiError(500, request.error))
                continue
            try:
                entry = choice.take(update)
            except Exception as error:  # of a stranger's decoder: the other answers go on
                _log.error("an answer's text failed", exc_info=error)
                self._fail([request], ApiError(500, "an internal error ended this answer"))
                continue
            if choice.is_finished:
                self._commands.put(partial(request.finish, "length"))  # unless the engine has ended the request itself
                del self._choices[request.request_id]
                if self._recorder is not None and choice.answer.body.record:
                    self._recorder.add(traffic_row(request.prompt_ids, request.token_ids, asdict(request.params)))
            if entry is not None:
                choice.answer.put(entry)

    def _count(self, choice: Choice, update: Update) -> None:
        metrics, request = self._metrics, update.request
        num_tokens, seconds = len(update.token_ids), time.perf_counter() - choice.answer.arrived
        metrics.target_forwards.inc()
        metrics.tokens.inc(num_tokens)
        metrics.tokens_per_step.observe(num_tokens)
        metrics.drafted_tokens.inc(update.num_accepted)
        if choice.num_steps == 0:
            metrics.first_token_seconds.observe(seconds)
            metrics.prompt_tokens.inc(len(request.prompt_ids))
            metrics.shared_tokens.inc(request.num_shared)
        if update.finish_reason is not None:
            metrics.answers.labels(update.finish_reason).inc()
            metrics.answer_seconds.observe(seconds)
            num_further = len(request.token_ids) - num_tokens
            if request.first_token is not None and request.finished is not None and num_further > 0:
                metrics.token_seconds.observe((request.finished - request.first_token) / num_further)

    def _fail(self, requests: Sequence[Request], error: ApiError) -> None:
        """End the answers of the requests by an error."""
        ids = {request.request_id for request in requests} & self._choices.keys()
        for answer in {self._choices[request_id].answer for request_id in ids}:
            self.abandon(answer)
            answer.put(error)

    # -- on the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            if not self.engine.has_work:
                self._commands.get()()  # waits
            while not self._commands.empty():
                self._commands.get()()
            if self.engine.has_work:
                before = self.engine.num_failed_drafts
                self._step()
                self._metrics.failed_drafts.inc(self.engine.num_failed_drafts - before)
            self._metrics.active_rows.set(self.engine.num_running)
            self._metrics.queue_depth.set(self.engine.num_waiting)

    def _add(self, request: Request) -> None:
        self._requests = [known for known in self._requests if not known.is_finished]
        self._requests.append(self.engine.add(request))

    def _step(self) -> None:
        started = time.perf_counter()
        try:
            updates = self.engine.step()
        except Exception as error:
            self._recover(error)  # whatever the error, the requests of this step alone fail
            return
        self._metrics.step_seconds.observe(time.perf_counter() - started)
        if updates:
            self._loop.call_soon_threadsafe(self._deliver, updates)

    def _recover(self, error: Exception) -> None:
        """Fail the answers of a failed step, or their later half when memory ran out, and go on."""
        is_memory = is_out_of_memory(error)
        num_running = self.engine.num_running
        keep = num_running // 2 if is_memory else 0
        _log.error("a step with %d rows failed; going on with %d", num_running, keep, exc_info=error)
        self._metrics.failed_steps.labels("memory" if is_memory else "error").inc()
        # Where the step failed before any row changed, the waiting requests would fail the next step too.
        failed = self.engine.drop(keep) or [request for request in self._requests if not request.is_finished]
        for request in failed:
            request.finish("abort")
        failure = ApiError(500, "an internal error ended this answer")
        if is_memory:
            message = "the server ran out of memory: try again later"
            failure = ApiError(503, message, code="out_of_memory", headers=TRY_LATER)
            # The traceback holds the frames of the step and with them its tensors.
            error.__traceback__ = None
            gc.collect()
            device = self.engine.target.device
            if device.type != "cpu":
                torch.get_device_module(device).empty_cache()
        self._loop.call_soon_threadsafe(self._fail, failed, failure)
