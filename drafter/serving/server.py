"""Server: makes jobs for the engine from the API's requests, and responses from the engine's deltas."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from drafter.decoding.params import SamplingParams
from drafter.engine.config import RequestOptions
from drafter.engine.engine import Engine
from drafter.serving.answers import Answer, ChatAnswer, CompletionAnswer, Model, TokenNames
from drafter.serving.calls import Call, Job
from drafter.serving.encoder import Encoder
from drafter.serving.options import ServeOptions
from drafter.serving.protocol import GREEDY_BELOW, ApiError, ChatRequest, CompletionRequest, Generation
from drafter.serving.stream import CLOSED_BY_CLIENT, DONE, KEEP_ALIVE, OUTCOME, EventStream, event, hung_up
from drafter.serving.worker import Metrics, Worker

_KEEP_ALIVE_SECONDS = 15.0
_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd, so that the seeds of all choices of one request differ


class _Deadline(NamedTuple):
    """The end of a request's time, by the event loop's clock."""

    at: float

    def seconds_left(self) -> float:
        return max(0.0, self.at - asyncio.get_running_loop().time())


class Server:
    """The state that all endpoints share: worker, encoder, metrics, model card."""

    def __init__(self, engine: Engine, options: ServeOptions) -> None:
        target = engine.target
        if target.tokenizer is None:
            raise ValueError(f"target {target.name!r} has no tokenizer: a server needs a tokenizer")
        if engine.config.max_length is None:
            raise ValueError("the rows of a server have one size: set max_length (--max-length)")
        self.request_timeout = options.request_timeout
        self.metrics = Metrics()
        self.worker = Worker(engine, max_queue=options.max_queue, metrics=self.metrics)
        fingerprint = "fp_" + hashlib.sha256(target.fingerprint.encode()).hexdigest()[:12]
        self.model = Model(options.served_name, fingerprint, TokenNames(target.tokenizer))
        self.max_length = min(engine.config.max_length, target.max_length)
        self.encoder = Encoder(
            target.tokenizer, target.name, self.max_length, escape_special_tokens=options.escape_special_tokens
        )
        self.model_card = {
            "id": self.model.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "drafter",
            "max_length": self.max_length,
            "max_rows": engine.config.max_rows,
            "speculation": engine.proposer.num_nodes > 1,
        }

    async def start(self) -> None:
        """Start the engine's thread and the tokenizer's process; return when the engine has generated its first tokens.

        Raises:
            ValueError: the engine failed.
        """
        await asyncio.gather(self.encoder.start(), self.worker.start())

    async def stop(self) -> None:
        """End the thread and the process. Open calls fail."""
        await self.worker.stop()
        await self.encoder.close()

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        deadline = self._deadline()
        num_choices = self._check(body, 1)
        prompt_ids = await self.encoder.chat([turn.plain for turn in body.messages], deadline.seconds_left())
        jobs = self._jobs(body, prompt_ids, body.limit, body.num_logprobs, num_choices)
        return await self._answer(ChatAnswer, body, request, jobs, num_choices, deadline)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        deadline = self._deadline()
        num_choices = self._check(body, len(body.prompts))
        jobs = []
        for prompt in body.prompts:
            prompt_ids = await self.encoder.prompt(prompt, deadline.seconds_left())
            jobs += self._jobs(body, prompt_ids, body.limit, body.num_logprobs, num_choices)
        return await self._answer(CompletionAnswer, body, request, jobs, num_choices, deadline)

    def _check(self, body: Generation, num_prompts: int) -> int:
        """The number of choices; ApiError for an unknown model, or when the worker has no room."""
        if body.model != self.model.name:
            raise ApiError(
                404,
                f"model {body.model!r} is not served here: use {self.model.name!r}",
                param="model",
                code="model_not_found",
            )
        num_choices = body.n or 1
        self.worker.check(num_prompts * num_choices)
        return num_choices

    def _jobs(
        self, body: Generation, prompt_ids: list[int], limit: int | None, num_logprobs: int | None, num_choices: int
    ) -> list[Job]:
        """One job for each choice of a prompt."""
        temperature = 1.0 if body.temperature is None else body.temperature
        options = RequestOptions(
            speculate=body.speculation is not False,
            num_logprobs=num_logprobs,
            want_tree=bool(body.details and body.stream),
        )
        jobs = []
        for choice in range(num_choices):
            seed = secrets.randbits(64) if body.seed is None else (body.seed + choice * _SEED_STRIDE) % 2**64
            params = SamplingParams(
                max_new_tokens=min(limit or self.max_length, self.max_length),
                temperature=0.0 if temperature < GREEDY_BELOW else temperature,
                top_k=max(0, body.top_k or 0),
                # 0 keeps the likeliest token alone, like any value below the probability of that token.
                top_p=1.0 if body.top_p is None else max(body.top_p, 1e-9),
                min_p=body.min_p or 0.0,
                seed=seed,
                stop=body.stops,
                stop_token_ids=tuple(body.stop_token_ids or ()),
                ignore_eos=bool(body.ignore_eos),
            )
            wants_pieces = bool(body.details) or num_logprobs is not None
            jobs.append(Job(prompt_ids, params, options, wants_pieces))
        return jobs

    async def _answer(
        self,
        kind: type[Answer],
        body: Generation,
        request: Request,
        jobs: list[Job],
        num_choices: int,
        deadline: "_Deadline",
    ) -> Response:
        answer = kind(
            self.model,
            [len(job.prompt_ids) for job in jobs[::num_choices]],
            num_choices,
            wants_logprobs=jobs[0].options.num_logprobs is not None,
            wants_details=bool(body.details),
            wants_usage=body.wants_usage,
            prompt_ids=[job.prompt_ids for job in jobs[::num_choices]] if body.return_token_ids else None,
        )
        call = self.worker.submit(jobs)
        if not body.stream:
            return await self._whole(answer, call, request, deadline)
        try:
            async with asyncio.timeout_at(deadline.at):
                await call.accepted()
        except BaseException:
            self.worker.abandon(call)
            raise
        return EventStream(
            self._events(answer, call, request),
            deadline=deadline.at,
            on_timeout=partial(self._end_stream, request, "timed_out", self._timeout_error()),
            on_hang_up=partial(request.scope.__setitem__, OUTCOME, "hung_up"),
        )

    async def _whole(self, answer: Answer, call: Call, request: Request, deadline: "_Deadline") -> Response:
        async def collect() -> None:
            async for delta in call.deltas():
                if delta is not None:
                    answer.collect(delta)

        collecting = asyncio.create_task(collect())
        watching = asyncio.create_task(hung_up(request.receive))
        try:
            timeout = deadline.seconds_left()
            await asyncio.wait({collecting, watching}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if collecting.done():
                collecting.result()
                return JSONResponse(answer.whole())
            if watching.done():
                return Response(status_code=CLOSED_BY_CLIENT)
            raise self._timeout_error()
        finally:
            collecting.cancel()
            watching.cancel()
            self.worker.abandon(call)

    async def _events(self, answer: Answer, call: Call, request: Request) -> AsyncGenerator[bytes, None]:
        try:
            for chunk in answer.opening():
                yield event(chunk)
            async for delta in call.deltas(_KEEP_ALIVE_SECONDS):
                if delta is None:
                    yield KEEP_ALIVE
                    continue
                for chunk in answer.chunks(delta):
                    yield event(chunk)
            for chunk in answer.closing():
                yield event(chunk)
            yield DONE
        except ApiError as error:
            yield self._end_stream(request, "overloaded" if error.status == 503 else "failed", error)
        finally:
            self.worker.abandon(call)

    def _end_stream(self, request: Request, outcome: str, error: ApiError) -> bytes:
        """The error as the last event, because the status was sent with the first."""
        request.scope[OUTCOME] = outcome
        return event(error.body)

    def _deadline(self) -> "_Deadline":
        return _Deadline(asyncio.get_running_loop().time() + self.request_timeout)

    def _timeout_error(self) -> ApiError:
        message = f"the answer took longer than {self.request_timeout:g} seconds"
        return ApiError(504, message, kind="server_error", code="timeout")
