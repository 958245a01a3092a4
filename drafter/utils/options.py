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
stand. ``--print-config`` prints all values as a file for ``--config``. jsonargparse does the work.
"""

import argparse
import difflib
import inspect
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from drafter.utils.parse import MAX_YAML_BYTES, parse_yaml
from drafter.utils.validate import Range, check_ranges, range_of

_METAVARS = {int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True)
class Options:
    """Base of all options: checks the ranges of all fields, and runs the checks of every section, on construction.

    Attributes of the class:
        sections: titles of the help, and the dataclasses whose fields stand below them.
        common: fields that the help shows first.
        positional: the field that is given without a flag.
        rare: fields that seldom matter: flags and keys like the others, which the help names in its last line only.
    """

    sections: ClassVar[Mapping[str, type]] = {}
    common: ClassVar[tuple[str, ...]] = ()
    positional: ClassVar[str | None] = None
    rare: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_ranges(self)
        classes = type(self).__mro__
        checked: list[type] = []  # the check of a class stands for the checks of its bases
        for base in classes[classes.index(Options) + 1 :]:
            check = vars(base).get("__post_init__")
            if check is not None and not any(issubclass(other, base) for other in checked):
                check(self)
                checked.append(base)


AnyOptions = TypeVar("AnyOptions", bound=Options)
Part = TypeVar("Part")


def part_of(options: Options, kind: type[Part]) -> Part:
    """The fields of ``options`` that ``kind``, one of the sections, has."""
    return kind(**{item.name: getattr(options, item.name) for item in fields(kind)})  # type: ignore[arg-type]


def comma_separated(default: tuple[str, ...]) -> Any:
    """A field of texts that hold no commas: ``--x a,b`` is ``--x a --x b``."""
    return field(default=default, metadata={"commas": True})


def suggestion(given: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` when a known name is close to ``given``; else nothing."""
    close = difflib.get_close_matches(given, list(known), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def flags_of(kind: type[Options]) -> list[str]:
    """The flags of a command's own fields, those that negate included."""
    hints = get_type_hints(kind)
    found = [f"--{item.name.replace('_', '-')}" for item in fields(kind) if item.name != kind.positional]
    return found + [f"--no-{item.name.replace('_', '-')}" for item in fields(kind) if _plain(hints[item.name]) is bool]


def read_options(kind: type[AnyOptions], words: Sequence[str], command: str = "drafter") -> AnyOptions | None:
    """The options of a command line; None when ``--help`` or ``--print-config`` was asked for and printed.

    Raises:
        ValueError: an unknown flag or key, a value of the wrong type or out of range, or a missing one.
    """
    parser = _parser(kind, command)
    spelled = _spelled(config_first(words))
    try:
        values = vars(parser.parse_args(spelled))
    except argparse.ArgumentError as error:
        known = [*flags_of(kind), "--config", "--print-config", "--help"]
        given = [word.partition("=")[0] for word in spelled if word.startswith("--")]
        hint = next((suggestion(flag, known) for flag in given if flag not in known), "")
        raise ValueError(f"{_one_line(error)}{hint} ({command} --help lists the flags)") from error
    except SystemExit as stop:
        if stop.code:
            raise
        return None
    del values["config"]
    return _made(kind, values)


def options_from(kind: type[AnyOptions], values: Mapping[str, Any], where: str) -> AnyOptions:
    """The options of a mapping such as a part of a YAML file; ``where`` names the mapping in errors (ValueError)."""
    try:
        found = vars(_parser(kind, "drafter").parse_object(dict(values)))
    except argparse.ArgumentError as error:
        raise ValueError(f"{where}: {_one_line(error)}") from error
    del found["config"]
    return _made(kind, found)


def config_first(words: Sequence[str]) -> list[str]:
    """The words with `--config FILE` in front: a flag replaces the value of the file wherever the flag stands."""
    files: list[str] = []
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--config" and left:
            files += [word, left.pop(0)]
        else:
            (files if word.startswith("--config=") else others).append(word)
    return files + others


def limit_yaml() -> None:
    """Let jsonargparse read files and values within the limits of :mod:`drafter.utils.parse`."""
    import yaml
    from jsonargparse import set_loader
    from jsonargparse._loaders_dumpers import yaml_load

    def load(text: str) -> Any:
        if len(text) > MAX_YAML_BYTES:
            raise ValueError(f"larger than {MAX_YAML_BYTES:,} bytes")
        parse_yaml(text, "YAML")
        return yaml_load(text)

    set_loader("yaml", load, (ValueError, yaml.YAMLError))  # the parser in C refuses some escapes more


class _Elements:
    """Converts the text of one flag, or a value of a file, to a tuple."""

    def __init__(self, kind: type, has_commas: bool) -> None:
        self.kind, self.has_commas = kind, has_commas
        self.__name__ = f"{kind.__name__} or a list"  # argparse names the type in its errors

    def __call__(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()] if self.has_commas else [value]
        return tuple(map(self._element, value if isinstance(value, list | tuple) else [value]))

    def _element(self, value: Any) -> Any:
        is_number = self.kind is float and isinstance(value, int)
        if not (isinstance(value, str | self.kind) or is_number) or isinstance(value, bool):
            raise ValueError(f"{value!r} is no {self.__name__}")
        return self.kind(value)


class _Repeated(argparse.Action):
    """A flag of several values: the values of the command line, all of them, replace those of the file."""

    _given: tuple[Any, ...] = ()

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        self._given += values
        setattr(namespace, self.dest, self._given)


def _parser(kind: type[Options], command: str) -> Any:
    from jsonargparse import ArgumentParser

    class Help(argparse.HelpFormatter):
        """Leaves out the fields that seldom matter; what argparse.SUPPRESS hides is missing in --print-config too."""

        def add_argument(self, action: argparse.Action) -> None:
            if action.dest not in kind.rare:
                super().add_argument(action)

    limit_yaml()
    parser = ArgumentParser(
        prog=command, usage=f"{command} {_needed(kind)}[--flags]", description=_description(kind), exit_on_error=False,
        allow_abbrev=False, print_config="--print-config", formatter_class=Help,
        epilog=_rare_flags(kind),
    )  # fmt: skip
    members, hints, texts = {item.name: item for item in fields(kind)}, get_type_hints(kind), _texts(kind)
    for title, names in _titles(kind).items():
        group = parser.add_argument_group(title)
        for name in names:
            _add(group, kind, members[name], hints[name], texts.get(name, ""))
    parser.add_argument("--config", action="config", help="YAML file of options; keys are the names of the flags")
    return parser


def _add(group: Any, kind: type[Options], item: "Field[Any]", hint: Any, text: str) -> None:
    """One field as an argument of the group."""
    from jsonargparse import ActionYesNo

    flag, plain = f"--{item.name.replace('_', '-')}", _plain(hint)
    default = item.default if item.default_factory is MISSING else item.default_factory()
    text += _range_and_default(range_of(kind, item.name), default, text)
    more: dict[str, Any] = {"required": True} if default is MISSING else {"default": default}
    element = get_args(plain)[0] if get_origin(plain) is tuple else plain
    metavar = _METAVARS.get(element) or "{" + ",".join(map(str, get_args(element))) + "}"
    if item.name == kind.positional:
        several = {"nargs": "+"} if element is not plain else {}
        group.add_argument(item.name, type=element, metavar=item.name.upper(), help=text, **several)
        return
    if plain is bool:
        more["action"] = ActionYesNo(no_prefix="no-")
    elif element is not plain:
        has_commas = element is not str or bool(item.metadata.get("commas"))
        text += "" if has_commas else "; may be repeated"
        more |= {"type": _Elements(element, has_commas), "action": _Repeated}
        more["metavar"] = f"{metavar},..." if has_commas else metavar
    else:
        more |= {"type": plain, "metavar": metavar}  # None is allowed to every type
    group.add_argument(flag, help=text, **more)


def _range_and_default(span: Range | None, default: Any, text: str) -> str:
    """What the help says of a field by itself: its range, and its default unless the text or nothing is the default."""
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else "on" if default is True else default
    is_nothing = default is None or default is False or default is MISSING or default == ()
    has_default = not is_nothing and "(default" not in text
    return (f" ({span})" if span is not None else "") + (f" (default: {shown})" if has_default else "")


def _titles(kind: type[Options]) -> dict[str, list[str]]:
    """The groups of the help: the common fields, the sections, the others."""
    left = [item.name for item in fields(kind)]
    sections = {title: [item.name for item in fields(section)] for title, section in kind.sections.items()}
    found: dict[str, list[str]] = {}
    for title, names in {"Common options": kind.common, **sections, "Options": tuple(left)}.items():
        found[title] = [name for name in names if name in left]
        left = [name for name in left if name not in names]
    return found


def _rare_flags(kind: type[Options]) -> str | None:
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in kind.rare)
    return f"Flags that seldom matter (--print-config shows them all): {flags}." if flags else None


def _needed(kind: type[Options]) -> str:
    names = [kind.positional.upper()] if kind.positional else []
    for item in fields(kind):
        if item.name != kind.positional and item.default is MISSING and item.default_factory is MISSING:
            names.append(f"--{item.name.replace('_', '-')} {item.name.upper()}")
    return "".join(f"{name} " for name in names)


def _description(kind: type) -> str:
    return re.split(r"\n(?:Attributes|Raises):\n", inspect.cleandoc(kind.__doc__ or ""))[0].strip()


def _spelled(words: Sequence[str]) -> list[str]:
    """``--max_new_tokens=8`` -> ``--max-new-tokens=8``; ``--trainer.max_epochs 1`` -> ``--trainer=max_epochs=1``."""
    found: list[str] = []
    left = list(words)
    while left:
        name, equals, value = left.pop(0).partition("=")
        flag, dot, key = name.partition(".")
        if not name.startswith("--"):
            found.append(name + equals + value)
        elif dot:
            found.append(f"{flag}={key}={value if equals else left.pop(0) if left else ''}")
        else:
            found.append(name.replace("_", "-") + equals + value)
    return found


def _made(kind: type[AnyOptions], values: Mapping[str, Any]) -> AnyOptions:
    hints = get_type_hints(kind)
    for name, value in values.items():
        if value is None and _plain(hints[name]) is hints[name]:
            raise ValueError(f"{name} is null but needs a value: give one, or leave the key out")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _plain(hint: Any) -> Any:
    """``T | None`` -> T."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = [arg for arg in get_args(hint) if arg is not types.NoneType]
    return hint


def _texts(kind: type) -> dict[str, str]:
    """The lines of all ``Attributes:`` by field; a class goes before the classes that it inherits from."""
    from docstring_parser import DocstringStyle, parse

    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for part in parse(vars(base).get("__doc__") or "", style=DocstringStyle.GOOGLE).params:
            text = " ".join((part.description or "").split()).replace("``", "").rstrip(".")
            found.update(dict.fromkeys(part.arg_name.split(", "), text))
    return found
