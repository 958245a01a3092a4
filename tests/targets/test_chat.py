"""A stranger's program: results come back whole, and what takes too long or too much ends in one line."""

import os
import signal
import time
from typing import Any

import pytest

from drafter.targets import chat
from drafter.targets.chat import limited_map


def test_a_stop_while_a_fork_goes_shows_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(child: int, how: int) -> tuple[int, int]:
        raise KeyboardInterrupt

    worker = chat.Fork(lambda item: item, "this")
    assert worker.map([1]) == [1]
    child = worker._child
    with monkeypatch.context() as patch:
        patch.setattr(os, "waitpid", stop)
        worker.__del__()
    os.waitpid(child, 0)
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(os, "fork", lambda: [signal.raise_signal(signal.SIGINT), forked.append(1), 10**9][-1])
        forked: list[int] = []
        worker.map([1])
    assert forked == [1], "the fork is whole first"
    with monkeypatch.context() as patch:
        patch.setattr(chat, "contextlib", None)  # as Python leaves the module at its end
        worker.__del__()
    worker._child = -1


def test_values_come_back_in_order() -> None:
    assert limited_map(lambda item: [item, "é" * item], [3, 0, 2], "it") == [[3, "ééé"], [0, ""], [2, "éé"]]
    assert limited_map(lambda item: item, [], "it") == []
    assert limited_map(len, ["a" * 5_000_000], "it") == [5_000_000]


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
        limited_map(function, [1, 2], "the program")
    assert time.monotonic() - start < 30
