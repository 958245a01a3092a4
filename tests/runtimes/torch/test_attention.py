"""Attention of trees in two parts gives the numbers of attention under one mask."""

import pytest
import torch
from torch.nn import functional as F

from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.runtimes.torch.attention import TwoParts
from drafter.runtimes.torch.cache import CacheShape, LayerShape, SlotCache
from drafter.targets.slots import Slots, slots_mask
from tests.engine.drafters import trained_drafter
from tests.engine.oracle import assert_lossless, requests, tiny_target
from tests.runtimes.kernels import put_kernels_on_the_cpu


@pytest.mark.parametrize("heads", [(2, 2), (6, 2)], ids=["one head a group", "three heads a group"])
def test_two_parts_have_the_numbers_of_one_mask(heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Random trees in rows of different lengths, an empty prefix and a full one among them."""
    put_kernels_on_the_cpu(monkeypatch)
    torch.manual_seed(0)
    num_slots, num_nodes, (num_heads, num_groups) = 600, 6, heads
    shape = CacheShape((LayerShape(num_groups, 8, 8),) * 2)
    cache = SlotCache(shape, 5, num_slots, dtype=torch.float32, device="cpu")
    for kept in cache.layer(1):
        kept.normal_()
    length_B = torch.tensor([0, 1, 250, 594])
    ancestor_BNN = torch.eye(num_nodes, dtype=torch.bool).repeat(4, 1, 1)
    for node in range(1, num_nodes):
        parent_B = torch.randint(node, (4,))
        ancestor_BNN[:, node] |= ancestor_BNN[torch.arange(4), parent_B]
    slot_BN = length_B[:, None] + torch.arange(num_nodes)
    slots = Slots(slot_BN, slot_BN, ancestor_BNN, num_visible=num_slots)
    parts = TwoParts.of(slots, cache, num_groups, num_heads // num_groups, torch.float32)
    cache.plan(slot_BN, num_visible=num_slots)
    key, value = cache.update(*torch.randn(2, 4, num_groups, num_nodes, 8), 1)
    query = torch.randn(4, num_heads, num_nodes, 8)
    found = parts.attend(query.reshape(4, num_groups, -1, 8), 1, 0.3).reshape(query.shape)
    key, value = (kept.repeat_interleave(num_heads // num_groups, 1) for kept in (key, value))
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=slots_mask(slots), scale=0.3)
    torch.testing.assert_close(found, expected)
    assert parts.is_empty_BGC1.shape[2] == 2, "long prefixes are cut"


def test_decoding_with_two_parts_is_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    put_kernels_on_the_cpu(monkeypatch)
    target = tiny_target()
    target.runtime.use_two_parts()
    engine = Engine(target, trained_drafter(), EngineConfig(max_num_seqs=4, beam_width=3))
    assert assert_lossless(engine, requests()) > 1.2


def test_where_the_kernel_is_missing_the_mask_stays() -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match="does not run here"):
        target.runtime.use_two_parts()
    assert assert_lossless(Engine(target, trained_drafter()), requests(4)) > 1
