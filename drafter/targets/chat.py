"""Text and conversations to token ids, by a tokenizer and its chat template, without the model.

A chat template is a program of the model's author. Nobody can stop a thread that runs such a program, or limit the
thread's memory. A forked process has both limits.
"""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from drafter.utils.io import first_line

MAX_SECONDS = 10.0  # for one text; a text of two megabytes takes one
MAX_BYTES = 1 << 30  # that a fork may add to the memory of the process that it was forked from
_PART, _CUT_TOKENS = 4096, 8  # characters that are counted at once, and tokens that a cut may add
_OUT_OF_MEMORY = 77  # exit code of a fork


class Chat(NamedTuple):
    """A conversation, and the functions that the target may call, in OpenAI's form."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


Pieces = tuple[str | int, ...]  # texts, and token ids between them


def texts_of(asked: str | Chat | Pieces) -> list[str]:
    if isinstance(asked, Chat):
        return [turn.get("content") or "" for turn in asked.messages]
    return [asked] if isinstance(asked, str) else [piece for piece in asked if isinstance(piece, str)]


def is_longer(tokenizer: Any, texts: Sequence[str], num_tokens: int) -> bool:
    """Whether texts certainly have more tokens; no more of the texts is read than needed to know."""
    if sum(map(len, texts)) <= num_tokens:
        return False
    for text in texts:
        for start in range(0, len(text), _PART):
            part = tokenizer(text[start : start + _PART], add_special_tokens=False)["input_ids"]
            num_tokens -= max(0, len(part) - _CUT_TOKENS)
            if num_tokens < 0:
                return True
    return False


def opening(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer puts before every text."""
    whole, bare = (tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (True, False))
    return list(whole[: next((at for at in range(len(whole)) if whole[at:][: len(bare)] == bare), 0)])


def what_runs(name: str) -> str:
    return f"the chat template of {name!r}"


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    name: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    has_opening: bool = True,
) -> str:
    """The text of a conversation by the tokenizer's own template, which runs in this process, without limits;
    ``has_opening``: the text ends with the opening of the assistant's turn.

    ValueError: there is no template, or the template refuses the messages or breaks on them. MemoryError: the template
    takes more memory than this process may have.
    """
    if not tokenizer.chat_template:
        raise ValueError(f"target {name!r} has no chat template: give raw text (`decode --raw`)")
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, add_generation_prompt=has_opening, tokenize=False
            )
        )
    except MemoryError:
        raise
    except Exception as error:
        # A template is a program of the model's author: its errors are of any type.
        kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
        raise ValueError(f"{what_runs(name)} refuses these messages: {kind}{first_line(error)}") from error


def encode(
    tokenizer: Any, asked: str | Chat | Pieces, name: str = "", *, escape_special_tokens: bool = False
) -> list[int]:
    """Token ids of raw text, with the special tokens that the tokenizer adds by itself; of pieces, without these; or of
    a conversation of the target ``name`` up to the opening of the assistant's turn. Contents may be :func:`escaped`.
    """

    def read(text: str) -> str:
        return escaped(tokenizer, text) if escape_special_tokens else text

    if isinstance(asked, str):
        return list(tokenizer(read(asked))["input_ids"])
    if isinstance(asked, Chat):
        turns = [dict(turn) for turn in asked.messages]
        if escape_special_tokens:
            turns = [{**turn, "content": read(turn.get("content") or "")} for turn in turns]
        text = render_chat(tokenizer, turns, name, tools=asked.tools)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    parts = (
        [piece] if isinstance(piece, int) else tokenizer(read(piece), add_special_tokens=False)["input_ids"]
        for piece in asked
    )
    return [token for part in parts for token in part]


def escaped(tokenizer: Any, text: str) -> str:
    """The text with a space behind the first character of every special token, which so is read as plain text.

    ``a<|end|>b`` becomes ``a< |end|>b``. ValueError: a special token remains (some tokenizers ignore case).
    """
    special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    for token in sorted((token for token in special.values() if len(token.strip()) > 1), key=len, reverse=True):
        text = text.replace(token, f"{token[0]} {token[1:]}")
    if special.keys() & set(tokenizer(text, add_special_tokens=False)["input_ids"]):
        raise ValueError("the text holds a special token of the model, which this server does not take from clients")
    return text


class ForkError(ValueError):
    """A :class:`Fork` has no value for an item. ``reason``: ``time`` or ``memory``, of which a limit was reached;
    ``ended``, by itself or a signal; or the type of the cause of the function's error.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Fork:
    """A fork of this process that computes one function of JSON values, without torch and threads, within the limits
    above for each item; it begins with the first call and stays, because a fork of a process with a model takes tens of
    milliseconds. After a limit was reached, the next call forks again. Without forks, the function runs here.
    """

    def __init__(self, function: Callable[[Any], Any], what: str) -> None:
        self._function, self._what = function, what
        self._begin()

    def _begin(self) -> None:
        self._child: Any = None  # the process, and our end of its pipe
        self._pipe: Any = None
        self._lock = threading.RLock()
        self._owner = os.getpid()

    def map(self, items: Sequence[Any], seconds: float | None = None) -> list[Any]:
        """``[function(item) for item in items]`` (:class:`ForkError`), each in ``seconds`` of processor time."""
        if self._owner != os.getpid():  # a fork of the user's process, whose parent has the child
            self._begin()
        seconds, is_forked = seconds or MAX_SECONDS, sys.platform.startswith("linux")
        with self._lock:
            return [self._value(item, seconds) if is_forked else self._function(item) for item in items]

    def kill(self) -> None:
        """End the process at once, from any thread: a call of :meth:`map` that runs raises ForkError."""
        if (child := self._child) is not None:
            child.kill()

    def close(self) -> int | None:
        """End the fork; its exit code, negative for a signal."""
        with self._lock:
            child, self._child = self._child, None
            if child is None:
                return None
            self._pipe.close()
            child.kill()  # without effect on a child that has ended
            child.join()
            return int(child.exitcode)

    def _value(self, item: Any, seconds: float) -> Any:
        if self._child is not None and not self._child.is_alive():
            self.close()  # ended between two calls
        if self._child is None:
            self._start()
        try:
            self._pipe.send_bytes(json.dumps([item, seconds]).encode())
            answer = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            code = self.close()
        except BaseException:  # the answer would come before the next item's
            self.close()
            raise
        else:
            if "value" in answer:
                return answer["value"]
            raise ForkError(answer["error"], answer["cause"])
        if code == _OUT_OF_MEMORY:
            raise ForkError(f"{self._what} takes more than {MAX_BYTES >> 20} MiB of memory", "memory")
        if code == -signal.SIGPROF:
            raise ForkError(f"{self._what} took longer than {seconds:g} seconds", "time")
        raise ForkError(f"{self._what} ended its process", "ended")

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_work, args=(self._function, theirs), daemon=True)
        with _later_interrupt():
            child.start()
            self._child = child
            theirs.close()


@contextlib.contextmanager
def _later_interrupt() -> Iterator[None]:
    """Ctrl-C waits for the end of the block: within the hooks of a fork Python forgets it, after a trace."""
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
        yield
        return
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if seen:
            signal.raise_signal(signal.SIGINT)


def _work(function: Callable[[Any], Any], pipe: Connection) -> None:
    """Answer items until the parent ends, in the forked process."""
    faulthandler.disable()  # the end of this process is expected
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which may have answers to finish
        for number in (signal.SIGPROF, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # the end of this process, within C as well
        os.closerange(3, pipe.fileno())  # a server's sockets end with the server
        os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        _limit_memory()
        while True:
            item, seconds = json.loads(pipe.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, seconds)  # processor time: other processes do not count
            try:
                answer = json.dumps({"value": function(item)}).encode()
            except MemoryError:
                os._exit(_OUT_OF_MEMORY)
            except Exception as error:
                cause = type(error.__cause__).__name__
                answer = json.dumps({"error": str(error) or type(error).__name__, "cause": cause}).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send_bytes(answer)
    finally:
        os._exit(0)


def _limit_memory() -> None:
    """Let this process take ``MAX_BYTES`` more than now; further allocations raise MemoryError."""
    most = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MAX_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]  # of `ulimit -v`, which nobody may raise
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
