"""Raw rows of files and of hub data sets, each with its place for messages.

A line of a JSONL file becomes an object by itself, so that an error names the line and no value changes its type.
`datasets` reads JSON, Parquet, CSV and hub data sets, whose columns have types. No code of a data set is run.
"""

import contextlib
import glob
import gzip
import hashlib
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from drafter.utils.io import first_line
from drafter.utils.parse import parse_json, read_lines

_JSONL = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_TABLES = {".json": "json", ".json.gz": "json", ".parquet": "parquet", ".csv": "csv"}
_KNOWN = "*.jsonl, *.json (both also .gz), *.parquet, *.csv, or a hub data set (owner/name or owner/name:split)"


class RawRow(NamedTuple):
    """The fields of one row without null, and its place for error messages, with its line or row number from 1."""

    fields: dict[str, Any]
    where: str


def read_records(name: str | Path, *, streaming: bool = True) -> Iterator[RawRow]:
    """The raw rows of a file or hub data set, one by one.

    Args:
        name: path, or ``owner/name[:split]`` of a hub data set.
        streaming: without a copy in the cache folder of `datasets`, which only tables and hub data sets have.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an empty or damaged file, an unknown kind of file, a line beyond the limit, no such data set, or a
            line that is no JSON object.
    """
    name, record = str(name), None
    path = _file_of(name)
    is_jsonl = path is not None and name.lower().endswith(_JSONL)
    for record in read_json_lines(path, name) if path is not None and is_jsonl else _table_rows(name, path, streaming):
        yield record
    if record is None:
        raise ValueError(f"{name} holds no rows")


def fingerprint_of(name: str) -> str:
    """A hash of the rows of a file or hub data set; errors as of :func:`read_records`."""
    path = _file_of(name)
    if path is None:
        with reading(name, is_hub=True):
            return str(_load(name, None, streaming=False)._fingerprint)
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_json_lines(path: Path, name: str, *, skip_torn: bool = False) -> Iterator[RawRow]:
    """The objects of a file of JSON lines, perhaps packed.

    Args:
        path: the file.
        name: of the file, for messages.
        skip_torn: leave a last line out, with a note, that has no line feed: a server is writing it.

    Raises:
        ValueError: a pipe, damage, a line beyond the limit, or a line that is no JSON object.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{name} is no regular file: write the rows to a file first")  # a pipe would be waited for
    number, is_packed = 0, path.name.lower().endswith(".gz")
    try:
        with cast(BinaryIO, gzip.open(path, "rb")) if is_packed else path.open("rb") as stream:
            for number, line in read_lines(stream, name):
                where = f"{name}, line {number}"
                if skip_torn and not line.endswith(b"\n"):
                    print(f"{where}: left out, as the line is not written to its end", file=sys.stderr)
                elif line.strip():
                    fields = parse_json(line, where)
                    if not isinstance(fields, dict):
                        raise ValueError(f"{where}: a row must be an object with keys, not {type(fields).__name__}")
                    yield RawRow({key: value for key, value in fields.items() if value is not None}, where)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{name}: damaged gzip file after line {number} ({error})") from error


def _table_rows(name: str, path: Path | None, streaming: bool) -> Iterator[RawRow]:
    with reading(name, is_hub=path is None):
        for number, item in enumerate(_load(name, path, streaming=streaming), start=1):
            yield RawRow(without_null(item), f"{name}, row {number}")


def _file_of(name: str) -> Path | None:
    """The file of a name, None for ``owner/name[:split]``; an error for what is no file of a known kind."""
    path, is_file_like = Path(name).expanduser(), name.lower().endswith((*_JSONL, *_TABLES))
    if not path.exists():
        if not is_file_like and re.fullmatch(r"[^./~][^/]*/[^/]+", name):
            return None
        raise FileNotFoundError(f"{name}: there is no such file")
    if not path.is_file():
        raise ValueError(f"{name} is a folder or no regular file: name a file ({_KNOWN})")
    if not is_file_like:
        raise ValueError(f"{name}: unknown kind of file; known are {_KNOWN}")
    return path


def _load(name: str, path: Path | None, *, streaming: bool) -> Any:
    """The ``datasets.Dataset`` of a table or hub data set, or its stream."""
    import datasets
    import huggingface_hub.utils.logging as hub_logging

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are told once, by us
    hub_logging.set_verbosity_error()
    if path is None:
        repository, _, split = name.partition(":")
        return datasets.load_dataset(repository, streaming=streaming, split=split or "train")
    kind = next(kind for suffix, kind in _TABLES.items() if name.lower().endswith(suffix))
    options: dict[str, Any] = {"keep_default_na": False} if kind == "csv" else {}
    file = glob.escape(str(path.absolute()))
    return datasets.load_dataset(kind, streaming=streaming, split="train", data_files=file, **options)


@contextlib.contextmanager
def reading(name: str, *, is_hub: bool) -> Iterator[None]:
    """Errors of `datasets`, pandas and Arrow within the block become one line that begins with ``name``."""
    try:
        yield
    except StopIteration as error:  # of an empty JSON file
        raise ValueError(f"{name} holds no rows") from error
    except Exception as error:
        # The parsers read a file as whatever the file holds: their errors are of any type.
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno is not None:
            raise cause from None  # a full disk, for instance
        place = "the data set cannot be loaded from the hub" if is_hub else "the file cannot be read"
        raise ValueError(f"{name}: {place} ({first_line(cause)})") from error


def without_null(value: Any) -> Any:
    """The value without null: Arrow gives every object of a column all keys of the column."""
    if isinstance(value, Mapping):
        return {key: without_null(item) for key, item in value.items() if item is not None}
    return [without_null(item) for item in value] if isinstance(value, list) else value
