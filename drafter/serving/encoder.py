"""Prompts to token ids in a process that can be killed: a chat template is a program of the model's author.

A thread that renders a template cannot be stopped, and its memory cannot be limited. So a child process of the server
loads the tokenizer and forks workers, one at a time. A worker has a memory limit, and a system alarm ends a worker
whose request takes too long. The child then reports the cause to the server and forks the next worker within
milliseconds. The processes exchange one line of JSON for each request and one for each result.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from typing import Any

from drafter.serving.protocol import ApiError
from drafter.targets.chat import encode_chat, encode_text, load_saved_tokenizer
from drafter.utils.limits import MAX_SECONDS, limit_memory, took_too_long, took_too_much

_STUCK_SECONDS = 2.0  # `/health` reports a request that takes longer
_CHARS_LOOKED_AT = 16  # for each token of a row; text has about four characters a token
_LINE_BYTES = 1 << 28  # limit of one result, larger than the token ids of any row
_START_SECONDS = 120.0


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
        self._setup = {"name": name, "max_length": max_length, "escape": escape_special_tokens}
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._busy_since: float | None = None

    @property
    def state(self) -> str:
        """``ok``, or ``stuck`` while one request takes unusually long."""
        is_stuck = self._busy_since is not None and time.monotonic() - self._busy_since > _STUCK_SECONDS
        return "stuck" if is_stuck else "ok"

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

    async def chat(self, messages: list[dict[str, str]], seconds: float) -> list[int]:
        """Token ids of a conversation.

        Raises:
            ApiError: 400 where the template refuses the messages, fails, or takes too much time or memory, and for a
                text that is far too long; 504 when the request's ``seconds`` end before.
        """
        return await self._ask("messages", {"messages": messages}, seconds)

    async def prompt(self, prompt: str | list[int], seconds: float) -> list[int]:
        """Token ids of a raw prompt, with the errors of :meth:`chat`. A list of token ids is returned unchanged."""
        return prompt if isinstance(prompt, list) else await self._ask("prompt", {"prompt": prompt}, seconds)

    async def _ask(self, param: str, request: dict[str, Any], seconds: float) -> list[int]:
        # Shielded: the result of a client that leaves must not stay in the pipe for the next client.
        exchange = asyncio.ensure_future(asyncio.shield(self._exchange(request | {"seconds": MAX_SECONDS})))
        try:
            answer = await asyncio.wait_for(exchange, max(0.0, seconds))
        except TimeoutError:
            raise ApiError(
                504, "the request took too long: its text could not be tokenized", kind="server_error", code="timeout"
            ) from None
        if "token_ids" in answer:
            return list(answer["token_ids"])
        raise ApiError(answer.get("status", 400), answer["error"], param=param, code=answer.get("code"))

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        async with self._lock:
            try:
                await self.start()
                assert self._process is not None and self._process.stdin and self._process.stdout
                self._busy_since = time.monotonic()
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                await self._process.stdin.drain()
                async with asyncio.timeout(2 * MAX_SECONDS):  # the worker's own alarm comes before
                    line = await self._process.stdout.readline()
                return dict(json.loads(line))
            except (OSError, ValueError, TimeoutError):
                # The child has ended; the next request starts another child.
                await self._kill()
                return {"status": 503, "error": "the tokenizer's process ended: try again later"}
            finally:
                self._busy_since = None


# -- in the child --------------------------------------------------------------------------------------------------


def run_child() -> None:
    """Load the tokenizer; fork workers until the server closes the pipe."""
    answers = os.dup(1)
    os.dup2(2, 1)  # printed text goes to the error stream
    setup = json.loads(sys.argv[1])
    tokenizer = load_saved_tokenizer(setup["folder"], trust_remote_code=setup["trust_remote_code"])
    longest = max(map(len, tokenizer.get_vocab()))
    _send(answers, {"loaded": True})
    while True:
        worker = os.fork()
        if worker == 0:
            _work(tokenizer, setup, longest, answers)
        status = os.waitpid(worker, 0)[1]
        if os.WIFEXITED(status):
            return  # the server closed the pipe
        number = os.WTERMSIG(status)
        is_slow = number == signal.SIGALRM
        _send(answers, _failed(setup, took_too_long() if is_slow else "ended its process"))


def _work(tokenizer: Any, setup: dict[str, Any], longest: int, answers: int) -> None:
    """Answer requests until the pipe is closed, then end the process."""
    limit_memory()
    requests = os.fdopen(os.dup(0), "rb")
    while line := requests.readline():
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])  # SIGALRM ends the process even within C code
        try:
            answer: dict[str, Any] = _encode(tokenizer, setup, longest, request)
        except MemoryError:
            answer = _failed(setup, took_too_much())
        except ValueError as error:
            answer = {"error": str(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(answers, answer)
    os._exit(0)


def _failed(setup: dict[str, Any], reason: str) -> dict[str, Any]:
    error = f"the chat template or tokenizer of {setup['name']!r} {reason} with this text"
    return {"error": error, "code": "template_failed"}


def _encode(tokenizer: Any, setup: dict[str, Any], longest: int, request: dict[str, Any]) -> dict[str, Any]:
    """The result of one request."""
    max_length, escape = setup["max_length"], setup["escape"]
    messages = request.get("messages")
    texts = [turn["content"] for turn in messages] if messages is not None else [request["prompt"]]
    num_chars = sum(map(len, texts))
    start = _CHARS_LOOKED_AT * max_length
    is_hopeless = len(texts) > max_length or num_chars > longest * max_length
    if not is_hopeless and num_chars > start:
        # The cut may split a word into more tokens than the whole word has; a tenth is enough room.
        is_hopeless = len(encode_text(tokenizer, "".join(texts)[:start])) > 1.1 * max_length + 16
    if is_hopeless:
        error = f"the prompt is far longer than the context of {max_length} tokens: shorten it"
        return {"error": error, "code": "context_length_exceeded"}
    if messages is None:
        return {"token_ids": encode_text(tokenizer, request["prompt"], escape_special_tokens=escape)}
    return {"token_ids": encode_chat(tokenizer, messages, setup["name"], escape_special_tokens=escape)}


def _send(answers: int, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(answers, data) :]
