"""SlotCache: static keys and values, every row with its own length, written by slot.

Shapes: B rows · H key/value heads · S slots of a row · K head dimension · T tokens of one forward · L moved slots.

A Hugging Face model writes through :meth:`SlotCache.update`; before the forward the caller says with
:meth:`SlotCache.prepare` which rows run, into which slots their tokens go, and how many slots are visible.
"""

import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticLayer


class LayerShape(NamedTuple):
    num_heads: int
    key_dim: int
    value_dim: int


class CacheShape(NamedTuple):
    layers: tuple[LayerShape, ...]

    @property
    def is_uniform(self) -> bool:
        return len(set(self.layers)) == 1

    def num_bytes(self, num_rows: int, num_slots: int, dtype: torch.dtype) -> int:
        """Bytes of a cache of ``num_rows`` rows and ``num_slots`` usable slots (each row gets a spare one)."""
        per_slot = sum(layer.num_heads * (layer.key_dim + layer.value_dim) for layer in self.layers)
        return per_slot * num_rows * (num_slots + 1) * dtype.itemsize


class _Store:
    """Keys and values [layers, B, H, S + 1, K] of all layers of one shape on one device."""

    def __init__(
        self, shape: LayerShape, num_layers: int, num_rows: int, num_slots: int, dtype: torch.dtype, device: Any
    ) -> None:
        lead = (num_layers, num_rows, shape.num_heads, num_slots + 1)
        # Zeros, not empty: a slot that no one has written is masked, but 0 * NaN would still be NaN.
        with torch.inference_mode(False):  # code is compiled for tensors of one kind
            self.keys = torch.zeros(*lead, shape.key_dim, dtype=dtype, device=device)
            self.values = torch.zeros(*lead, shape.value_dim, dtype=dtype, device=device)
        self.row_B1 = torch.arange(num_rows, device=device)[:, None]
        self.slot_BT = torch.zeros(0, 0, dtype=torch.int64)


def cache_keyword(decoder: nn.Module) -> str:
    """Name of the argument by which the decoder's forward takes a cache; transformers 5.24 renamed the argument."""
    takes = (inspect.signature(type(part).forward).parameters for part in decoder.modules())  # a wrapper takes anything
    return next((name for names in takes for name in ("cache", "past_key_values") if name in names), "cache")


class SlotCache(Cache):
    """Static K/V of ``num_rows`` rows and ``num_slots`` slots on a device, or on each layer's; a spare slot behind each
    row, never visible, takes padding. ``rows`` and ``num_visible`` are the rows and visible slots of the next forward.

    All layers of one shape and device share a tensor, so that moving accepted slots is mostly one gather and one
    scatter.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_rows: int,
        num_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str | Sequence[torch.device],
    ) -> None:
        layers = shape.layers
        super().__init__(layers=[StaticLayer(num_slots) for _ in layers])  # what a model may ask; these store nothing
        self.num_rows, self.num_slots, self.spare_slot = num_rows, num_slots, num_slots
        places = [device] * len(layers) if isinstance(device, torch.device | str) else list(device)
        kinds = list(zip(layers, places, strict=True))
        self._stores = {
            kind: _Store(kind[0], number, num_rows, num_slots, dtype, kind[1])
            for kind, number in Counter(kinds).items()
        }
        # Of each layer: its store, and its number there.
        self._places = [(self._stores[kind], kinds[:layer].count(kind)) for layer, kind in enumerate(kinds)]
        self.rows = slice(0, num_rows)
        self.num_visible = num_slots

    def prepare(self, slot_BT: Tensor, *, first_row: int = 0, num_visible: int | None = None) -> None:
        """Say where the rows from ``first_row`` on write in the next forward, and how many slots it sees; None: all."""
        num_rows = slot_BT.shape[0]
        assert first_row + num_rows <= self.num_rows, (first_row, num_rows, self.num_rows)
        self.rows = slice(first_row, first_row + num_rows)
        for store in self._stores.values():
            store.slot_BT = slot_BT.to(store.keys.device)
        self.num_visible = self.num_slots if num_visible is None else num_visible

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Scatter a layer's keys and values [B, H, T, K] to their slots; views of the visible ones [B, H, S, K]."""
        row_B1, slot_BT = self._places[layer_idx][0].row_B1[self.rows], self._places[layer_idx][0].slot_BT
        keys, values = self.layer(layer_idx)
        for kept, new in ((keys, key_states), (values, value_states)):
            # A masked slot has weight 0 in attention, and 0 * NaN is NaN: an overflow at a drafted token, or in an
            # earlier request, must not reach other tokens.
            # Indices around a slice put the indexed dimensions first: the values go in as [B, T, H, K].
            kept[row_B1, :, slot_BT] = new.transpose(1, 2).nan_to_num(0.0, 0.0, 0.0)
        return keys[self.rows, :, : self.num_visible], values[self.rows, :, : self.num_visible]

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer: all rows and slots, the spare ones included [B, H, S + 1, K]."""
        store, layer = self._places[layer_idx]
        return store.keys[layer], store.values[layer]

    def move_slots(self, source_BL: Tensor, destination_BL: Tensor) -> None:
        """Copy slots within rows 0 .. B-1, all layers at once: slot source[b, l] becomes slot destination[b, l]. All
        sources are read before anything is written. A slot that is to stay is moved onto itself, or from and to the
        spare slot.
        """
        for store in self._stores.values():
            device, row_B1 = store.keys.device, store.row_B1[: len(source_BL)]
            from_BL, to_BL = source_BL.to(device), destination_BL.to(device)
            for kept in (store.keys, store.values):
                # The heads' slice stands between the two index tensors, so they lead: [B, L, layers, H, K].
                kept[:, row_B1, :, to_BL] = kept[:, row_B1, :, from_BL]

    def copy_row(self, source: int, destination: int, num_slots: int) -> None:
        """Copy the first ``num_slots`` slots of a row over another row's (rows close up, a shared prefix)."""
        for store in self._stores.values():
            for kept in (store.keys, store.values):
                kept[:, destination, :, :num_slots] = kept[:, source, :, :num_slots]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Visible slots and offset, for the rare model that asks although it is given a ready mask."""
        return self.num_visible, 0


class NothingKept(Cache):
    """The cache of a forward that keeps nothing.

    Without any cache, transformers asks the device whether positions are of one text each, and the host waits.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0
