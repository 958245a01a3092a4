"""Readers of files from other sources: JSON, YAML and lines of text.

The limits stand here once. Whatever a file holds, a reader returns plain values within the limits, or raises one line
that names the file, in a time and a memory that the limits bound.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAX_CONFIG_BYTES = 16 << 20  # a settings file; what `drafter tune` writes is the largest
MAX_YAML_BYTES = 1 << 20  # the YAML parser takes a second for as much
MAX_LINE_MIB = 64  # a row of data
MAX_DEPTH = 64  # lists and mappings within each other
MAX_ITEMS = 1_000_000  # values of a file, where an alias counts as often as it is used
MAX_INTEGER = 2**64


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        ValueError: the file is too large, not UTF-8, not JSON, or beyond the limits.
        OSError: the file cannot be read.
    """
    return parse_json(_read_bytes(path, MAX_CONFIG_BYTES), str(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file, as :func:`read_json`; ValueError as well for a file that holds no object."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {_kind(found)}, but must hold an object with keys")
    return found


def parse_json(data: bytes, where: str, *, only_depth: bool = False) -> Any:
    """The value of JSON text.

    Args:
        data: UTF-8, perhaps with a byte order mark.
        where: for messages: the file, or the file and the line.
        only_depth: numbers may be of any size, as in rows of data, where most of them are never read.
    """
    text = _text_of(data, where)
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: broken JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise ValueError(f"{where}: nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise ValueError(f"{where}: a number has too many digits") from error
    if not only_depth or data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check(found, where, only_depth=only_depth)
    return found


def read_yaml(path: Path) -> Any:
    """The value of a YAML file; errors as of :func:`read_json`, and for aliases that repeat more than the limits."""
    return parse_yaml(_text_of(_read_bytes(path, MAX_YAML_BYTES), str(path)), str(path))


def _text_of(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}): convert the file") from error


def parse_yaml(text: str, where: str) -> Any:
    """The value of YAML text, within the limits; ``where`` is for messages."""
    import yaml

    try:
        # The parser in Python: the one in C follows deep brackets until its stack is full.
        found = yaml.load(text, Loader=yaml.SafeLoader)  # noqa: S506
    except RecursionError as error:
        raise ValueError(f"{where}: nested deeper than {MAX_DEPTH} levels") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: broken YAML ({' '.join(str(error).split())})") from error
    except Exception as error:
        # Values with a tag of the wrong kind, such as `!!int ""`, raise errors of any type.
        raise ValueError(f"{where}: broken YAML (a value does not fit its tag: {error})") from error
    _check(found, where)
    return found


def read_lines(stream: BinaryIO, where: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a binary stream with their numbers from 1 on; no more than one line is held at once.

    Raises:
        ValueError: a line is longer than ``MAX_LINE_MIB``.
    """
    number, max_bytes = 1, MAX_LINE_MIB << 20
    while line := stream.readline(max_bytes + 1):
        if len(line) > max_bytes:
            raise ValueError(f"{where}, line {number}: longer than {MAX_LINE_MIB} MiB: split the row")
        yield number, line
        number += 1


def _read_bytes(path: Path, max_bytes: int) -> bytes:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file")  # a pipe would be waited for
    with path.open("rb") as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path}: larger than {max_bytes:,} bytes")
    return data


def _check(value: Any, where: str, *, only_depth: bool = False) -> None:
    """ValueError for a value beyond the limits. Shared parts count each time, so that aliases cannot multiply."""
    waiting = [(value, 1)]
    num_items = 0
    while waiting:
        item, depth = waiting.pop()
        num_items += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"{where}: nested deeper than {MAX_DEPTH} levels")
        if num_items > MAX_ITEMS and not only_depth:
            raise ValueError(f"{where}: more than {MAX_ITEMS:,} values, those of aliases included")
        if isinstance(item, dict):
            waiting += [(part, depth + 1) for part in item.values()]
        elif isinstance(item, list):
            waiting += [(part, depth + 1) for part in item]
        elif not only_depth and isinstance(item, int) and abs(item) > MAX_INTEGER:
            raise ValueError(f"{where}: a number is beyond the limit of {MAX_INTEGER:,}")


def check_shape(value: Any, shape: Any, where: str) -> None:
    """ValueError, with the place within the value, for a parsed value of another shape.

    Args:
        value: what was parsed.
        shape: a type; ``(shape, None)`` where null may stand instead; ``[shape]`` for a list; a mapping of
            keys to shapes, where ``"name?"`` may be missing and ``"*"`` stands for every key. ``float`` takes integers,
            and finite numbers only; keys that the shape does not name are free.
        where: for messages.
    """
    if isinstance(shape, dict):
        _check_keys(value, shape, where)
    elif isinstance(shape, list):
        _require(isinstance(value, list), where, "a list", value)
        for place, item in enumerate(value):
            check_shape(item, shape[0], f"{where}, entry {place}")
    elif isinstance(shape, tuple):
        if value is not None:
            check_shape(value, shape[0], where)
    elif shape is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # An integer may be larger than any float.
        _require(is_number and abs(value) <= sys.float_info.max, where, "a finite number", value)
    else:
        _require(type(value) is shape, where, {int: "an integer", str: "a text", bool: "true or false"}[shape], value)


def _check_keys(value: Any, shape: dict[str, Any], where: str) -> None:
    _require(isinstance(value, dict), where, "an object", value)
    if "*" in shape:
        for name, item in value.items():
            check_shape(item, shape["*"], f"{where}, {name[:40]}")
        return
    missing = [name for name in shape if not name.endswith("?") and name not in value]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    for name, part in shape.items():
        key = name.removesuffix("?")
        if key in value:
            check_shape(value[key], part, f"{where}, {key}")


def _require(is_fitting: bool, where: str, wanted: str, value: Any) -> None:
    if not is_fitting:
        raise ValueError(f"{where} is {_kind(value)}, but must be {wanted}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
