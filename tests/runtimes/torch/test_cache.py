"""SlotCache: writes by slot, what a forward sees, moved slots, copied rows; against loops over plain tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drafter.runtimes.torch.cache import CacheShape, LayerShape, SlotCache, cache_keyword

LAYERS, ROWS, SLOTS = 3, 4, 9
LAYER = LayerShape(num_heads=2, key_dim=4, value_dim=5)
SHAPE = CacheShape((LAYER,) * LAYERS)


def new_cache() -> SlotCache:
    """A cache of random numbers."""
    cache = SlotCache(SHAPE, ROWS, SLOTS, dtype=torch.float32, device="cpu")
    torch.manual_seed(0)
    for layer in range(LAYERS):
        for kept in cache.layer(layer):
            kept.normal_()
    return cache


def contents(cache: SlotCache) -> tuple[Tensor, Tensor]:
    """A copy of the keys and of the values of all layers, [layers, B, H, S + 1, K]."""
    keys, values = zip(*map(cache.layer, range(LAYERS)), strict=True)
    return torch.stack(keys), torch.stack(values)


def test_what_models_and_the_memory_check_ask() -> None:
    cache = new_cache()
    assert SHAPE.num_bytes(ROWS, SLOTS, torch.float32) == sum(kept.nbytes for kept in contents(cache))
    assert SHAPE.num_bytes(ROWS, SLOTS, torch.bfloat16) * 2 == SHAPE.num_bytes(ROWS, SLOTS, torch.float32)
    assert (cache.get_seq_length(), cache.get_max_length(), len(cache.layers)) == (0, SLOTS, LAYERS)
    cache.prepare(torch.zeros(1, 1, dtype=torch.int64), num_visible=4)
    assert cache.get_mask_sizes(1, 0) == (4, 0)
    with pytest.raises(AssertionError):
        cache.prepare(torch.zeros(2, 1, dtype=torch.int64), first_row=ROWS - 1)


@pytest.mark.parametrize(("first_row", "num_visible"), [(0, None), (2, 6)])
def test_update_agrees_with_a_loop(first_row: int, num_visible: int | None) -> None:
    cache = new_cache()
    wanted_keys, wanted_values = contents(cache)
    slot_BT = torch.tensor([[3, 4, 5], [0, 1, cache.spare_slot]])
    cache.prepare(slot_BT, first_row=first_row, num_visible=num_visible)
    for layer in range(LAYERS):
        keys, values = torch.randn(2, 2, 3, LAYER.key_dim), torch.randn(2, 2, 3, LAYER.value_dim)
        seen_keys, seen_values = cache.update(keys, values, layer)
        for row in range(2):
            for token, slot in enumerate(slot_BT[row].tolist()):
                wanted_keys[layer, first_row + row, :, slot] = keys[row, :, token]
                wanted_values[layer, first_row + row, :, slot] = values[row, :, token]
        window = SLOTS if num_visible is None else num_visible
        assert torch.equal(seen_keys, wanted_keys[layer, first_row : first_row + 2, :, :window])
        assert torch.equal(seen_values, wanted_values[layer, first_row : first_row + 2, :, :window])
    assert all(map(torch.equal, contents(cache), (wanted_keys, wanted_values)))


@pytest.mark.parametrize("seed", range(6))
def test_move_slots_agrees_with_a_loop(seed: int) -> None:
    cache = new_cache()
    torch.manual_seed(seed)
    before = contents(cache)
    num_rows, num_moved = 1 + seed % ROWS, 1 + seed % 4
    source_BL = torch.randint(0, SLOTS, (num_rows, num_moved))
    destination_BL = torch.stack([torch.randperm(SLOTS)[:num_moved] for _ in range(num_rows)])
    cache.move_slots(source_BL, destination_BL)
    for store, old in zip(contents(cache), before, strict=True):
        wanted = old.clone()
        for row in range(num_rows):
            for source, destination in zip(source_BL[row].tolist(), destination_BL[row].tolist(), strict=True):
                wanted[:, row, :, destination] = old[:, row, :, source]
        assert torch.equal(store, wanted)


def test_copy_row_copies_a_prefix_only() -> None:
    cache = new_cache()
    before = contents(cache)
    cache.copy_row(2, 0, 5)
    for store, wanted in zip(contents(cache), before, strict=True):
        wanted[:, 0, :, :5] = wanted[:, 2, :, :5]
        assert torch.equal(store, wanted)


class Decoder(nn.Module):
    def forward(self, cache: SlotCache) -> None: ...


class OlderDecoder(nn.Module):
    def forward(self, past_key_values: SlotCache) -> None: ...


class Wrapper(nn.Module):
    """A module that hands on whatever it gets."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(("inner", "name"), [(Decoder(), "cache"), (OlderDecoder(), "past_key_values")])
def test_the_cache_goes_by_the_name_that_the_model_has_for_it(inner: nn.Module, name: str) -> None:
    assert cache_keyword(inner) == cache_keyword(Wrapper(inner)) == name
