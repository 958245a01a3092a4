"""Rows of recorded traffic: token ids of prompts and answers, of the server's files or other files of such rows."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from drafter.utils.parse import check_shape, parse_json, read_lines

_KINDS = ("*.jsonl", "*.jsonl.gz")


class TrafficRow(NamedTuple):
    """One answer: the tokens of its prompt, and its own."""

    prompt_token_ids: list[int]
    token_ids: list[int]


def read_traffic(path: str | Path) -> list[TrafficRow]:
    """The rows of a file, or of all ``.jsonl`` files of a folder in the order of their names; equal rows count once.

    The last line of a file may be torn, because a server may be writing it; such a line is left out.

    Raises:
        ValueError: a row lacks ``prompt_token_ids`` or ``token_ids``, or there is no row with tokens in both.
        OSError: no such file or folder.
    """
    path = Path(path).expanduser()
    files = sorted(file for kind in _KINDS for file in path.glob(kind)) if path.is_dir() else [path]
    rows: dict[tuple[tuple[int, ...], tuple[int, ...]], TrafficRow] = {}
    for file in files:
        for row in _rows_of(file):
            if row.prompt_token_ids and row.token_ids:
                rows[tuple(row.prompt_token_ids), tuple(row.token_ids)] = row
    if not rows:
        raise ValueError(f"{path} holds no recorded answers: name a folder of `drafter serve --record`")
    return list(rows.values())


def _rows_of(file: Path) -> Iterator[TrafficRow]:
    is_packed = file.name.endswith(".gz")
    with cast(BinaryIO, gzip.open(file, "rb")) if is_packed else file.open("rb") as stream:
        for number, line in read_lines(stream, str(file)):
            if not line.endswith(b"\n") or not line.strip():
                continue
            where = f"{file}, line {number}"
            fields = parse_json(line, where, only_depth=True)
            check_shape(fields, {"prompt_token_ids": [int], "token_ids": [int]}, where)
            yield TrafficRow(fields["prompt_token_ids"], fields["token_ids"])
