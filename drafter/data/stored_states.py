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
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from drafter.data.hidden_states import States, crop_to_answers
from drafter.data.rows import TokenRow, TokenRows
from drafter.targets.target import Target
from drafter.utils.io import first_line

FLAG = "--data.hidden_states"
LOCK_SECONDS = 10.0
_STATES, _TOKENS, _SCALES = "hidden_states", "token_ids", "hidden_states_scales"
_MOST_COMPARED = 2000  # files that an error message looks at
# States of a quantised copy of the target differ by some hundredths, states of another model by about 1.
_MOST_DIFFERENT = 0.25


class StoredFile(NamedTuple):
    """One text on disk: its file and its number of tokens."""

    path: Path
    num_tokens: int


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
        self.paths = paths
        self._by_tokens: dict[bytes, StoredFile] = {}
        self._by_beginning: dict[bytes, StoredFile] = {}
        for path in tqdm(paths, desc="stored states", unit="file", disable=not progress, delay=1.0, file=sys.stderr):
            token_T = read_tokens(path)
            file = StoredFile(path, len(token_T))
            self._by_tokens[_digest(token_T)] = file
            if len(token_T) > longest:
                self._by_beginning[_digest(token_T[:longest])] = file

    def find(self, token_T: Tensor, num_needed: int) -> StoredFile | None:
        """The file of the whole row, or of at least its first ``num_needed`` tokens; None without such a file.

        An engine stores no state for its last token, nor for the template after an answer.
        """
        found = self._by_beginning.get(_digest(token_T))
        for length in range(len(token_T), max(1, num_needed) - 1, -1):
            found = found or self._by_tokens.get(_digest(token_T[:length]))
        return found

    def nearest(self, token_T: Tensor) -> tuple[Path, int]:
        """The file with the longest common beginning with a row, and the number of common tokens."""
        shared = [(_num_shared(read_tokens(path), token_T), path) for path in self.paths[:_MOST_COMPARED]]
        num, path = max(shared, key=lambda pair: pair[0])
        return path, num


class StoredStates:
    """The states of rows; the interface of :class:`drafter.data.hidden_states.CachedStates`.

    Args:
        files: the file of each row.
        rows: the rows, cut to the positions that a drafter starts from.
        norm: the target's final norm.
        dtype: the target's dtype.
        layers: places of the context layers in the files; empty: the context is the final hidden state.
    """

    def __init__(
        self, files: Sequence[Path], rows: TokenRows, norm: nn.Module, dtype: torch.dtype, layers: Sequence[int] = ()
    ) -> None:
        self._files, self.rows, self._norm, self._dtype, self._layers = list(files), rows, norm, dtype, list(layers)

    @torch.no_grad()
    def row(self, index: int) -> States:
        """The states of a row's kept positions. Positions after the last stored state are zero and train nothing."""
        token_T, _ = self.rows.row(index)
        start, path = int(self.rows.start_R[index]), self._files[index]
        with _open(path) as file:
            stored_T = file.get_slice(_TOKENS)[start : start + len(token_T)]
            if not torch.equal(stored_T.long(), token_T[: len(stored_T)].long()):
                raise ValueError(f"{path} changed while it was in use: its tokens are no longer those of row {index}")
            span = slice(start, start + len(stored_T))
            final_TD = self._norm(self._layer(file, path, span, -1))
            context = [self._layer(file, path, span, layer) for layer in self._layers]
        missing = len(token_T) - len(stored_T)
        hidden_TD = _padded(final_TD, missing)
        return States(hidden_TD, _padded(torch.cat(context, dim=-1), missing) if context else None)

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
    stored_layers: Sequence[int] | None = None,
) -> StoredStates:
    """A reader of the states of all rows, in the target's dtype.

    Args:
        files: the folder.
        rows: the rows, which :func:`crop_to_answers` cuts by ``margin``.
        target: the target; its final norm is applied, and one row is compared with its forward.
        margin: kept positions before the first trained token.
        context_layers: layers of the drafter's context.
        stored_layers: layers in the files without the last layer; None: ``context_layers``.

    Raises:
        ValueError: a row has no file, the files lack a layer, or the states are another model's.
    """
    found = [files.find(rows.row(index).token_T, _num_needed(rows.row(index))) for index in range(len(rows))]
    missing = [index for index, file in enumerate(found) if file is None]
    if missing:
        raise ValueError(_missing_text(files, rows, missing))
    kept = [file for file in found if file is not None]
    names = list(context_layers if stored_layers is None else stored_layers)
    for path in dict.fromkeys(file.path for file in kept):
        _check_shape(path, target.hidden_size, len(names) if context_layers else None)
    lacking = [layer for layer in context_layers if layer not in names]
    if lacking:
        raise ValueError(
            f"--data.hidden_states_layers {names} lacks layer {lacking[0]} of --model.drafter.context_layers: store "
            "the layer too, or train without it"
        )
    places = [names.index(layer) for layer in context_layers]
    cropped = crop_to_answers(rows, margin)
    states = StoredStates([file.path for file in kept], cropped, target.final_norm(), target.dtype, places)
    _check_model(states, rows, target, context_layers)
    return states


def read_tokens(path: Path) -> Tensor:
    """The token ids of a file, int64 [T]; ValueError for a file of another format."""
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
    return token_T


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """The open file, once its writer has let go of its lock."""
    lock = path.with_name(path.name + ".lock")
    with ExitStack() as stack:
        if lock.exists():
            _wait_for(stack.enter_context(lock.open()), path)
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read ({first_line(error)}): make the file again") from error
        yield file


def _wait_for(lock: Any, path: Path) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"{path} is still being written (its lock is held for {LOCK_SECONDS:g} s): wait for the engine"
                ) from error
            time.sleep(0.02)


def _check_shape(path: Path, hidden_size: int, num_layers: int | None) -> None:
    """ValueError unless the file has the target's hidden size and, where layers are read, the expected layers."""
    with _open(path) as file:
        _, num_stored, size = file.get_slice(_STATES).get_shape()
    if size != hidden_size:
        raise ValueError(f"{path} holds states of {size} values, the target's have {hidden_size}: another model")
    if num_layers is not None and num_stored != num_layers + 1:
        raise ValueError(
            f"{path} holds {num_stored} layers, expected are {num_layers} and the last one: name the stored layers, "
            "without the last one, with --data.hidden_states_layers"
        )


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
                f"{states._files[index]}: the {what} differ from those of target {target.name!r} by {far:.0%}: another "
                "model, other layers, or states that are already behind the final norm"
            )


def _missing_text(files: StoredFiles, rows: TokenRows, missing: Sequence[int]) -> str:
    token_T = rows.row(missing[0]).token_T
    path, shared = files.nearest(token_T)
    return (
        f"{FLAG} {files.folder}: {len(missing)} of {len(rows)} rows have no stored states. Row {missing[0]} "
        f"({len(token_T)} tokens) is nearest to {path.name} and differs from token {shared} on: another chat template, "
        "another tokenizer, or a text that was not stored"
    )


def _num_needed(row: TokenRow) -> int:
    """Positions whose states are used: all before the last trained token. Later states predict no trained token."""
    trained = row.loss_mask_T.nonzero()
    return int(trained[-1]) if len(trained) else 1


def _num_shared(one_T: Tensor, other_T: Tensor) -> int:
    length = min(len(one_T), len(other_T))
    return int((one_T[:length].long() == other_T[:length].long()).long().cumprod(dim=0).sum())


def _digest(token_T: Tensor) -> bytes:
    return hashlib.blake2b(token_T.to(torch.int64).contiguous().numpy().tobytes(), digest_size=16).digest()


def _padded(state_TC: Tensor, num_missing: int) -> Tensor:
    return torch.nn.functional.pad(state_TC, (0, 0, 0, num_missing))
