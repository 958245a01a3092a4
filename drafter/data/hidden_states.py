"""The target's hidden states of a data set on disk, so that several epochs cost one forward pass.

The states of a row are bfloat16 and begin shortly before the first token that is trained on, because no drafter starts
from earlier positions. A shard is named by a hash of its rows: an interrupted run continues with the next shard, data
that grow at their end keep their shards, and several data sets share a folder. Each shard holds the token ids of its
states; every read compares them.

Shapes: N positions of a shard · T positions of a row · D target hidden size · C context size.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafter.data.batch import plan_in_order
from drafter.data.store import TokenStore
from drafter.targets.target import Target
from drafter.utils.io import replacing, write_atomic

_SHARD_BYTES = 1 << 26
_SPARE = 1.02  # headers, and the overhead of the file system


@dataclass(frozen=True)
class StateSpec:
    """Properties that all shards of a folder share."""

    target_fingerprint: str
    dtype: str
    hidden_size: int
    context_size: int
    context_layers: tuple[int, ...]
    margin: int

    @property
    def bytes_per_position(self) -> int:
        return 2 * (self.hidden_size + self.context_size) + 4


class States(NamedTuple):
    """The states of one row in the target's dtype; ``context_TC`` is None if the context is the final hidden state."""

    hidden_TD: Tensor
    context_TC: Tensor | None


class Crop(NamedTuple):
    """Rows without the positions that no drafter starts from, and the start of each in the whole row."""

    store: TokenStore
    starts: list[int]
    margin: int


def crop_to_answers(store: TokenStore, margin: int) -> Crop:
    """Drop the positions more than ``margin`` before the first trained token of each row.

    A drafter that unrolls K tokens starts at most K + 1 positions before that token.
    """
    starts = []
    for row in range(len(store)):
        trained = store.row(row)[1].nonzero()
        starts.append(max(0, int(trained[0]) - margin) if len(trained) else 0)
    offset_R = store.offset_R1[:-1] + torch.tensor(starts, dtype=torch.int64)
    keep_N = torch.ones(len(store.token_N), dtype=torch.bool)
    for row, start in enumerate(offset_R.tolist()):
        keep_N[int(store.offset_R1[row]) : start] = False
    lengths = store.offset_R1[1:] - offset_R
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return Crop(TokenStore(store.token_N[keep_N], store.loss_mask_N[keep_N], offsets), starts, margin)


def describe_cache(target: Target, margin: int, context_layers: Sequence[int]) -> StateSpec:
    """The spec of a cache of this target's states."""
    return StateSpec(
        target_fingerprint=target.fingerprint,
        dtype=str(target.dtype).removeprefix("torch."),
        hidden_size=target.hidden_size,
        context_size=target.hidden_size * len(context_layers),
        context_layers=tuple(context_layers),
        margin=margin,
    )


def build_states(
    folder: str | Path,
    store: TokenStore,
    target: Target,
    *,
    margin: int,
    context_layers: Sequence[int] = (),
    batch_tokens: int = 8192,
    progress: bool = True,
) -> "HiddenStates":
    """A reader of the states of all rows, cut by :func:`crop_to_answers`. Missing states are computed first.

    The size is printed before anything is written. A second process waits and finds the cache complete. A cache with
    further layers or a larger margin is used as well, so that one cache serves drafters of different shapes.

    Raises:
        OSError: the disk has no room for the cache.
        ValueError: the folder holds the states of another target.
    """
    from filelock import FileLock
    from tqdm import tqdm

    folder = Path(folder).expanduser()
    spec = describe_cache(target, margin, context_layers)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if (richer := _richer(folder, spec)) is not None:
            spec = describe_cache(target, richer["margin"], richer["context_layers"])
        crop = crop_to_answers(store, spec.margin)
        _check_spec(folder, spec)
        shards = [(rows, _shard_path(folder, store, rows)) for rows in _plan_shards(crop.store, spec)]
        missing = [(rows, path) for rows, path in shards if not path.is_file()]
        if missing:
            _check_room(folder, spec, sum(int(crop.store.length_R[list(rows)].sum()) for rows, _ in missing))
            write_atomic(folder / "cache.json", json.dumps(asdict(spec), indent=2) + "\n")
        total = sum(int(store.length_R[list(rows)].sum()) for rows, _ in missing)
        with tqdm(
            total=total, desc="hidden states", unit="token", unit_scale=True, disable=not progress, file=sys.stderr
        ) as bar:
            for rows, path in missing:
                _write_shard(path, _compute(store, crop, rows, target, spec, batch_tokens, bar))
    return HiddenStates(shards, crop, spec, with_context=bool(context_layers))


class HiddenStates:
    """Reads a cache; every read is checked against the token ids that the caller trains on.

    Args:
        shards: rows and file of each, in the order of the rows.
        crop: the crop of all rows.
        spec: the spec of the cache.
        with_context: return the states of the fused layers, if the cache has any.

    Attributes:
        store: the rows, cut to the positions that have states.
    """

    def __init__(
        self, shards: Sequence[tuple[range, Path]], crop: Crop, spec: StateSpec, *, with_context: bool = True
    ) -> None:
        self._with_context = with_context and spec.context_size > 0
        self.store = crop.store
        self._dtype = getattr(torch, spec.dtype)
        self._place: list[tuple[Path, int]] = []  # (file, first position in the file) of each row
        for rows, path in shards:
            base = int(crop.store.offset_R1[rows.start])
            self._place += [(path, int(crop.store.offset_R1[row]) - base) for row in rows]
        self._open: dict[Path, Any] = {}  # handles of memory maps; they go with this reader

    def row(self, row: int) -> States:
        """The states of a row's kept positions."""
        path, start = self._place[row]
        token_T, _ = self.store.row(row)
        file = self._shard(path)
        span = slice(start, start + len(token_T))
        if not torch.equal(file.get_slice("token_N")[span], token_T):
            raise ValueError(
                f"{path}: the states belong to other tokens than row {row}: delete the file, and it is made again"
            )
        hidden_TD = file.get_slice("hidden_ND")[span].to(self._dtype)
        return States(hidden_TD, file.get_slice("context_NC")[span].to(self._dtype) if self._with_context else None)

    def _shard(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged ({error}); delete it, and it is made again") from error
        return self._open[path]


@torch.no_grad()
def _compute(
    store: TokenStore, crop: Crop, rows: range, target: Target, spec: StateSpec, batch_tokens: int, bar: Any
) -> dict[str, Tensor]:
    """The tensors of one shard. The target reads whole rows; the shard gets the positions of the crop."""
    base, end = int(crop.store.offset_R1[rows.start]), int(crop.store.offset_R1[rows.stop])
    hidden_ND = torch.empty(end - base, spec.hidden_size, dtype=torch.bfloat16)
    context_NC = torch.empty(end - base, spec.context_size, dtype=torch.bfloat16)
    length_R = store.length_R[rows.start : rows.stop]
    for batch in plan_in_order(length_R, batch_tokens=batch_tokens):
        tokens = [store.row(rows.start + index)[0].long() for index in batch]
        token_BT = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(target.device)
        output = target.forward(token_BT, context_layers=spec.context_layers)
        for line, index in enumerate(batch):
            row = rows.start + index
            kept = slice(crop.starts[row], len(tokens[line]))
            place = slice(int(crop.store.offset_R1[row]) - base, int(crop.store.offset_R1[row + 1]) - base)
            hidden_ND[place] = output.hidden_BTD[line, kept].to(torch.bfloat16).cpu()
            if spec.context_size:
                context_NC[place] = output.context_BTC[line, kept].to(torch.bfloat16).cpu()
            bar.update(len(tokens[line]))
    tensors = {"hidden_ND": hidden_ND, "token_N": crop.store.token_N[base:end].clone()}
    return tensors | ({"context_NC": context_NC} if spec.context_size else {})


def _plan_shards(cropped: TokenStore, spec: StateSpec) -> list[range]:
    """Ranges of rows of about 64 MiB, planned from the first row on, so that added rows change no earlier range."""
    limit = max(1, _SHARD_BYTES // spec.bytes_per_position)
    offsets = cropped.offset_R1.tolist()
    shards, start = [], 0
    for row in range(1, len(cropped) + 1):
        if row == len(cropped) or offsets[row + 1] - offsets[start] > limit:
            shards.append(range(start, row))
            start = row
    return shards


def _shard_path(folder: Path, store: TokenStore, rows: range) -> Path:
    """The path, a hash of the uncut rows: a state depends on all text before its position, cut text included."""
    return folder / f"states-{store.select(rows).digest()}.safetensors"


def _check_spec(folder: Path, spec: StateSpec) -> None:
    """ValueError if the folder holds a cache of another spec."""
    path = folder / "cache.json"
    if not path.is_file():
        if any(folder.glob("states-*")):
            raise ValueError(f"{folder} holds states but no cache.json: delete the folder")
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: delete the folder") from error
    wanted = json.loads(json.dumps(asdict(spec)))
    if found.get("target_fingerprint") != wanted["target_fingerprint"]:
        raise ValueError(f"{folder} holds the hidden states of another target: name another folder, or delete it")
    for name, value in wanted.items():
        if found.get(name) != value:
            raise ValueError(f"{folder} was made with {name} {found.get(name)}, now it is {value}: name another folder")


def _richer(folder: Path, spec: StateSpec) -> dict[str, Any] | None:
    """The spec of the folder's cache, if the cache holds at least the states of ``spec``."""
    try:
        found = json.loads((folder / "cache.json").read_text(encoding="utf-8"))
        margin, layers = int(found["margin"]), tuple(found["context_layers"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing or damaged: _check_spec reports the error
    is_richer = margin >= spec.margin and (layers == spec.context_layers or not spec.context_layers)
    return found if is_richer else None


def _check_room(folder: Path, spec: StateSpec, num_positions: int) -> None:
    needed = int(num_positions * spec.bytes_per_position * _SPARE)
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


def _write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        with replacing(path) as new:
            save_file(tensors, new)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written ({error}): is the disk full?") from error
