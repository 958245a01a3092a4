"""SlotCache: writes by slot, what a forward sees, moved slots, copied rows; against loops over plain tensors."""

import pytest
import torch
from torch import Tensor

from drafter.targets.cache import CacheShape, SlotCache

SHAPE = CacheShape(num_layers=3, num_heads=2, key_dim=4, value_dim=5)
ROWS, SLOTS = 4, 9


def new_cache(*, filled: bool = False) -> SlotCache:
    cache = SlotCache(SHAPE, ROWS, SLOTS, dtype=torch.float32, device="cpu")
    if filled:
        generator = torch.Generator().manual_seed(0)
        cache.keys.copy_(torch.randn(cache.keys.shape, generator=generator))
        cache.values.copy_(torch.randn(cache.values.shape, generator=generator))
    return cache


def new_states(num_rows: int, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lead = (num_rows, SHAPE.num_heads, num_tokens)
    return (
        torch.randn(*lead, SHAPE.key_dim, generator=generator),
        torch.randn(*lead, SHAPE.value_dim, generator=generator),
    )


def test_size_in_bytes_is_what_the_tensors_take() -> None:
    cache = new_cache()
    assert SHAPE.num_bytes(ROWS, SLOTS, torch.float32) == cache.keys.nbytes + cache.values.nbytes
    assert SHAPE.num_bytes(ROWS, SLOTS, torch.bfloat16) * 2 == SHAPE.num_bytes(ROWS, SLOTS, torch.float32)
    assert cache.keys.shape == (3, ROWS, 2, SLOTS + 1, 4) and cache.values.shape == (3, ROWS, 2, SLOTS + 1, 5)


@pytest.mark.parametrize(("first_row", "num_visible"), [(0, None), (1, 6), (2, 9)])
def test_update_agrees_with_a_loop(first_row: int, num_visible: int | None) -> None:
    cache = new_cache(filled=True)
    wanted_keys, wanted_values = cache.keys.clone(), cache.values.clone()
    slot_BT = torch.tensor([[3, 4, 5], [0, 1, cache.spare_slot]])
    cache.plan(slot_BT, first_row=first_row, num_visible=num_visible)
    for layer in range(SHAPE.num_layers):
        keys, values = new_states(2, 3, seed=layer)
        seen_keys, seen_values = cache.update(keys, values, layer)
        for row in range(2):
            for token, slot in enumerate(slot_BT[row].tolist()):
                wanted_keys[layer, first_row + row, :, slot] = keys[row, :, token]
                wanted_values[layer, first_row + row, :, slot] = values[row, :, token]
        window = SLOTS if num_visible is None else num_visible
        assert torch.equal(seen_keys, wanted_keys[layer, first_row : first_row + 2, :, :window])
        assert torch.equal(seen_values, wanted_values[layer, first_row : first_row + 2, :, :window])
    assert torch.equal(cache.keys, wanted_keys) and torch.equal(cache.values, wanted_values)


def test_rows_outside_the_cache_are_refused() -> None:
    with pytest.raises(AssertionError):
        new_cache().plan(torch.zeros(2, 1, dtype=torch.int64), first_row=ROWS - 1)


@pytest.mark.parametrize("seed", range(6))
def test_move_slots_agrees_with_a_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache = new_cache(filled=True)
    before = cache.keys.clone(), cache.values.clone()
    num_rows, num_moved = 1 + seed % ROWS, 1 + seed % 4
    source_BL = torch.randint(0, SLOTS, (num_rows, num_moved), generator=generator)
    destination_BL = torch.stack([torch.randperm(SLOTS, generator=generator)[:num_moved] for _ in range(num_rows)])
    cache.move_slots(source_BL, destination_BL)
    for store, old in zip((cache.keys, cache.values), before, strict=True):
        wanted = old.clone()
        for row in range(num_rows):
            for source, destination in zip(source_BL[row].tolist(), destination_BL[row].tolist(), strict=True):
                wanted[:, row, :, destination] = old[:, row, :, source]
        assert torch.equal(store, wanted)


def test_copy_row_copies_a_prefix_only() -> None:
    cache = new_cache(filled=True)
    old_keys, old_values = cache.keys.clone(), cache.values.clone()
    cache.copy_row(2, 0, 5)
    for store, old in ((cache.keys, old_keys), (cache.values, old_values)):
        assert torch.equal(store[:, 0, :, :5], old[:, 2, :, :5])
        assert torch.equal(store[:, 0, :, 5:], old[:, 0, :, 5:])
        assert torch.equal(store[:, 1:], old[:, 1:])


def test_what_models_ask_of_a_cache() -> None:
    cache = new_cache()
    assert (cache.get_seq_length(), cache.get_max_length()) == (0, SLOTS)
    cache.plan(torch.zeros(1, 1, dtype=torch.int64), num_visible=4)
    assert cache.get_mask_sizes(1, 0) == (4, 0)
    assert len(cache.layers) == SHAPE.num_layers
