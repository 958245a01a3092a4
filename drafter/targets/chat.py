"""Text and conversations to token ids, by a tokenizer and its chat template, without the model.

A chat template is a program of the model's author. Nobody can stop a thread that runs such a program, or limit the
thread's memory. A forked process has both limits.
"""

import contextlib
import faulthandler
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from drafter.utils.io import first_line

Item = TypeVar("Item")

MAX_SECONDS = 10.0  # for one text; a text of two megabytes takes one
MAX_BYTES = 1 << 30  # that a fork may add to the memory of the process that it was forked from
_PAGES = Path("/proc/self/statm")


def encode_text(tokenizer: Any, text: str, *, escape_special_tokens: bool = False) -> list[int]:
    """Token ids of raw text, with the special tokens that the tokenizer adds by itself; ``escape``: as below."""
    return list(tokenizer(escaped(tokenizer, text) if escape_special_tokens else text)["input_ids"])


class Chat(NamedTuple):
    """A conversation, and the functions that the target may call, in OpenAI's form."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


def what_runs(name: str) -> str:
    """What a message about a limit names."""
    return f"the chat template of {name!r}"


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    name: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    has_opening: bool = True,
) -> str:
    """The text of a conversation by the tokenizer's own template, which runs in this process, without limits.

    Args:
        tokenizer: with a chat template.
        messages: turns with ``role`` and ``content``.
        name: of the target, for messages.
        tools: functions that the target may call, in OpenAI's form.
        has_opening: the text ends with the opening of the assistant's turn.

    Raises:
        ValueError: there is no template, or the template refuses the messages or breaks on them.
        MemoryError: the template takes more memory than this process may have.
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


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    name: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    escape_special_tokens: bool = False,
) -> list[int]:
    """Token ids of a conversation up to the opening of the assistant's turn, as :func:`render_chat` renders it.

    ``escape_special_tokens``: special tokens that stand in a content as text are :func:`escaped`.
    """
    turns = [dict(message) for message in messages]
    if escape_special_tokens:
        turns = [{**turn, "content": escaped(tokenizer, turn["content"])} for turn in turns]
    return list(tokenizer(render_chat(tokenizer, turns, name, tools=tools), add_special_tokens=False)["input_ids"])


def escaped(tokenizer: Any, text: str) -> str:
    """The text with a space behind the first character of every special token, which so is read as plain text.

    ``a<|end|>b`` becomes ``a< |end|>b``.

    Raises:
        ValueError: a special token remains, as a tokenizer that ignores case may read one.
    """
    special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    for token in sorted((token for token in special.values() if len(token.strip()) > 1), key=len, reverse=True):
        text = text.replace(token, f"{token[0]} {token[1:]}")
    if special.keys() & set(tokenizer(text, add_special_tokens=False)["input_ids"]):
        raise ValueError("the text holds a special token of the model, which this server does not take from clients")
    return text


def _limit_memory() -> None:
    """Let this process take ``MAX_BYTES`` more than now; further allocations raise MemoryError."""
    if _PAGES.exists():  # Linux
        most = int(_PAGES.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MAX_BYTES
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]  # of `ulimit -v`, which nobody may raise
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def limited_map(function: Callable[[Item], Any], items: Sequence[Item], what: str) -> list[Any]:
    """``[function(item) for item in items]``, computed in a fork of this process with the limits above for each item.

    Args:
        function: returns a JSON value; uses neither torch nor threads.
        items: arguments of the calls.
        what: name of the program, for messages: "the chat template of 'x'".

    Raises:
        ValueError: of the function, or a limit was reached.
    """
    fork = Fork(lambda index: function(items[index]), what)
    try:
        return fork.map(range(len(items)))
    finally:
        fork.close()


class ForkError(ValueError):
    """A :class:`Fork` has no value for an item.

    Attributes:
        reason: ``limit``; ``ended``, by itself or a signal; or the type of the cause of the function's error.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Fork:
    """A fork of this process that computes one function, with the limits above for each item.

    The fork begins with the first call and stays: a fork of a process with a model takes tens of milliseconds, and
    keeps every page that this process changes later. After a limit was reached, the next call forks again. Where the
    system has no forks, the function runs in this process.

    Args:
        function: takes and returns a JSON value; uses neither torch nor threads.
        what: name of the program, for messages.
    """

    def __init__(self, function: Callable[[Any], Any], what: str) -> None:
        self._function, self._what = function, what
        self._child = self._writing = self._reading = -1
        self._lock = threading.RLock()

    def map(self, items: Sequence[Any]) -> list[Any]:
        """``[function(item) for item in items]``, for one thread after the other (:class:`ForkError`)."""
        with self._lock:
            return self._map(items)

    def _map(self, items: Sequence[Any]) -> list[Any]:
        if not items or not sys.platform.startswith("linux"):
            return [self._function(item) for item in items]
        if self._child < 0:
            self._fork()
        data, num_lines = bytearray(), 0
        try:
            _send(self._writing, list(items))
            while num_lines < len(items) and len(data) <= MAX_BYTES and not _is_last(data):
                if not (part := os.read(self._reading, 1 << 20)):
                    break
                data += part
                num_lines += part.count(b"\n")
        except BaseException:  # the child's answer would come before the next one's
            self.close()
            raise
        answers = [json.loads(line) for line in data.split(b"\n") if line] if len(data) <= MAX_BYTES else []
        if answers and "error" in answers[-1]:
            raise ForkError(answers[-1]["error"], answers[-1]["cause"])
        if len(answers) == len(items) and "value" in answers[-1]:
            return [answer["value"] for answer in answers]
        status = self.close()
        if len(data) > MAX_BYTES or (answers and answers[-1].get("is_too_large")):
            raise ForkError(f"{self._what} takes more than {MAX_BYTES >> 20} MiB of memory", "limit")
        is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        reason = f"took longer than {MAX_SECONDS:g} seconds" if is_late else "ended its process"
        raise ForkError(f"{self._what} {reason}", "limit" if is_late else "ended")

    def __del__(self) -> None:
        if contextlib is None:  # Python ends and has cleared this module; the fork ends with its pipe
            return
        with contextlib.suppress(KeyboardInterrupt):  # which Python forgets here, after a trace on the screen
            self.close()

    def close(self) -> int:
        """End the fork; its status."""
        with self._lock:
            if self._child < 0:
                return 0
            child, self._child = self._child, -1
            os.close(self._writing)
            os.close(self._reading)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)  # without effect on a child that has ended
            return os.waitpid(child, 0)[1]

    def _fork(self) -> None:
        asked, self._writing = os.pipe()
        self._reading, answered = os.pipe()
        sys.stdout.flush()
        with _later_interrupt():
            self._child = os.fork()
            if self._child == 0:
                _work(self._function, asked, answered)
            os.close(asked)
            os.close(answered)


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


def _is_last(data: bytearray) -> bool:
    """Whether the child has refused an item, and computes no further ones."""
    return data.endswith(b"\n") and not data[data.rfind(b"\n", 0, -1) + 1 :].startswith(b'{"value"')


def _work(function: Callable[[Any], Any], asked: int, answered: int) -> NoReturn:
    """Answer lists of items until the parent ends, in the forked process."""
    faulthandler.disable()  # the end of this process is expected
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which may have answers to finish
        for number in (signal.SIGPROF, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # the end of this process, within C as well
        for first, last in ((3, min(asked, answered)), (min(asked, answered) + 1, max(asked, answered))):
            os.closerange(first, last)
        os.closerange(max(asked, answered) + 1, os.sysconf("SC_OPEN_MAX"))  # a server's sockets end with the server
        _limit_memory()
        with os.fdopen(asked, "rb") as stream:
            for line in stream:
                for item in json.loads(line):
                    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # processor time: other processes do not count
                    try:
                        _send(answered, {"value": function(item)})
                    except MemoryError:
                        _send(answered, {"is_too_large": True})
                        break
                    except Exception as error:
                        cause = type(error.__cause__).__name__
                        _send(answered, {"error": str(error) or type(error).__name__, "cause": cause})
                        break
                    signal.setitimer(signal.ITIMER_PROF, 0)
    finally:
        os._exit(0)


def _send(writing: int, value: Any) -> None:
    data = memoryview(json.dumps(value).encode() + b"\n")
    while data:
        data = data[os.write(writing, data) :]
