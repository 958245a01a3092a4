"""Attention of trees in two parts gives the numbers of attention under one mask."""

import pytest
import torch
from torch.nn import functional as F

from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.runtimes.two_parts import KernelParts, PlainParts, TwoParts
from drafter.targets.cache import CacheShape, SlotCache
from drafter.targets.masks import slots_mask
from drafter.targets.slots import Slots
from tests.engine.drafters import trained_drafter
from tests.engine.oracle import assert_lossless, requests, tiny_target


def flash_on_a_cpu(*given: object, scale: float, seqused_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel of ``aten._flash_attention_forward`` sequence by sequence, with its odd result for an empty one."""
    query, key, value, query_start, key_start, *_ = given
    assert isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
    outputs, lses = torch.zeros_like(query), torch.full((1, len(query)), torch.inf)
    for start, stop, first, used in zip(query_start, query_start[1:], key_start, seqused_k, strict=False):
        if used:
            scores = query[start:stop, 0] @ key[first : first + used, 0].T * scale
            outputs[start:stop, 0] = scores.softmax(dim=1) @ value[first : first + used, 0]
            lses[0, start:stop] = scores.logsumexp(dim=1)
    return outputs, lses


def efficient_on_a_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, has_lse: bool, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten._scaled_dot_product_efficient_attention``: rows of the bias are aligned, rows of the result padded."""
    assert bias.stride(2) % 16 == 0 and has_lse
    scores = query @ key.transpose(2, 3) * scale + bias
    return scores.softmax(dim=3) @ value, F.pad(scores.logsumexp(dim=3), (0, -query.shape[2] % 32))


@pytest.mark.parametrize("kind", [PlainParts, KernelParts])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)], ids=["one head a group", "three heads a group"])
def test_two_parts_have_the_numbers_of_one_mask(
    kind: type, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random trees in rows of different lengths, an empty prefix and a full one among them."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_on_a_cpu)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", efficient_on_a_cpu)
    torch.manual_seed(0)
    num_slots, num_nodes, (num_heads, num_groups) = 600, 6, heads
    cache = SlotCache(CacheShape(2, num_groups, 8, 8), 5, num_slots, dtype=torch.float32, device="cpu")
    cache.keys.normal_()
    cache.values.normal_()
    length_B = torch.tensor([0, 1, 250, 594])
    ancestor_BNN = torch.eye(num_nodes, dtype=torch.bool).repeat(4, 1, 1)
    for node in range(1, num_nodes):
        parent_B = torch.randint(node, (4,))
        ancestor_BNN[:, node] |= ancestor_BNN[torch.arange(4), parent_B]
    slot_BN = length_B[:, None] + torch.arange(num_nodes)
    slots = Slots(slot_BN, slot_BN, ancestor_BNN, num_visible=num_slots)
    parts = TwoParts.of(kind, slots, cache, num_groups, num_heads // num_groups)
    cache.plan(slot_BN, num_visible=num_slots)
    key, value = cache.update(*torch.randn(2, 4, num_groups, num_nodes, 8), 1)
    query = torch.randn(4, num_heads, num_nodes, 8)
    found = parts.attend(query.reshape(4, num_groups, -1, 8), 1, 0.3).reshape(query.shape)
    key, value = (kept.repeat_interleave(num_heads // num_groups, 1) for kept in (key, value))
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=slots_mask(slots), scale=0.3)
    torch.testing.assert_close(found, expected)
    assert kind is PlainParts or parts.parts.is_empty_BGC1.shape[2] == 2, "long prefixes are cut"


def test_decoding_with_two_parts_is_lossless() -> None:
    target = tiny_target()
    target.runtime.use_attention(PlainParts)
    engine = Engine(target, trained_drafter(), EngineConfig(max_num_seqs=4, beam_width=3))
    assert assert_lossless(engine, requests()) > 1.2


def test_where_the_kernel_is_missing_the_mask_stays() -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match="does not run here"):
        target.runtime.use_attention(KernelParts)
    assert assert_lossless(Engine(target, trained_drafter()), requests(4)) > 1
