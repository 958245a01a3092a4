"""Attention masks for tokens that lie in a slot cache: which slots may each new token see?

Shapes: B rows · T new tokens of a chunk · N tree nodes (root included) · S visible cache slots.
All masks are boolean, True = may be seen, and shaped [B, 1, T or N, S] as ``attention_mask`` of a Hugging Face model.
"""

import torch
from torch import Tensor


def chunk_mask(start_B: Tensor, num_tokens: int, num_slots: int) -> Tensor:
    """Causal mask of a chunk of ``num_tokens`` consecutive tokens whose first one goes to slot ``start``.

    Token t of row b sees the slots 0 .. start[b] + t. For start = [1], two tokens and four slots::

        [[1, 1, 0, 0],
         [1, 1, 1, 0]]

    Args:
        start_B: first slot of the chunk, int64 [B].
        num_tokens: T.
        num_slots: S, the visible slots.

    Returns:
        bool [B, 1, T, S].
    """
    slot_S = torch.arange(num_slots, device=start_B.device)
    position_BT = start_B[:, None] + torch.arange(num_tokens, device=start_B.device)
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
