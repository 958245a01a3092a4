"""A command's options: one frozen dataclass is the flags, the YAML keys, the Python arguments and the help.

jsonargparse parses; the arguments for it are made here. ``x: bool = True`` is ``--x`` and ``--no-x``; a
``tuple[int, ...]`` is ``--x 1,2,4``; a ``tuple[str, ...]`` is a flag that may be repeated; a dataclass has flags with
dots, ``--x.y 1``; the lines of ``Attributes:`` in the docstring are the help. Precedence: default < file of
``--config`` < flag that was given, in whatever order the words stand. ``--print-config`` prints all values as a file
for ``--config``, ``--help-all`` the help of rare fields, too.
"""

import argparse
import difflib
import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from drafter.utils.parse import MAX_YAML_BYTES, parse_yaml
from drafter.utils.validate import Checked, flag_of, range_of


@dataclass(frozen=True)
class Options(Checked):
    """Base of all options.

    Attributes of the class:
        positional: the field that is given without a flag.
        common, rare: fields that the help shows first, and fields that ``--help-all`` alone explains.
        kept: what Ctrl-C leaves of the command's work, and how to go on.
    """

    positional: ClassVar[str | None] = None
    common: ClassVar[tuple[str, ...]] = ()
    rare: ClassVar[tuple[str, ...]] = ()
    kept: ClassVar[str] = ""
    prefix: ClassVar[str] = "--"  # of the fields of SamplingParams too


_CONFIGS = Path(__file__).parent.parent / "configs"
AnyOptions = TypeVar("AnyOptions", bound=Options)
Part = TypeVar("Part")


def part_of(options: Options, kind: type[Part]) -> Part:
    """The fields of ``options`` that ``kind``, one of its bases, has."""
    return kind(**{item.name: getattr(options, item.name) for item in fields(kind)})  # type: ignore[arg-type]


def suggestion(given: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` when a known name is close to ``given``; else nothing."""
    close = difflib.get_close_matches(given, list(known), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def read_options(kind: type[AnyOptions], words: Sequence[str], command: str = "drafter") -> AnyOptions | None:
    """The options of a command line; None when ``--help`` or ``--print-config`` was asked for and printed.

    ValueError: an unknown flag or key, a value of the wrong type or out of range, or a missing one.
    """
    parser = _parser(kind, command, is_whole="--help-all" in words)
    words = ["--help" if word == "--help-all" else word for word in words]
    try:
        values = parser.parse_args([_dashed(word) for word in config_first(words, command.rpartition(" ")[2])])
    except argparse.ArgumentError as error:
        raise ValueError(f"{' '.join(str(error).split())} ({command} --help lists the flags)") from error
    except SystemExit as stop:
        if stop.code:
            raise
        return None
    return _made(kind, vars(values))


def options_from(kind: type[AnyOptions], values: Mapping[str, Any], where: str) -> AnyOptions:
    """The options of a mapping such as a part of a YAML file; ``where`` names the mapping in errors (ValueError)."""
    try:
        return _made(kind, vars(_parser(kind, "drafter").parse_object(dict(values))))
    except argparse.ArgumentError as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error


def config_first(words: Sequence[str], command: str = "") -> list[str]:
    """The words with `--config FILE` in front: a flag replaces the value of the file wherever the flag stands.

    A name without a folder and an ending stands for a file of the package for this command; ValueError for another.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=[])
    found, others = parser.parse_known_args(words)
    shipped, files = _shipped_configs(command), []
    for name in found.config:
        is_path = not re.fullmatch(r"[\w.-]+", name) or name.endswith((".yaml", ".yml", ".json"))
        if Path(name).exists() and not Path(name).is_file():
            raise ValueError(f"--config {name} is no regular file: name a YAML file")  # a pipe would be waited for
        if not (is_path or Path(name).exists() or name in shipped):
            known = f", nor a configuration of the package: {', '.join(shipped)}" if shipped else ""
            raise ValueError(f"--config {name} is no file{known}")
        files.append(f"--config={name if is_path or Path(name).exists() else shipped[name]}")
    return files + others


def _shipped_configs(command: str) -> dict[str, str]:
    """The package's files of a command by name."""
    return {file.stem: str(file) for file in sorted(_CONFIGS.glob(f"{command}/*.yaml"))}


def _dashed(word: str) -> str:
    """``--max_new_tokens=8`` -> ``--max-new-tokens=8``; the keys of ``--trainer.max_epochs`` are the user's own."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") and "." not in name else word


@cache
def limit_yaml() -> None:
    """Let jsonargparse read files and values within the limits of :mod:`drafter.utils.parse`."""
    import yaml
    from jsonargparse import get_loader, set_loader

    yaml_load = get_loader("yaml")

    def load(text: str) -> Any:
        if len(text) > MAX_YAML_BYTES:
            raise ValueError(f"larger than {MAX_YAML_BYTES:,} bytes")
        parse_yaml(text, "YAML")
        return yaml_load(text)

    set_loader("yaml", load, (ValueError, yaml.YAMLError))  # the parser in C refuses some escapes more


def _elements(kind: type, has_commas: bool) -> Callable[[Any], tuple[Any, ...]]:
    """Converts the text of one flag, or a value of a file, to a tuple."""
    from pydantic import TypeAdapter, ValidationError

    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def convert(value: Any) -> tuple[Any, ...]:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()] if has_commas else [value]
        values = value if isinstance(value, list | tuple) else [value]
        try:
            return tuple(adapter.validate_python(each, strict=not isinstance(each, str)) for each in values)
        except ValidationError as error:
            raise ValueError(f"{value!r} is no {convert.__name__}") from error

    convert.__name__ = f"{kind.__name__} or a list"  # argparse names the type in its errors
    return convert


class _Repeated(argparse.Action):
    """A flag of several values: the values of the command line, all of them, replace those of the file."""

    _given: tuple[Any, ...] = ()

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        self._given += values
        setattr(namespace, self.dest, self._given)


def _parser(kind: type[Options], command: str, *, is_whole: bool = False) -> Any:
    from jsonargparse import ArgumentParser

    rare = () if is_whole else kind.rare

    class Help(argparse.HelpFormatter):
        """Leaves out the rare fields; what argparse.SUPPRESS hides is missing in --print-config too."""

        def add_argument(self, action: argparse.Action) -> None:
            if action.dest.partition(".")[0] not in rare:
                super().add_argument(action)

    limit_yaml()
    needed = [
        f"{item.name.upper()} " if item.name == kind.positional else f"{flag_of(item.name)} {item.name.upper()} "
        for item in fields(kind)
        if item.default is MISSING and item.default_factory is MISSING
    ]
    parser = ArgumentParser(
        prog=command, usage=f"{command} {''.join(needed)}[--flags]", exit_on_error=False, allow_abbrev=False,
        description=re.split(r"\n(?:Attributes|Raises):\n", inspect.cleandoc(kind.__doc__ or ""))[0].strip(),
        epilog=f"Flags that seldom matter (--help-all): {', '.join(map(flag_of, rare))}." if rare else None,
        print_config="--print-config", formatter_class=Help,
    )  # fmt: skip
    shipped = ", ".join(_shipped_configs(command.rpartition(" ")[2]))
    text = f" (of the package: {shipped})" if shipped else ""
    parser.add_argument("--config", action="config", help=f"YAML file of options; keys are the flags' names{text}")
    hints, texts, left = get_type_hints(kind), _texts(kind), {item.name: item for item in fields(kind)}
    groups: dict[str, Iterable[str]] = {"Common options": kind.common}
    for base in kind.__mro__[1:]:
        title = inspect.cleandoc(base.__doc__ or "").partition("\n")[0].partition(". ")[0].rstrip(".")
        groups[title] = vars(base).get("__annotations__", {})
    for title, names in {**groups, "Other options": list(left)}.items():
        group = parser.add_argument_group(title)
        for item in [left.pop(name) for name in names if name in left]:
            if is_dataclass(hint := _plain(hints[item.name])):
                parser.add_class_arguments(hint, item.name, help=texts.get(item.name, ""))
            else:
                _add(group, kind, item, hint, texts.get(item.name, ""))
    return parser


def _add(group: Any, kind: type[Options], item: "Field[Any]", hint: Any, text: str) -> None:
    """One field as an argument of the group."""
    from jsonargparse import ActionYesNo

    flag, span = flag_of(item.name), range_of(kind, item.name)
    default = item.default if item.default_factory is MISSING else item.default_factory()
    more: dict[str, Any] = {"required": True} if default is MISSING else {"default": default}
    element = get_args(hint)[0] if get_origin(hint) is tuple else hint
    if item.name == kind.positional:
        number = "+" if element is not hint else None if default is MISSING else "?"
        flag, more = item.name, {"type": element, "nargs": number}
    elif hint is bool:
        more["action"] = ActionYesNo(no_prefix="no-")
    elif element is not hint:
        has_commas = element is not str or bool(item.metadata.get("commas"))
        text += ", separated by commas" if has_commas else "; may be repeated"
        more |= {"type": _elements(element, has_commas), "action": _Repeated}
    else:
        more["type"] = hint  # None is allowed to every type
    text += f" ({span})" if span is not None else ""
    if not (default is MISSING or default is False or default in (None, (), {}) or "(default" in text):
        text += f" (default: {','.join(map(str, default)) if isinstance(default, tuple) else default})"
    group.add_argument(flag, help=text, **more)


def _made(kind: type[AnyOptions], values: Mapping[str, Any]) -> AnyOptions:
    hints = get_type_hints(kind)
    given = {name: _value_of(hints.get(name), value) for name, value in values.items()}
    del given["config"]
    for name, value in given.items():
        if value is None and _plain(hints[name]) is hints[name]:
            raise ValueError(f"{name} is null but needs a value: give one, or leave the key out")
    return kind(**given)


def _value_of(hint: Any, value: Any) -> Any:
    """A parsed value as the field holds it: lists are tuples, and the values of a dataclass that dataclass."""
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{name: _value_of(hints[name], each) for name, each in vars(value).items()})
    return tuple(value) if isinstance(value, list) else value


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
