"""The target's hidden states of a data set on disk, so that several epochs cost one forward pass.

One safetensors file holds the states of one row, from shortly before the first token that is trained on: no drafter
starts from earlier positions. A hash of the row and of everything that the states depend on is the file's name. So an
interrupted run continues, and several data sets, targets and drafters share a folder.

    hidden_states [P, L, D]   bfloat16: the layers of the context, then the final states

Shapes: P kept positions of a row · L layers · D target hidden size · R rows.
"""

import hashlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from drafter.data.batch import States, plan_in_order
from drafter.data.rows import TokenRow, TokenRows
from drafter.targets.target import Target

_STATES = "hidden_states"
_SPARE_BYTES = 4096  # of a file: its header, and the rest of its last block on the disk
_VERSION = 2  # raise the number when the files' content changes


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
        files: the file of each row.
        dtype: the target's dtype.
    """

    def __init__(self, rows: TokenRows, files: Sequence[Path], dtype: torch.dtype) -> None:
        self.rows, self.files, self._dtype = rows, files, dtype

    def row(self, index: int) -> States:
        """The states of a row's kept positions; ValueError for a damaged file."""
        path = self.files[index]
        try:
            state_PLD = safetensors.torch.load_file(path)[_STATES].to(self._dtype)
        except (safetensors.SafetensorError, OSError, KeyError) as error:
            raise ValueError(f"{path} is damaged ({error}); delete it, and it is made again") from error
        context_PLD = state_PLD[:, :-1]
        return States(state_PLD[:, -1], context_PLD.flatten(1) if context_PLD.numel() else None)


@torch.no_grad()
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
    from filelock import FileLock
    from tqdm import tqdm

    folder = Path(folder).expanduser()
    cropped = crop_to_answers(rows, margin)
    key = repr((target.fingerprint, target.dtype, target.hidden_size, tuple(context_layers), _VERSION))
    starts = cropped.start_R.tolist()
    files = [folder / _name(rows.row(index), start, key) for index, start in enumerate(starts)]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        missing = list({file: index for index, file in enumerate(files) if not file.is_file()}.values())
        if missing:
            num_positions, num_states = int(cropped.length_R[missing].sum()), 1 + len(context_layers)
            _check_room(folder, num_positions, num_positions * 2 * target.hidden_size * num_states, len(missing))
        length_R = rows.length_R[missing]
        options: dict[str, Any] = {"desc": "hidden states", "unit": "token", "unit_scale": True, "file": sys.stderr}
        with tqdm(total=int(length_R.sum()), disable=not progress, **options) as bar:
            for batch in plan_in_order(length_R, batch_tokens=batch_tokens):
                indices = [missing[place] for place in batch]
                tokens = [row.token_T for row in rows.take(indices)]
                token_BT = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(target.device)
                output = target.forward(token_BT, context_layers=context_layers)
                layers = [output.context_BTC, output.hidden_BTD] if context_layers else [output.hidden_BTD]
                state_BTLD = torch.cat(layers, dim=-1).unflatten(-1, (-1, target.hidden_size))
                for state_TLD, index, token_T in zip(state_BTLD, indices, tokens, strict=True):
                    _write(files[index], state_TLD[starts[index] : len(token_T)])
                bar.update(sum(map(len, tokens)))
    return CachedStates(cropped, files, target.dtype)


def _write(file: Path, state_PLD: Tensor) -> None:
    """Write beside, then rename: a file under the final name is whole."""
    new = file.with_suffix(".tmp")
    new.write_bytes(safetensors.torch.save({_STATES: state_PLD.to(torch.bfloat16).cpu().contiguous()}))
    new.replace(file)


def _name(row: TokenRow, start: int, key: str) -> str:
    """A state depends on all text before its position, so the hash is of the whole row."""
    hasher = hashlib.blake2b(f"{start} {key}".encode(), digest_size=16)
    hasher.update(row.token_T.numpy().tobytes())
    return f"{hasher.hexdigest()}.safetensors"


def _check_room(folder: Path, num_positions: int, num_bytes: int, num_files: int) -> None:
    needed, free = num_bytes + num_files * _SPARE_BYTES, shutil.disk_usage(folder).free
    print(
        f"hidden states of {num_positions:,} positions: {needed / 1e9:.2f} GB in {folder} ({free / 1e9:.1f} GB free)",
        file=sys.stderr,
    )
    if free < needed:
        raise OSError(
            f"{folder} has {free / 1e9:.2f} GB free, the hidden states need {needed / 1e9:.2f} GB: make room, name a "
            "folder on another disk, or train without --data.cache_hidden_states"
        )
