"""A command's options: one frozen dataclass is the flags, the YAML keys, the Python arguments and the help.

    @dataclass(frozen=True, kw_only=True)
    class ToyOptions(Options, SamplingParams):
        '''Do a thing.

        Attributes:
            source: file to read
        '''
        source: str                                         # --source TEXT, required

    options = read_options(ToyOptions, ["--config", "toy.yaml", "--top-k", "5"])

Rules: ``x: bool = True`` is ``--x`` and ``--no-x``; a ``tuple[int, ...]`` is ``--x 1,2,4``; a ``tuple[str, ...]`` is a
flag that may be repeated. Precedence: default < file of ``--config`` < flag that was given, in whatever order the words
stand. ``--print_config`` prints all values as a file for ``--config``.

jsonargparse converts and checks the values and writes the YAML. Importing jsonargparse takes 0.1 s, so the help is
written without it, from the same fields.
"""

import argparse
import difflib
import inspect
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from drafter.utils.parse import MAX_LINE_MIB, read_yaml
from drafter.utils.validate import Range, check_ranges, range_of, within

_HELP_WORDS = ("-h", "--help")
_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}
_EVERYWHERE = (
    (
        "--config PATH",
        "YAML file of options; keys are the names of the flags, and a given flag replaces the file's value",
    ),
    ("--print_config", "print every option with its value, as a file for --config"),
)
_METAVARS = {int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True)
class Options:
    """Base of all options: checks the ranges of all fields, and runs the checks of every section, on construction.

    Attributes of the class:
        sections: titles of the help, and the dataclasses whose fields stand below them.
        common: fields that the help shows first.
        positional: the field that is given without a flag.
    """

    sections: ClassVar[Mapping[str, type]] = {}
    common: ClassVar[tuple[str, ...]] = ()
    positional: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        check_ranges(self)
        classes = type(self).__mro__
        checked: list[type] = []  # the check of a class stands for the checks of its bases
        for base in classes[classes.index(Options) + 1 :]:
            check = vars(base).get("__post_init__")
            if check is not None and not any(issubclass(other, base) for other in checked):
                check(self)
                checked.append(base)


@dataclass(frozen=True, kw_only=True)
class LineOptions:
    """Options of every command that reads prompts or rows.

    Attributes:
        max_line_mib: longest line of a file of prompts or rows, in MiB
    """

    max_line_mib: int = within(MAX_LINE_MIB, low=1, high=1024)


AnyOptions = TypeVar("AnyOptions", bound=Options)
Part = TypeVar("Part")


def part_of(options: Options, kind: type[Part]) -> Part:
    """The fields of ``options`` that ``kind``, one of the sections, has."""
    return kind(**{item.name: getattr(options, item.name) for item in fields(kind)})  # type: ignore[arg-type]


def comma_separated(default: tuple[str, ...]) -> Any:
    """A field of texts that hold no commas: ``--x a,b`` is ``--x a --x b``."""
    return field(default=default, metadata={"commas": True})


class Option(NamedTuple):
    """One field of a command's options."""

    name: str
    hint: Any
    default: Any
    text: str
    title: str
    has_commas: bool
    range: Range | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def kind(self) -> Any:
        """The type without ``None``; for a tuple that of the elements."""
        plain = _without_none(self.hint)
        return get_args(plain)[0] if get_origin(plain) is tuple else plain

    @property
    def is_list(self) -> bool:
        return get_origin(_without_none(self.hint)) is tuple

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    def refusal(self, value: object, where: str = "") -> ValueError:
        """The error for a value of another type."""
        choices = [str(choice) for choice in get_args(self.kind)] if get_origin(self.kind) is Literal else []
        kind = f"one of {', '.join(choices)}" if choices else _KINDS.get(self.kind, str(self.kind))
        name = f"{where}: {self.name}" if where else self.flag
        several = " (or a list)" if self.is_list else ""
        return ValueError(f"{name} is {value!r} but must be {kind}{several}{suggestion(str(value), choices)}")


def suggestion(given: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` when a known name is close to ``given``; else nothing."""
    close = difflib.get_close_matches(given, list(known), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def parse_error(message: str, known: Iterable[str] = ()) -> str:
    """An error of jsonargparse in one line: the flag, the value and the permitted types.

    Args:
        message: text of the error.
        known: names of all settings, for suggestions.

    >>> parse_error('Parser key "model.optim.lr":\\n  Expected a <class \\'float\\'>. Got value: x')
    "--model.optim.lr is 'x' but must be a number"
    >>> parse_error("Group 'model' does not accept option 'drafter.cel'", ["model.drafter.cell"])
    'unknown setting model.drafter.cel (did you mean model.drafter.cell?)'
    """
    unknown = re.search(r"unrecognized arguments: --(\S+)|Group '(.*)' does not accept option '(.*)'", message)
    if unknown:
        name = unknown[1].partition("=")[0] if unknown[1] else f"{unknown[2]}.{unknown[3]}"
        return f"unknown setting {name}{suggestion(name, known)}"
    found = re.search(r'Parser key "([^"]+)"', message)
    value = re.search(r"(?:Got value|Given value): (.*)", message)
    kinds = re.findall(r"Expected an? ([^\n]+?)(?:\. Got value|\n|$)", message)
    if found and "File does not exist" in message:
        return f"--{found[1]}{message.rpartition(':')[2]}: there is no such file"
    if not found or not value or not kinds:
        return " ".join(message.split())
    given = value[1].strip()
    if given == "None":
        return f"--{found[1]} is missing: give --{found[1]}, or the key in the file of --config"
    choices = re.findall(r"'([^']+)'", next((kind for kind in kinds if "Literal" in kind), ""))
    names = {str(kind): name for kind, name in _KINDS.items()} | {str(type(None)): "null"}
    wanted = [f"one of {', '.join(choices)}"] if choices else []
    wanted += [names.get(kind, kind) for kind in kinds if "Literal" not in kind]
    return f"--{found[1]} is {given!r} but must be {' or '.join(dict.fromkeys(wanted))}{suggestion(given, choices)}"


def options_of(kind: type[Options]) -> dict[str, Option]:
    """All fields by name, in the order of the help."""
    hints, texts = get_type_hints(kind), _texts(kind)
    found: dict[str, Option] = {}
    members = {item.name: item for item in fields(kind)}
    titled = [*(("Common options", name) for name in kind.common)]
    for title, section in kind.sections.items():
        inherited = {
            item.name
            for base in kind.sections.values()
            if section is not base and issubclass(section, base)
            for item in fields(base)
        }
        titled += [(title, item.name) for item in fields(section) if item.name not in inherited]
    titled += [("Options", name) for name in members]
    for title, name in titled:
        if name not in found:
            text, item = texts.get(name, ""), members[name]
            has_commas = bool(item.metadata.get("commas"))
            default = item.default if item.default_factory is MISSING else item.default_factory()
            found[name] = Option(name, hints[name], default, text, title, has_commas, range_of(kind, name))
    return found


def read_options(kind: type[AnyOptions], words: Sequence[str], command: str = "drafter") -> AnyOptions | None:
    """The options of a command line; None when ``--help`` or ``--print_config`` was asked for and printed.

    Raises:
        FileNotFoundError: ``--config`` names no file.
        ValueError: an unknown flag or key, a value of the wrong type or out of range, or a missing one.
    """
    if any(word in _HELP_WORDS for word in words):
        print(help_of(kind, command))
        return None
    given = _read_words(kind, words, command)
    files, wants_config = given.pop("config", []), given.pop("print_config", None)
    parser, known = _parser(kind), options_of(kind)
    values = parser.get_defaults()
    for file in files:
        _add_mapping(kind, parser, values, _read_yaml(Path(file)), file)
    try:
        texts = [f"--{name}={_as_word(known[name], found)}" for name, found in given.items()]
        values = parser.parse_args(texts, namespace=values)
    except argparse.ArgumentError as error:
        name = _key_of(error)
        raise known[name].refusal(",".join(given[name])) from error
    if wants_config:
        sys.stdout.write(parser.dump(values, skip_unset=False))
        return None
    option = _missing(kind, vars(values))
    if option is not None:
        name = option.name.upper() if option.name == kind.positional else option.flag
        raise ValueError(f"{name} is missing: give {name}, or `{option.name}:` in the file of --config")
    return kind(**vars(values))


def options_from(kind: type[AnyOptions], values: Mapping[str, Any], where: str) -> AnyOptions:
    """The options of a mapping such as a part of a YAML file; ``where`` names the mapping in errors (ValueError)."""
    parser = _parser(kind)
    base = parser.get_defaults()
    _add_mapping(kind, parser, base, values, where)
    option = _missing(kind, vars(base))
    if option is not None:
        raise ValueError(f"{where}: {option.name} is missing: add `{option.name}:`")
    return kind(**vars(base))


def help_of(kind: type[Options], command: str) -> str:
    """The help: a description of the command, the common options, then the sections."""
    width = min(max(shutil.get_terminal_size((100, 40)).columns, 60), 120)
    options = options_of(kind)
    needed = [option.name.upper() for option in options.values() if option.name == kind.positional]
    needed += [
        f"{option.flag} {_metavar(option)}"
        for option in options.values()
        if option.is_required and option.name != kind.positional
    ]
    description = re.split(r"\n(?:Attributes|Raises):\n", inspect.cleandoc(kind.__doc__ or ""))[0].strip()
    lines = [" ".join(["usage:", command, *needed, "[--flags]"]), "", description]
    titles = dict.fromkeys(option.title for option in options.values())
    for title in titles:
        lines += ["", f"{title}:"]
        shown = [_shown(kind, option) for option in options.values() if option.title == title]
        for flag, text in [*shown, *(_EVERYWHERE if title == next(iter(titles)) else ())]:
            lines += _entry(flag, text, width)
    return "\n".join(lines)


def _shown(kind: type[Options], option: Option) -> tuple[str, str]:
    default = option.default
    if option.kind is bool:
        flag = f"--[no-]{option.name.replace('_', '-')}" if default is not False else option.flag
        value = "on" if default is True else ""
    else:
        name = option.name.upper() if option.name == kind.positional else option.flag
        flag = name if option.name == kind.positional else f"{name} {_metavar(option)}"
        shown = default if isinstance(default, tuple) else (default,)
        value = "" if default is MISSING or default is None else ",".join(map(str, shown))
    repeat = "; may be repeated" if option.is_list and option.kind is str and not option.has_commas else ""
    text, span = option.text + repeat, "" if option.range is None else str(option.range)
    if span and "(default" in text:
        return flag, text.replace("(default", f"({span}; default", 1)
    says_default = not value or "default" in text
    notes = [note for note in (span, "" if says_default else f"default: {value}") if note]
    return flag, text + (f" ({'; '.join(notes)})" if notes else "")


def _entry(flag: str, text: str, width: int) -> list[str]:
    indent = 28
    lines = textwrap.wrap(text, width - indent) or [""]
    if len(flag) > indent - 4:
        return [f"  {flag}", *(" " * indent + line for line in lines)]
    return [f"  {flag}".ljust(indent) + lines[0], *(" " * indent + line for line in lines[1:])]


def _metavar(option: Option) -> str:
    if get_origin(option.kind) is Literal:
        return "{" + ",".join(map(str, get_args(option.kind))) + "}"
    name = _METAVARS[option.kind]
    return f"{name},..." if option.is_list and (option.kind is not str or option.has_commas) else name


def _read_words(kind: type[Options], words: Sequence[str], command: str) -> dict[str, list[str]]:
    """The texts that were given for each field, in order."""
    options = options_of(kind)
    by_flag = {option.flag: option.name for option in options.values()} | {"--config": "config"}
    switches = {option.flag for option in options.values() if option.kind is bool}
    opposites = {"--no-" + flag[2:]: flag for flag in switches}
    found: dict[str, list[str]] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        given, equals, text = word.partition("=")
        given = given.replace("_", "-") if given.startswith("--") else given
        if given == "--print-config":
            found["print_config"] = ["true"]
        elif given in opposites and not equals:
            found.setdefault(by_flag[opposites[given]], []).append("false")
        elif given in by_flag:
            if not equals and given in switches:
                text = "true"
            elif not equals:
                if not left or left[0].startswith("--"):
                    raise ValueError(f"{given} needs a value ({command} --help lists the flags)")
                text = left.pop(0)
            found.setdefault(by_flag[given], []).append(text)
        elif given.startswith("-") and given != "-":
            close = suggestion(given, [*by_flag, *opposites])
            raise ValueError(f"unknown flag {word.partition('=')[0]}{close} ({command} --help lists the flags)")
        elif kind.positional is None or (kind.positional in found and not options[kind.positional].is_list):
            raise ValueError(f"unknown word {word!r}: every option is a flag ({command} --help lists the flags)")
        else:
            found.setdefault(kind.positional, []).append(word)
    return found


def _as_word(option: Option, texts: list[str]) -> str:
    """The texts of one flag as the one text that jsonargparse reads."""
    import json

    if not option.is_list:
        return texts[-1]
    if option.kind is str and not option.has_commas:
        return json.dumps(texts, ensure_ascii=False)
    parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    return json.dumps(parts, ensure_ascii=False) if option.kind is str else f"[{','.join(parts)}]"


def _parser(kind: type[Options]) -> Any:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, add_help=False)
    for option in options_of(kind).values():
        default = None if option.is_required else option.default
        parser.add_argument(f"--{option.name}", type=option.hint, default=default)
    return parser


def _key_of(error: Exception) -> str:
    """The field that jsonargparse complains about."""
    found = re.search(r'Parser key "(\w+)"', str(error))
    assert found, error
    return found[1]


def _read_yaml(path: Path) -> dict[str, Any]:
    found = read_yaml(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: options are keys with values, such as `target: smollm2-135m`")
    return found


def _add_mapping(kind: type[Options], parser: Any, base: Any, values: Mapping[str, Any], where: str) -> None:
    """Put ``values`` into the namespace ``base``. One value stands for a list of one."""
    known = options_of(kind)
    listed: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}{suggestion(str(key), known)}; keys are {', '.join(known)}")
        option = known[key]
        if value is None:
            if type(None) not in get_args(option.hint) and not option.is_required:
                raise option.refusal(value, where)
            continue
        listed[key] = [value] if option.is_list and not isinstance(value, list | tuple) else value
    try:
        read = parser.parse_object(listed)
    except argparse.ArgumentError as error:
        raise known[_key_of(error)].refusal(values[_key_of(error)], where) from error
    for key in listed:
        base[key] = read[key]


def _missing(kind: type[Options], values: Mapping[str, Any]) -> Option | None:
    """The first required field without a value."""
    options = options_of(kind).values()
    return next((option for option in options if option.is_required and values[option.name] is None), None)


def _without_none(hint: Any) -> Any:
    """``T | None`` -> T."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = [arg for arg in get_args(hint) if arg is not types.NoneType]
    return hint


def _texts(kind: type) -> dict[str, str]:
    """The lines of all ``Attributes:`` by field; a class goes before the classes that it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        lines = inspect.cleandoc(vars(base).get("__doc__") or "").partition("\nAttributes:\n")[2]
        section = re.split(r"\n\S", lines)[0]
        for entry in re.split(r"\n {4}(?=\S)", "\n" + textwrap.indent(textwrap.dedent(section), "    ")):
            names, colon, text = " ".join(entry.split()).partition(": ")
            if colon:
                found.update(dict.fromkeys(names.split(", "), text.replace("``", "").rstrip(".")))
    return found
