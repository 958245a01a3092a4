"""Plain decoding of targets that trees cannot use: the model's own cache for every row, one row a forward.

A recurrent layer keeps one state of the whole text. Draft nodes with one parent would need copies of the state, and
rejected tokens cannot be taken out of a state. So such a target decodes one token a step, with the cache object that
its own forward makes. A prompt runs in one forward: not every model continues a state by several tokens.

Shapes: B rows · T tokens of a forward · D hidden size.
"""

from collections.abc import Iterator
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafter.targets.cache import CacheShape, SlotCache

# What models call their cache, as an argument and in their output.
_NAMES = ("past_key_values", "cache_params", "state", "mems")


class StateShape(NamedTuple):
    """What a model's own cache stores for a text."""

    fixed_bytes: int
    token_bytes: int

    def num_bytes(self, num_rows: int, num_slots: int, dtype: torch.dtype) -> int:
        """Bytes of ``num_rows`` texts of ``num_slots`` tokens."""
        return num_rows * (self.fixed_bytes + num_slots * self.token_bytes)


class _Text(NamedTuple):
    """A row's text: number of tokens, the model's cache after them, hidden states [1, T, D] of the last forward."""

    num_tokens: int
    state: dict[str, Any]
    hidden_1TD: Tensor


class OwnCache(SlotCache):
    """The model's own cache for each of ``num_rows`` rows, planned as a slot cache is; it stores no slots itself."""

    def __init__(self, num_rows: int, num_slots: int) -> None:
        super().__init__(CacheShape(0, 0, 0, 0), num_rows, num_slots, dtype=torch.float32, device="cpu")
        self._texts: list[_Text | None] = [None] * num_rows

    def copy_row(self, source: int, destination: int, num_slots: int) -> None:
        """Move a row's text to another row (rows close up)."""
        self._texts[destination], self._texts[source] = self._texts[source], None

    def forward(self, decoder: PreTrainedModel, token_BT: Tensor) -> Tensor:
        """Run each planned row on its own; the final hidden states [B, T, D], zeros at padding.

        A row whose tokens have run already, in a step that failed at a later row, gets its hidden states again.
        """
        found: dict[int, Tensor] = {}
        for index, slots in enumerate(self.planned_slots.tolist()):
            size = sum(slot != self.spare_slot for slot in slots)
            if size == 0:
                continue
            row, end = self.rows.start + index, slots[0] + size
            text = self._texts[row] if slots[0] > 0 else None
            if text is None or text.num_tokens != end:
                assert slots[0] == (0 if text is None else text.num_tokens), (slots, text and text.num_tokens)
                text = self._texts[row] = _run_on(decoder, token_BT[index : index + 1, :size], text)
            found[index] = text.hidden_1TD
        some_1TD = next(iter(found.values()))
        hidden_BTD = some_1TD.new_zeros(*token_BT.shape, some_1TD.shape[-1])
        for index, hidden_1TD in found.items():
            hidden_BTD[index, : hidden_1TD.shape[1]] = hidden_1TD[0]
        return hidden_BTD


def _run_on(decoder: PreTrainedModel, token_1T: Tensor, text: _Text | None) -> _Text:
    """The text with further tokens behind it.

    Raises:
        ValueError: the model hands out no cache.
    """
    start = 0 if text is None else text.num_tokens
    end = start + token_1T.shape[1]
    arguments: dict[str, Any] = {} if text is None else dict(text.state)
    if "position_ids" in signature(decoder.forward).parameters:  # not every model counts on from its cache
        arguments["position_ids"] = torch.arange(start, end, device=token_1T.device)[None]
    output = decoder(input_ids=token_1T, use_cache=True, return_dict=True, **arguments)
    state = {name: output[name] for name in _NAMES if output.get(name) is not None}
    if not state:
        raise ValueError("its forward returns no cache")
    return _Text(end, state, output.last_hidden_state)


@torch.no_grad()
def probe_own_cache(decoder: PreTrainedModel, vocab_size: int, name: str) -> StateShape:
    """Compare a text token by token with the same text in one forward, and count the bytes of the cache.

    Raises:
        ValueError: the model gives other hidden states token by token.
    """
    device = next(decoder.parameters()).device
    token_1T = (torch.arange(1, 11, device=device)[None] * 7919) % vocab_size
    whole_1TD = decoder(input_ids=token_1T, use_cache=False, return_dict=True).last_hidden_state.float()
    cache, steps, sizes = OwnCache(1, 32), [], []
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, 8), (8, 9), (9, 10)):
        cache.plan(torch.arange(start, stop)[None])
        steps.append(cache.forward(decoder, token_1T[:, start:stop]).float())
        text = cache._texts[0]
        assert text is not None
        sizes.append(sum(tensor.nbytes for tensor in _tensors(text.state)))
    distance = (torch.cat(steps, dim=1) - whole_1TD).norm().item()
    rounding = 16 * torch.finfo(next(decoder.parameters()).dtype).eps
    if not distance <= (0.01 + rounding) * whole_1TD.norm().item():
        raise ValueError(f"target {name!r} gives other hidden states token by token than in one forward")
    growth = max(0, sizes[-1] - sizes[-2])
    return StateShape(max(0, sizes[-1] - 10 * growth), growth)


def _tensors(thing: Any) -> Iterator[Tensor]:
    """The tensors of a cache, wherever its class keeps them."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for part in thing.values():
            yield from _tensors(part)
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from _tensors(part)
    elif hasattr(thing, "__dict__"):
        yield from _tensors(vars(thing))
