"""Attention of several tokens under a mask, over the slots of a cache.

transformers' own SDPA attention copies the keys and values of every layer once for each query head of a group when
several tokens come with a mask. :func:`folded_attention` reads the slots where they are: the heads of a group become
further queries of one head.

:class:`TwoParts` computes the same for a tree in two parts, joined by their log-sum-exps: the committed prefix without
a mask, and the tree. A mask over all visible slots rules out flash attention, and every slot is read, whatever a row's
length. A prefix needs no mask: all nodes see all of its slots. So the prefix goes to flash attention, each row with its
own length, and only the N x N numbers among the nodes are masked, by memory-efficient attention. Both kernels need CUDA
and 16 bits.

Shapes: B rows · N nodes · G key/value heads · H query heads · R query heads of a group · X = R N queries of a group ·
S slots of a row of the cache, the spare one included · K head dimension · C chunks of a prefix · Y sequences.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.runtimes.torch.cache import SlotCache
from drafter.targets.slots import Slots

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FOLDED_ATTENTION = "drafter_sdpa"
OPAQUE_ATTENTION = "drafter_sdpa_opaque"  # the same, which a compiler leaves alone

_BLOCK = 128  # queries that flash attention takes together
_WANTED_BLOCKS = 256  # about two for each multiprocessor of a large GPU
_SMALLEST_CHUNK = 256  # slots
_ALIGNED = 16  # numbers of a row of the bias of memory-efficient attention


def use_folded_attention(model: "PreTrainedModel") -> None:
    """Switch a model that runs with SDPA over to :func:`folded_attention`."""
    if model.config._attn_implementation == "sdpa":
        set_attention(model, FOLDED_ATTENTION, folded_attention)


def set_attention(model: "PreTrainedModel", name: str, function: Any) -> None:
    """Let a model compute attention by a function, which transformers knows by the name from now on."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)


def folded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot product attention under a mask that all heads share.

    Args:
        module: the model's attention layer.
        query: [B, H, N, K].
        key, value: [B, G, S, K]; head h reads those of head h // R. Of the dtype that is computed in.
        attention_mask: [B, 1, N, S], bool or added to the scores.
        dropout: as transformers calls it; none is applied to a frozen model.
        scaling: of the scores.
        **kwargs: of other attention implementations; ``parts``: a :class:`TwoParts`, which computes the same without
            the mask.

    Returns:
        [B, N, H, K] in the query's dtype, and no weights.
    """
    dtype, query = query.dtype, query.to(key.dtype)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.to(key.dtype)
    num_heads, num_groups = query.shape[1], key.shape[1]
    parts = kwargs.pop("parts", None)
    is_plain = (
        attention_mask is not None
        and attention_mask.shape[1] == 1
        and all(kwargs.get(name) is None for name in ("position_bias", "softcap", "s_aux"))
    )
    if not is_plain or (parts is None and num_heads == num_groups):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output.to(dtype), None
    assert attention_mask is not None
    num_rows, _, num_queries, size = query.shape
    heads_per_group = num_heads // num_groups
    query = query.reshape(num_rows, num_groups, heads_per_group * num_queries, size)
    if parts is not None:
        folded = parts.attend(query, module.layer_idx, size**-0.5 if scaling is None else scaling)
    else:
        mask = attention_mask.repeat(1, 1, heads_per_group, 1)
        folded = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    output = folded.reshape(num_rows, num_heads, num_queries, value.shape[3])
    return output.transpose(1, 2).to(dtype).contiguous(), None


class TwoParts(NamedTuple):
    """What :func:`folded_attention` calls in place of its own kernel; made for one forward.

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
