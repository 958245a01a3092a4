"""Rows of recorded traffic: token ids of prompts and answers, of the server's files or other files of such rows."""

from pathlib import Path
from typing import NamedTuple

from drafter.data.formats import check_ids, ids_of, parse_row
from drafter.data.reading import RawRow, read_json_lines


class TrafficRow(NamedTuple):
    """One answer: the tokens of its prompt, and its own."""

    prompt_token_ids: list[int]
    token_ids: list[int]


def read_traffic(path: str | Path, *, vocab_size: int | None = None) -> list[TrafficRow]:
    """The rows of a file, or of all ``.jsonl`` files of a folder in the order of their names; equal rows count once.

    A server may be writing: a last line that is not written to its end is left out, and a file of a folder may be gone
    before it is read.

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
    rows: dict[tuple[tuple[int, ...], tuple[int, ...]], TrafficRow] = {}
    for file in sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")]) if is_folder else [path]:
        try:
            for record in read_json_lines(file, str(file), skip_torn=True):
                ids = ids_of(record.fields)
                lacking = [name for name, value in ids.items() if value is None]
                if lacking:
                    raise ValueError(f"{record.where} lacks {', '.join(lacking)}: the row is no recorded answer")
                row = parse_row(RawRow(ids, record.where))
                if vocab_size is not None:
                    check_ids((*row.prompt_ids, *(row.token_ids or ())), vocab_size, row.where)
                if row.prompt_ids and row.token_ids:
                    rows[row.prompt_ids, row.token_ids] = TrafficRow(list(row.prompt_ids), list(row.token_ids))
        except FileNotFoundError:
            if not is_folder:
                raise
    if not rows:
        raise ValueError(f"{path} holds no recorded answers: name a folder of `drafter serve --record`")
    return list(rows.values())
