"""The target's hidden states on disk: a cache that training fills, and files that vLLM and speculators stored.

One safetensors file holds one text:

    hidden_states         [T, A, D]   the layers of the context, then the last layer
    token_ids             [T]         the tokens that the states belong to
    hidden_states_scales  [T, 1, 1]   only with float8 states: state = value x scale

Of another engine: whole texts, whose last layer stands *before* the final norm. A row finds its file by its token ids,
so names and order do not matter. While a file is being written, its writer holds a lock on the file of the same name
with ``.lock`` behind.

Of the cache: bfloat16 states behind the final norm, from shortly before the first token that is trained on, as no
drafter starts earlier. A hash of the row and of everything that the states depend on is the file's name. So an
interrupted run continues, and several data sets, targets and drafters share a folder.

Shapes: X rows · B rows of a batch · T tokens · A stored layers · D hidden size · C context size.
"""

import hashlib
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from drafter.data.batch import plan_in_order
from drafter.data.rows import TokenRow, TokenRows
from drafter.targets.target import Target
from drafter.utils.io import first_line, locked

FLAG = "--data.hidden_states"
_STATES, _TOKENS, _SCALES = "hidden_states", "token_ids", "hidden_states_scales"
_SPARE_BYTES = 4096  # of a file of the cache: its header, and the rest of its last block on the disk
_VERSION = 3  # raise the number when the content of the cache's files changes
# States of a quantised copy of the target differ by some hundredths, states of another model by about 1.
_MOST_DIFFERENT = 0.25


class States(NamedTuple):
    """Hidden states of one row in the target's dtype; ``context_TC`` is None if the context is the final one."""

    hidden_TD: Tensor
    context_TC: Tensor | None


@dataclass(frozen=True, eq=False)
class StatesOnDisk:
    """The states of rows.

    Attributes:
        files: the file of each row.
        rows: the rows, cut by :func:`crop_to_answers`.
        dtype: the target's dtype.
        has_context: the layers in front of the last one are the drafter's context.
        norm: the target's final norm, for files of another engine, which hold whole texts; None: files of the cache,
            which begin where the cut rows begin.
    """

    files: list[Path]
    rows: TokenRows
    dtype: torch.dtype
    has_context: bool = False
    norm: nn.Module | None = None

    @torch.no_grad()
    def row(self, index: int) -> States:
        """The states of a row's kept positions. Positions after the last stored state are zero and train nothing.

        Raises:
            ValueError: the file is damaged, or was changed since it was chosen.
        """
        path, token_T = self.files[index], self.rows.row(index).token_T
        start = 0 if self.norm is None or self.rows.start_X is None else int(self.rows.start_X[index])
        span = slice(start, start + len(token_T))
        with _open(path) as file:
            stored_T, state_TAD = file.get_slice(_TOKENS)[span], file.get_slice(_STATES)[span]
            is_whole = state_TAD.ndim == 3 and len(state_TAD) == len(stored_T)
            if not is_whole or not torch.equal(stored_T.long(), token_T[: len(stored_T)]):
                raise ValueError(f"{path} changed while it was in use: its tokens are no longer those of row {index}")
            if _SCALES in file.keys():  # noqa: SIM118  # a handle of safetensors is no mapping
                state_TAD = state_TAD.float() * file.get_slice(_SCALES)[span].float()
        if not bool(state_TAD.float().isfinite().all()):
            raise ValueError(f"{path}: the hidden states hold numbers that are not finite: make the file again")
        state_TAD = state_TAD.to(self.dtype)
        hidden_TD = state_TAD[:, -1] if self.norm is None else self.norm(state_TAD[:, -1])
        padding = (0, 0, 0, len(token_T) - len(stored_T))
        context_TC = pad(state_TAD[:, :-1].flatten(1), padding) if self.has_context else None
        return States(pad(hidden_TD, padding), context_TC)


def crop_to_answers(rows: TokenRows, margin: int) -> TokenRows:
    """The rows without the positions more than ``margin`` before the first trained token of each.

    A drafter that unrolls L tokens starts at most L + 1 positions before that token.
    """
    firsts = [int(rows.row(index).loss_mask_T.to(torch.uint8).argmax()) for index in range(len(rows))]
    return replace(rows, start_X=(torch.tensor(firsts, dtype=torch.int64) - margin).clamp(min=0))


# -- the cache -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def cache_states(
    folder: str | Path,
    rows: TokenRows,
    target: Target,
    *,
    margin: int,
    context_layers: Sequence[int] = (),
    batch_tokens: int = 8192,
) -> StatesOnDisk:
    """A reader of the states of all rows, cut by :func:`crop_to_answers`. Missing states are computed first.

    The size is printed before anything is written. A second process waits and finds the states complete.

    Raises:
        OSError: the disk has no room for the states.
    """
    from tqdm import tqdm

    folder = Path(folder).expanduser()
    cropped = crop_to_answers(rows, margin)
    assert cropped.start_X is not None
    starts = cropped.start_X.tolist()
    key = repr((target.fingerprint, target.dtype, target.hidden_size, tuple(context_layers), _VERSION))
    # A state depends on all text before its position, so the hash is of the whole row.
    names = [_digest(rows.row(index).token_T, f"{start} {key}") for index, start in enumerate(starts)]
    files = [folder / f"{name.hex()}.safetensors" for name in names]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".lock").touch()
    with locked(folder / ".lock", seconds=math.inf):
        missing = list({file: index for index, file in enumerate(files) if not file.is_file()}.values())
        if missing:
            num_positions = int(cropped.length_X[missing].sum())
            num_bytes = num_positions * 2 * target.hidden_size * (1 + len(context_layers))
            _check_room(folder, num_positions, num_bytes + len(missing) * _SPARE_BYTES)
        length_X = rows.length_X[missing]
        options: dict[str, Any] = {"desc": "hidden states", "unit": "token", "unit_scale": True, "disable": None}
        with tqdm(total=int(length_X.sum()), **options) as bar:
            for batch in plan_in_order(length_X, batch_tokens=batch_tokens):
                indices = [missing[place] for place in batch]
                tokens = [row.token_T for row in rows.take(indices)]
                token_BT = pad_sequence(tokens, batch_first=True).to(target.device)
                output = target.forward(token_BT, context_layers=context_layers)
                layers = [output.context_BTC, output.hidden_BTD] if context_layers else [output.hidden_BTD]
                state_BTD = torch.cat(layers, dim=-1).to(torch.bfloat16).cpu()
                state_BTAD = state_BTD.unflatten(-1, (-1, target.hidden_size))
                for state_TAD, index, token_T in zip(state_BTAD, indices, tokens, strict=True):
                    kept = slice(starts[index], len(token_T))
                    new = files[index].with_suffix(".tmp")  # whole, or not there; nobody else writes
                    save_file({_STATES: state_TAD[kept].contiguous(), _TOKENS: token_T[kept].contiguous()}, new)
                    new.replace(files[index])
                bar.update(sum(map(len, tokens)))
    return StatesOnDisk(files, cropped, target.dtype, has_context=bool(context_layers))


def _check_room(folder: Path, num_positions: int, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    size = f"{needed / 1e9:.2f} GB in {folder} ({free / 1e9:.2f} GB free)"
    print(f"hidden states of {num_positions:,} positions: {size}", file=sys.stderr)
    if free < needed:
        raise OSError(
            f"the hidden states need {size}: make room, name a folder on another disk, or train without "
            "--data.cache_hidden_states"
        )


# -- files of another engine ---------------------------------------------------------------------------------------


def index_stored_files(
    folder: str | Path, target: Target, *, context_layers: Sequence[int], longest: int
) -> dict[bytes, Path]:
    """The files of a folder by a hash of their first ``longest`` tokens, where training cuts longer texts.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: the folder holds no such file, or a file is damaged, of another format, of other layers than the
            drafter's context and the last one, or still being written.
    """
    from tqdm import tqdm

    path = Path(folder).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(f"{FLAG} {folder}: there is no such folder")
    paths = sorted(path.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{FLAG} {folder} holds no .safetensors file")
    files = {}
    for path in tqdm(paths, "stored states", disable=None):
        with _open(path) as file:
            lacking = sorted({_STATES, _TOKENS} - set(file.keys()))
            if lacking:
                raise ValueError(f"{path} is no file of stored states: it lacks the tensor {', '.join(lacking)}")
            token_T, shape = file.get_tensor(_TOKENS), file.get_slice(_STATES).get_shape()
        num_layers = [len(context_layers) + 1] if context_layers else shape[1:2]  # any number without a context
        if token_T.ndim != 1 or shape != [len(token_T), *num_layers, target.hidden_size]:
            raise ValueError(
                f"{path}: hidden_states {shape} with token_ids {list(token_T.shape)}, but must be tokens x layers (the "
                f"{len(context_layers)} of --model.drafter.context_layers and the last one) x {target.hidden_size}"
            )
        files[_digest(token_T[:longest])] = path
    return files


def open_stored_states(
    files: dict[bytes, Path], rows: TokenRows, target: Target, *, margin: int, context_layers: Sequence[int] = ()
) -> StatesOnDisk:
    """A reader of the states of all rows, in the target's dtype.

    Args:
        files: of :func:`index_stored_files`.
        rows: the rows, which :func:`crop_to_answers` cuts by ``margin``.
        target: the target; its final norm is applied, and one row is compared with its forward.
        margin: kept positions before the first trained token.
        context_layers: layers of the drafter's context; the files hold these layers and the last one.

    Raises:
        ValueError: a row has no file, or the states are another model's.
    """
    found = [_file_of(rows.row(index), files) for index in range(len(rows))]
    paths = [path for path in found if path is not None]
    if len(paths) < len(rows):
        index = found.index(None)
        raise ValueError(
            f"{FLAG}: {len(rows) - len(paths)} of {len(rows)} rows have no stored states, such as row {index} "
            f"({int(rows.length_X[index])} tokens): another chat template, another tokenizer, or a text that was not "
            "stored"
        )
    cropped, norm = crop_to_answers(rows, margin), target.final_norm()
    states = StatesOnDisk(paths, cropped, target.dtype, has_context=bool(context_layers), norm=norm)
    _check_model(states, rows, target, context_layers)
    return states


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """The open file; ValueError while its writer holds the lock, and for a damaged file."""
    lock = path.with_name(path.name + ".lock")
    with ExitStack() as stack:
        if lock.is_file() and stack.enter_context(locked(lock, is_shared=True)) is False:
            raise ValueError(f"{path} is still being written (its lock is held): wait for the engine")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no regular file")  # a pipe would be waited for
        try:
            yield stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read ({first_line(error)}): delete it, and make it again") from error


def _file_of(row: TokenRow, files: dict[bytes, Path]) -> Path | None:
    """The file of the whole row, or of at least its positions before the last trained token; None without a file.

    An engine stores no state for its last token, nor for the template after an answer.
    """
    lengths = range(len(row.token_T), max(1, _num_needed(row)) - 1, -1)
    return next(filter(None, (files.get(_digest(row.token_T[:length])) for length in lengths)), None)


@torch.no_grad()
def _check_model(states: StatesOnDisk, rows: TokenRows, target: Target, context_layers: Sequence[int]) -> None:
    """ValueError if final states or context of the shortest row are far from those of a forward of the target."""
    index = int(rows.length_X.argmin())
    row, found = rows.row(index), states.row(index)
    start = len(row.token_T) - len(found.hidden_TD)
    used = slice(start, max(start + 1, _num_needed(row)))
    output = target.forward(row.token_T[None].to(target.device), context_layers=context_layers)
    pairs = (
        ("final states", output.hidden_BTD, found.hidden_TD),
        ("context layers", output.context_BTC, found.context_TC),
    )
    for what, mine_BTC, theirs_TC in pairs:
        if theirs_TC is None:
            continue
        mine_TC = mine_BTC[0, used].float().cpu()
        far = float((theirs_TC[: len(mine_TC)].float() - mine_TC).norm() / mine_TC.norm().clamp_min(1e-12))
        if not far <= _MOST_DIFFERENT:
            raise ValueError(
                f"{states.files[index]}: the {what} differ from those of target {target.name!r} by {far:.0%}: another "
                "model, other layers, or states that are already behind the final norm"
            )


def _num_needed(row: TokenRow) -> int:
    """Positions whose states are used: all before the last trained token. Later states predict no trained token."""
    trained = row.loss_mask_T.nonzero()
    return int(trained[-1]) if len(trained) else 1


def _digest(token_T: Tensor, key: str = "") -> bytes:
    data = key.encode() + token_T.to(torch.int64).contiguous().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()
