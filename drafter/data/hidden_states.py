"""The target's hidden states on disk: a cache that training fills, or `drafter distill --states` while it answers.

One safetensors file holds one text: ``hidden_states`` [T, A, D], in bfloat16, the layers of the context and then the
final states, and ``token_ids`` [T]; both from shortly before the first token that is trained on, as no drafter starts
earlier. A hash of the row and of everything that the states depend on is the file's name. So an interrupted run
continues, and several data sets, targets and drafters share a folder.

Shapes: X rows · B rows of a batch · T tokens · A stored layers · D hidden size · C context size.
"""

import hashlib
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from drafter.data.loader import plan_in_order
from drafter.data.rows import ChatBatch, TokenRows, stack
from drafter.targets.target import Target
from drafter.utils.io import first_line, locked

_STATES, _TOKENS = "hidden_states", "token_ids"
_SPARE_BYTES = 4096  # of a file of the cache: its header, and the rest of its last block on the disk
_MARGIN = 17  # positions before an answer that are kept at least: enough for a drafter that unrolls 16 tokens
_VERSION = 5  # raise the number when the content of the cache's files changes


@dataclass(frozen=True, eq=False, kw_only=True)
class RowsWithStates(TokenRows):
    """Rows whose states are on the disk. They begin where :func:`first_kept` says.

    Attributes:
        files, stored_X: the file of each row, and the first position stored in it.
        dtype: the target's dtype.
        has_context: the layers in front of the last one are the drafter's context.
    """

    files: list[Path]
    stored_X: Tensor
    dtype: torch.dtype
    has_context: bool

    def batch(self, rows: Sequence[int]) -> ChatBatch:
        """The batch of these rows, with their hidden states and their context, if there is one."""
        hiddens, contexts = zip(*map(self.states, rows), strict=True)
        context_BTC = stack(contexts) if self.has_context else None
        return super().batch(rows)._replace(hidden_BTD=stack(hiddens), context_BTC=context_BTC)

    def states(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Final states and context of a row's kept positions, in the target's dtype: [T, D], and [T, C] or None.

        The last position may have no state: it is zero, and trains nothing. ValueError for a damaged file, of other
        tokens, or with numbers that are not finite.
        """
        path, token_T = self.files[index], self.row(index)[0]
        assert self.start_X is not None
        start = int(self.start_X[index] - self.stored_X[index])
        kept = slice(start, start + len(token_T))
        try:
            with safe_open(path, framework="pt") as file:
                stored_T, state_TAD = (file.get_slice(name)[kept] for name in (_TOKENS, _STATES))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read ({first_line(error)}): delete it, and make it again") from error
        num = len(state_TAD)
        if num < len(token_T) - 1 or not torch.equal(stored_T, token_T[:num]) or not state_TAD.isfinite().all():
            raise ValueError(f"{path} holds other tokens, or numbers that are not finite: delete it, and make it again")
        state_TAD = state_TAD.to(self.dtype)
        padding = (0, 0, 0, len(token_T) - num)
        context_TC = pad(state_TAD[:, :-1].flatten(1), padding) if self.has_context else None
        return pad(state_TAD[:, -1], padding), context_TC


def first_kept(rows: TokenRows, margin: int) -> Tensor:
    """The position ``margin`` before the first trained token of each row, or its beginning [X].

    A drafter that unrolls L tokens starts at most L + 1 positions before that token.
    """
    firsts = [int(rows.row(index)[1].to(torch.uint8).argmax()) for index in range(len(rows))]
    return (torch.tensor(firsts, dtype=torch.int64) - margin).clamp(min=0)


@torch.no_grad()
def cache_states(
    folder: str | Path,
    rows: TokenRows,
    target: Target,
    margin: int,
    context_layers: Sequence[int] = (),
    batch_tokens: int = 8192,
) -> RowsWithStates:
    """The rows with their states, which are computed first where they are missing, after a line about their size.

    A second process waits and finds the states complete. OSError where the disk has no room.
    """
    from tqdm import tqdm

    folder = Path(folder).expanduser()
    start_X, stored_X = (first_kept(rows, each) for each in (margin, max(margin, _MARGIN)))
    starts = stored_X.tolist()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".lock").touch()
    with locked(folder / ".lock", seconds=math.inf):
        names = (_name(rows.row(index)[0], start, target, context_layers) for index, start in enumerate(starts))
        files = [folder / name for name in names]
        missing = list({file: index for index, file in enumerate(files) if not file.is_file()}.values())
        if missing:
            _check_room(folder, target, context_layers, (rows.length_X - stored_X)[missing].tolist(), is_most=False)
        length_X = rows.length_X[missing]
        with tqdm(total=int(length_X.sum()), desc="hidden states", unit="token", unit_scale=True, disable=None) as bar:
            for batch in plan_in_order(length_X, batch_tokens=batch_tokens):
                indices = [missing[place] for place in batch]
                tokens = [token_T for token_T, _ in rows.take(indices)]
                token_BT = pad_sequence(tokens, batch_first=True).to(target.device)
                output = target.forward(token_BT, context_layers=context_layers)
                layers = [output.context_BTC, output.hidden_BTD] if context_layers else [output.hidden_BTD]
                state_BTAD = torch.cat(layers, dim=-1).to(torch.bfloat16).cpu().unflatten(-1, (-1, target.hidden_size))
                for state_TAD, index, token_T in zip(state_BTAD, indices, tokens, strict=True):
                    kept = slice(starts[index], len(token_T))
                    _write(files[index], state_TAD[kept], token_T[kept])
                bar.update(sum(map(len, tokens)))
    return RowsWithStates(
        rows.dataset, start_X, rows.everything, files=files, stored_X=stored_X, dtype=target.dtype,
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
        _check_room(self.folder, self.target, self.context_layers, [longest + _MARGIN] * num_answers, is_most=True)

    def write(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], states: Callable[[int], Tensor]) -> None:
        """Store ``states(start)``: from position ``start`` to the token before the last one, which predicts nothing."""
        token_T, start = torch.tensor([*prompt_ids, *answer_ids]), max(0, len(prompt_ids) - _MARGIN)
        name = _name(token_T, start, self.target, self.context_layers)
        _write(self.folder / name, states(start), token_T[start:-1])


def _name(token_T: Tensor, start: int, target: Target, context_layers: Sequence[int]) -> str:
    """A file's name: a hash of the text, the first stored position, and all that the states depend on."""
    parts = target.fingerprint, target.traits.number_format, target.hidden_size, tuple(context_layers), start, _VERSION
    data = repr(parts).encode() + token_T.to(torch.int64).contiguous().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest() + ".safetensors"


def _write(path: Path, state_TAD: Tensor, token_T: Tensor) -> None:
    new = path.with_suffix(f".{os.getpid()}.tmp")  # whole, or not there
    save_file({_STATES: state_TAD.contiguous(), _TOKENS: token_T.contiguous()}, new)
    new.replace(path)


def _check_room(
    folder: Path, target: Target, context_layers: Sequence[int], positions: Sequence[int], *, is_most: bool
) -> None:
    """Say how large files of so many positions each are; OSError where they do not fit, unless ``is_most`` of them."""
    num_bytes = sum(positions) * 2 * target.hidden_size * (1 + len(context_layers))
    needed, free = num_bytes + len(positions) * _SPARE_BYTES, shutil.disk_usage(folder).free
    size = f"{needed / 1e9:.2f} GB in {folder} ({free / 1e9:.2f} GB free)"
    said = f"hidden states of {'at most ' if is_most else ''}{sum(positions):,} positions: {size}"
    print(said, file=sys.stderr)
    if free < needed and not is_most:
        raise OSError(f"{said}: make room, name a folder on another disk, or train without --data.cache_hidden_states")
