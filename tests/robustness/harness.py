"""What the tests of robustness share: commands in processes that can be limited and killed, and damage to files.

A process that has imported everything forks one for each command, so that a command costs milliseconds and no import.
"""

import contextlib
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from drafter.targets.catalog import ALIASES
from tests.targets.tiny_gguf import write_wheels
from tests.tiny_files import SMALL_ADAPT

MAX_BYTES = 4 << 30  # of address space
MAX_CPU_SECONDS = 10  # of the process: a busy machine does not matter
MAX_SECONDS = 600.0  # on the clock, for what waits without computing: a busy machine stretches every second
_POLITE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORKS = multiprocessing.get_context("forkserver")
_MODULES = [
    "drafter.bench.tune",
    "drafter.cli.decode",
    "drafter.distill.run",
    "drafter.training.adapt",
    "transformers.models.llama.modeling_llama",
]


class Outcome(NamedTuple):
    """How a command ended. ``code`` is negative for a signal, None for a command that had to be stopped."""

    code: int | None
    error: str
    seconds: float

    @property
    def fault(self) -> str:
        """What is wrong with the end of a command that was given damaged input; nothing for a good end."""
        if self.code is None or self.code == -signal.SIGXCPU:
            return "hangs"
        if "Traceback" in self.error:
            return "trace"
        if self.code == 0:
            return ""
        lines = self.error.strip().splitlines() or [""]
        if self.code != 2 or not lines[-1].startswith("drafter: error: "):
            return f"exit code {self.code} without one line of error"
        return "a line without end" if len(lines[-1]) > 1500 else ""


class Spawner:
    """Runs command lines in forks of one process, with ``folder`` for their output and home."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.home = folder / "home"
        self._folder = folder
        self._alias = write_wheels(folder, part_bytes=20_000)[1]
        _FORKS.set_forkserver_preload(_MODULES)

    def __call__(
        self, words: Sequence[str], *, stop_after: float | None = None, stop_by: int = signal.SIGKILL,
        is_limited: bool = True,
    ) -> Outcome:  # fmt: skip
        """Run `drafter WORDS`; ``stop_after`` seconds the process gets the signal ``stop_by``."""
        ready, child_end = _FORKS.Pipe(duplex=False)
        child = _FORKS.Process(target=_run, args=(list(words), self._folder, self._alias, is_limited, child_end))
        child.start()
        child_end.close()
        with contextlib.suppress(EOFError):
            ready.recv()
        start = time.monotonic()
        child.join(MAX_SECONDS if stop_after is None else stop_after)
        if stop_after is not None and child.is_alive():
            # A kill takes the whole group; a polite signal goes to the command, as from a supervisor.
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if stop_by == signal.SIGKILL else os.kill)(child.pid or 0, stop_by)
            child.join(MAX_SECONDS)
        seconds, code = time.monotonic() - start, child.exitcode
        if code is None:
            child.kill()
            child.join()
        return Outcome(code, (self._folder / "stderr").read_text("utf-8", errors="replace"), seconds)

    def must(self, words: Sequence[str]) -> Outcome:
        """Run a command that has to succeed."""
        outcome = self(words, is_limited=False)
        assert outcome.code == 0, (words, outcome)
        return outcome


def _run(words: list[str], folder: Path, alias: Any, is_limited: bool, ready: Connection) -> None:
    """Run the command in this process; never returns."""
    # A signal that arrives before the command begins waits: Python's own work after a fork would drop it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _POLITE)
    code, is_command = 1, False
    try:
        os.setpgid(0, 0)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", encoding="utf-8") for number in (1, 2))
        if is_limited:
            resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
            resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS + 5))
        os.environ["DRAFTER_HOME"] = str(folder / "home")
        ALIASES["tiny"] = alias  # `target fetch tiny` takes the wheels of a tiny target
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup would wait for a stop that never comes
        from drafter.cli.main import main
        from drafter.training import adapt

        vars(adapt).update(SMALL_ADAPT)
        ready.send(None)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _POLITE)
            is_command = True
            code = main(words)
            is_command = False
            signal.pthread_sigmask(signal.SIG_BLOCK, _POLITE)
        except KeyboardInterrupt:
            if is_command:
                raise
            code = 130  # the signal came before the command or after its end
            print("drafter: interrupted", file=sys.stderr)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _POLITE)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def leftovers(folder: Path) -> list[str]:
    """Hidden and temporary files below a folder."""
    found = (path for path in folder.rglob("*") if path.name.startswith(".") or path.suffix in (".tmp", ".partial"))
    return sorted(str(path.relative_to(folder)) for path in found)


# -- damage ------------------------------------------------------------------------------------------------------------

BIG = 10**400
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 5, 7, 64, 10**7, 2**31, 2**63, 2**64, BIG, -BIG, 1e30, 0.5, -0.0, 1e-320,
    float("nan"), float("inf"), "", "x", "evil", "nan", "float64", "../../etc/passwd", "\ud800", "\x00", "a" * 3000,
    [], {}, [[]], [None], [1, "a"], {"a": 1}, {"": None}, [0] * 300, [-1, 10**9], "{{ 1/0 }}",
    "!!python/object:os.system",
]  # fmt: skip
_PIECES = [
    b"", b"\x00", b"\xff\xfe", b"{", b"]", b'"', b"9", b"\\u", b"[" * 5000, b"{" * 300, b"9" * 5000, b"1e999", b"NaN",
    b"\xef\xbb\xbf", b"\n", b"\t", b": ", b"- ", b"&a [*a]", b"*a", b"!!int ''", b"!!python/name:os.system", b"{{",
    b"#", b"\xed\xa0\x80", b"null",
]  # fmt: skip


def mutated(value: Any, chance: random.Random, values: Sequence[Any] = VALUES) -> Any:
    """The same JSON value with something in it changed, added or left out."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(list(value))
        kind = chance.random()
        if kind < 0.1:
            return {key: item for key, item in value.items() if key != name}
        if kind < 0.2:
            return value | {chance.choice(["unknown", "", f"{name}_"]): chance.choice(values)}
        return value | {name: mutated(value[name], chance, values)}
    if isinstance(value, list) and value and chance.random() < 0.7:
        place = chance.randrange(len(value))
        return [*value[:place], mutated(value[place], chance, values), *value[place + 1 :]]
    return chance.choice(values)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The same bytes with pieces cut out, put in or turned over."""
    raw = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        kind, place = chance.random(), chance.randrange(len(raw) + 1)
        if kind < 0.15:
            del raw[place:]
        elif kind < 0.4 and raw:
            raw[place % len(raw)] ^= 1 << chance.randrange(8)
        elif kind < 0.55:
            raw[place:place] = raw[place : place + chance.randint(1, 200)]
        else:
            raw[place : place + chance.randint(0, 8)] = chance.choice(_PIECES)
    return bytes(raw)
