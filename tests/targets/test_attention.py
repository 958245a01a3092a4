"""Folded attention (its numbers: test_target.py) in float64 forgets the slots."""

import pytest
import torch
from torch import Tensor, nn

from drafter.targets.attention import folded_attention

HEADS, GROUPS, QUERIES, SLOTS, SIZE = 6, 2, 4, 40, 16


def drawn(num_slots: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, HEADS, QUERIES, SIZE, generator=generator).to(dtype)
    key, value = torch.randn(2, 2, GROUPS, num_slots, SIZE, generator=generator).to(dtype).unbind(0)
    return query, key, value


@pytest.mark.parametrize("is_additive", [False, True])
def test_float64_keys_give_the_same_bits_wherever_tokens_stand(is_additive: bool) -> None:
    num_equal = {torch.float64: 0, torch.bfloat16: 0}
    for seed in range(8):
        query, key, value = drawn(SLOTS, seed, torch.bfloat16)
        # The same 40 tokens close together, and scattered over 90 slots among others that are masked.
        slot_S = torch.randperm(90, generator=torch.Generator().manual_seed(seed))[:SLOTS].sort().values
        wide_key, wide_value = drawn(90, seed + 100, torch.bfloat16)[1:]
        wide_key[:, :, slot_S], wide_value[:, :, slot_S] = key, value
        wide_mask = torch.zeros(2, 1, QUERIES, 90, dtype=torch.bool)
        wide_mask[..., slot_S] = True
        masks = [torch.ones(2, 1, QUERIES, SLOTS, dtype=torch.bool), wide_mask]
        if is_additive:
            lowest = torch.finfo(torch.bfloat16).min
            masks = [torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, lowest) for mask in masks]
        for dtype in num_equal:
            close, _ = folded_attention(nn.Module(), query, key.to(dtype), value.to(dtype), masks[0])
            wide, _ = folded_attention(nn.Module(), query, wide_key.to(dtype), wide_value.to(dtype), masks[1])
            assert close.dtype == torch.bfloat16
            num_equal[dtype] += int(torch.equal(close, wide))
    assert num_equal[torch.float64] == 8
    assert num_equal[torch.bfloat16] < 8  # which is what float64 is for
