"""Server: makes answers for the engine from the API's requests, and sends them."""

import asyncio
import hashlib
import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.request import Request as EngineRequest
from drafter.engine.request import RequestOptions
from drafter.serving.answers import Answer, ChatAnswer, CompletionAnswer, Model
from drafter.serving.encoder import Encoder
from drafter.serving.follow import Follower
from drafter.serving.metrics import Metrics
from drafter.serving.options import ServeOptions
from drafter.serving.protocol import GREEDY_BELOW, ApiError, ChatRequest, CompletionRequest, Generation, timed_out
from drafter.serving.record import TrafficLog
from drafter.serving.stream import CLOSED_BY_CLIENT, EventStream, unless_client_leaves
from drafter.serving.worker import Worker
from drafter.targets.chat import Chat
from drafter.utils.io import first_line

_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd, so that the seeds of all choices of one request differ


class Server:
    """The state that all endpoints share: worker, encoder, metrics, model card."""

    def __init__(self, engine: Engine, options: ServeOptions) -> None:
        target = engine.target
        if target.tokenizer is None:
            raise ValueError(f"target {target.name!r} has no tokenizer: a server needs a tokenizer")
        if engine.plan.max_model_len is None:
            raise ValueError("the rows of a server have one size: set max_model_len (--max-model-len)")
        self._seconds = options.request_timeout
        self.metrics = Metrics()
        self._traffic = None
        if options.record is not None:
            self._traffic = TrafficLog(options.record, options.record_max_mib, self.metrics)
        self.worker = Worker(engine, max_queue=options.max_queue, metrics=self.metrics, traffic=self._traffic)
        fingerprint = "fp_" + hashlib.sha256(target.fingerprint.encode()).hexdigest()[:12]
        self.model = Model(options.served_name, fingerprint, target.tokenizer)
        self.max_length = min(engine.plan.max_model_len, target.max_length)
        self.encoder = Encoder(
            target.tokenizer, target.name, self.max_length, escape_special_tokens=options.escape_special_tokens
        )
        self.follower = None
        if options.drafter_used is not None and engine.drafter is not None:
            self.follower = Follower(options.drafter_used, self.worker, self.metrics)
        self._follows = options.follow
        self._following: asyncio.Task[None] | None = None
        self._card = {
            "id": self.model.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "drafter",
            "max_model_len": self.max_length,
            "max_num_seqs": engine.plan.max_num_seqs,
            "speculation": engine.proposer.num_nodes > 1,
        }

    @property
    def model_card(self) -> dict[str, Any]:
        """The model as ``/v1/models`` describes it, with the digest of the drafter in use."""
        return self._card | {"drafter": None if self.follower is None else self.follower.digest}

    async def start(self) -> None:
        """Start the engine's thread and the tokenizer's process; return when the engine has generated its first tokens.

        Raises:
            ValueError: the engine failed.
        """
        await asyncio.gather(self.encoder.start(), self.worker.start())
        if self._follows:
            assert self.follower is not None, "--follow without a drafter"
            self._following = asyncio.create_task(self.follower.follow())

    async def stop(self) -> None:
        """End the thread and the process. Open answers fail."""
        if self._following is not None:
            self._following.cancel()
        await self.worker.stop()
        await self.encoder.close()
        if self._traffic is not None:
            await asyncio.to_thread(self._traffic.close)

    async def reload_drafter(self) -> dict[str, Any]:
        """Load the drafter's folder again; the drafter in use, and whether it has just taken over."""
        if self.follower is None:
            raise ApiError(400, "this server drafts without a drafter's folder: there is nothing to reload")
        try:
            is_replaced = await self.follower.reload()
        except (OSError, ValueError) as error:
            message = f"the old drafter stays: {first_line(error)}"
            raise ApiError(409, message, code="drafter_refused") from error
        return {"drafter": self.follower.digest, "replaced": is_replaced}

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a conversation (TimeoutError after the request's time)."""
        return await self._respond(ChatAnswer, body, [Chat([turn.plain for turn in body.messages])], request)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Continue texts (TimeoutError after the request's time)."""
        return await self._respond(CompletionAnswer, body, body.prompts, request)

    async def _respond(
        self,
        kind: type[Answer],
        body: ChatRequest | CompletionRequest,
        asked: Sequence[str | Chat | list[int]],
        request: Request,
    ) -> Response:
        self._check(body, len(asked))
        async with asyncio.timeout(self._seconds) as limit:
            prompts = [ids if isinstance(ids, list) else await self.encoder.encode(ids) for ids in asked]
            answer = kind(self.model, body, self._requests(body, prompts), limit.when() or 0.0)
            abandon = partial(self.worker.abandon, answer)
            self.worker.submit(answer)
            if body.stream:  # the end of the stream frees the rows
                return EventStream(answer, timed_out(self._seconds), abandon)
            try:
                whole = await unless_client_leaves(answer.whole(), request.receive)
                return Response(status_code=CLOSED_BY_CLIENT) if whole is None else JSONResponse(whole)
            finally:
                abandon()

    def _check(self, body: Generation, num_prompts: int) -> None:
        """ApiError for an unknown model, or when the worker has no room."""
        if body.model != self.model.name:
            message = f"model {body.model!r} is not served here: use {self.model.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        self.worker.check(num_prompts * (body.n or 1))

    def _requests(self, body: ChatRequest | CompletionRequest, prompts: Sequence[list[int]]) -> list[EngineRequest]:
        """The engine's request of each text; the texts of a prompt differ in the seed (ApiError for a bad prompt)."""
        temperature = 1.0 if body.temperature is None else body.temperature
        params = SamplingParams(
            max_new_tokens=min(body.limit or self.max_length, self.max_length),
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            top_k=max(0, body.top_k or 0),
            # 0 keeps the likeliest token alone, like any value below the probability of that token.
            top_p=1.0 if body.top_p is None else max(body.top_p, 1e-9),
            min_p=body.min_p or 0.0,
            stop=body.stops,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
        )
        options = RequestOptions(
            speculate=body.speculation is not False,
            num_logprobs=body.num_logprobs,
            want_tree=bool(body.details and body.stream),
        )
        make = self.worker.engine.make_request
        places = itertools.product(prompts, range(body.n or 1))
        try:
            return [make(ids, replace(params, seed=_seed(body, choice)), options) for ids, choice in places]
        except ValueError as error:
            code = "context_length_exceeded" if "context" in str(error) else None
            raise ApiError(400, str(error), code=code) from error


def _seed(body: Generation, choice: int) -> int:
    """The seed of a choice: the client's, another for each further choice, or a random seed."""
    return secrets.randbits(64) if body.seed is None else (body.seed + choice * _SEED_STRIDE) % 2**64
