"""The target's hidden states on disk: a cache that training fills, and files that vLLM and speculators stored.

One safetensors file holds one text:

    hidden_states         [T, A, D]   the layers of the context, then the last layer
    token_ids             [T]         the tokens that the states belong to
    hidden_states_scales  [T, 1, 1]   only with float8 states: state = value x scale

Of another engine: whole texts, whose last layer stands *before* the final norm. A row finds its file by its token ids,
so names and order do not matter. While a file is being written, its writer holds a lock on the file of the same name
with ``.lock`` behind.

Of the cache: bfloat16 states behind the final norm, from shortly before the first token that is trained on, as no
drafter starts earlier. A hash of the row and of everything that the states depend on is the file's name, with the first
stored position behind. So an interrupted run continues, and several data sets, targets and drafters share a folder.
`drafter distill --states` writes the same files while it answers.

Shapes: X rows · B rows of a batch · T tokens · A stored layers · D hidden size · C context size.
"""

import hashlib
import math
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from drafter.data.loader import plan_in_order
from drafter.data.rows import ChatBatch, TokenRow, TokenRows, stack
from drafter.targets.target import Target
from drafter.utils.io import first_line, locked

FLAG = "--data.hidden_states"
_STATES, _TOKENS, _SCALES = "hidden_states", "token_ids", "hidden_states_scales"
_SPARE_BYTES = 4096  # of a file of the cache: its header, and the rest of its last block on the disk
_MARGIN = 17  # positions before an answer that answering keeps: enough for a drafter that unrolls 16 tokens
_VERSION = 4  # raise the number when the content of the cache's files changes
# States of a quantised copy of the target differ by some hundredths, states of another model by about 1.
_MOST_DIFFERENT = 0.25


@dataclass(frozen=True, eq=False, kw_only=True)
class RowsWithStates(TokenRows):
    """Rows whose states are on the disk. They begin where :func:`first_kept` says.

    Attributes:
        files: the file of each row.
        dtype: the target's dtype.
        has_context: the layers in front of the last one are the drafter's context.
        norm: the target's final norm, for files of another engine; None: files of the cache.
        first_X: the first stored position of each row's file.
    """

    files: list[Path]
    first_X: list[int]
    dtype: torch.dtype
    has_context: bool
    norm: nn.Module | None = None

    def batch(self, rows: Sequence[int]) -> ChatBatch:
        """The batch of these rows, with their hidden states and their context, if there is one."""
        hiddens, contexts = zip(*map(self.states, rows), strict=True)
        context_BTC = stack(contexts) if self.has_context else None
        return super().batch(rows)._replace(hidden_BTD=stack(hiddens), context_BTC=context_BTC)

    @torch.no_grad()
    def states(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Final states and context of a row's kept positions, in the target's dtype: [T, D], and [T, C] or None.

        Positions after the last stored state are zero and train nothing.

        Raises:
            ValueError: the file is damaged, or was changed since it was chosen.
        """
        path, token_T = self.files[index], self.row(index).token_T
        start = (0 if self.start_X is None else int(self.start_X[index])) - self.first_X[index]
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
        return pad(hidden_TD, padding), context_TC


def first_kept(rows: TokenRows, margin: int) -> Tensor:
    """The position ``margin`` before the first trained token of each row, or its beginning [X].

    A drafter that unrolls L tokens starts at most L + 1 positions before that token.
    """
    firsts = [int(rows.row(index).loss_mask_T.to(torch.uint8).argmax()) for index in range(len(rows))]
    return (torch.tensor(firsts, dtype=torch.int64) - margin).clamp(min=0)


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
) -> RowsWithStates:
    """The rows with their states, which are computed first where they are missing.

    The size is printed before anything is written. A second process waits and finds the states complete.

    Raises:
        OSError: the disk has no room for the states.
    """
    from tqdm import tqdm

    folder = Path(folder).expanduser()
    start_X, key = first_kept(rows, margin), _key(target, context_layers)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".lock").touch()
    with locked(folder / ".lock", seconds=math.inf):
        stored = defaultdict[str, list[int]](list)
        for path in folder.glob("*-*.safetensors"):
            name, _, first = path.stem.partition("-")
            stored[name] += [int(first)] if first.isdecimal() else []
        names = [_digest(rows.row(index).token_T, key).hex() for index in range(len(rows))]
        starts = [
            max((first for first in stored[name] if first <= start), default=start)
            for name, start in zip(names, start_X.tolist(), strict=True)
        ]
        files = [folder / f"{name}-{start}.safetensors" for name, start in zip(names, starts, strict=True)]
        missing = list({file: index for index, file in enumerate(files) if not file.is_file()}.values())
        if missing:
            positions = (rows.length_X - start_X)[missing].tolist()
            _check_room(folder, target, 1 + len(context_layers), positions, is_most=False)
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
                    _write(files[index], state_TAD[kept], token_T[kept])
                bar.update(sum(map(len, tokens)))
    return RowsWithStates(
        rows.dataset, start_X, rows.everything, files=files, first_X=starts, dtype=target.dtype,
        has_context=bool(context_layers),
    )  # fmt: skip


@dataclass(frozen=True)
class StatesOfAnswers:
    """A folder of the cache that is filled while ``target`` answers: training then runs no forward of the target."""

    folder: Path
    target: Target
    context_layers: tuple[int, ...] = ()

    def say_size(self, num_answers: int, longest: int) -> None:
        """Print how large the states of answers of at most ``longest`` tokens may become, and how much room is free."""
        self.folder.mkdir(parents=True, exist_ok=True)
        positions = [longest + _MARGIN] * num_answers
        _check_room(self.folder, self.target, 1 + len(self.context_layers), positions, is_most=True)

    def write(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], states: Callable[[int], Tensor]) -> None:
        """Store ``states(start)``: from position ``start`` to the token before the last one, which predicts nothing."""
        token_T, start = torch.tensor([*prompt_ids, *answer_ids]), max(0, len(prompt_ids) - _MARGIN)
        name = _digest(token_T, _key(self.target, self.context_layers)).hex()
        _write(self.folder / f"{name}-{start}.safetensors", states(start), token_T[start:-1])


def _key(target: Target, context_layers: Sequence[int]) -> str:
    """Everything that a text's states depend on."""
    return repr((target.fingerprint, target.traits.number_format, target.hidden_size, tuple(context_layers), _VERSION))


def _write(path: Path, state_TAD: Tensor, token_T: Tensor) -> None:
    new = path.with_suffix(f".{os.getpid()}.tmp")  # whole, or not there
    save_file({_STATES: state_TAD.contiguous(), _TOKENS: token_T.contiguous()}, new)
    new.replace(path)


def _check_room(folder: Path, target: Target, num_layers: int, positions: Sequence[int], *, is_most: bool) -> None:
    """Say how large files of so many positions each are; OSError where they do not fit, unless ``is_most`` of them."""
    needed = sum(positions) * 2 * target.hidden_size * num_layers + len(positions) * _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    size = f"{needed / 1e9:.2f} GB in {folder} ({free / 1e9:.2f} GB free)"
    said = f"hidden states of {'at most ' if is_most else ''}{sum(positions):,} positions: {size}"
    print(said, file=sys.stderr)
    if free < needed and not is_most:
        raise OSError(f"{said}: make room, name a folder on another disk, or train without --data.cache_hidden_states")


# -- files of another engine ---------------------------------------------------------------------------------------


def open_stored_states(
    folder: str | Path, parts: dict[str, TokenRows], target: Target, *, margin: int, context_layers: Sequence[int] = ()
) -> dict[str, RowsWithStates]:
    """The rows of each part with their states from a folder's files.

    Args:
        folder: files with the layers of the drafter's context and the last one.
        parts: training rows and others, by name.
        target: the target; its final norm is applied, and one row of each part is compared with its forward.
        margin: kept positions before the first trained token.
        context_layers: layers of the drafter's context.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: the folder holds no such file; a file is damaged, of another format, of other layers, or still being
            written; a row has no file; or the states are another model's.
    """
    longest = max(int(rows.length_X.max()) for rows in parts.values())  # training cuts longer texts
    files = _index(folder, target, context_layers, longest)
    found = {}
    for name, rows in parts.items():
        paths = [_file_of(rows.row(index), files) for index in range(len(rows))]
        if None in paths:
            index = paths.index(None)
            raise ValueError(
                f"{FLAG}: {paths.count(None)} of {len(rows)} rows have no stored states, such as row {index} "
                f"({int(rows.length_X[index])} tokens): another chat template, another tokenizer, or a text that was "
                "not stored"
            )
        found[name] = RowsWithStates(
            rows.dataset, first_kept(rows, margin), rows.everything, files=[path for path in paths if path is not None],
            first_X=[0] * len(paths), dtype=target.dtype, has_context=bool(context_layers),
            norm=target.runtime.final_norm(),
        )  # fmt: skip
        _check_model(found[name], rows, target, context_layers)
    return found


def _index(folder: str | Path, target: Target, context_layers: Sequence[int], longest: int) -> dict[bytes, Path]:
    """The files of a folder by a hash of their first ``longest`` tokens; errors as of :func:`open_stored_states`."""
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
def _check_model(stored: RowsWithStates, rows: TokenRows, target: Target, context_layers: Sequence[int]) -> None:
    """ValueError if final states or context of the shortest row are far from those of a forward of the target."""
    index = int(rows.length_X.argmin())
    row, (hidden_TD, context_TC) = rows.row(index), stored.states(index)
    start = len(row.token_T) - len(hidden_TD)
    used = slice(start, max(start + 1, _num_needed(row)))
    output = target.forward(row.token_T[None].to(target.device), context_layers=context_layers)
    pairs = (("final states", output.hidden_BTD, hidden_TD), ("context layers", output.context_BTC, context_TC))
    for what, mine_BTC, theirs_TC in pairs:
        if theirs_TC is None:
            continue
        mine_TC = mine_BTC[0, used].float().cpu()
        far = float((theirs_TC[: len(mine_TC)].float() - mine_TC).norm() / mine_TC.norm().clamp_min(1e-12))
        if not far <= _MOST_DIFFERENT:
            raise ValueError(
                f"{stored.files[index]}: the {what} differ from those of target {target.name!r} by {far:.0%}: another "
                "model, other layers, or states that are already behind the final norm"
            )


def _num_needed(row: TokenRow) -> int:
    """Positions whose states are used: all before the last trained token. Later states predict no trained token."""
    trained = row.loss_mask_T.nonzero()
    return int(trained[-1]) if len(trained) else 1


def _digest(token_T: Tensor, key: str = "") -> bytes:
    data = key.encode() + token_T.to(torch.int64).contiguous().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()
