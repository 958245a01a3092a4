"""Attention of a tree in two parts, joined by their log-sum-exp: the committed prefix without a mask, and the tree.

A mask over all visible slots rules out flash attention, and every slot is read, whatever a row's length. A prefix needs
no mask: all nodes see all of its slots. So the prefix goes to flash attention, each row with its own length, and only
the N x N numbers among the nodes are masked.

Shapes: B rows · N nodes · G key/value heads · R query heads of a group · X = R N queries of a group · S slots of a row
of the cache, the spare one included · K head dimension · C parts of a prefix.
"""

from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from drafter.targets.cache import SlotCache
from drafter.targets.slots import Slots

_BLOCK = 128  # queries that flash attention takes together
_WANTED_BLOCKS = 256  # about two for each multiprocessor of a large GPU
_SMALLEST_CHUNK = 256  # slots


class PrefixPart(Protocol):
    """Attention to the committed slots of every row; made once for a forward, called by each layer."""

    @classmethod
    def of(cls, length_B: Tensor, num_groups: int, num_queries: int, num_slots: int) -> Self:
        """For the prefixes of B rows, G, X and S."""

    def attend(self, query_BGXK: Tensor, key_BGSK: Tensor, value_BGSK: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Outputs [B, G, C, X, K] and their log-sum-exps, float32 [B, G, C, X]; -inf for an empty part."""


class FlashPrefix(NamedTuple):
    """Flash attention in C chunks of the prefix; a sequence is a chunk of one key/value head of one row.

    Attributes:
        used_BGC: slots of each chunk, int32 [B, G, C].
        query_start_Y, key_start_Y: first query and first slot of each sequence, int32 [B G C + 1].
        chunk: most slots of a chunk.
    """

    used_BGC: Tensor
    query_start_Y: Tensor
    key_start_Y: Tensor
    chunk: int

    @classmethod
    def of(cls, length_B: Tensor, num_groups: int, num_queries: int, num_slots: int) -> Self:
        device, num_rows = length_B.device, len(length_B)
        num_blocks = num_rows * num_groups * -(-num_queries // _BLOCK)
        num_chunks = max(1, min(-(-_WANTED_BLOCKS // num_blocks), num_slots // _SMALLEST_CHUNK))
        chunk = -(-num_slots // num_chunks)
        start_C = torch.arange(num_chunks, device=device) * chunk
        used_BC = (length_B[:, None] - start_C).clamp(0, chunk).int()
        sequence_Y = torch.arange(num_rows * num_groups * num_chunks + 1, device=device)
        key_start_Y = sequence_Y // num_chunks * num_slots + sequence_Y % num_chunks * chunk
        used_BGC = used_BC[:, None].repeat(1, num_groups, 1)
        return cls(used_BGC, (sequence_Y * num_queries).int(), key_start_Y.int(), chunk)

    def attend(self, query_BGXK: Tensor, key_BGSK: Tensor, value_BGSK: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        num_rows, num_groups, num_queries, size = query_BGXK.shape
        num_chunks = self.used_BGC.shape[2]
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            query_BGXK[:, :, None].expand(-1, -1, num_chunks, -1, -1).reshape(-1, 1, size),
            key_BGSK.reshape(-1, 1, size), value_BGSK.reshape(-1, 1, size), self.query_start_Y, self.key_start_Y,
            num_queries, self.chunk, 0.0, False, False, scale=scale, seqused_k=self.used_BGC.flatten(),
        )  # fmt: skip
        lead = num_rows, num_groups, num_chunks, num_queries
        # The kernel gives an empty sequence zeros and +inf.
        return output.view(*lead, size), lse.view(lead).masked_fill(self.used_BGC[..., None] == 0, -torch.inf)


class PlainPrefix(NamedTuple):
    """The same in plain torch: slow, for every device and dtype.

    Attributes:
        seen_B11S: the committed slots, bool [B, 1, 1, S].
    """

    seen_B11S: Tensor

    @classmethod
    def of(cls, length_B: Tensor, num_groups: int, num_queries: int, num_slots: int) -> Self:
        return cls((torch.arange(num_slots, device=length_B.device) < length_B[:, None])[:, None, None])

    def attend(self, query_BGXK: Tensor, key_BGSK: Tensor, value_BGSK: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        output_BGXK, lse_BGX = masked_part(query_BGXK, key_BGSK, value_BGSK, self.seen_B11S, scale)
        return output_BGXK[:, :, None], lse_BGX[:, :, None]


class TwoParts(NamedTuple):
    """What :func:`drafter.targets.cache.folded_attention` calls in place of its own kernel.

    Attributes:
        prefix: attention to the committed slots.
        cache: of the rows from 0 on.
        slot_BN: of the nodes.
        seen_B1XN: which nodes a query sees, bool.
    """

    prefix: PrefixPart
    cache: SlotCache
    slot_BN: Tensor
    seen_B1XN: Tensor

    @classmethod
    def of(cls, kind: type[PrefixPart], slots: Slots, cache: SlotCache, num_groups: int, heads_per_group: int) -> Self:
        """For a forward over trees."""
        assert slots.ancestor_BTT is not None and slots.first_row == 0, "a forward over trees of the first rows"
        num_queries = heads_per_group * slots.slot_BT.shape[1]
        prefix = kind.of(slots.position_BT[:, 0], num_groups, num_queries, cache.num_slots + 1)
        return cls(prefix, cache, slots.slot_BT, slots.ancestor_BTT.repeat(1, heads_per_group, 1)[:, None])

    def attend(self, query_BGXK: Tensor, layer: int, scale: float) -> Tensor:
        """Outputs [B, G, X, K] of a layer whose keys and values are in the cache."""
        num_rows = len(query_BGXK)
        key_BGSK, value_BGSK = (kept[:num_rows] for kept in self.cache.layer(layer))
        row_B1 = torch.arange(num_rows, device=query_BGXK.device)[:, None]
        key_BGNK, value_BGNK = (kept[row_B1, :, self.slot_BN].transpose(1, 2) for kept in (key_BGSK, value_BGSK))
        tree_BGXK, tree_BGX = masked_part(query_BGXK, key_BGNK, value_BGNK, self.seen_B1XN, scale)
        outputs, lses = self.prefix.attend(query_BGXK, key_BGSK, value_BGSK, scale)
        weight_BGCX = torch.cat([lses, tree_BGX[:, :, None]], dim=2).softmax(dim=2)
        parts = torch.cat([outputs.float(), tree_BGXK[:, :, None]], dim=2)
        return (parts * weight_BGCX[..., None]).sum(dim=2).to(query_BGXK.dtype)


def masked_part(
    query_BGXK: Tensor, key_BGTK: Tensor, value_BGTK: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to T keys under a mask in float32: outputs [B, G, X, K], and log-sum-exps [B, G, X], -inf where a query
    sees nothing.

    Args:
        query_BGXK, key_BGTK, value_BGTK: of any dtype.
        seen: bool, broadcast to [B, G, X, T].
        scale: of the scores.
    """
    scores = (query_BGXK.float() @ key_BGTK.float().transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    lse_BGX = scores.logsumexp(dim=3)
    share = (scores - lse_BGX[..., None].clamp_min(torch.finfo(torch.float32).min)).exp()
    return share @ value_BGTK.float(), lse_BGX
