"""Rows of recorded traffic: token ids of prompts and answers, of the server's files or other files of such rows."""

import sys
from pathlib import Path
from typing import NamedTuple

from drafter.data.formats import Row, ids_of, validated
from drafter.data.reading import lines_of
from drafter.utils.parse import parse_json

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
            for number, line in lines_of(file, str(file)):
                if not line.strip():
                    continue
                if not line.endswith(b"\n"):
                    num_torn += 1
                    continue
                row = _row_of(line, f"{file}, line {number}", vocab_size)
                if row.prompt_token_ids and row.token_ids:
                    rows[tuple(row.prompt_token_ids), tuple(row.token_ids)] = row
        except FileNotFoundError:
            if not is_folder:
                raise
    if num_torn:
        print(f"{path}: {num_torn} lines left out that are not written to their end", file=sys.stderr)
    if not rows:
        raise ValueError(f"{path} holds no recorded answers: name a folder of `drafter serve --record`")
    return list(rows.values())


def _row_of(line: bytes, where: str, vocab_size: int | None) -> TrafficRow:
    fields = parse_json(line, where, only_depth=True)
    ids = ids_of(fields if isinstance(fields, dict) else {})
    lacking = [name for name, value in ids.items() if value is None]
    if lacking:
        raise ValueError(f"{where} lacks {', '.join(lacking)}: the row is no recorded answer")
    row = validated(Row, ids, where)
    largest = max((*row.prompt_ids, *(row.token_ids or ())), default=0)
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"{where}: a token id is outside the target's vocabulary of {vocab_size} tokens ({largest}): the row is "
            "another model's"
        )
    return TrafficRow(list(row.prompt_ids), list(row.token_ids or ()))
