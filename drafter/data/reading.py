"""Raw rows of files and of hub data sets, each with its place for messages.

A file of any kind is read row by row, within limits that do not depend on its size, so that an error names the row and
no value changes its type. `datasets` names the files of a data set of the hub; no code of a data set is run.
"""

import contextlib
import csv
import gzip
import hashlib
import itertools
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from drafter.utils import parse
from drafter.utils.io import first_line
from drafter.utils.parse import parse_json, read_lines, read_objects

BUILTIN_PROMPTS = Path(__file__).parent.parent / "assets" / "prompts.jsonl"  # about 100 short ones
_JSONL = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_JSON = (".json", ".json.gz")
_KINDS = (*_JSONL, *_JSON, ".parquet", ".csv")
_KNOWN = "*.jsonl, *.json (both also .gz), *.parquet, *.csv, or a hub data set (owner/name or owner/name:split)"
_MOST_COLUMNS = 1000
_MOST_VALUES = 1 << 27  # of lists in a row group of Parquet, whose run lengths may stand for any number
_ROWS = 4  # of Parquet decoded at once: each may be a copy of one long value, whatever the sizes in the file say


class RawRow(NamedTuple):
    """The fields of one row without null, and its place for error messages, with its line or row number from 1."""

    fields: dict[str, Any]
    where: str


def read_records(name: str | Path) -> Iterator[RawRow]:
    """The raw rows of a file, or of a hub data set ``owner/name[:split]``, which is read without a copy on the disk.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an empty or damaged file, an unknown kind of file, a line beyond the limit, no such data set, or a
            line that is no JSON object.
    """
    name, record = str(name), None
    path = _file_of(name)
    for record in _hub_rows(name) if path is None else _file_rows(path, name):
        yield record
    if record is None:
        raise ValueError(f"{name} holds no rows")


def digest_of_rows(name: str) -> str:
    """A hash of the rows of a file or hub data set; errors as of :func:`read_records`."""
    path = _file_of(name)
    if path is None:
        with reading(name, is_hub=True):
            return hashlib.sha256("\n".join(_hub_files(name)).encode()).hexdigest()
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_json_lines(path: Path | str, name: str, *, skip_torn: bool = False) -> Iterator[RawRow]:
    """The objects of a file of JSON lines, perhaps packed, or of its address on the hub; ``name`` is for messages.

    ``skip_torn`` leaves a last line out, with a note, that has no line feed: a server is writing it. ValueError for a
    pipe, damage, a line beyond the limit, or a line that is no JSON object.
    """
    with _open(path, name) as stream:
        for number, line in read_lines(stream, name):
            where = f"{name}, line {number}"
            if skip_torn and not line.endswith(b"\n"):
                print(f"{where}: left out, as the line is not written to its end", file=sys.stderr)
            elif line.strip():
                yield _row_of(line, where)


@contextlib.contextmanager
def _open(path: Path | str, name: str) -> Iterator[BinaryIO]:
    """The bytes of a file or of an address on the hub, unpacked if the name ends with .gz."""
    if isinstance(path, Path) and path.exists() and not path.is_file():
        raise ValueError(f"{name} is no regular file: write the rows to a file first")  # a pipe would be waited for
    try:
        with contextlib.ExitStack() as stack:
            import fsspec

            stream: Any = stack.enter_context(path.open("rb") if isinstance(path, Path) else fsspec.open(path, "rb"))
            if str(path).lower().endswith(".gz"):
                stream = stack.enter_context(gzip.GzipFile(fileobj=stream))
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{name}: damaged gzip file ({error})") from error


def _row_of(data: bytes, where: str) -> RawRow:
    fields = parse_json(data, where)
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: a row must be an object with keys, not {type(fields).__name__}")
    return RawRow({key: value for key, value in fields.items() if value is not None}, where)


def _file_rows(path: Path | str, name: str) -> Iterator[RawRow]:
    """The rows of a file by the end of its name."""
    kind = str(path).lower()
    if kind.endswith(_JSONL):
        yield from read_json_lines(path, name)
        return
    with _open(path, name) as stream:
        if kind.endswith(".parquet"):
            yield from _parquet_rows(stream, name)
        elif kind.endswith(_JSON):
            yield from (_row_of(data, f"{name}, row {number}") for number, data in read_objects(stream, name))
        else:
            yield from _csv_rows(stream, name)


def _csv_rows(stream: BinaryIO, name: str) -> Iterator[RawRow]:
    """The rows of a table with a header; all values are text, and a short row lacks its last columns."""
    csv.field_size_limit(parse.MAX_LINE_MIB << 20)  # 128 KiB by default
    lines = (line.decode("utf-8-sig" if number == 1 else "utf-8") for number, line in read_lines(stream, name))
    reader = csv.DictReader(lines, strict=True)
    try:
        _check_columns(len(reader.fieldnames or ()), name)
        for number, item in enumerate(reader, start=1):
            if None in item:
                raise csv.Error(f"more values than the {len(item) - 1} columns of the header")
            yield RawRow({key: value for key, value in item.items() if value is not None}, f"{name}, row {number}")
    except (csv.Error, UnicodeDecodeError) as error:
        place = f"{name}, line {reader.line_num}" if reader.line_num else name
        why = f"the file cannot be read ({error})" if isinstance(error, csv.Error) else parse.NOT_UTF8
        raise ValueError(f"{place}: {why}") from error


def _parquet_rows(stream: BinaryIO, name: str) -> Iterator[RawRow]:
    """The rows of a Parquet file, a few at a time: a packed page may hold any number of copies of a long value."""
    with reading(name, is_hub=False):
        from pyarrow import parquet

        number = 0
        with parquet.ParquetFile(stream) as file:
            about = file.metadata
            _check_columns(about.num_columns, name)
            is_list = [about.schema.column(index).max_repetition_level > 0 for index in range(about.num_columns)]
            for group in range(about.num_row_groups):
                chunks = [about.row_group(group).column(index) for index in range(about.num_columns)]
                if any(chunk.num_values > _MOST_VALUES for chunk in itertools.compress(chunks, is_list)):
                    raise ValueError(f"more than {_MOST_VALUES:,} values in a row group: write smaller row groups")
                for batch in file.iter_batches(_ROWS, row_groups=[group], use_threads=False):
                    if batch.nbytes > batch.num_rows * parse.MAX_LINE_MIB << 20:
                        raise ValueError(f"a row after row {number} is longer than {parse.MAX_LINE_MIB} MiB: split it")
                    for item in batch.to_pylist():
                        number += 1
                        yield RawRow(without_null(item), f"{name}, row {number}")


def _check_columns(number: int, name: str) -> None:
    if number > _MOST_COLUMNS:
        raise ValueError(f"{name}: {number:,} columns are more than {_MOST_COLUMNS:,}: name rows by line, as JSON")


def _hub_rows(name: str) -> Iterator[RawRow]:
    with reading(name, is_hub=True):
        for address in _hub_files(name):
            yield from _file_rows(address, f"{name}, {address.rpartition('/')[2]}")


def _file_of(name: str) -> Path | None:
    """The file of a name, None for ``owner/name[:split]``; an error for what is no file of a known kind."""
    path, is_file_like = Path(name).expanduser(), name.lower().endswith(_KINDS)
    if not path.exists():
        if not is_file_like and re.fullmatch(r"[^./~][^/]*/[^/]+", name):
            return None
        raise FileNotFoundError(f"{name}: there is no such file")
    if not path.is_file():
        raise ValueError(f"{name} is a folder or no regular file: name a file ({_KNOWN})")
    if not is_file_like:
        raise ValueError(f"{name}: unknown kind of file; known are {_KNOWN}")
    return path


def _hub_files(name: str) -> list[str]:
    """The addresses of a hub data set's files, each with the revision."""
    import datasets
    import huggingface_hub.utils.logging as hub_logging

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are told once, by us
    hub_logging.set_verbosity_error()
    repository, _, split = name.partition(":")
    if Path(repository).exists():  # which `datasets` would take in place of the hub's
        raise ValueError(f"{name}: {repository} is a folder here: name a file in it ({_KNOWN}), or work elsewhere")
    files = datasets.load_dataset_builder(repository).config.data_files or {}
    addresses = [str(address) for address in files.get(split or "train", ())]
    if not addresses:
        raise ValueError(f"no split {split or 'train'}: it has {', '.join(map(str, files)) or 'no files'}")
    if other := next((each for each in addresses if not each.lower().endswith(_KINDS)), None):
        raise ValueError(f"unknown kind of file {other.rpartition('/')[2]}; known are {_KNOWN}")
    return addresses


@contextlib.contextmanager
def reading(name: str, *, is_hub: bool) -> Iterator[None]:
    """Errors of `datasets` and Arrow within the block become one line that begins with ``name``."""
    try:
        yield
    except Exception as error:
        # The parsers read a file as whatever the file holds: their errors are of any type.
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno is not None:
            raise cause from None  # a full disk, for instance
        if str(cause).startswith(f"{name}, "):
            raise  # of a row
        place = "the data set cannot be loaded from the hub" if is_hub else "the file cannot be read"
        raise ValueError(f"{name}: {place} ({first_line(cause)})") from error


def without_null(value: Any) -> Any:
    """The value without null: Arrow gives every object of a column all keys of the column."""
    if isinstance(value, Mapping):
        return {key: without_null(item) for key, item in value.items() if item is not None}
    return [without_null(item) for item in value] if isinstance(value, list) else value
