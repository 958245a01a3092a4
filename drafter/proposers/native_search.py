"""The beam search in one call of the native step, with weights rounded to 8 bits.

Rounding changes drafts only, never the tokens of an answer.

Shapes: B rows · C context size · D hidden size · S cache slots · M drafted nodes · R draft vocabulary ·
V target vocabulary · X lengths of a match, 0 first.
"""

import ctypes

import torch
from torch import Tensor

from drafter.decoding.proposer import RowState
from drafter.decoding.sampling import Noise
from drafter.decoding.tree import NodeList
from drafter.kernels import native
from drafter.models.drafter import RecurrentDrafter, RnnCell
from drafter.targets.target import Target


def can_search(drafter: RecurrentDrafter, width: int, tau: float) -> bool:
    """Whether the native search may draft for a drafter: one whose weights decode, on a CPU, with tau = 1."""
    is_here = drafter.is_packed and native.takes(drafter.draft_token_ids_R) and type(drafter.cell) is RnnCell
    return is_here and width <= native.MOST_BEAMS and tau == 1.0


class NativeSearch:
    """A drafter's weights in 8 bits, and the search over them. ``index_V`` is the place of each target token in the
    draft vocabulary or -1, int64; ``log_odds_X`` log(share / (1 - share)) by the length of a match, -inf first.
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
        noise_weight: float,
    ) -> None:
        self._noise_weight = noise_weight
        self._drafter, self._width, self._length, self._depth = drafter, width, length, depth
        config = drafter.config
        cell, downs, blocks, head, output = drafter.rounded()
        log_odds_X = log_odds_X.float().contiguous()
        own = getattr(target.runtime, "embedding_matrix", None)
        embedding_VD = target.runtime.embedding_weight_VD.float().contiguous() if own is None else None
        self._native = native.Drafter(
            hidden_size=config.hidden_size, num_blocks=len(blocks), num_tokens=len(drafter.draft_token_ids_R),
            embedding_scale=config.embedding_scale, hidden_scale=config.hidden_scale,
            cell=cell, down=(native.Matrix * len(downs))(*downs) if downs else None,
            blocks=(native.Matrix * len(blocks))(*blocks), head=head, rows=output,
            token=drafter.draft_token_ids_R.data_ptr(), index=index_V.data_ptr(), log_odds=log_odds_X.data_ptr(),
            copies=bool(log_odds_X.isfinite().any()),
            embedding=None if embedding_VD is None else embedding_VD.data_ptr(),
            embedding_matrix=None if own is None else ctypes.pointer(own),
            embedding_matrix_scale=1.0 if own is None else target.runtime.embedding_scale,
        ).keep(cell, head, output, *blocks, *downs, log_odds_X, embedding_VD, own, index_V)  # fmt: skip

    def __call__(self, rows: RowState, noise: Noise | None) -> NodeList:
        num_rows = len(rows.root_B)
        is_fused = self._drafter.fuse_context is not None  # a module's dtype costs a walk over its parts
        hidden_BD = (self._drafter.fuse(rows.context_BC) if is_fused else rows.context_BC).float().contiguous()
        history_BS, position_B = (each.contiguous() for each in rows.text())
        root_B = rows.root_B.contiguous()
        if rows.prediction_BP is not None:
            noise = None  # the search counts the noise's places from the beginning of the text
        num_nodes = self._width * self._length + self._depth - self._length  # all beams, and copies behind the best
        token_BM = torch.zeros(num_rows, num_nodes, dtype=torch.int64)
        parent_BM, score_BM = torch.zeros_like(token_BM), torch.zeros(num_rows, num_nodes)
        sampling = None if noise is None else ctypes.pointer(native.Sampling.of(rows.warp, noise.seed_B))
        native.search(
            self._native,
            native.Search(
                num_rows, self._width, self._length, self._depth, root_B.data_ptr(), position_B.data_ptr(),
                hidden_BD.data_ptr(), history_BS.data_ptr(), history_BS.stride(0), token_BM.data_ptr(),
                parent_BM.data_ptr(), score_BM.data_ptr(), sampling, self._noise_weight,
            ),
        )  # fmt: skip
        return NodeList(token_BM, parent_BM, score_BM)
