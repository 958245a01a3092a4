"""Rows of recorded traffic: token ids of prompts and answers, of the server's files or other files of such rows."""

import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from drafter.data.formats import answer_of
from drafter.utils.parse import check_shape, parse_json, read_lines

_KINDS = ("*.jsonl", "*.jsonl.gz")


class TrafficRow(NamedTuple):
    """One answer: the tokens of its prompt, and its own."""

    prompt_token_ids: list[int]
    token_ids: list[int]


def read_traffic(path: str | Path, *, vocab_size: int | None = None) -> list[TrafficRow]:
    """The rows of a file, or of all ``.jsonl`` files of a folder in the order of their names; equal rows count once.

    A server may be writing: the last line of a file may be torn, and a file may be gone before it is read. Torn lines
    are left out, and their number is printed.

    Args:
        path: file or folder.
        vocab_size: the target's; larger token ids are refused. None: ids of any size.

    Raises:
        ValueError: a row without ``prompt_token_ids`` and ``token_ids``, an id outside the vocabulary, or no row with
            tokens in both; names file and line.
        OSError: no such file or folder.
    """
    path = Path(path).expanduser()
    is_folder = path.is_dir()
    files = sorted(file for kind in _KINDS for file in path.glob(kind)) if is_folder else [path]
    rows: dict[tuple[tuple[int, ...], tuple[int, ...]], TrafficRow] = {}
    num_torn = 0
    for file in files:
        try:
            for row in _rows_of(file, vocab_size):
                if row is None:
                    num_torn += 1
                elif row.prompt_token_ids and row.token_ids:
                    rows[tuple(row.prompt_token_ids), tuple(row.token_ids)] = row
        except FileNotFoundError:
            if not is_folder:
                raise
    if num_torn:
        print(f"{path}: {num_torn} lines left out that are not written to their end", file=sys.stderr)
    if not rows:
        raise ValueError(f"{path} holds no recorded answers: name a folder of `drafter serve --record`")
    return list(rows.values())


def _rows_of(file: Path, vocab_size: int | None) -> Iterator[TrafficRow | None]:
    """The rows of a file; None for a torn line."""
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is no regular file")  # a pipe would be waited for
    is_packed = file.name.endswith(".gz")
    with cast(BinaryIO, gzip.open(file, "rb")) if is_packed else file.open("rb") as stream:
        try:
            for number, line in read_lines(stream, str(file)):
                if line.strip():
                    yield _row_of(line, f"{file}, line {number}", vocab_size) if line.endswith(b"\n") else None
        except (EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{file}: damaged gzip file ({error})") from error


def _row_of(line: bytes, where: str, vocab_size: int | None) -> TrafficRow:
    fields = parse_json(line, where, only_depth=True)
    if isinstance(fields, dict):
        fields = {**fields, **answer_of(fields)}
    check_shape(fields, {"prompt_token_ids": [int], "token_ids": [int]}, where)
    ids = (*fields["prompt_token_ids"], *fields["token_ids"])
    if min(ids, default=0) < 0 or (vocab_size is not None and max(ids, default=0) >= vocab_size):
        size = "" if vocab_size is None else f" of {vocab_size} tokens"
        raise ValueError(f"{where}: a token id is outside the target's vocabulary{size}: the row is another model's")
    return TrafficRow(fields["prompt_token_ids"], fields["token_ids"])
