"""What goes into a forward over a cache of slots, what its tokens see, and what comes out.

Shapes: B rows · T tokens of one forward · N tree nodes (root included) · S visible cache slots · D hidden size ·
C context size. All masks are boolean, True = may be seen, and shaped [B, 1, T, S] as ``attention_mask`` of a Hugging
Face model.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Slots(NamedTuple):
    """Where the tokens of one forward stand.

    A tree whose root goes to slot 1, with two children, is ``Slots([[1, 2, 3]], [[1, 2, 2]],
    [[[1,0,0],[1,1,0],[1,0,1]]], num_visible=5)``: each node sees slot 0, its ancestors and itself.
    """

    slot_BT: Tensor  # cache slot of every token, int64; the spare slot for padding and inactive rows
    position_BT: Tensor  # absolute positions, int64
    # [b, i, j] is True where j is i or above i. Token i sees the committed slots 0 .. slot_BT[b, 0] - 1 and its
    # ancestors' slots. None: causal; a token in slot s stands at position s and sees the slots 0 .. s. What padding and
    # rows of spare slots compute is finite, and nobody reads it.
    ancestor_BTT: Tensor | None
    first_row: int = 0  # rows first_row .. first_row + B - 1 of the cache take part
    num_visible: int = 0  # attention looks at so many slots, the spare one left out; rounded up, so that shapes repeat


class TargetOutput(NamedTuple):
    """One forward: the final hidden states (after the last norm) and what a drafter takes as context."""

    hidden_BTD: Tensor
    context_BTC: Tensor


class Window(NamedTuple):
    """How far a windowed attention layer sees, in tokens. ``sliding``: a token sees itself and the ``size`` - 1
    positions before its own. ``chunked``: positions are cut into chunks of ``size``, and a token sees its own chunk
    only.
    """

    kind: Literal["sliding", "chunked"]
    size: int

    def mask(self, query_position_BT: Tensor, key_position_BS: Tensor) -> Tensor:
        """Which keys lie inside the window of each query, later keys included, bool [B, 1, T, S]; combine with a causal
        or tree mask.

        For a sliding window of 2, queries at positions [1, 3] and keys at positions 0 .. 3::

            [[1, 1, 1, 1],
             [0, 0, 1, 1]]
        """
        query_BT1, key_B1S = query_position_BT[:, :, None], key_position_BS[:, None, :]
        if self.kind == "chunked":
            inside_BTS = query_BT1 // self.size <= key_B1S // self.size
        else:
            inside_BTS = key_B1S > query_BT1 - self.size
        return inside_BTS[:, None]


def slot_positions(slots: Slots) -> Tensor:
    """Position of the token in each visible slot, int64 [B, S]: its slot for a committed token, its own for a new one.

    A tree node's slot says nothing of its depth. For nodes in slots [2, 3, 4] at positions [2, 3, 3] and five visible
    slots the result is [0, 1, 2, 3, 3].
    """
    slot_S = torch.arange(slots.num_visible + 1, device=slots.slot_BT.device)  # the last for all slots that nobody sees
    slot_BT = slots.slot_BT.clamp(max=slots.num_visible)
    return slot_S.repeat(len(slot_BT), 1).scatter_(1, slot_BT, slots.position_BT)[:, : slots.num_visible]


def slots_mask(slots: Slots) -> Tensor:
    """What the tokens of a forward see, bool [B, 1, T, S].

    Without ancestors each token sees the slots up to its own. For positions [1, 2] and four slots::

        [[1, 1, 0, 0],
         [1, 1, 1, 0]]

    A tree node sees the committed prefix, its ancestors and itself, as in :class:`Slots`.
    """
    slot_S = torch.arange(slots.num_visible, device=slots.position_BT.device)
    if slots.ancestor_BTT is None:
        return (slot_S <= slots.position_BT[:, :, None])[:, None]
    num_nodes = slots.ancestor_BTT.shape[-1]
    # The root's position is its row's length, in rows whose writes go to the spare slot as well.
    node_BS = slot_S - slots.position_BT[:, :1]
    is_tree_BS = (node_BS >= 0) & (node_BS < num_nodes)
    index_BNS = node_BS.clamp(0, num_nodes - 1)[:, None].expand(-1, num_nodes, -1)
    seen_BNS = slots.ancestor_BTT.gather(2, index_BNS) & is_tree_BS[:, None]
    return (seen_BNS | (node_BS < 0)[:, None])[:, None]
