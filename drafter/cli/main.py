"""The `drafter` command: a table of commands, their help, and errors in one line.

`drafter WORDS --flags` looks WORDS up in `COMMANDS` and calls that function with its options, as
:mod:`drafter.utils.options` reads them. The modules named here import torch inside their functions, so that every
`--help` answers at once.
"""

import contextlib
import ctypes
import inspect
import io
import os
import re
import signal
import sys
import typing
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

from drafter.utils.io import printable
from drafter.utils.options import Options, read_options, suggestion

COMMANDS: dict[str, str] = {
    "target fetch": "drafter.cli.target:target_fetch",
    "target list": "drafter.cli.target:target_list",
    "target clear": "drafter.cli.target:target_clear",
    "distill": "drafter.cli.distill:distill",
    "data inspect": "drafter.cli.data:data_inspect",
    "train": "drafter.cli.train:train",
    "adapt": "drafter.cli.adapt:adapt",
    "export": "drafter.cli.export:export",
    "decode": "drafter.cli.decode:decode",
    "tune": "drafter.cli.tune:tune",
    "evaluate": "drafter.cli.evaluate:evaluate",
    "bench": "drafter.cli.bench:bench",
    "bench report": "drafter.cli.bench:bench_report",
    "serve": "drafter.cli.serve:serve",
}

_EXIT_ERROR = 2
_LONGEST_ERROR = 1000  # characters
_HELP = ("-h", "--help")
_DAMAGE = ("SafetensorError", "OutOfMemoryError")  # of packages that are not imported here


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _end_at_shortened_file(_: int) -> None:
    """A file that a library had mapped was cut: no exception comes of that, and going on would fault again."""
    os.write(2, b"drafter: error: a file was shortened while it was read: is it still being copied?\n")
    os._exit(_EXIT_ERROR)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. A user's mistake is one line."""
    try:
        ctypes.CDLL(None).signal(signal.SIGBUS, _end_at_shortened_file)
        words = list(sys.argv[1:] if argv is None else argv)
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the shell (`>&-`): what is written is swallowed
                setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="utf-8"))
            if hasattr(stream := getattr(sys, name), "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no error
        if not sys.stderr.isatty():
            os.environ.setdefault("TQDM_DISABLE", "1")  # read by bars that leave it open, and by other packages
        code = _dispatch(words)
        sys.stdout.flush()  # here, where a closed pipe is caught
        return code
    except KeyboardInterrupt as stop:
        print(f"drafter: interrupted{f': {stop}' if str(stop) else ''}", file=sys.stderr)
        return 130  # 128 + SIGINT
    except BrokenPipeError:
        # The reader of our output went away (`drafter ... | head`): also keep the interpreter's last flush quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE
    except Exception as error:
        # A user can mend a value, a file, a full disk, too little memory, a missing package.
        is_ours = isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "drafter"
        kinds = ValueError, OSError, ArgumentError, MemoryError, ModuleNotFoundError
        is_known = isinstance(error, kinds) or type(error).__name__ in _DAMAGE or "can't allocate memory" in str(error)
        if is_ours or not is_known:
            raise
        print(f"drafter: error: {_one_line(error)}", file=sys.stderr)
        return _EXIT_ERROR


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        text = f"this machine, or its limit (ulimit -v), has too little memory: {text}"
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{printable(str(error.filename), _LONGEST_ERROR // 2)}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError):
        # All packages of the extra that the module belongs to.
        module = packages = error.name or ""
        with contextlib.suppress(PackageNotFoundError):
            found = [line.partition(";") for line in requires("recurrent-drafter") or ()]
            owner = module.replace("_", "-")
            for extra in {extra for name, _, extra in found if extra and re.split(r"[^\w-]", name)[0] == owner}:
                packages = " ".join(f"'{name.strip()}'" for name, _, other in found if other == extra)
        text = f"{module} is not installed: pip install {packages}"
    # A library or a server may repeat a value, whatever its length and whatever a terminal would obey in it.
    return printable(text, _LONGEST_ERROR)


def _dispatch(words: list[str]) -> int:
    if words == ["--version"]:
        from drafter.utils import VERSION

        print(VERSION)
        return 0
    name = next((name for name in (" ".join(words[:2]), " ".join(words[:1])) if name in COMMANDS), None)
    if name is None:
        beginning = f"{words[0]} " if words and words[0] not in _HELP else ""
        group = [other for other in COMMANDS if other.startswith(beginning)]
        if group and (not words or not set(_HELP).isdisjoint(words[:2])):
            print(
                "usage: drafter COMMAND [--flags]\n\nLarge language models answer faster, token for token the same.\n"
            )
            for name in group:
                text = inspect.getdoc(options_class(load_command(name))) or ""
                print(f"  {name:<12}  {text.partition(chr(10))[0]}")
            print("\ndrafter COMMAND --help lists the flags of a command.")
            return 0 if words else _EXIT_ERROR
        given = " ".join(words[:2]) if group else words[0]
        raise ValueError(f"unknown command {given!r}{suggestion(given, COMMANDS)}. Commands: {', '.join(COMMANDS)}")
    function, rest = load_command(name), words[len(name.split()) :]
    kind = options_class(function)
    options = read_options(kind, rest, f"drafter {name}")
    if options is None:
        return 0
    if isinstance(target := getattr(options, "target", None), str):
        from drafter.targets.catalog import check_name

        check_name(target, getattr(options, "revision", None))  # before torch is imported, which takes seconds
    if (read := target or getattr(options, "checkpoint", None)) is not None and sys.stderr.isatty():
        print(f"loading {printable(str(read), 100)}", file=sys.stderr)
    try:
        return function(options) or 0
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(kind.kept) from stop


def load_command(name: str) -> Callable[..., int | None]:
    """The function behind a command's name."""
    module, _, function = COMMANDS[name].partition(":")
    return getattr(import_module(module), function)


def options_class(function: Callable[..., Any]) -> type[Options]:
    """The dataclass of a command's options."""
    (parameter,) = inspect.signature(function).parameters
    hint: type[Options] = typing.get_type_hints(function)[parameter]
    return hint
