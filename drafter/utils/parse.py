"""Readers of files from other sources: JSON, YAML and lines of text.

Whatever a file holds, a reader returns plain values within the limits, or raises one line that names the file, in a
time and a memory that the limits bound.
"""

import codecs
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from drafter.utils.io import printable

MAX_CONFIG_BYTES = 16 << 20  # a settings file; what `drafter tune` writes is the largest
MAX_YAML_BYTES = 1 << 20  # the YAML parser takes a second for as much
MAX_LINE_MIB = 16  # a row of data: a million token ids as JSON take 8
MAX_INTEGER = 2**64
NOT_UTF8 = "the text is not UTF-8: save the file in this encoding"

_JSON_PARTS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?P<quote>"?)|[][{}]', re.DOTALL)  # a string, or a bracket

Kind = TypeVar("Kind")


def read_json(path: Path) -> Any:
    """The value of a JSON file; OSError, or ValueError: too large, not UTF-8, not JSON, or deeper than 200 levels."""
    return parse_json(_read_bytes(path, MAX_CONFIG_BYTES), str(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file; errors as of :func:`read_json`, and for a file that holds no object."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be a JSON object")
    return found


def parse_json(data: bytes, where: str) -> Any:
    """The value of JSON text in UTF-8, perhaps with a byte order mark; ``where``: file and line, for messages."""
    from pydantic_core import from_json  # limits the depth and the digits of a number; json does not

    try:
        return from_json(data.removeprefix(b"\xef\xbb\xbf"))
    except ValueError as error:
        raise ValueError(f"{where}: {_fault_of(data, str(error))}") from error


def _fault_of(data: bytes, fault: str) -> str:
    """What is wrong with JSON text, which may end within a character: its encoding, or ``fault``."""
    with contextlib.suppress(UnicodeDecodeError):
        if "\0" not in codecs.getincrementaldecoder("utf-8")().decode(data):
            return f"broken JSON ({fault})"
    return NOT_UTF8


def read_yaml(path: Path) -> Any:
    """The value of a YAML file; errors as of :func:`read_json`, and for aliases."""
    return parse_yaml(_read_bytes(path, MAX_YAML_BYTES), str(path))


def parse_yaml(text: str | bytes, where: str) -> Any:
    """The value of YAML text, within the limits; ``where`` is for messages."""
    import yaml

    class Loader(yaml.SafeLoader):  # in Python: the parser in C follows deep brackets until its stack is full
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # ten lines of aliases may stand for a billion values
                raise yaml.YAMLError("an alias (*NAME): write the value again")
            return super().compose_node(parent, index)

        def construct_yaml_int(self, node: Any) -> int:
            if abs(number := int(super().construct_yaml_int(node))) > MAX_INTEGER:
                raise yaml.YAMLError(f"a number is beyond the limit of {MAX_INTEGER:,}")
            return number

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    try:
        return yaml.load(text, Loader=Loader)  # noqa: S506
    except Exception as error:  # of any type: for values that do not fit their tag, such as `!!int ""`
        reason = "nested too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ValueError(f"{where}: broken YAML ({reason or type(error).__name__})") from error


def read_lines(stream: BinaryIO, where: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a binary stream with their numbers from 1 on; ValueError for one longer than ``MAX_LINE_MIB``."""
    number, num_blank, max_bytes = 1, 0, MAX_LINE_MIB << 20
    while line := stream.readline(max_bytes + 1):
        num_blank = num_blank + len(line) if line.isspace() else 0
        if max(len(line), num_blank) > max_bytes:
            raise ValueError(f"{where}, line {number}: longer than {MAX_LINE_MIB} MiB: split the row")
        yield number, line
        number += 1


def read_objects(stream: BinaryIO, where: str) -> Iterator[tuple[int, bytes]]:
    """The objects of a JSON array, or of JSON texts one after the other, as text, with their numbers from 1 on.

    One object is held at once. Brackets outside of strings show where an object ends; the rest of its grammar is
    unchecked. ValueError: an object is longer than ``MAX_LINE_MIB``, or something stands between objects.
    """
    number, depth, lowest, is_first = 1, 0, 0, True  # lowest: 1 within an array
    data, num_seen = b"", 0  # what is not handed out yet
    while chunk := stream.read(1 << 20):
        data += chunk if data else chunk.removeprefix(b"\xef\xbb\xbf")
        start, num_seen_now = 0, len(data)
        for part in _JSON_PARTS.finditer(data, num_seen):
            mark = part[0]
            if mark.startswith(b'"'):
                if not part["quote"]:  # the string goes on in the next chunk
                    num_seen_now = part.start()
                    break
                continue
            is_opening = mark in b"[{"
            if depth == lowest:
                if data[start : part.start()].strip(b" \t\r\n,"):
                    break
                start = part.start() if is_opening else part.end()
            depth += 1 if is_opening else -1
            if (mark == b"[" and is_first) or depth < lowest:  # the array begins or ends
                lowest, start = depth, part.end()
            elif depth == lowest:
                yield number, data[start : part.end()]
                number, start = number + 1, part.end()
            is_first = False
        data, num_seen = data[start:], num_seen_now - start
        if len(data) > MAX_LINE_MIB << 20:
            raise ValueError(f"{where}, row {number}: longer than {MAX_LINE_MIB} MiB: split the row")
    if depth or data.strip():
        fault = _fault_of(data, "the file must hold objects, or an array of objects")
        raise ValueError(f"{where}, row {number}: {fault}")


def _read_bytes(path: Path, max_bytes: int) -> bytes:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file")  # a pipe would be waited for
    with path.open("rb") as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path}: larger than {max_bytes:,} bytes")
    return data


def validated(kind: type[Kind], value: Any, where: str, *, strict: bool = False) -> Kind:
    """The value of a type that pydantic reads, such as a model or a TypedDict; of JSON text in bytes, or parsed.

    Keys that a TypedDict does not name are free, and absent from the result. Lists should stop at the first fault
    (``fail_fast``): a million faults take a gigabyte. ``strict``: a text stands for no number. ValueError: the first
    fault in one line, which begins with ``where`` and the place in the value.
    """
    from pydantic import TypeAdapter, ValidationError

    adapter = TypeAdapter(kind)
    try:
        read = adapter.validate_json if isinstance(value, bytes) else adapter.validate_python
        return read(value, strict=strict or None)  # None: as the type says
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"]))
        message = fault["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {printable(f'{place}: {message}' if place else message)}") from error
