"""Prompts to token ids in a process of their own: a chat template is a program of the model's author.

A :class:`drafter.targets.chat.Fork` has limits of time and memory. A text that reaches one ends the process: the
client of this text gets the cause, and the next text starts another process.
"""

import asyncio
from typing import Any

from jinja2 import TemplateSyntaxError

from drafter.serving.protocol import ApiError
from drafter.targets.chat import Chat, Fork, ProcessEnded, encode_chat, encode_text, what_runs

_TRIAL = Chat([{"role": "user", "content": "x"}])


class Encoder:
    """Makes token ids of prompts. Only the event loop uses the encoder.

    Args:
        tokenizer: the tokenizer.
        name: name of the target, for messages.
        max_length: tokens of a row. A text that cannot fit is refused before the text is tokenized.
        escape_special_tokens: read special tokens in clients' texts as plain text.
    """

    def __init__(self, tokenizer: Any, name: str, max_length: int, *, escape_special_tokens: bool = False) -> None:
        def encode(asked: Any) -> list[int] | str:
            """Token ids; or why no conversation has any."""
            try:
                if isinstance(asked, str):
                    return encode_text(tokenizer, asked, escape_special_tokens=escape_special_tokens)
                return encode_chat(tokenizer, asked, name, escape_special_tokens=escape_special_tokens)
            except ValueError as error:
                if isinstance(error.__cause__, TemplateSyntaxError | SyntaxError | RecursionError):
                    return str(error)
                raise

        self._fork = Fork(encode, f"{what_runs(name)}, or its tokenizer,")
        self._max_length = max_length
        self._most_chars = max_length * max(map(len, tokenizer.get_vocab()))
        self._lock = asyncio.Lock()
        self._failure: str | None = None  # of a template that fails for every conversation

    async def start(self) -> None:
        """Start the process, before other threads run; a short conversation shows whether the template works at all."""
        try:
            found = await self._exchange(list(_TRIAL.messages))
        except ProcessEnded as error:
            found = str(error)
        except ValueError:  # the template wants other messages
            return
        self._failure = found if isinstance(found, str) else None

    async def close(self) -> None:
        """End the process, after the text that it encodes."""
        async with self._lock:
            await asyncio.to_thread(self._fork.close)

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
            # Shielded: the process goes on with the text of a client that leaves, and the next client waits for it.
            found = await asyncio.shield(self._exchange(asked if isinstance(asked, str) else list(asked.messages)))
        except ValueError as error:
            if isinstance(error, ProcessEnded) and not error.is_limit:
                raise ApiError(503, "the tokenizer's process ended: try again later") from error
            raise ApiError(400, str(error), param=param) from error
        if isinstance(found, str):
            raise ApiError(400, found, param=param)
        return found

    async def _exchange(self, asked: Any) -> list[int] | str:
        async with self._lock:
            found: list[list[int] | str] = await asyncio.to_thread(self._fork.map, [asked])
            return found[0]
