"""What the tests of robustness share: sizes, and commands in processes that can be limited and killed.

`python -m tests.robustness.harness` imports everything once and forks a process for each command line that it reads,
so that a command costs milliseconds and no import.
"""

import contextlib
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from drafter.targets.catalog import ALIASES
from tests.targets.tiny_gguf import write_wheel

WHEEL = "tiny_model-1.0-py3-none-any.whl"  # in the spawner's folder, of the alias `tiny`
FULL_SIZE = os.environ.get("DRAFTER_FULL_TESTS") == "1"
MAX_BYTES = 4 << 30  # of address space
MAX_CPU_SECONDS = 10  # of the process: a busy machine does not matter
MAX_SECONDS = 600.0  # on the clock, for what waits without computing: a busy machine stretches every second
_POLITE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MODULES = (
    "drafter.bench.plots",
    "drafter.bench.run",
    "drafter.bench.tune",
    "drafter.cli.decode",
    "drafter.data.inspect",
    "drafter.distill.local",
    "drafter.engine.engine",
    "drafter.engine.loading",
    "drafter.training.run",
    "rich.console",
    "transformers.models.llama.modeling_llama",
)


def size(small: int, full: int) -> int:
    """How many cases: ``full`` with DRAFTER_FULL_TESTS=1 in the environment."""
    return full if FULL_SIZE else small


class Outcome(NamedTuple):
    """How a command ended. ``code`` is negative for a signal, None for a command that had to be stopped."""

    code: int | None
    error: str
    seconds: float
    output: str

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
    """Runs command lines in forks of one process."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        environment = os.environ | {"DRAFTER_HOME": str(self.home), "PYTHONPATH": os.pathsep.join(sys.path)}
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.robustness.harness", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def __call__(
        self,
        words: Sequence[str],
        *,
        stop_after: float | None = None,
        stop_by: int = signal.SIGKILL,
        is_limited: bool = True,
    ) -> Outcome:
        """Run `drafter WORDS`; ``stop_after`` seconds the process gets the signal ``stop_by``."""
        assert self._process.stdin and self._process.stdout
        order = {
            "words": list(words), "folder": str(self._folder), "stop_after": stop_after, "stop_by": int(stop_by),
            "is_limited": is_limited,
        }  # fmt: skip
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        code, seconds = json.loads(self._process.stdout.readline())
        error, output = (
            (self._folder / name).read_text(encoding="utf-8", errors="replace") for name in ("stderr", "stdout")
        )
        return Outcome(code, error, seconds, output)

    def must(self, words: Sequence[str]) -> Outcome:
        """Run a command that has to succeed."""
        outcome = self(words, is_limited=False)
        assert outcome.code == 0, (words, outcome)
        return outcome

    def close(self) -> None:
        """End the process."""
        self._process.kill()  # there is nothing to save
        self._process.wait()


def run_new_process(words: Sequence[str], home: Path, *, stop_after: float | None = None) -> Outcome:
    """Run `python -m drafter WORDS` as a user would start the command; ``stop_after`` seconds SIGKILL ends it."""
    start = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "drafter", *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env=os.environ | {"DRAFTER_HOME": str(home)}, start_new_session=True,
    )  # fmt: skip
    try:
        output, error = child.communicate(timeout=MAX_SECONDS if stop_after is None else stop_after)
        code: int | None = child.returncode
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, error = child.communicate()
        code = None if stop_after is None else child.returncode
    return Outcome(code, error, time.monotonic() - start, output)


@contextlib.contextmanager
def spawner(folder: Path) -> Iterator[Spawner]:
    """A spawner, ended at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Spawner(folder)
    try:
        yield made
    finally:
        made.close()


def leftovers(folder: Path) -> list[str]:
    """Hidden and temporary files below a folder."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.name.startswith(".") or path.suffix in (".tmp", ".partial")
    )


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


# -- the process that forks --------------------------------------------------------------------------------------------


def _serve_orders() -> None:
    for name in _MODULES:
        import_module(name)
    # `target fetch tiny` takes a wheel of a tiny target: those of real targets are large.
    ALIASES["tiny"] = write_wheel(Path(sys.argv[1]))[1]
    for line in sys.stdin:
        order = json.loads(line)
        start = time.monotonic()
        # A signal that arrives before the command begins waits: Python's own work after a fork would drop it.
        signal.pthread_sigmask(signal.SIG_BLOCK, _POLITE)
        child = os.fork()
        if child == 0:
            _run(order)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _POLITE)
        print(json.dumps([_wait(child, order), time.monotonic() - start]), flush=True)


def _wait(child: int, order: dict[str, Any]) -> int | None:
    """The exit code; None for a process that had to be stopped."""
    watch = os.pidfd_open(child)
    stop_after, is_stopped = order["stop_after"], False
    try:
        if stop_after is not None and not select.select([watch], [], [], stop_after)[0]:
            _stop(child, order["stop_by"])
        if not select.select([watch], [], [], MAX_SECONDS)[0]:
            is_stopped = True
            _stop(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(watch)
    return None if is_stopped else code


def _stop(child: int, number: int) -> None:
    # A kill takes the whole group; a polite signal goes to the command, as from a supervisor.
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if number == signal.SIGKILL else os.kill)(child, number)


def _run(order: dict[str, Any]) -> None:
    """Run the command in this process; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        folder = Path(order["folder"])
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
        if order["is_limited"]:
            resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
            resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS + 5))
        from drafter.cli.main import main

        is_command = False
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _POLITE)
            is_command = True
            code = main(order["words"])
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
        import traceback

        traceback.print_exc()
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _POLITE)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve_orders()
