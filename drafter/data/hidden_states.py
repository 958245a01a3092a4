"""The target's hidden states of a data set on disk, so that several epochs cost one forward pass.

The states of a row are bfloat16 and begin shortly before the first token that is trained on, because no drafter starts
from earlier positions. `datasets` writes them as Arrow files of about 64 MiB, each named by a hash of its rows and of
everything that the states depend on: an interrupted run continues with the next file, data that grow at their end keep
their files, and several data sets, targets and drafters share a folder.

Shapes: T positions of a row · D target hidden size · C context size · R rows.
"""

import hashlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter.data.batch import States, plan_in_order
from drafter.data.rows import TokenRows
from drafter.targets.target import Target

_FILE_BYTES = 1 << 26
_SPARE = 1.02  # headers, and the overhead of the file system
_VERSION = 1  # raise the number when the files' content changes


def crop_to_answers(rows: TokenRows, margin: int) -> TokenRows:
    """The rows without the positions more than ``margin`` before the first trained token of each.

    A drafter that unrolls K tokens starts at most K + 1 positions before that token.
    """
    starts = []
    for index in range(len(rows)):
        trained = rows.row(index).loss_mask_T.nonzero()
        starts.append(max(0, int(trained[0]) - margin) if len(trained) else 0)
    return rows.cropped(torch.tensor(starts, dtype=torch.int64))


class CachedStates:
    """Reads the states of all rows.

    Args:
        rows: the rows, cut to the positions that have states.
        states: a ``datasets.Dataset`` of their states.
        dtype: the target's dtype.
    """

    def __init__(self, rows: TokenRows, states: Any, dtype: torch.dtype) -> None:
        self.rows, self._states, self._dtype = rows, states.with_format("arrow"), dtype

    def row(self, index: int) -> States:
        """The states of a row's kept positions."""
        table, length = self._states[index], int(self.rows.length_R[index])
        hidden, context = (bytearray(table[name][0].as_buffer()) for name in ("hidden", "context"))
        return States(self._tensor(hidden, length), self._tensor(context, length) if context else None)

    def _tensor(self, data: bytearray, length: int) -> Tensor:
        return torch.frombuffer(data, dtype=torch.bfloat16).view(length, -1).to(self._dtype)


def cache_states(
    folder: str | Path,
    rows: TokenRows,
    target: Target,
    *,
    margin: int,
    context_layers: Sequence[int] = (),
    batch_tokens: int = 8192,
    progress: bool = True,
) -> CachedStates:
    """A reader of the states of all rows, cut by :func:`crop_to_answers`. Missing states are computed first.

    The size is printed before anything is written. A second process waits and finds the states complete.

    Raises:
        OSError: the disk has no room for the states.
    """
    import datasets
    from filelock import FileLock
    from tqdm import tqdm

    folder = Path(folder).expanduser()
    cropped = crop_to_answers(rows, margin)
    key = repr((target.fingerprint, target.dtype, target.hidden_size, tuple(context_layers), margin, _VERSION))
    position_bytes = 2 * target.hidden_size * (1 + len(context_layers))
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        files = [
            (part, folder / f"states-{_name(rows.select(part), key)}.arrow")
            for part in _plan_files(cropped, position_bytes)
        ]
        missing = [(part, path) for part, path in files if not path.is_file()]
        if missing:
            num_positions = sum(int(cropped.length_R[list(part)].sum()) for part, _ in missing)
            _check_room(folder, num_positions, position_bytes)
        total = sum(int(rows.length_R[list(part)].sum()) for part, _ in missing)
        with tqdm(
            total=total, desc="hidden states", unit="token", unit_scale=True, disable=not progress, file=sys.stderr
        ) as bar:
            for part, path in missing:
                start_R = cropped.start_R[list(part)]
                _write(path, _compute(rows.select(part), start_R, target, context_layers, batch_tokens, bar))
    states = datasets.concatenate_datasets([_open(path, len(part)) for part, path in files])
    return CachedStates(cropped, states, target.dtype)


@torch.no_grad()
def _compute(
    rows: TokenRows, start_R: Tensor, target: Target, context_layers: Sequence[int], batch_tokens: int, bar: Any
) -> dict[str, list[bytes]]:
    """The states of one file. The target reads whole rows; the file gets the positions from ``start_R`` on."""
    columns: dict[str, list[bytes]] = {"hidden": [b""] * len(rows), "context": [b""] * len(rows)}
    for batch in plan_in_order(rows.length_R, batch_tokens=batch_tokens):
        tokens = [row.token_T for row in rows.take(batch)]
        token_BT = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(target.device)
        output = target.forward(token_BT, context_layers=context_layers)
        for line, index in enumerate(batch):
            kept = slice(int(start_R[index]), len(tokens[line]))
            columns["hidden"][index] = _bytes(output.hidden_BTD[line, kept])
            if context_layers:
                columns["context"][index] = _bytes(output.context_BTC[line, kept])
            bar.update(len(tokens[line]))
    return columns


def _bytes(state_TD: Tensor) -> bytes:
    return state_TD.to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().tobytes()


def _write(path: Path, columns: dict[str, list[bytes]]) -> None:
    """Write beside, then rename: a file under the final name is whole."""
    from datasets.arrow_writer import ArrowWriter

    from drafter.utils.io import replacing

    with replacing(path, follows_links=False) as new, ArrowWriter(path=str(new), features=_features()) as writer:
        writer.write_batch(columns)
        writer.finalize()


def _open(path: Path, num_rows: int) -> Any:
    import datasets
    import pyarrow

    try:
        found = datasets.Dataset.from_file(str(path))
        if (found.features, len(found)) != (_features(), num_rows):
            raise ValueError(f"{len(found)} rows of {', '.join(found.column_names)}")
    except (OSError, ValueError, pyarrow.ArrowInvalid) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, and it is made again") from error
    return found


def _features() -> Any:
    from datasets import Features, Value

    return Features({"hidden": Value("large_binary"), "context": Value("large_binary")})


def _plan_files(cropped: TokenRows, position_bytes: int) -> list[range]:
    """Ranges of rows of about 64 MiB, planned from the first row on, so that added rows change no earlier range."""
    limit = max(1, _FILE_BYTES // position_bytes)
    files, start, size = [], 0, 0
    for index, length in enumerate(cropped.length_R.tolist()):
        size += length
        if index + 1 == len(cropped) or size > limit:
            files.append(range(start, index + 1))
            start, size = index + 1, 0
    return files


def _name(rows: TokenRows, key: str) -> str:
    """A hash of the uncut rows and the key: a state depends on all text before its position, cut text included."""
    return hashlib.blake2b((rows.digest() + key).encode(), digest_size=16).hexdigest()


def _check_room(folder: Path, num_positions: int, position_bytes: int) -> None:
    needed = int(num_positions * position_bytes * _SPARE)
    free = shutil.disk_usage(folder).free
    print(
        f"hidden states of {num_positions:,} positions: {needed / 1e9:.2f} GB in {folder} ({free / 1e9:.1f} GB free)",
        file=sys.stderr,
    )
    if free < needed:
        raise OSError(
            f"{folder} has {free / 1e9:.2f} GB free, the hidden states need {needed / 1e9:.2f} GB: make room, name a "
            "folder on another disk, or train without --data.cache_hidden_states"
        )
