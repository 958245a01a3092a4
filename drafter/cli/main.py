"""The `drafter` command: a table of commands, and the rules by which a function's signature becomes its flags.

`drafter WORDS --flags` looks WORDS up in `COMMANDS` and imports only that function's module; modules named there import
torch and its like inside their functions, so that every `--help` answers at once. The rules:

    def f(checkpoint: Path, ...)       a positional argument CHECKPOINT
    def f(*, out: Path)                --out OUT, required
    def f(*, seed: int = 0)            --seed SEED, with the default in the help
    x: bool = False / True             --x / --no-x
    x: bool | None = None              both
    x: Literal["a", "b"]               --x with these choices
    x: list[str] = ()                  --x, which may be repeated
    x: tuple[int, ...] = ()            --x 1,2,4
    def f(*args: str)                  everything after the command's name, unread
"""

import argparse
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

COMMANDS: dict[str, str] = {
    "target fetch": "drafter.cli.target:target_fetch",
    "distill": "drafter.cli.distill:distill",
    "data inspect": "drafter.cli.data:data_inspect",
    "train": "drafter.cli.train:train",
    "export": "drafter.cli.export:export",
    "decode": "drafter.cli.decode:decode",
    "serve": "drafter.cli.serve:serve",
    "bench": "drafter.cli.bench:bench",
    "bench report": "drafter.cli.bench:bench_report",
    "bench sweep": "drafter.cli.bench:bench_sweep",
    "bench serve": "drafter.cli.bench:bench_serve",
    "tune": "drafter.cli.tune:tune",
}

_EXIT_ERROR = 2
_EXIT_INTERRUPT = 130  # 128 + SIGINT
_EXIT_PIPE = 141  # 128 + SIGPIPE
_HELP = ("-h", "--help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code. What a user can do wrong is one line (DRAFTER_TRACEBACK=1: a trace)."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no error
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # here, where a closed pipe is caught
        return code
    except KeyboardInterrupt:
        print("drafter: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPT
    except BrokenPipeError:
        # The reader of our output went away (`drafter ... | head`): also keep the interpreter's last flush quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_PIPE
    except (ValueError, OSError) as error:
        return _fail(error, _one_line(error))
    except _file_errors() as error:
        return _fail(error, f"a weight file cannot be read or written: {_one_line(error)}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "drafter":
            raise
        return _fail(error, f"{error.name} is not installed: in the repository, pip install -e '.[dev]'")


def _file_errors() -> tuple[type[BaseException], ...]:
    """The error of safetensors (a full disk, a damaged file), which is no OSError; nothing if nobody loaded it."""
    safetensors = sys.modules.get("safetensors")
    return () if safetensors is None else (safetensors.SafetensorError,)


def _fail(error: BaseException, message: str) -> int:
    if os.environ.get("DRAFTER_TRACEBACK", "0") not in ("", "0"):
        raise error
    print(f"drafter: error: {message}", file=sys.stderr)
    return _EXIT_ERROR


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in _HELP:
        print(_overview(COMMANDS))
        return 0 if words else _EXIT_ERROR
    if words[0] == "--version":
        from drafter import __version__

        print(__version__)
        return 0
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), None)
    if name is None:
        return _group(words)
    function = load_command(name)
    rest = words[len(name.split()) :]
    has_positional = not all(_is_named(parameter) for parameter in inspect.signature(function).parameters.values())
    if rest and not rest[0].startswith("-") and not has_positional and _below(name):
        return _group(words)  # `bench reprot`: no argument of bench but a command misspelt
    if _takes_everything(function) and not any(word in _HELP for word in rest):
        return function(*rest) or 0
    parser = build_parser(name, function)
    if any(word in _HELP for word in rest):
        print(parser.format_help(), end="")
        return 0
    return _call(function, parser, rest) or 0


def _group(words: list[str]) -> int:
    """The first word alone, or one that no command begins with."""
    members = {name: place for name, place in COMMANDS.items() if name.split()[0] == words[0]}
    if members and (len(words) == 1 or words[1] in _HELP):
        print(_overview(members))
        return 0 if len(words) > 1 else _EXIT_ERROR
    given = " ".join(words[:2]) if members else words[0]
    known = list(members or COMMANDS)
    raise ValueError(f"unknown command {given!r}{_suggest(given, known)}. Commands: {', '.join(known)}")


def _below(name: str) -> list[str]:
    """The commands whose names go on where `name` ends."""
    return [other for other in COMMANDS if other.startswith(name + " ")]


def load_command(name: str) -> Callable[..., int | None]:
    """The function behind a command's name."""
    module, _, function = COMMANDS[name].partition(":")
    return getattr(import_module(module), function)


def _overview(commands: dict[str, str]) -> str:
    lines = [
        "usage: drafter COMMAND [--flags]",
        "",
        "Large language models answer faster, token for token the same.",
        "",
    ]
    width = max(len(name) for name in commands)
    for name in commands:
        summary = _sections(load_command(name))[0].partition("\n")[0]
        lines.append(f"  {name:<{width}}  {summary}")
    return "\n".join([*lines, "", "drafter COMMAND --help shows the flags of a command."])


def _takes_everything(function: Callable[..., Any]) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    return kinds == [inspect.Parameter.VAR_POSITIONAL]


class _Parser(argparse.ArgumentParser):
    """argparse, with errors raised instead of printed."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} ({self.prog} --help lists the flags)")


def build_parser(name: str, function: Callable[..., Any]) -> argparse.ArgumentParser:
    """The parser of a command, made of its function's signature and docstring (see the rules above)."""
    description, helps = _sections(function)
    parameters = _parameters(function)
    needed = [
        f"{_flag(parameter)} ..." if _is_named(parameter) else parameter.name.upper()
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty
    ]
    parser = _Parser(
        prog=f"drafter {name}",
        usage=" ".join([f"drafter {name}", *needed, "[--flags]"]),
        description=_escape(description),
        epilog=f"More: drafter {', drafter '.join(_below(name))}" if _below(name) else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    hints = typing.get_type_hints(function)
    for parameter in parameters:
        _add_argument(parser, parameter, _without_none(hints[parameter.name]), helps.get(parameter.name, ""))
    parser.add_argument(*_HELP, action="help", help="show this and stop")
    return parser


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    every = inspect.signature(function).parameters.values()
    return [parameter for parameter in every if parameter.kind is not inspect.Parameter.VAR_POSITIONAL]


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.KEYWORD_ONLY


def _flag(parameter: inspect.Parameter) -> str:
    """`--name`, or `--no-name` for what is true unless told otherwise."""
    return ("--no-" if parameter.default is True else "--") + parameter.name.replace("_", "-")


def _add_argument(parser: argparse.ArgumentParser, parameter: inspect.Parameter, hint: Any, help_text: str) -> None:
    default = parameter.default
    is_required = default is inspect.Parameter.empty
    name, flag = parameter.name, _flag(parameter)
    if hint is bool:
        assert _is_named(parameter) and not is_required, f"{name}: a bool needs a name and a default"
        if default is None:
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, dest=name, action=action, default=None, help=_escape(help_text))
            return
        parser.add_argument(flag, dest=name, action="store_false" if default else "store_true", help=_escape(help_text))
        return
    options = _value_options(hint, _is_named(parameter))
    is_silent = is_required or default is None or default == () or default == ""
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    options["help"] = _escape(help_text + ("" if is_silent else f" (default: {shown})"))
    if _is_named(parameter):
        parser.add_argument(flag, dest=name, required=is_required, default=None if is_required else default, **options)
    elif is_required:
        parser.add_argument(name, **{**options, "metavar": name.upper()})
    else:
        parser.add_argument(name, nargs="?", default=default, **{**options, "metavar": name.upper()})


def _value_options(hint: Any, is_named: bool) -> dict[str, Any]:
    """How argparse turns words into a value of the type `hint`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"type": _one_of(args), "metavar": "{" + ",".join(map(str, args)) + "}"}
    if origin is list:
        repeat: dict[str, Any] = {"action": "append"} if is_named else {"nargs": "+"}
        return {"type": args[0], "metavar": _METAVARS[args[0]], **repeat}
    if origin is tuple:
        return {"type": _comma_separated(args[0]), "metavar": f"{_METAVARS[args[0]]},..."}
    assert hint in _METAVARS, f"no rule for a flag of type {hint}"
    return {"type": hint, "metavar": _METAVARS[hint]}


_METAVARS: dict[type, str] = {str: "TEXT", int: "INT", float: "NUMBER", Path: "PATH"}


def _one_of(choices: Sequence[Any]) -> Callable[[str], Any]:
    by_name = {str(choice): choice for choice in choices}

    def parse(text: str) -> Any:
        if text not in by_name:
            raise argparse.ArgumentTypeError(f"unknown value {text}{_suggest(text, by_name)}; use {', '.join(by_name)}")
        return by_name[text]

    return parse


def _comma_separated(kind: type) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(kind(part) for part in text.split(",") if part)

    parse.__name__ = f"list of {kind.__name__}"  # argparse says "invalid list of int value"
    return parse


def _without_none(hint: Any) -> Any:
    """`T | None` -> T."""
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = [arg for arg in get_args(hint) if arg is not types.NoneType]
        return kind
    return hint


def _call(function: Callable[..., int | None], parser: argparse.ArgumentParser, words: list[str]) -> int | None:
    parameters = _parameters(function)
    known = [flag for action in parser._actions for flag in action.option_strings]
    # Before argparse looks: of "--targt x" it would only say that --target is missing.
    for word in words:
        given = word.partition("=")[0]
        if given.startswith("--") and given != "--" and given not in known:
            raise ValueError(f"unknown flag {given}{_suggest(given, known)} ({parser.prog} --help lists the flags)")
    values = vars(parser.parse_args(words))
    positional = [values[parameter.name] for parameter in parameters if not _is_named(parameter)]
    named = {parameter.name: values[parameter.name] for parameter in parameters if _is_named(parameter)}
    return function(*positional, **named)


def _suggest(given: str, known: Iterable[str]) -> str:
    import difflib

    close = difflib.get_close_matches(given, list(known), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _sections(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """A docstring's description, and the lines of its `Args:` by parameter."""
    description, _, arguments = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")
    helps: dict[str, str] = {}
    name = ""
    for line in arguments.splitlines():
        if not line.strip() or not line.startswith(" "):
            break
        if not line.startswith("     "):  # four spaces: a new name; more: the line above goes on
            name, _, text = line.strip().partition(":")
            helps[name] = text.strip()
        else:
            helps[name] += " " + line.strip()
    return description.strip(), helps


def _escape(text: str) -> str:
    return text.replace("%", "%%")


if __name__ == "__main__":
    sys.exit(main())
