"""The rows of a training, in two parts: those to train on, and those that are held out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from drafter.data.encode import RowEncoder, encode_files
from drafter.data.hidden_states import cache_states
from drafter.data.options import DataOptions
from drafter.data.reading import digest_of_rows
from drafter.data.rows import TokenRows, split_by_prompt
from drafter.targets.target import Target
from drafter.utils.fingerprint import same_fingerprint
from drafter.utils.parse import read_json_object


class Parts(NamedTuple):
    """The rows to train on, with the loss mask of the loss, and the held-out rows."""

    train: TokenRows
    val: TokenRows


def read_parts(
    names: Sequence[str], target: Target, options: DataOptions, say: Callable[[str], object] = print
) -> Parts:
    """The rows of files or hub data sets, encoded with the target's tokenizer.

    `datasets` reads and tokenises a file once and keeps the token rows in its cache folder (HF_DATASETS_CACHE), in
    which other processes find them. ``say`` takes the lines of a report.

    Raises:
        ValueError: unreadable rows, one prompt alone, or another target's answers, by the settings file beside them;
            the message names file and flag.
    """
    if target.tokenizer is None:
        raise ValueError(f"--target {target.name}: the folder holds no tokenizer, which the rows of a training need")
    encoder = RowEncoder(target.tokenizer, target.name, options.max_length, options.columns, target.vocab_size)

    def read(names: Sequence[str], what: str) -> TokenRows:
        rows, report = encode_files(names, encoder)
        for line in report:
            say(f"{what}: {line}")
        return rows

    val_names = (options.val,) if isinstance(options.val, str) else options.val
    if isinstance(val_names, tuple):
        train, val = read(names, "train"), read(val_names, "val")
        names = [*names, *val_names]
    else:
        train, val = split_by_prompt(read(names, "train"), val_names)
    for name in () if options.foreign_answers else names:
        settings = Path(f"{name}.settings.json")
        written = read_json_object(settings).get("target_fingerprint") if settings.is_file() else None
        if written is not None and not same_fingerprint(str(written), target.fingerprint):
            raise ValueError(
                f"{name}: another target than {target.name!r} wrote these answers, as {settings.name} says: let "
                "this one answer (`drafter distill`), or train on them with --data.foreign_answers true"
            )
    return Parts(replace(train, everything=options.train_on == "everything"), val)


def with_states(
    parts: Parts, target: Target, options: DataOptions, draft_length: int, context_layers: Sequence[int] = ()
) -> Parts:
    """The rows with the target's hidden states where ``options`` name a folder; missing ones are computed first.

    Batches begin ``draft_length + 1`` positions before the first trained token. OSError: the disk has no room.
    """
    if options.cache_hidden_states is None:
        return parts
    folder, margin, size = options.cache_hidden_states, draft_length + 1, options.batch_tokens
    return Parts(*(cache_states(folder, rows, target, margin, context_layers, size) for rows in parts))


def summary_of(names: Sequence[str], rows: TokenRows, train_on: str) -> dict[str, Any]:
    """Rows to train on in numbers, and each file by name, with a hash of its bytes (None for data of the hub)."""
    files: list[dict[str, Any]] = [{"name": name, "sha256": None} for name in names]
    for file, name in zip(files, names, strict=True):
        if Path(name).is_file():
            file |= {"name": Path(name).name, "sha256": digest_of_rows(name)}
    return {"files": files, "rows": len(rows), "trained_tokens": rows.num_trained_tokens, "train_on": train_on}
