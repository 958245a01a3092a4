"""Hidden states that another engine stored: files of vLLM's ``extract_hidden_states`` and of speculators.

One safetensors file holds one text:

    hidden_states         [T, L, D]   the layers that the engine was told to store, the last one *before* the final norm
    token_ids             [T]         the tokens that the states belong to
    hidden_states_scales  [T, 1, 1]   only with float8 states: state = value x scale

speculators names its files ``hs_0.safetensors``, vLLM by the id of the request. While a file is being written, its
writer holds a lock on the file of the same name with ``.lock`` behind. A row finds its file by its token ids, so names
and order do not matter.

Shapes: T tokens of a text · L stored layers · D hidden size · C context size.
"""

import fcntl
import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import pad

from drafter.data.batch import States
from drafter.data.hidden_states import crop_to_answers
from drafter.data.rows import TokenRow, TokenRows
from drafter.targets.target import Target
from drafter.utils.io import first_line

FLAG = "--data.hidden_states"
_STATES, _TOKENS, _SCALES = "hidden_states", "token_ids", "hidden_states_scales"
# States of a quantised copy of the target differ by some hundredths, states of another model by about 1.
_MOST_DIFFERENT = 0.25


class StoredFile(NamedTuple):
    """One text on disk: its file, its tokens [T], and the shape [T, L, D] of its states."""

    path: Path
    token_T: Tensor
    shape: list[int]


class StoredFiles:
    """An index of a folder: which file holds the states of which tokens.

    Args:
        folder: folder of safetensors files, one for each text.
        longest: largest number of tokens of a row. Training cuts longer texts, and finds their files by these tokens.
        progress: show a bar.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: the folder holds no such file, or a file is damaged, of another format or still being written.
    """

    def __init__(self, folder: str | Path, *, longest: int, progress: bool = True) -> None:
        from tqdm import tqdm

        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{FLAG} {folder}: there is no such folder")
        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise ValueError(f"{FLAG} {folder} holds no .safetensors file")
        bar = tqdm(paths, desc="stored states", unit="file", disable=not progress, delay=1.0, file=sys.stderr)
        self._by_tokens = {_digest(file.token_T[:longest]): file for file in map(read_header, bar)}

    def find(self, row: TokenRow) -> StoredFile | None:
        """The file of the whole row, or of at least its positions before the last trained token; None without a file.

        An engine stores no state for its last token, nor for the template after an answer.
        """
        for length in range(len(row.token_T), max(1, _num_needed(row)) - 1, -1):
            if (file := self._by_tokens.get(_digest(row.token_T[:length]))) is not None:
                return file
        return None


class StoredStates:
    """The states of rows; the interface of :class:`drafter.data.hidden_states.CachedStates`.

    Args:
        files: the file of each row.
        rows: the rows, cut to the positions that a drafter starts from.
        norm: the target's final norm.
        dtype: the target's dtype.
        num_layers: context layers in front of the last one; 0: the context is the final hidden state.
    """

    def __init__(
        self, files: Sequence[Path], rows: TokenRows, norm: nn.Module, dtype: torch.dtype, num_layers: int = 0
    ) -> None:
        self.files, self.rows, self._norm, self._dtype, self._num_layers = list(files), rows, norm, dtype, num_layers

    @torch.no_grad()
    def row(self, index: int) -> States:
        """The states of a row's kept positions. Positions after the last stored state are zero and train nothing."""
        token_T, _ = self.rows.row(index)
        start, path = int(self.rows.start_R[index]), self.files[index]
        with _open(path) as file:
            stored_T = file.get_slice(_TOKENS)[start : start + len(token_T)]
            if not torch.equal(stored_T.long(), token_T[: len(stored_T)]):
                raise ValueError(f"{path} changed while it was in use: its tokens are no longer those of row {index}")
            span, padding = slice(start, start + len(stored_T)), (0, 0, 0, len(token_T) - len(stored_T))
            hidden_TD = pad(self._norm(self._layer(file, path, span, -1)), padding)
            context = [pad(self._layer(file, path, span, layer), padding) for layer in range(self._num_layers)]
        return States(hidden_TD, torch.cat(context, dim=-1) if context else None)

    def _layer(self, file: Any, path: Path, span: slice, layer: int) -> Tensor:
        """States [T, D] of one layer, in the target's dtype."""
        states = file.get_slice(_STATES)
        place = layer % states.get_shape()[1]
        state_TD = states[span, place : place + 1][:, 0]
        if _SCALES in file.keys():  # noqa: SIM118  # a handle of safetensors is no mapping
            state_TD = state_TD.float() * file.get_slice(_SCALES)[span].reshape(-1, 1).float()
        if not bool(state_TD.float().isfinite().all()):
            raise ValueError(f"{path}: the hidden states hold numbers that are not finite: make the file again")
        return state_TD.to(self._dtype)


def open_stored_states(
    files: StoredFiles,
    rows: TokenRows,
    target: Target,
    *,
    margin: int,
    context_layers: Sequence[int] = (),
) -> StoredStates:
    """A reader of the states of all rows, in the target's dtype.

    Args:
        files: the folder.
        rows: the rows, which :func:`crop_to_answers` cuts by ``margin``.
        target: the target; its final norm is applied, and one row is compared with its forward.
        margin: kept positions before the first trained token.
        context_layers: layers of the drafter's context; the files hold these layers and the last one.

    Raises:
        ValueError: a row has no file, the files hold other layers, or the states are another model's.
    """
    found = [files.find(rows.row(index)) for index in range(len(rows))]
    missing = [index for index, file in enumerate(found) if file is None]
    if missing:
        raise ValueError(
            f"{FLAG} {files.folder}: {len(missing)} of {len(rows)} rows have no stored states, such as row "
            f"{missing[0]} ({len(rows.row(missing[0]).token_T)} tokens): another chat template, another tokenizer, or "
            "a text that was not stored"
        )
    kept = [file for file in found if file is not None]
    for path, _, (_, num_stored, size) in kept:
        if size != target.hidden_size:
            raise ValueError(f"{path} holds states of {size} values, the target's have {target.hidden_size}")
        if context_layers and num_stored != len(context_layers) + 1:
            raise ValueError(
                f"{path} holds {num_stored} layers, expected are the {len(context_layers)} of "
                "--model.drafter.context_layers and the last one: let the engine store these"
            )
    cropped = crop_to_answers(rows, margin)
    states = StoredStates([file.path for file in kept], cropped, target.final_norm(), target.dtype, len(context_layers))
    _check_model(states, rows, target, context_layers)
    return states


def read_header(path: Path) -> StoredFile:
    """The token ids of a file, int64 [T], and the shape of its states; ValueError for a file of another format."""
    with _open(path) as file:
        names = set(file.keys())
        if not {_STATES, _TOKENS} <= names:
            lacking = ", ".join(sorted({_STATES, _TOKENS} - names))
            raise ValueError(f"{path} is no file of stored states: it lacks the tensor {lacking}")
        token_T: Tensor = file.get_tensor(_TOKENS).long()
        shape, kind = file.get_slice(_STATES).get_shape(), file.get_slice(_STATES).get_dtype()
    if token_T.ndim != 1 or len(shape) != 3 or shape[0] != len(token_T):
        raise ValueError(
            f"{path}: hidden_states {list(shape)} must be tokens x layers x hidden size, for the "
            f"{len(token_T)} tokens of token_ids"
        )
    if kind.startswith("F8") and _SCALES not in names:
        raise ValueError(f"{path}: states in float8 need the tensor {_SCALES}")
    return StoredFile(path, token_T, shape)


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """The open file; ValueError while its writer holds the lock."""
    lock = path.with_name(path.name + ".lock")
    with ExitStack() as stack:
        if lock.is_file():
            try:
                fcntl.flock(stack.enter_context(lock.open()), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"{path} is still being written (its lock is held): wait for the engine") from error
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no regular file")  # a pipe would be waited for
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read ({first_line(error)}): make the file again") from error
        yield file


@torch.no_grad()
def _check_model(states: StoredStates, rows: TokenRows, target: Target, context_layers: Sequence[int]) -> None:
    """Compare the shortest row with a forward of the target.

    Raises:
        ValueError: final states or context are far from the target's own.
    """
    index = int(rows.length_R.argmin())
    row, found, start = rows.row(index), states.row(index), int(states.rows.start_R[index])
    output = target.forward(row.token_T[None].to(target.device), context_layers=context_layers)
    num_stored = max(1, _num_needed(row) - start)
    for what, mine, theirs in (
        ("final states", output.hidden_BTD, found.hidden_TD),
        ("context layers", output.context_BTC, found.context_TC),
    ):
        if theirs is None:
            continue
        mine_TC = mine[0, start : start + num_stored].float().cpu()
        far = float((theirs[:num_stored].float() - mine_TC).norm() / mine_TC.norm().clamp_min(1e-12))
        if not far <= _MOST_DIFFERENT:
            raise ValueError(
                f"{states.files[index]}: the {what} differ from those of target {target.name!r} by {far:.0%}: another "
                "model, other layers, or states that are already behind the final norm"
            )


def _num_needed(row: TokenRow) -> int:
    """Positions whose states are used: all before the last trained token. Later states predict no trained token."""
    trained = row.loss_mask_T.nonzero()
    return int(trained[-1]) if len(trained) else 1


def _digest(token_T: Tensor) -> bytes:
    return hashlib.blake2b(token_T.to(torch.int64).contiguous().numpy().tobytes(), digest_size=16).digest()
