"""Prompts to token ids in a process of its own: a chat template is a program of the model's author.

A thread that renders a template cannot be stopped, and its memory cannot be limited. So a child process of the server
holds the tokenizer. The child has a memory limit, and an alarm ends the child when a text takes too long: the client
of this text gets the cause, and the next text starts another child.
"""

import asyncio
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import TemplateSyntaxError

from drafter.serving.protocol import ApiError
from drafter.targets.chat import MAX_SECONDS, Chat, encode_chat, encode_text, limit_memory

_SPAWN = multiprocessing.get_context("spawn")  # a fork of the server would share its locks and devices


_TRIAL = Chat([{"role": "user", "content": "x"}])


class _Broken(str):
    """The reason for a refusal that may have nothing to do with the text."""

    __slots__ = ()


class Encoder:
    """Makes token ids of prompts in a child process. Only the event loop uses the encoder.

    Args:
        tokenizer: the tokenizer; the child gets a copy.
        name: name of the target, for messages.
        max_length: tokens of a row. A text that cannot fit is refused before the text is tokenized.
        escape_special_tokens: read special tokens in clients' texts as plain text.
        seconds: time of one text.
    """

    def __init__(
        self,
        tokenizer: Any,
        name: str,
        max_length: int,
        *,
        escape_special_tokens: bool = False,
        seconds: float = MAX_SECONDS,
    ) -> None:
        self._arguments = (tokenizer, name, escape_special_tokens, seconds)
        self._program = f"the chat template or tokenizer of {name!r}"
        self._max_length = max_length
        self._most_chars = max_length * max(map(len, tokenizer.get_vocab()))
        self._lock = asyncio.Lock()
        self._failure: str | None = None  # of a template that does not compile: the same for every conversation
        self._process: Any = None  # mypy knows no common type of the processes of all contexts
        self._pipe: Connection | None = None

    async def start(self) -> None:
        """Start the child; return when the child has the tokenizer (OSError when the child does not start).

        A short conversation shows whether the template compiles at all.
        """
        found = await self._exchange(_TRIAL)
        if isinstance(found, _Broken):
            self._failure = found
        if await self._exchange("") is None:
            raise OSError("the tokenizer's process ended at its start")

    async def close(self) -> None:
        """End the child."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.join)

    async def encode(self, asked: str | Chat) -> list[int]:
        """Token ids of a text or a conversation.

        Raises:
            ApiError: 400 where the template refuses the messages, fails, or takes too much time or memory, and for a
                text that is far too long; 503 where the child has ended.
        """
        param = "prompt" if isinstance(asked, str) else "messages"
        texts = [asked] if isinstance(asked, str) else [turn["content"] for turn in asked.messages]
        if len(texts) > self._max_length or sum(map(len, texts)) > self._most_chars:
            message = f"the prompt is far longer than the context of {self._max_length} tokens: shorten it"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        if self._failure is not None and not isinstance(asked, str):
            raise ApiError(400, self._failure, param=param)
        # Shielded: the result of a client that leaves must not stay in the pipe for the next client.
        found = await asyncio.shield(self._exchange(asked))
        if isinstance(found, str):
            raise ApiError(400, found, param=param)
        if found is None:
            raise ApiError(503, "the tokenizer's process ended: try again later")
        return found

    async def _exchange(self, asked: str | Chat) -> list[int] | str | None:
        """Token ids, or the reason for a refusal; None if the child has ended. The next text starts another child."""

        def exchange() -> list[int] | str:
            if self._process is None or not self._process.is_alive():
                self._start()
            assert self._pipe is not None
            self._pipe.send(asked)
            return self._pipe.recv()

        async with self._lock:
            try:
                return await asyncio.to_thread(exchange)
            except (OSError, EOFError):
                await self.close()
                if self._process is not None and self._process.exitcode == -signal.SIGALRM:
                    return _Broken(f"{self._program} took longer than {self._arguments[-1]:g} seconds with this text")
                return None

    def _start(self) -> None:
        self._pipe, end = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_run_child, args=(end, self._program, *self._arguments), daemon=True)
        # Ctrl-C reaches the server alone, which finishes running requests.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        end.close()


def _run_child(pipe: Connection, program: str, tokenizer: Any, name: str, escape: bool, seconds: float) -> None:
    """Answer texts until the server closes the pipe or ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    limit_memory()
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends the process even within C code
        try:
            if isinstance(asked, str):
                result: list[int] | str = encode_text(tokenizer, asked, escape_special_tokens=escape)
            else:
                result = encode_chat(tokenizer, asked.messages, name, escape_special_tokens=escape)
        except MemoryError:
            result = _Broken(f"{program} takes too much memory with this text")
        except ValueError as error:
            is_broken = isinstance(error.__cause__, TemplateSyntaxError | SyntaxError | RecursionError)
            result = _Broken(error) if is_broken else str(error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send(result)
