"""Runs foreign programs, such as chat templates, in a process with limits of time and memory.

Nobody can stop a thread that runs such a program, or limit the thread's memory. A forked process has both limits.
"""

import contextlib
import faulthandler
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Item = TypeVar("Item")

MAX_SECONDS = 10.0  # for one text; a text of two megabytes takes one
MAX_BYTES = 1 << 30  # that a worker may add to the memory of the process that it was forked from
_PAGES = Path("/proc/self/statm")


def limit_memory() -> None:
    """Let this process take ``MAX_BYTES`` more than now; further allocations raise MemoryError."""
    if _PAGES.exists():  # Linux
        most = int(_PAGES.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MAX_BYTES
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
    if not items or not sys.platform.startswith("linux"):
        return [function(item) for item in items]
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work(function, items, writing)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    finally:
        # The child still runs only after Ctrl-C or after an answer that is too large.
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    answers = [json.loads(line) for line in data.split(b"\n") if line] if len(data) <= MAX_BYTES else []
    if answers and "error" in answers[-1]:
        raise ValueError(answers[-1]["error"])
    if len(answers) == len(items) and "value" in answers[-1]:
        return [answer["value"] for answer in answers]
    if len(data) > MAX_BYTES or (answers and answers[-1].get("is_too_large")):
        raise ValueError(f"{what} takes more than {MAX_BYTES >> 20} MiB of memory")
    is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    raise ValueError(f"{what} {f'took longer than {MAX_SECONDS:g} seconds' if is_late else 'ended its process'}")


def _work(function: Callable[[Item], Any], items: Sequence[Item], writing: int) -> NoReturn:
    """Write an answer for each item, in the forked process."""
    faulthandler.disable()  # the end of this process is expected
    try:
        for number in (signal.SIGPROF, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # the end of this process, within C as well
        limit_memory()
        for item in items:
            signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # processor time: other processes do not count
            _send(writing, {"value": function(item)})
    except MemoryError:
        _send(writing, {"is_too_large": True})
    except Exception as error:
        _send(writing, {"error": str(error) or type(error).__name__})
    finally:
        os._exit(0)


def _send(writing: int, answer: dict[str, Any]) -> None:
    data = memoryview(json.dumps(answer).encode() + b"\n")
    while data:
        data = data[os.write(writing, data) :]
