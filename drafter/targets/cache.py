"""SlotCache: static keys and values, every row with its own length, written by slot.

Shapes: B rows · H key/value heads · S slots of a row · K head dimension · T tokens of one forward · L moved slots.

A Hugging Face model writes through :meth:`SlotCache.update` without knowing any of this: before the forward the caller
says with :meth:`SlotCache.plan` which rows run, into which slots their tokens go, and how many slots are visible.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from drafter.kernels.slot_ops import move_slots, write_slots


class CacheShape(NamedTuple):
    """What a target's attention stores for one token: found by a probe, not read from a configuration."""

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int

    def num_bytes(self, num_rows: int, num_slots: int, dtype: torch.dtype) -> int:
        """Bytes of a cache of ``num_rows`` rows and ``num_slots`` usable slots (each row gets a spare one)."""
        per_slot = self.num_layers * self.num_heads * (self.key_dim + self.value_dim) * dtype.itemsize
        return per_slot * num_rows * (num_slots + 1)


class SlotCache(Cache):
    """Static K/V of ``num_rows`` rows and ``num_slots`` slots; one spare slot behind each row takes padding.

    One tensor holds the keys of all layers and one the values, so that moving accepted slots is one gather and one
    scatter for the whole model, however many layers it has.

    Args:
        shape: what a token stores.
        num_rows, num_slots: B, S.
        dtype: of what is stored.
        device: where.
        read_dtype: what attention gets to read, and so computes in (None: ``dtype``); a copy of a layer's visible slots
            at a time.

    Attributes:
        keys: [layers, B, H, S + 1, K].
        values: [layers, B, H, S + 1, K].
        num_rows: B.
        num_slots: S.
        spare_slot: index of the slot that takes the writes of padding; never visible.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_rows: int,
        num_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        read_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(layers=[SlotLayer(num_slots) for _ in range(shape.num_layers)])
        self.num_rows = num_rows
        self.num_slots = num_slots
        self.spare_slot = num_slots
        lead = (shape.num_layers, num_rows, shape.num_heads, num_slots + 1)
        # Zeros, not empty: a slot that no one has written is masked, but 0 * NaN would still be NaN.
        self.keys = torch.zeros(*lead, shape.key_dim, dtype=dtype, device=device)
        self.values = torch.zeros(*lead, shape.value_dim, dtype=dtype, device=device)
        self._read_dtype = read_dtype or dtype
        self._rows = slice(0, num_rows)
        self._window = num_slots
        self._slot_BT = torch.zeros(0, 0, dtype=torch.int64)
        self._row_B1 = torch.arange(num_rows, device=device)[:, None]

    def plan(self, slot_BT: Tensor, *, first_row: int = 0, num_visible: int | None = None) -> None:
        """Say where the next forward writes and what it sees.

        Args:
            slot_BT: slot of every token, int64 [B, T]; B rows from ``first_row`` on run in this forward.
            first_row: first row of the cache that takes part.
            num_visible: slots that attention looks at (the mask's last dimension); all of them when None.
        """
        num_rows = slot_BT.shape[0]
        assert first_row + num_rows <= self.num_rows, (first_row, num_rows, self.num_rows)
        self._rows = slice(first_row, first_row + num_rows)
        self._slot_BT = slot_BT
        self._window = self.num_slots if num_visible is None else num_visible

    @property
    def rows(self) -> slice:
        """Rows that take part in the next forward."""
        return self._rows

    @property
    def device(self) -> torch.device:
        """Where keys and values are."""
        return self.keys.device

    @property
    def window(self) -> int:
        """Slots that attention looks at in the next forward."""
        return self._window

    @property
    def is_read_as_stored(self) -> bool:
        """Whether attention reads keys and values in the dtype they are stored in."""
        return self._read_dtype == self.keys.dtype

    @property
    def planned_slots(self) -> Tensor:
        """Slot of every token of the next forward, int64 [B, T]."""
        return self._slot_BT

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Scatter one layer's new keys and values to their planned slots (called by the model's attention).

        Args:
            key_states, value_states: [B, H, T, K].
            layer_idx: the layer.

        Returns:
            The visible keys and values of the rows that run, [B, H, S, K]; views, but for another ``read_dtype``.
        """
        row_B1 = self._row_B1[self._rows]
        write_slots(self.keys, self.values, layer_idx, row_B1, self._slot_BT, key_states, value_states)
        return (
            self.keys[layer_idx, self._rows, :, : self._window].to(self._read_dtype),
            self.values[layer_idx, self._rows, :, : self._window].to(self._read_dtype),
        )

    def move_slots(self, source_BL: Tensor, destination_BL: Tensor) -> None:
        """Copy slots within rows 0 .. B-1, all layers at once: slot source[b, l] becomes slot destination[b, l].

        All sources are read before anything is written, so the two may overlap. A slot that is to stay is moved onto
        itself, or from and to the spare slot.
        """
        move_slots(self.keys, self.values, self._row_B1[: source_BL.shape[0]], source_BL, destination_BL)

    def copy_row(self, source: int, destination: int, num_slots: int) -> None:
        """Copy the first ``num_slots`` slots of a row over another row's (rows close up, a shared prefix)."""
        for store in (self.keys, self.values):
            store[:, destination, :, :num_slots] = store[:, source, :, :num_slots]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused by models that get positions and a 4-D mask; rows have their own lengths, known to the caller."""
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Slots of a row."""
        return self.num_slots

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Visible slots and offset, for the rare model that asks although it is given a ready mask."""
        return self._window, 0


class SplitSlotCache(SlotCache):
    """A slot cache whose layers lie on several devices: one cache for each run of layers on a device.

    Args:
        shape, num_rows, num_slots, dtype, read_dtype: as of :class:`SlotCache`.
        devices: of every layer.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_rows: int,
        num_slots: int,
        *,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
        read_dtype: torch.dtype | None = None,
    ) -> None:
        assert len(devices) == shape.num_layers, (len(devices), shape)
        Cache.__init__(self, layers=[SlotLayer(num_slots) for _ in devices])
        self.num_rows, self.num_slots, self.spare_slot = num_rows, num_slots, num_slots
        self._parts: list[SlotCache] = []
        self._places: list[tuple[SlotCache, int]] = []  # of each layer: its cache, and its number there
        for device, run in groupby(devices):
            num_layers = len(list(run))
            part = SlotCache(
                shape._replace(num_layers=num_layers), num_rows, num_slots, dtype=dtype, device=device,
                read_dtype=read_dtype,
            )  # fmt: skip
            self._parts.append(part)
            self._places += [(part, index) for index in range(num_layers)]

    def plan(self, slot_BT: Tensor, *, first_row: int = 0, num_visible: int | None = None) -> None:
        for part in self._parts:
            part.plan(slot_BT.to(part.device), first_row=first_row, num_visible=num_visible)
        self._rows, self._slot_BT, self._window = self._parts[0].rows, slot_BT, self._parts[0].window

    @property
    def is_read_as_stored(self) -> bool:
        return self._parts[0].is_read_as_stored

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        part, index = self._places[layer_idx]
        return part.update(key_states, value_states, index)

    def move_slots(self, source_BL: Tensor, destination_BL: Tensor) -> None:
        for part in self._parts:
            part.move_slots(source_BL.to(part.device), destination_BL.to(part.device))

    def copy_row(self, source: int, destination: int, num_slots: int) -> None:
        for part in self._parts:
            part.copy_row(source, destination, num_slots)


class SlotLayer(CacheLayerMixin):
    """What a model may ask of one layer; keys and values themselves go through the cache, which holds all layers."""

    is_compileable = True

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self._num_slots = num_slots
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the storage exists from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("a slot layer is written through its SlotCache")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._num_slots, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._num_slots
