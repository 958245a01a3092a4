"""A stranger's program: results come back whole, and what takes too long or too much ends in one line."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from drafter.targets import chat


def mapped(function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    with closing(chat.Fork(function, "the program")) as fork:
        return fork.map(items)


def test_ctrl_c_waits_for_the_end_of_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, worker = os.fork, chat.Fork(lambda item: item, "this")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background ignore the signal
    monkeypatch.setattr(os, "fork", lambda: [signal.raise_signal(signal.SIGINT), fork()][-1])
    with pytest.raises(KeyboardInterrupt):
        worker.map([1])
    assert worker._child.is_alive() and worker.map([2]) == [2], "the fork is whole first"
    worker.close()


def test_a_fork_of_the_users_process_has_a_fork_of_its_own() -> None:
    with closing(chat.Fork(lambda item: os.getppid(), "this")) as fork:
        assert fork.map([1]) == [os.getpid()]
        if (user := os.fork()) == 0:
            code = 1
            try:
                code = int(fork.map([1]) != [os.getpid()])
            finally:
                os._exit(code)
        assert os.waitpid(user, 0)[1] == 0 and fork.map([1]) == [os.getpid()]


def test_values_come_back_in_order() -> None:
    assert mapped(lambda item: [item, "é" * item], [3, 0, 2]) == [[3, "ééé"], [0, ""], [2, "éé"]]
    assert mapped(len, ["a" * 5_000_000]) == [5_000_000]


def refuse(item: int) -> int:
    raise ValueError(f"no {item}")


def hang(item: int) -> int:
    return item if item < 2 else len(str(10 ** (10**10)))  # within C, where no signal handler of Python runs


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (refuse, "^no 1$"),
        (hang, "^the program took longer than 0.3 seconds$"),
        (lambda item: len("a" * (1 << 31)), "^the program takes more than 64 MiB of memory$"),
        (lambda item: ["a" * (1 << 24)] * 3, "^the program takes more than 64 MiB of memory$"),
        (lambda item: os._exit(3), "^the program ended its process$"),
    ],
)
def test_faults_are_one_line(function: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # An answer of 48 MB takes a good part of 0.3 seconds to write.
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.3 if function is hang else 10.0)
    monkeypatch.setattr(chat, "MAX_BYTES", 1 << 26)
    start = time.monotonic()
    with pytest.raises(ValueError, match=message):
        mapped(function, [1, 2])
    assert time.monotonic() - start < 30
