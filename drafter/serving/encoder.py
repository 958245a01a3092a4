"""Prompts to token ids in a process of their own: a chat template is a program of the model's author.

The target's fork (:class:`drafter.targets.chat.Fork`) has limits of time and memory. A text that reaches one ends the
process: the client of this text gets the cause, and the next text starts another process.
"""

import asyncio
from typing import Any

from drafter.serving.protocol import ApiError, told
from drafter.targets.chat import Chat, ForkError
from drafter.targets.target import Target

_TRIAL = [{"role": "user", "content": "x"}]
_BROKEN = ("limit", "TemplateSyntaxError", "SyntaxError", "RecursionError")  # whatever the conversation


class Encoder:
    """Makes token ids of prompts. Only the event loop uses the encoder.

    Args:
        name: the target's name for clients.
        max_length: tokens of a row. A text that cannot fit is refused before the text is tokenized.
        escape_special_tokens: read special tokens in clients' texts as plain text.
    """

    def __init__(self, target: Target, name: str, max_length: int, *, escape_special_tokens: bool = False) -> None:
        assert target.tokenizer is not None
        self._target, self._is_escaped = target, escape_special_tokens
        self._names = {target.name: name}
        self._max_length = max_length
        self._most_chars = max_length * max(map(len, target.tokenizer.get_vocab()))
        self._lock = asyncio.Lock()  # one text after the other
        self._failure: str | None = None  # of a template that fails for every conversation

    async def start(self) -> None:
        """Start the process; a short conversation shows whether the template works at all."""
        try:
            await self._exchange(_TRIAL)
        except ForkError as error:
            self._failure = told(error, self._names) if error.reason in _BROKEN else None

    async def close(self) -> None:
        """End the process, after the text that it encodes."""
        await asyncio.to_thread(self._target.encoder.close)

    async def encode(self, asked: str | Chat) -> list[int]:
        """Token ids of a text or a conversation.

        Raises:
            ApiError: 400 where the template refuses the messages, fails, or takes too much time or memory, and for a
                text that is far too long; 503 where the process has ended.
        """
        param = "prompt" if isinstance(asked, str) else "messages"
        texts = [asked] if isinstance(asked, str) else [turn["content"] for turn in asked.messages]
        if len(texts) > self._max_length or sum(map(len, texts)) > self._most_chars:
            message = f"the prompt is far longer than the context of {self._max_length} tokens: shorten it"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        if self._failure is not None and not isinstance(asked, str):
            raise ApiError(400, self._failure, param=param)
        try:
            return await self._exchange(asked if isinstance(asked, str) else list(asked.messages))
        except ValueError as error:
            if isinstance(error, ForkError) and error.reason == "ended":
                raise ApiError(503, "the tokenizer's process ended: try again later") from error
            raise ApiError(400, told(error, self._names), param=param) from error

    async def _exchange(self, asked: Any) -> list[int]:
        async with self._lock:
            (token_ids,) = await asyncio.to_thread(self._target.encoder.map, [[asked, [], self._is_escaped]])
        return list(token_ids)
