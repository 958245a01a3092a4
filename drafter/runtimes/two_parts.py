"""Attention of a tree in two parts, joined by their log-sum-exps: the committed prefix without a mask, and the tree.

A mask over all visible slots rules out flash attention, and every slot is read, whatever a row's length. A prefix needs
no mask: all nodes see all of its slots. So the prefix goes to flash attention, each row with its own length, and only
the N x N numbers among the nodes are masked, by memory-efficient attention. Both kernels need CUDA and 16 bits.

Shapes: B rows · N nodes · G key/value heads · R query heads of a group · X = R N queries of a group · S slots of a row
of the cache, the spare one included · K head dimension · C chunks of a prefix · Y sequences.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from drafter.targets.cache import SlotCache
from drafter.targets.slots import Slots

_BLOCK = 128  # queries that flash attention takes together
_WANTED_BLOCKS = 256  # about two for each multiprocessor of a large GPU
_SMALLEST_CHUNK = 256  # slots
_ALIGNED = 16  # numbers of a row of the bias of memory-efficient attention


class TwoParts(NamedTuple):
    """What :func:`drafter.targets.cache.folded_attention` calls in place of its own kernel; made for one forward.

    A sequence of flash attention is a chunk of one key/value head of one row.

    Attributes:
        cache: of the rows from 0 on.
        used_Y: slots of each sequence, int32.
        is_empty_BGC1: whether there are none.
        query_start, key_start: first query and first slot of each sequence, int32 [Y + 1].
        chunk: most slots of a sequence.
        bias_B1XN: 0 where a query sees a node, else -inf.
    """

    cache: SlotCache
    used_Y: Tensor
    is_empty_BGC1: Tensor
    query_start: Tensor
    key_start: Tensor
    chunk: int
    bias_B1XN: Tensor

    @classmethod
    def of(cls, slots: Slots, cache: SlotCache, num_groups: int, heads_per_group: int, dtype: torch.dtype) -> Self:
        """For a forward over trees, with keys and values of the dtype."""
        assert slots.ancestor_BTT is not None and slots.first_row == 0, "a forward over trees of the first rows"
        length_B, seen_B1XN = slots.position_BT[:, 0], slots.ancestor_BTT.repeat(1, heads_per_group, 1)[:, None]
        device, (num_rows, _, num_queries, num_nodes) = length_B.device, seen_B1XN.shape
        num_slots, num_blocks = cache.num_slots + 1, num_rows * num_groups * -(-num_queries // _BLOCK)
        num_chunks = max(1, min(-(-_WANTED_BLOCKS // num_blocks), num_slots // _SMALLEST_CHUNK))
        chunk = -(-num_slots // num_chunks)
        used_BC = (length_B[:, None] - torch.arange(num_chunks, device=device) * chunk).clamp(0, chunk).int()
        used_BGC = used_BC[:, None].repeat(1, num_groups, 1)
        place = torch.arange(num_rows * num_groups * num_chunks + 1, device=device, dtype=torch.int32)
        key_start = place // num_chunks * num_slots + place % num_chunks * chunk
        wide = torch.zeros(num_rows, 1, num_queries, -(-num_nodes // _ALIGNED) * _ALIGNED, dtype=dtype, device=device)
        bias_B1XN = wide[..., :num_nodes].masked_fill_(~seen_B1XN, -torch.inf)
        used_Y, is_empty_BGC1 = used_BGC.flatten(), used_BGC[..., None] == 0
        return cls(cache, used_Y, is_empty_BGC1, place * num_queries, key_start, chunk, bias_B1XN)

    def attend(self, query_BGXK: Tensor, layer: int, scale: float) -> Tensor:
        """Outputs [B, G, X, K] of the layer that has just written its keys and values to the cache."""
        key_BGSK, value_BGSK = (kept[: len(query_BGXK)] for kept in self.cache.layer(layer))
        outputs, lses = self._prefix(query_BGXK, key_BGSK, value_BGSK, scale)
        assert self.cache.written is not None, "attention before the layer's keys"
        tree_BGXK, tree_BGX = self._tree(query_BGXK, *self.cache.written, scale)
        self.cache.written = None
        weights = torch.cat([lses, tree_BGX[:, :, None]], dim=2).softmax(dim=2)[..., None]
        joined_BGXK = (outputs * weights[:, :, :-1]).sum(dim=2).addcmul_(tree_BGXK, weights[:, :, -1])
        return joined_BGXK.to(query_BGXK.dtype)

    def _prefix(self, query_BGXK: Tensor, key_BGSK: Tensor, value_BGSK: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attention to the committed slots: outputs [B, G, C, X, K] and log-sum-exps, float32 [B, G, C, X]."""
        num_chunks, (num_queries, size) = self.is_empty_BGC1.shape[2], query_BGXK.shape[2:]
        query_BGCXK = query_BGXK[:, :, None].expand(-1, -1, num_chunks, -1, -1)
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            query_BGCXK.reshape(-1, 1, size), key_BGSK.reshape(-1, 1, size), value_BGSK.reshape(-1, 1, size),
            self.query_start, self.key_start, num_queries, self.chunk, 0.0, False, False, scale=scale,
            seqused_k=self.used_Y,
        )  # fmt: skip
        # The kernel gives an empty sequence zeros and +inf.
        lse_BGCX = lse.view(query_BGCXK.shape[:4]).masked_fill(self.is_empty_BGC1, -torch.inf)
        return output.view(query_BGCXK.shape), lse_BGCX

    def _tree(self, query_BGXK: Tensor, key_BGNK: Tensor, value_BGNK: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attention to the nodes: outputs [B, G, X, K] and log-sum-exps, float32 [B, G, X]."""
        bias = self.bias_B1XN.expand(-1, query_BGXK.shape[1], -1, -1)
        output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query_BGXK, key_BGNK, value_BGNK, bias, True, scale=scale
        )
        return output, lse[:, :, : query_BGXK.shape[2]]  # padded
