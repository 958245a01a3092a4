"""Prompts to token ids in processes of their own: a chat template is a program of the model's author.

The target's forks (:class:`drafter.targets.chat.Fork`) have limits of time and memory. A text that reaches one ends the
process: the client of this text gets the cause. Two forks serve all texts, each for a moment; a text that takes longer
begins again in a fork of its own, so that nobody waits for a slow template.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from drafter.serving.protocol import ApiError, told
from drafter.targets.chat import Chat, Fork, ForkError, Pieces, opening, texts_of
from drafter.targets.infill import InfillTokens
from drafter.targets.target import Target

_TRIAL = [{"role": "user", "content": "x"}]
_LIMITS = ("time", "memory", "ended")  # the fork has no process any more
_BROKEN = ("time", "memory", "TemplateSyntaxError", "SyntaxError", "RecursionError")  # whatever the conversation
_NUM_QUICK, _NUM_SLOW = 2, 3  # forks
_QUICK_SECONDS = 0.05  # of processor time; others may wait so long for a text
_QUICK_LENGTH = 1 << 16  # characters; a longer text takes more time


class Encoder:
    """Makes token ids of prompts; only the event loop uses the encoder. ``infill``: tokens for filling in the middle.

    ``name``: of the target for clients. A text that cannot fit into ``max_length`` tokens is refused before all of the
    text is tokenized. ``escape_special_tokens``: such tokens in clients' texts are plain text.
    """

    def __init__(self, target: Target, name: str, max_length: int, *, escape_special_tokens: bool = False) -> None:
        assert target.tokenizer is not None
        self._target, self._is_escaped = target, escape_special_tokens
        self._has_template = bool(target.tokenizer.chat_template)
        self._names = {target.name: name}
        self._opening = opening(target.tokenizer)
        self.infill = InfillTokens.of(target.tokenizer)
        self._max_length = max_length
        self._most_chars = max_length * max(map(len, target.tokenizer.get_vocab()))
        self._forks = [target.encoder, *(target.new_encoder() for _ in range(_NUM_QUICK - 1))]
        self._ready: asyncio.Queue[Fork] = asyncio.Queue()
        self._slow = asyncio.Semaphore(_NUM_SLOW)
        self._threads = ThreadPoolExecutor(2 * (_NUM_QUICK + _NUM_SLOW), "encoder")
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: str | None = None  # of a template that fails for every conversation

    async def start(self) -> None:
        """Start the processes; a short conversation shows whether the template works at all."""
        for fork in self._forks:
            try:
                await self._run(fork, _TRIAL)
            except ForkError as error:
                self._failure = told(error, self._names) if error.reason in _BROKEN else None
            self._ready.put_nowait(fork)
        if not self._has_template:
            self._failure = "the model has no chat template: send raw text to /v1/completions"

    async def close(self) -> None:
        """End the processes, after the texts that they encode."""
        for fork in self._forks:
            await asyncio.to_thread(fork.close)
        self._threads.shutdown(wait=False)

    async def encode(self, asked: str | Chat | Pieces, param: str = "") -> list[int]:
        """Token ids of a text, a conversation, or pieces of text between tokens. ApiError: 400 about ``param`` where a
        template fails, refuses the messages, or takes too much time or memory, and for a text that is far too long; 503
        where the process has ended.
        """
        param = param or ("messages" if isinstance(asked, Chat) else "prompt")
        texts = texts_of(asked)
        num_chars = sum(map(len, texts))
        message = f"the prompt is far longer than the context of {self._max_length} tokens: shorten it"
        too_long = ApiError(400, message, param=param, code="context_length_exceeded")
        if len(texts) > self._max_length or num_chars > self._most_chars:
            raise too_long
        if isinstance(asked, Chat) and self._failure is not None:
            raise ApiError(400, self._failure, param=param)
        try:
            token_ids = await self._exchange(asked, is_long=num_chars > _QUICK_LENGTH)
        except ValueError as error:
            if isinstance(error, ForkError) and error.reason == "ended":
                raise ApiError(503, "the tokenizer's process ended: try again later") from error
            raise ApiError(400, told(error, self._names), param=param) from error
        if token_ids is None:
            raise too_long
        return token_ids

    async def encode_infill(
        self, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = (), room: int = 0
    ) -> list[int]:
        """Token ids of the prompt for the text between a prefix and a suffix (errors as of :meth:`encode`).

        ``files``: name and text of what else is known; the first ones go where a prompt has no ``room`` for all tokens.
        """
        assert self.infill is not None
        token_ids = await self.encode(self.infill.around(prefix, suffix))
        if files:
            head, *entries, current = self.infill.context(files)
            first, last = await self.encode(head), await self.encode(current)
            room -= sum(map(len, (self._opening, first, last, token_ids)))
            kept: list[int] = []
            for part in reversed(entries):
                try:
                    found = await self.encode(part)
                except ApiError as error:
                    if error.code != "context_length_exceeded":
                        raise
                    break
                if len(kept) + len(found) > room:
                    break
                kept = [*found, *kept]
            token_ids = [*first, *kept, *last, *token_ids] if kept else token_ids
        return [*self._opening, *token_ids]

    async def _exchange(self, asked: Any, *, is_long: bool) -> list[int] | None:
        if not is_long:
            fork, has_ended = await self._ready.get(), False
            try:
                return await self._run(fork, asked, _QUICK_SECONDS)
            except ForkError as error:
                has_ended = error.reason in _LIMITS
                if error.reason != "time":
                    raise
            finally:
                if has_ended:
                    self._later(self._renew(fork))
                else:
                    self._ready.put_nowait(fork)
        async with self._slow:
            fork = self._target.new_encoder()
            try:
                return await self._run(fork, asked)
            finally:
                fork.kill()  # also for a client that has left
                self._later(self._in_thread(fork.close))

    async def _run(self, fork: Fork, asked: Any, seconds: float | None = None) -> list[int] | None:
        tools = list(asked.tools) if isinstance(asked, Chat) else []
        plain = list(asked.messages) if isinstance(asked, Chat) else asked
        (token_ids,) = await self._in_thread(fork.map, [[plain, tools, self._is_escaped, self._max_length]], seconds)
        return token_ids

    async def _in_thread(self, call: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def _renew(self, fork: Fork) -> None:
        """Start a process again, and let the process compile the template."""
        with contextlib.suppress(ForkError):
            await self._run(fork, _TRIAL)
        self._ready.put_nowait(fork)

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the event loop itself keeps no task
        task.add_done_callback(self._tasks.discard)
