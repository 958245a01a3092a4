"""Raw rows of JSONL, JSON (both also .gz) and Parquet files and of hub data sets, each with its place.

A JSONL file is split at line feeds only, because U+2028 and similar characters are legal inside a JSON string.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from drafter.utils.io import first_line
from drafter.utils.parse import MAX_WHOLE_BYTES, parse_json, read_lines, read_whole

_JSONL = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_JSON = (".json", ".json.gz")
_KNOWN = "*.jsonl, *.json (both also .gz), *.parquet, or a hub data set (owner/name or owner/name:split)"


class RawRow(NamedTuple):
    """The fields of one row, its place for error messages, and its line or row number from 1."""

    fields: dict[str, Any]
    where: str
    number: int


def read_records(name: str | Path) -> Iterator[RawRow]:
    """The raw rows of a file or hub data set, one by one.

    Raises:
        FileNotFoundError: no such file.
        ValueError: empty file, unknown kind of file, broken JSON, UTF-8, gzip or Parquet (with the line).
    """
    path = Path(name).expanduser()
    if not path.exists():
        if is_hub_name(str(name)):
            yield from _checked(_read_hub(str(name)), str(name))
            return
        raise FileNotFoundError(f"{name}: there is no such file")
    if path.is_dir():
        raise ValueError(f"{name} is a folder: name a file in it ({_KNOWN})")
    if not path.is_file():
        raise ValueError(f"{name} is no regular file: write the rows to a file first")
    lowered = path.name.lower()
    if lowered.endswith(_JSONL):
        yield from _checked(_read_jsonl(path), str(name))
    elif lowered.endswith(_JSON):
        yield from _checked(_read_json(path), str(name))
    elif lowered.endswith(".parquet"):
        yield from _checked(_read_parquet(path), str(name))
    else:
        raise ValueError(f"{name}: unknown kind of file; known are {_KNOWN}")


def is_hub_name(name: str) -> bool:
    """Whether ``name`` has the form ``owner/name`` or ``owner/name:split`` of a hub data set."""
    owner, slash, rest = name.partition("/")
    is_file_like = name.lower().endswith((*_JSONL, *_JSON, ".parquet"))
    return bool(slash and owner and rest and "/" not in rest and owner[0] not in ".~" and not is_file_like)


def _checked(records: Iterator[RawRow], name: str) -> Iterator[RawRow]:
    empty = True
    for record in records:
        empty = False
        yield record
    if empty:
        raise ValueError(f"{name} holds no rows")


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.name.lower().endswith(".gz") else path.open("rb")


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    number = 0
    with _open(path) as stream:
        try:
            for number, line in read_lines(stream, str(path)):  # lines of a binary file end at b"\n" only
                where = f"{path}, line {number}"
                if not line.strip():
                    continue
                yield RawRow(_as_record(parse_json(line, where, only_depth=True), where), where, number)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: damaged gzip file after line {number} ({error})") from error


def _as_record(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a row must be an object with keys, not {type(value).__name__}")
    return value


def _read_json(path: Path) -> Iterator[RawRow]:
    """A JSON array of objects, or an object with one array of objects (such as ``{"data": [...]}``)."""
    try:
        with _open(path) as stream:
            data = read_whole(stream, str(path), MAX_WHOLE_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: damaged gzip file ({error})") from error
    if not data.strip():
        return
    value = parse_json(data, str(path), only_depth=True)
    if isinstance(value, dict):
        arrays = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict)]
        is_one_row = len(arrays) != 1 or any(key in value for key in ("messages", "conversations"))
        value = [value] if is_one_row else arrays[0]
    if not isinstance(value, list):
        raise ValueError(f"{path}: the file must hold an array of objects, not {type(value).__name__}")
    for number, item in enumerate(value, start=1):
        where = f"{path}, row {number}"
        yield RawRow(_as_record(item, where), where, number)


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for item in batch.to_pylist():
                    number += 1
                    yield RawRow(item, f"{path}, row {number}", number)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: damaged Parquet file ({first_line(error)})") from error


def load_hub(name: str) -> Any:
    """Open ``owner/name`` or ``owner/name:split`` (default split ``train``) through ``datasets``."""
    import datasets

    base, _, split = name.partition(":")
    try:
        return datasets.load_dataset(base, split=split or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"data set {name!r} cannot be loaded from the hub: {first_line(error)}") from error


def _read_hub(name: str) -> Iterator[RawRow]:
    for number, item in enumerate(load_hub(name), start=1):
        yield RawRow(dict(item), f"{name}, row {number}", number)
