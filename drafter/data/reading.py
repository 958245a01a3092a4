"""Raw rows of files and of hub data sets, read by `datasets`, each with its place for messages.

`datasets` reads a JSONL file as lines of text and a JSON file as one text; a line becomes an object here, so that an
error names the line and no value changes its type. Parquet, CSV and hub data sets have typed columns. No code of a data
set is run.
"""

import contextlib
import glob
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from drafter.utils.io import first_line
from drafter.utils.parse import MAX_WHOLE_BYTES, parse_json, read_lines, read_whole

_JSONL = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_JSON = (".json", ".json.gz")
_TABLES = {".parquet": "parquet", ".csv": "csv"}
_KNOWN = "*.jsonl, *.json (both also .gz), *.parquet, *.csv, or a hub data set (owner/name or owner/name:split)"


class RawRow(NamedTuple):
    """The fields of one row, its place for error messages, and its line or row number from 1."""

    fields: dict[str, Any]
    where: str
    number: int


@dataclass(frozen=True)
class Source:
    """An open data set.

    Attributes:
        name: as the user gave it.
        dataset: of `datasets`; a stream, or Arrow on disk.
        lines: whether a row is a line of JSON in the column ``text``.
        unit: what ``RawRow.number`` counts: lines or rows.
    """

    name: str
    dataset: Any
    lines: bool
    unit: str

    def record(self, item: Mapping[str, Any], number: int) -> RawRow | None:
        """The row of an item of ``dataset``, without keys whose value is null; None for an empty line.

        Raises:
            ValueError: the line is no JSON object.
        """
        where = f"{self.name}, {self.unit} {number}"
        if not self.lines:
            return RawRow(_without_null(item), where, number)
        if not item["text"].strip():
            return None
        fields = parse_json(item["text"].encode(), where, only_depth=True)
        if not isinstance(fields, dict):
            raise ValueError(f"{where}: a row must be an object with keys, not {type(fields).__name__}")
        return RawRow({key: value for key, value in fields.items() if value is not None}, where, number)

    def map(self, function: Callable[..., dict[str, list[Any]]], *, features: Any, key: str, progress: bool) -> Any:
        """``function(items, numbers)`` over batches of rows, kept on disk under ``key`` by `datasets`.

        A damaged file of the cache is made again.
        """
        import datasets

        def run(*, cached: bool) -> Any:
            return self.dataset.map(
                lambda batch, indices: function(_items(batch), [index + 1 for index in indices]),
                batched=True,
                batch_size=256,
                with_indices=True,
                remove_columns=self.dataset.column_names,
                features=features,
                new_fingerprint=key,
                load_from_cache_file=cached,
                desc=f"tokenising {Path(self.name).name}",
            )

        datasets.enable_progress_bars() if progress else datasets.disable_progress_bars()
        with reading(self.name):
            return _repaired(lambda: run(cached=True), lambda: run(cached=False))


def open_source(name: str | Path, *, streaming: bool) -> Source:
    """The rows of a file or hub data set, as a stream or as Arrow in the cache folder of `datasets`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an empty or damaged file, an unknown kind of file, a line beyond the limits, no such data set.
    """
    name = str(name)
    path = Path(name).expanduser()
    lowered = path.name.lower()
    if not path.exists() and is_hub_name(name):
        base, _, split = name.partition(":")
        with reading(name, "the hub"):
            return Source(name, _load(streaming, base, split=split or "train"), False, "row")
    if not path.exists():
        raise FileNotFoundError(f"{name}: there is no such file")
    if path.is_dir():
        raise ValueError(f"{name} is a folder: name a file in it ({_KNOWN})")
    if not path.is_file():
        raise ValueError(f"{name} is no regular file: write the rows to a file first")
    files = glob.escape(str(path.absolute()))
    if lowered.endswith(_JSONL):
        _check_lines(path, name)
        with reading(name):
            return Source(name, _load(streaming, "text", data_files=files, split="train"), True, "line")
    if lowered.endswith(_JSON):
        _check_whole(path, name)
        with reading(name):
            whole = _load(streaming, "text", data_files=files, split="train", sample_by="document")
            return Source(name, whole.map(_rows_of_json, batched=True, fn_kwargs={"where": name}), True, "row")
    if path.suffix.lower() in _TABLES:
        kind = _TABLES[path.suffix.lower()]
        options = {"keep_default_na": False} if kind == "csv" else {}
        with reading(name):
            return Source(name, _load(streaming, kind, data_files=files, split="train", **options), False, "row")
    raise ValueError(f"{name}: unknown kind of file; known are {_KNOWN}")


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
    is_file_like = name.lower().endswith((*_JSONL, *_JSON, *_TABLES))
    return bool(slash and owner and rest and "/" not in rest and owner[0] not in ".~" and not is_file_like)


@contextlib.contextmanager
def reading(name: str, where: str = "") -> Iterator[None]:
    """Errors of `datasets`, pandas and Arrow within the block become one line that begins with ``name``."""
    import datasets
    import pyarrow

    try:
        yield
    except (datasets.exceptions.DatasetsError, ValueError, OSError, OverflowError, pyarrow.ArrowException) as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        if isinstance(cause, ValueError) and str(cause).startswith(name):
            raise cause from None  # one of our own
        if isinstance(cause, OSError) and cause.errno is not None:
            raise cause from None  # a full disk, for instance
        place = f"the data set cannot be loaded from {where}" if where else "the file cannot be read"
        raise ValueError(f"{name}: {place} ({first_line(cause or error)})") from error


def _load(streaming: bool, kind: str, **options: Any) -> Any:
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are told once, by us

    def load(mode: str | None) -> Any:
        return datasets.load_dataset(kind, streaming=streaming, download_mode=mode, **options)

    return load(None) if streaming else _repaired(lambda: load(None), lambda: load("force_redownload"))


def _repaired(make: Callable[[], Any], make_again: Callable[[], Any]) -> Any:
    """``make()``, or ``make_again()`` where the cache of `datasets` is damaged."""
    import pyarrow

    try:
        return make()
    except pyarrow.ArrowInvalid:
        return make_again()
    except OSError as error:
        if error.errno is not None:
            raise
        return make_again()


def _items(batch: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """The rows of a batch of columns."""
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def _rows_of_json(batch: Mapping[str, list[str]], where: str) -> dict[str, list[str]]:
    """The rows of a JSON text as lines: an array of objects, or an object with one such array, as {"data": [...]}."""
    (text,) = batch["text"]
    value = parse_json(text.encode(), where, only_depth=True)
    if isinstance(value, dict):
        arrays = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict)]
        is_one_row = len(arrays) != 1 or any(key in value for key in ("messages", "conversations"))
        value = [value] if is_one_row else arrays[0]
    if not isinstance(value, list):
        raise ValueError(f"{where}: the file must hold an array of objects, not {type(value).__name__}")
    return {"text": [json.dumps(item) for item in value]}


def _check_lines(path: Path, name: str) -> None:
    """ValueError, with its line, for a damaged or empty file, text that is not UTF-8, or a line that is too long."""
    number, is_empty = 0, True
    with _unpacking(path, name, lambda: f"after line {number}") as stream:
        for number, line in read_lines(stream, name):
            is_empty = is_empty and not line.strip()
            _check_text(line, f"{name}, line {number}")
    if is_empty:
        raise ValueError(f"{name} holds no rows")


def _check_whole(path: Path, name: str) -> None:
    with _unpacking(path, name, lambda: "") as stream:
        data = read_whole(stream, name, MAX_WHOLE_BYTES)
    _check_text(data, name)
    if not data.strip():
        raise ValueError(f"{name} holds no rows")


def _check_text(data: bytes, where: str) -> None:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}): convert the file") from error


@contextlib.contextmanager
def _unpacking(path: Path, name: str, place: Callable[[], str]) -> Iterator[BinaryIO]:
    is_packed = path.name.lower().endswith(".gz")
    try:
        with cast(BinaryIO, gzip.open(path, "rb")) if is_packed else path.open("rb") as stream:
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{name}: damaged gzip file {place()} ({error})") from error


def _without_null(value: Any) -> Any:
    """The value without null: Arrow gives every object of a column all keys of the column."""
    if isinstance(value, Mapping):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value
