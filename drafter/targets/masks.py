"""Attention masks for tokens that lie in a slot cache: which slots may each new token see?

Shapes: B rows · T new tokens of a chunk · N tree nodes (root included) · S visible cache slots.
All masks are boolean, True = may be seen, and shaped [B, 1, T or N, S] as ``attention_mask`` of a Hugging Face model.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from drafter.targets.slots import Slots


class Window(NamedTuple):
    """How far a windowed attention layer sees.

    Attributes:
        kind: ``sliding``: a token sees itself and the ``size`` - 1 positions before its own. ``chunked``: positions are
            cut into chunks of ``size``, and a token sees its own chunk only.
        size: tokens.
    """

    kind: Literal["sliding", "chunked"]
    size: int

    def mask(self, query_position_BT: Tensor, key_position_BS: Tensor) -> Tensor:
        """Which keys lie inside the window of each query, later keys included; combine with a causal or tree mask.

        For a sliding window of 2, queries at positions [1, 3] and keys at positions 0 .. 3::

            [[1, 1, 1, 1],
             [0, 0, 1, 1]]

        Args:
            query_position_BT: int64 [B, T].
            key_position_BS: position of the token in each slot, int64 [B, S].

        Returns:
            bool [B, 1, T, S].
        """
        query_BT1, key_B1S = query_position_BT[:, :, None], key_position_BS[:, None, :]
        if self.kind == "chunked":
            inside_BTS = query_BT1 // self.size <= key_B1S // self.size
        else:
            inside_BTS = key_B1S > query_BT1 - self.size
        return inside_BTS[:, None]


def slot_positions(slot_BT: Tensor, position_BT: Tensor, num_slots: int) -> Tensor:
    """Position of the token in each visible slot: its slot for a committed token, ``position_BT`` for a new one.

    A tree node's slot says nothing of its depth. For nodes in slots [2, 3, 4] at positions [2, 3, 3] and five slots
    the result is [0, 1, 2, 3, 3].

    Args:
        slot_BT: slot of every new token, int64 [B, T]; slots that are not visible are left out.
        position_BT: its position, int64 [B, T].
        num_slots: S, the visible slots.

    Returns:
        int64 [B, S].
    """
    slot_S = torch.arange(num_slots + 1, device=slot_BT.device)
    position_BS = slot_S.repeat(slot_BT.shape[0], 1).scatter_(1, slot_BT.clamp(max=num_slots), position_BT)
    return position_BS[:, :num_slots]


def slots_mask(slots: Slots) -> Tensor:
    """What the tokens of a forward see, bool [B, 1, T, S]: :func:`causal_mask` or :func:`tree_mask`."""
    if slots.ancestor_BTT is None:
        return causal_mask(slots.position_BT, slots.num_visible)
    # The root's position is its row's length, in rows whose writes go to the spare slot as well.
    return tree_mask(slots.position_BT[:, 0], slots.ancestor_BTT, slots.num_visible)


def causal_mask(position_BT: Tensor, num_slots: int) -> Tensor:
    """Mask of tokens whose slots are their positions: each sees the slots up to its own.

    For positions [1, 2] and four slots::

        [[1, 1, 0, 0],
         [1, 1, 1, 0]]

    Args:
        position_BT: int64 [B, T].
        num_slots: S, the visible slots.

    Returns:
        bool [B, 1, T, S].
    """
    slot_S = torch.arange(num_slots, device=position_BT.device)
    return (slot_S <= position_BT[:, :, None])[:, None]


def tree_mask(length_B: Tensor, ancestor_BNN: Tensor, num_slots: int) -> Tensor:
    """Mask of N tree nodes that go to the slots length .. length + N - 1: the committed prefix and a node's ancestors.

    For length = [1], a root with two children (``ancestor = [[1,0,0],[1,1,0],[1,0,1]]``) and five slots::

        [[1, 1, 0, 0, 0],
         [1, 1, 1, 0, 0],
         [1, 1, 0, 1, 0]]

    Args:
        length_B: committed slots of each row, int64 [B].
        ancestor_BNN: bool [B, N, N]; [b, i, j] is True where j is i or an ancestor of i.
        num_slots: S, the visible slots.

    Returns:
        bool [B, 1, N, S].
    """
    num_nodes = ancestor_BNN.shape[-1]
    relative_BS = torch.arange(num_slots, device=length_B.device) - length_B[:, None]
    node_BNS = relative_BS.clamp(0, num_nodes - 1)[:, None, :].expand(-1, num_nodes, -1)
    is_tree_BS = (relative_BS >= 0) & (relative_BS < num_nodes)
    seen_BNS = ancestor_BNN.gather(2, node_BNS) & is_tree_BS[:, None, :]
    return (seen_BNS | (relative_BS < 0)[:, None, :])[:, None]
