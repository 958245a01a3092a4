"""The target's hidden states of the running rows, kept beside their keys and values.

Shapes: B rows · T tokens of a forward · L moved slots · S slots of a row · D hidden size · Y = D times the number of
kept layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafter.runtimes.base import RowCache, Slots, TargetOutput
from drafter.targets.target import Target


class CacheWithStates:
    """A cache that also keeps the hidden states of its slots in bfloat16: those of ``layers``, and the final ones."""

    def __init__(self, target: Target, inner: RowCache, layers: tuple[int, ...]) -> None:
        self._target, self._inner, self._layers = target, inner, layers
        self.num_rows, self.num_slots, self.spare_slot = inner.num_rows, inner.num_slots, inner.spare_slot
        shape = self.num_rows, self.spare_slot + 1, target.hidden_size * (len(layers) + 1)
        self._state_BSY = torch.zeros(shape, dtype=torch.bfloat16, device=target.device)
        self._row_B1 = torch.arange(self.num_rows, device=target.device)[:, None]

    def move_slots(self, source_BL: Tensor, destination_BL: Tensor) -> None:
        self._inner.move_slots(source_BL, destination_BL)
        row_B1 = self._row_B1[: len(source_BL)]
        self._state_BSY[row_B1, destination_BL] = self._state_BSY[row_B1, source_BL]

    def copy_row(self, source: int, destination: int, num_slots: int) -> None:
        self._inner.copy_row(source, destination, num_slots)
        self._state_BSY[destination, :num_slots] = self._state_BSY[source, :num_slots]

    def forward(self, token_BT: Tensor, slots: Slots, context_layers: Sequence[int]) -> TargetOutput:
        """The target's forward over this cache; the states of all tokens go to the tokens' slots."""
        layers = tuple(dict.fromkeys((*context_layers, *self._layers)))
        hidden_BTD, read_BTC = self._target.forward(token_BT, slots, self._inner, layers)
        state_of = dict(zip(layers, read_BTC.split(self._target.hidden_size, dim=-1), strict=bool(layers)))
        state_BTY = torch.cat([*(state_of[layer] for layer in self._layers), hidden_BTD], dim=-1)
        row_B1 = self._row_B1[slots.first_row : slots.first_row + len(token_BT)]
        self._state_BSY[row_B1, slots.slot_BT] = state_BTY.to(torch.bfloat16)
        context = [state_of[layer] for layer in context_layers]
        return TargetOutput(hidden_BTD, torch.cat(context, dim=-1) if context else hidden_BTD)

    def states(self, row: int, start: int, stop: int) -> Tensor:
        """The kept states of some positions of a row, [stop - start, layers + 1, D] on the CPU."""
        return self._state_BSY[row, start:stop].unflatten(-1, (-1, self._target.hidden_size)).cpu().clone()
