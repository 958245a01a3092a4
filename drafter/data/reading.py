"""Raw rows of files and of hub data sets, read by `datasets`, each with its place for messages.

`datasets` reads a JSONL file as lines of text; a line becomes an object here, so that an error names the line and no
value changes its type. JSON, Parquet, CSV and hub data sets have typed columns. No code of a data set is run.
"""

import contextlib
import glob
import gzip
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from drafter.utils.io import first_line
from drafter.utils.parse import parse_json, read_lines

_JSONL = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_TABLES = {".json": "json", ".json.gz": "json", ".parquet": "parquet", ".csv": "csv"}
_KNOWN = "*.jsonl, *.json (both also .gz), *.parquet, *.csv, or a hub data set (owner/name or owner/name:split)"


# `datasets` reads a JSON file as whatever the file holds, and fails accordingly.
_OF_ODD_FILES = (ValueError, OSError, OverflowError, TypeError, AttributeError, LookupError, RecursionError)


class RawRow(NamedTuple):
    """The fields of one row, and its place for error messages, with its line or row number from 1."""

    fields: dict[str, Any]
    where: str


@dataclass(frozen=True)
class Source:
    """An open data set.

    Attributes:
        name: as the user gave it.
        dataset: of `datasets`; a stream, or Arrow on disk.
        lines: whether a row is a line of JSON in the column ``text``.
    """

    name: str
    dataset: Any
    lines: bool

    def record(self, item: Mapping[str, Any], number: int) -> RawRow | None:
        """The row of an item of ``dataset``, without keys whose value is null; None for an empty line.

        Raises:
            ValueError: the line is no JSON object.
        """
        where = f"{self.name}, {'line' if self.lines else 'row'} {number}"
        if not self.lines:
            return RawRow(_without_null(item), where)
        if not item["text"].strip():
            return None
        fields = parse_json(item["text"].encode(), where, only_depth=True)
        if not isinstance(fields, dict):
            raise ValueError(f"{where}: a row must be an object with keys, not {type(fields).__name__}")
        return RawRow({key: value for key, value in fields.items() if value is not None}, where)


def open_source(name: str | Path, *, streaming: bool) -> Source:
    """The rows of a file or hub data set, as a stream or as Arrow in the cache folder of `datasets`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an empty or damaged file, an unknown kind of file, a line beyond the limit, no such data set.
    """
    import datasets
    import huggingface_hub.utils.logging as hub_logging

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are told once, by us
    hub_logging.set_verbosity_error()
    name = str(name)
    path = Path(name).expanduser()
    is_file = path.exists() or not is_hub_name(name)
    kind, options = _kind_of(path, name) if is_file else (name.partition(":")[0], {})
    split = "train" if is_file else name.partition(":")[2] or "train"
    with reading(name, is_hub=not is_file):
        return Source(name, datasets.load_dataset(kind, streaming=streaming, split=split, **options), kind == "text")


def _kind_of(path: Path, name: str) -> tuple[str, dict[str, Any]]:
    """The builder of `datasets` for a file, and its options."""
    if not path.exists():
        raise FileNotFoundError(f"{name}: there is no such file")
    if path.is_dir():
        raise ValueError(f"{name} is a folder: name a file in it ({_KNOWN})")
    if not path.is_file():
        raise ValueError(f"{name} is no regular file: write the rows to a file first")
    options: dict[str, Any] = {"data_files": glob.escape(str(path.absolute()))}
    if path.name.lower().endswith(_JSONL):
        _check_lines(path, name)
        return "text", options
    kind = next((kind for suffix, kind in _TABLES.items() if path.name.lower().endswith(suffix)), None)
    if kind is None:
        raise ValueError(f"{name}: unknown kind of file; known are {_KNOWN}")
    return kind, options | ({"keep_default_na": False} if kind == "csv" else {})


def read_records(name: str | Path) -> Iterator[RawRow]:
    """The raw rows of a file or hub data set, one by one, without a copy on disk.

    Raises:
        FileNotFoundError, ValueError: see :func:`open_source` and :meth:`Source.record`.
    """
    source = open_source(name, streaming=True)
    is_empty = True
    with reading(str(name)):
        for number, item in enumerate(source.dataset, start=1):
            record = source.record(item, number)
            if record is not None:
                is_empty = False
                yield record
    if is_empty:
        raise ValueError(f"{name} holds no rows")


def is_hub_name(name: str) -> bool:
    """Whether ``name`` has the form ``owner/name`` or ``owner/name:split`` of a hub data set."""
    owner, slash, rest = name.partition("/")
    is_file_like = name.lower().endswith((*_JSONL, *_TABLES))
    return bool(slash and owner and rest and "/" not in rest and owner[0] not in ".~" and not is_file_like)


@contextlib.contextmanager
def reading(name: str, *, is_hub: bool = False) -> Iterator[None]:
    """Errors of `datasets`, pandas and Arrow within the block become one line that begins with ``name``."""
    import datasets
    import pyarrow

    try:
        yield
    except StopIteration as error:  # of an empty JSON file
        raise ValueError(f"{name} holds no rows") from error
    except (datasets.exceptions.DatasetsError, pyarrow.ArrowException, *_OF_ODD_FILES) as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        if isinstance(cause, ValueError) and str(cause).startswith(name):
            raise cause from None  # one of our own
        if isinstance(cause, OSError) and cause.errno is not None:
            raise cause from None  # a full disk, for instance
        place = "the data set cannot be loaded from the hub" if is_hub else "the file cannot be read"
        raise ValueError(f"{name}: {place} ({first_line(cause or error)})") from error


def lines_of(path: Path, name: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, perhaps packed, with their numbers; ValueError for a pipe, damage or a line too long."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{name} is no regular file: write the rows to a file first")  # a pipe would be waited for
    number, is_packed = 0, path.name.lower().endswith(".gz")
    try:
        with cast(BinaryIO, gzip.open(path, "rb")) if is_packed else path.open("rb") as stream:
            for number, line in read_lines(stream, name):
                yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{name}: damaged gzip file after line {number} ({error})") from error


def _check_lines(path: Path, name: str) -> None:
    """ValueError, with its line, for a damaged or empty file, text that is not UTF-8, or a line that is too long."""
    is_empty = True
    for number, line in lines_of(path, name):
        is_empty = is_empty and not line.strip()
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            place = f"{error.reason} at byte {error.start}"
            raise ValueError(f"{name}, line {number}: not UTF-8 ({place}): convert the file") from error
    if is_empty:
        raise ValueError(f"{name} holds no rows")


def _without_null(value: Any) -> Any:
    """The value without null: Arrow gives every object of a column all keys of the column."""
    if isinstance(value, Mapping):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value
