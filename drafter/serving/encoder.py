"""Prompts to token ids in a process of its own: a chat template is a program of the model's author.

A thread that renders a template cannot be stopped, and its memory cannot be limited. So a child process of the server
loads the tokenizer and forks workers, one at a time. A worker has a memory limit, and an alarm ends a worker whose text
takes too long: the child then reports the cause and forks the next worker within milliseconds. The processes
exchange one line of JSON for each text and one for each result.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TextIO

from drafter.serving.protocol import ApiError, server_error
from drafter.targets.chat import encode_chat, encode_text, load_saved_tokenizer
from drafter.utils.limits import MAX_SECONDS, limit_memory

_Asked = str | list[dict[str, str]]  # a text or a conversation
_LINE_BYTES = 1 << 28  # of one result, larger than the token ids of any row
_START_SECONDS = 120.0
_LONGEST_SECONDS = 2 * MAX_SECONDS  # the worker's own alarm comes before


class Encoder:
    """Makes token ids of prompts in a child process. Only the event loop uses the encoder.

    Args:
        tokenizer: the tokenizer; the encoder saves the tokenizer to a folder for the child.
        name: name of the target, for messages.
        max_length: tokens of a row. A text that cannot fit is refused before the whole text is tokenized.
        escape_special_tokens: read special tokens in clients' texts as plain text.
    """

    def __init__(self, tokenizer: Any, name: str, max_length: int, *, escape_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._setup = {"name": name, "max_length": max_length, "seconds": MAX_SECONDS, "escape": escape_special_tokens}
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def start(self) -> None:
        """Start the child; return when the child has loaded the tokenizer (OSError when the child does not start)."""
        if self._process is not None and self._process.returncode is None:
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="drafter-tokenizer-")
            self._tokenizer.save_pretrained(self._folder.name)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        is_custom = type(self._tokenizer).__module__.startswith("transformers_modules")
        setup = json.dumps(self._setup | {"folder": self._folder.name, "trust_remote_code": is_custom})
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from drafter.serving.encoder import run_child; run_child()", setup,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment, limit=_LINE_BYTES,
            start_new_session=True,  # Ctrl-C reaches the server alone, which finishes running requests
        )  # fmt: skip
        assert self._process.stdout is not None
        async with asyncio.timeout(_START_SECONDS):
            if not await self._process.stdout.readline():
                raise OSError("the tokenizer's process ended at its start")

    async def close(self) -> None:
        """End the child."""
        await self._kill()
        if self._folder is not None:
            self._folder.cleanup()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the group holds the worker as well
            await process.wait()

    async def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation.

        Raises:
            ApiError: 400 where the template refuses the messages, fails, or takes too much time or memory, and for a
                text that is far too long; 503 where the child has ended.
        """
        return await self._ask("messages", messages)

    async def prompt(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a raw prompt, with the errors of :meth:`chat`. A list of token ids is returned unchanged."""
        return prompt if isinstance(prompt, list) else await self._ask("prompt", prompt)

    async def _ask(self, param: str, asked: _Asked) -> list[int]:
        # Shielded: the result of a client that leaves must not stay in the pipe for the next client.
        found = await asyncio.shield(asyncio.ensure_future(self._exchange(asked)))
        if found is None:
            raise server_error(503, "the tokenizer's process ended: try again later")
        if "token_ids" in found:
            return list(found["token_ids"])
        raise ApiError(400, found["error"], param=param, code=found["code"])

    async def _exchange(self, asked: _Asked) -> dict[str, Any] | None:
        """The child's result; None if the child has ended. The next text starts another child."""
        async with self._lock:
            try:
                await self.start()
                assert self._process is not None and self._process.stdin and self._process.stdout
                self._process.stdin.write(json.dumps(asked).encode() + b"\n")
                await self._process.stdin.drain()
                async with asyncio.timeout(_LONGEST_SECONDS):
                    return dict(json.loads(await self._process.stdout.readline()))
            except (OSError, ValueError, TimeoutError):
                await self._kill()
                return None


def run_child() -> None:
    """Load the tokenizer; fork workers, one at a time, until the server closes the pipe."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # printed text goes to the error stream
    setup = json.loads(sys.argv[1])
    tokenizer = load_saved_tokenizer(setup["folder"], trust_remote_code=setup["trust_remote_code"])
    most_chars = setup["max_length"] * max(map(len, tokenizer.get_vocab()))
    _send(results, {"token_ids": []})
    while True:
        worker = os.fork()
        if worker == 0:
            _work(partial(_encode, tokenizer, setup, most_chars), setup, results)
        status = os.waitpid(worker, 0)[1]
        if os.WIFEXITED(status):
            return  # the server closed the pipe
        is_late = os.WTERMSIG(status) == signal.SIGALRM
        reason = f"took longer than {setup['seconds']:g} seconds" if is_late else "ended its process"
        _send(results, _failed(setup, reason))


def _work(encode: Callable[[_Asked], dict[str, Any]], setup: dict[str, Any], results: TextIO) -> NoReturn:
    """Answer texts until the pipe is closed, then end the process."""
    limit_memory()
    texts = os.fdopen(os.dup(0), "rb")
    while line := texts.readline():
        signal.setitimer(signal.ITIMER_REAL, setup["seconds"])  # SIGALRM ends the process even within C code
        try:
            result = encode(json.loads(line))
        except MemoryError:
            result = _failed(setup, "takes too much memory")
        except ValueError as error:
            result = {"error": str(error), "code": None}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(results, result)
    os._exit(0)


def _failed(setup: dict[str, Any], reason: str) -> dict[str, Any]:
    error = f"the chat template or tokenizer of {setup['name']!r} {reason} with this text"
    return {"error": error, "code": "template_failed"}


def _send(results: TextIO, result: dict[str, Any]) -> None:
    print(json.dumps(result), file=results, flush=True)


def _encode(tokenizer: Any, setup: dict[str, Any], most_chars: int, asked: _Asked) -> dict[str, Any]:
    """The result of one text or conversation."""
    texts = [asked] if isinstance(asked, str) else [turn["content"] for turn in asked]
    if len(texts) > setup["max_length"] or sum(map(len, texts)) > most_chars:
        error = f"the prompt is far longer than the context of {setup['max_length']} tokens: shorten it"
        return {"error": error, "code": "context_length_exceeded"}
    if isinstance(asked, str):
        return {"token_ids": encode_text(tokenizer, asked, escape_special_tokens=setup["escape"])}
    return {"token_ids": encode_chat(tokenizer, asked, setup["name"], escape_special_tokens=setup["escape"])}
