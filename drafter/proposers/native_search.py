"""The beam search of rows without noise in one call of the native step, with weights rounded to 8 bits.

Rounding changes drafts only, never the tokens of an answer.

Shapes: B rows · C context size · D hidden size · S cache slots · M drafted nodes · R draft vocabulary ·
V target vocabulary · X lengths of a match, 0 first.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from drafter.decoding.tree import NodeList
from drafter.kernels import native
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target


def can_search(drafter: RecurrentDrafter, width: int) -> bool:
    """Whether the native search may draft for a drafter: one whose weights decode, on a CPU."""
    is_here = native.library() is not None and drafter.is_packed and drafter.device.type == "cpu"
    return is_here and width <= native.MOST_BEAMS


class NativeSearch:
    """A drafter's weights in 8 bits, and the search over them.

    Args:
        drafter: bound to its target.
        target: whose embeddings the drafter reads.
        index_V: place of each target token in the draft vocabulary, -1 outside, int64.
        log_odds_X: log(share / (1 - share)) of a copy by the length of its match, -inf first.
        width, length: W, L of the search.
        depth: of the deepest node.
    """

    def __init__(
        self,
        drafter: RecurrentDrafter,
        target: Target,
        index_V: Tensor,
        log_odds_X: Tensor,
        width: int,
        length: int,
        depth: int,
    ) -> None:
        self._drafter, self._width, self._length, self._depth = drafter, width, length, depth
        config, cell = drafter.config, drafter.cell
        parts: list[Any] = list(drafter.blocks)
        blocks = [native.round_matrix(part.linear.weight, part.linear.bias) for part in parts]
        downs = [native.round_matrix(part.down.weight) for part in parts if part.down is not None]
        cell_matrix = native.round_matrix(torch.cat([cell.w.weight, cell.u.weight], dim=1), cell.u.bias)
        head = native.round_matrix(drafter.head.weight) if config.head == "tied" else native.NO_MATRIX
        rows = drafter.packed_rows()
        array = native.Matrix * max(1, len(blocks))
        kept: dict[str, Any] = {
            "blocks": array(*blocks),
            "down": array(*downs),
            "odds": log_odds_X.float().contiguous(),
        }
        embedding, scale = getattr(target.runtime, "embedding_matrix", None), 1.0
        if embedding is None:
            kept["embedding"] = target.embedding_weight_VD.float().contiguous()
        else:
            kept["embedding"], scale = (native.Matrix * 1)(embedding), target.runtime.embedding_scale
        address = kept["embedding"].data_ptr() if embedding is None else None
        pointer = None if embedding is None else ctypes.cast(kept["embedding"], ctypes.POINTER(native.Matrix))
        self._native = native.Drafter(
            hidden_size=config.hidden_size, num_blocks=len(blocks), num_tokens=len(drafter.draft_token_ids_R),
            embedding_scale=config.embedding_scale, hidden_scale=config.hidden_scale,
            cell=cell_matrix,
            down=ctypes.cast(kept["down"], ctypes.POINTER(native.Matrix)) if downs else None,
            blocks=ctypes.cast(kept["blocks"], ctypes.POINTER(native.Matrix)),
            head=head, rows=rows,
            token=drafter.draft_token_ids_R.data_ptr(), index=index_V.data_ptr(), log_odds=kept["odds"].data_ptr(),
            copies=bool(log_odds_X.isfinite().any()), embedding=address, embedding_matrix=pointer,
            embedding_matrix_scale=scale,
        ).keep(cell_matrix, head, rows, *blocks, *downs, *kept.values(), index_V, embedding)  # fmt: skip

    @property
    def num_nodes(self) -> int:
        """M: the beams of all steps, then the copies that lengthen the best one."""
        return self._width * self._length + self._depth - self._length

    def __call__(self, root_B: Tensor, context_BC: Tensor, history_BS: Tensor, position_B: Tensor) -> NodeList:
        num_rows = len(root_B)
        hidden_BD = self._drafter.fuse(context_BC).float().contiguous()
        root_B, position_B, history_BS = root_B.contiguous(), position_B.contiguous(), history_BS.contiguous()
        token_BM = torch.zeros(num_rows, self.num_nodes, dtype=torch.int64)
        parent_BM, score_BM = torch.zeros_like(token_BM), torch.zeros(num_rows, self.num_nodes)
        native.search(
            self._native,
            native.Search(
                num_rows, self._width, self._length, self._depth, root_B.data_ptr(), position_B.data_ptr(),
                hidden_BD.data_ptr(), history_BS.data_ptr(), history_BS.stride(0), token_BM.data_ptr(),
                parent_BM.data_ptr(), score_BM.data_ptr(),
            ),
        )  # fmt: skip
        return NodeList(token_BM, parent_BM, score_BM)
