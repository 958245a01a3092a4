"""BeamProposer: the recurrent drafter searches a beam, and what it searched is the tree.

Shapes: B rows · W beam width (1 at the first step) · L draft length · R draft vocabulary · V target vocabulary ·
D hidden size · C context size · M = L * W drafted nodes.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from drafter.decoding.compile import Compiler
from drafter.decoding.proposer import RowState, StatelessRows
from drafter.decoding.sampling import Warp, warp_logits
from drafter.decoding.tree import Candidates, pack_nodes
from drafter.kernels.largest import topk
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target


class BeamSearch:
    """Beam search of a recurrent drafter: L steps, each keeps the W best of all (parent, token) pairs.

    Children are ranked by the log of softmax((log q / temperature + weight * noise) / tau): with the target's coming
    noise known this is how likely the child is the target's next pick; without noise and with tau = 1 it is log q.
    Temperature 0 counts as 1 here, and has no noise. (ReDrafter, arXiv 2403.09919, section 3; noise: docs/sampling.md.)

    Args:
        drafter: a trained drafter.
        target: its target.
        beam_width, draft_length, tau: W, L, and the softness of the ranking.
        noise_weight: what the noise counts; below 1 where q is flatter than p.
        is_frozen: the drafter's weights will not change any more, so that a compiler may make copies of them.
    """

    def __init__(
        self,
        drafter: RecurrentDrafter,
        target: Target,
        beam_width: int,
        draft_length: int,
        tau: float,
        noise_weight: float = 1.0,
        *,
        is_frozen: bool = False,
    ) -> None:
        if drafter.draft_token_ids_R.device.type != target.device.type:
            raise ValueError(
                f"the drafter is on {drafter.device} but the target on {target.device}: drafter.to(...) first"
            )
        self.drafter = drafter.bind(target)
        self._embed = target.embed
        self._token_R = drafter.draft_token_ids_R
        self.device = self._token_R.device
        self.width = beam_width
        self.length = draft_length
        self.tau = tau
        self.noise_weight = noise_weight
        # A compiler takes for a weight only what is a module's parameter.
        self._frozen_head = _linear_of(self.drafter.output_rows()) if is_frozen else None
        num_draft_tokens = self._token_R.shape[0]
        if beam_width > num_draft_tokens:
            raise ValueError(
                f"--beam-width {beam_width} exceeds the drafter's vocabulary of {num_draft_tokens} tokens: lower it"
            )

    def search(self, rows: RowState, noise_BLV: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """All nodes of the search, step after step.

        Args:
            rows: the running rows.
            noise_BLV: noise of the picks by depth [B, >= L, V] to rank with, or None.

        Returns:
            token int64, parent int64 (index into the list, -1 = root), cumulative score float32; each [B, L * W].
        """
        return self._search(rows.root_B, rows.context_BC, rows.warp, noise_BLV)

    def search_greedily(self, root_B: Tensor, context_BC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`search` for rows without noise."""
        return self._search(root_B, context_BC, None, None)

    def _search(
        self, root_B: Tensor, context_BC: Tensor, warp: Warp | None, noise_BLV: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = self.width
        dtype = self.drafter.dtype
        context_B1C = context_BC[:, None].to(dtype)
        state_BWD = self.drafter.init_state(context_B1C)
        token_BW = root_B[:, None]
        total_BW = torch.zeros_like(token_BW, dtype=torch.float32)
        tokens, parents, scores = [], [], []
        for step in range(self.length):
            context_BWC = context_B1C.expand(-1, token_BW.shape[1], -1)
            state_BWD = self.drafter.step(context_BWC, state_BWD, self._embed(token_BW).to(dtype))
            logits_BWR = self._logits(context_BWC, state_BWD)
            noise_BR = None if noise_BLV is None else noise_BLV[:, step].index_select(1, self._token_R)
            value_BWK, index_BWK = self._rank_children(logits_BWR, noise_BR, warp)
            # W children of each parent are enough: no parent can have more among the W best of all.
            total_BM = (total_BW[:, :, None] + value_BWK).flatten(1)
            total_BW, best_BW = total_BM.topk(width, dim=1)
            beam_BW = best_BW // width
            token_BW = self._token_R[index_BWK.flatten(1).gather(1, best_BW)]
            state_BWD = state_BWD.gather(1, beam_BW[:, :, None].expand(-1, -1, state_BWD.shape[2]))
            tokens.append(token_BW)
            parents.append(beam_BW + (step - 1) * width if step else torch.full_like(beam_BW, -1))
            scores.append(total_BW)
        return torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1)

    def _logits(self, context_BWC: Tensor, state_BWD: Tensor) -> Tensor:
        """The drafter's logits [B, W, R]."""
        if self._frozen_head is None:
            return self.drafter.logits(context_BWC, state_BWD)
        logits_BWR: Tensor = self._frozen_head(self.drafter.features(self.drafter.fuse(context_BWC), state_BWD))
        return logits_BWR

    def _rank_children(self, logits_BWR: Tensor, noise_BR: Tensor | None, warp: Warp | None) -> tuple[Tensor, Tensor]:
        """The W best children of every beam: log-probabilities and draft indices, each [B, W, W]."""
        has_noise = warp is not None and warp.flags.has_noise
        rank_BWR = warp_logits(logits_BWR, warp) if warp is not None and has_noise else logits_BWR.float()
        if noise_BR is not None:
            assert warp is not None
            weight_B11 = ((warp.temperature_B > 0) * self.noise_weight)[:, None, None]
            rank_BWR = rank_BWR + noise_BR[:, None] * weight_B11
        if self.tau != 1.0:
            rank_BWR = rank_BWR / self.tau
        value_BWK, index_BWK = topk(rank_BWR, self.width)
        return value_BWK - rank_BWR.logsumexp(dim=2, keepdim=True), index_BWK


def _linear_of(weight_RX: Tensor) -> nn.Linear:
    """A layer that multiplies with this very weight."""
    layer = nn.Linear(weight_RX.shape[1], weight_RX.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight_RX.detach(), requires_grad=False)
    return layer.eval()


class BeamProposer(StatelessRows):
    """The recurrent drafter as a proposer.

    ``all-nodes``: the N - 1 likeliest nodes of all steps, dead beams included. ``final-beams``: the published policy,
    the W final beams with shared prefixes merged, 1 + W * L nodes of which the unused ones are padding.

    A compiler is used in steps in which no row samples. (Rows that sample combine filters in too many ways.)
    """

    def __init__(
        self,
        search: BeamSearch,
        num_nodes: int,
        policy: Literal["all-nodes", "final-beams"],
        *,
        coupled: bool = True,
        compiler: Compiler | None = None,
    ) -> None:
        self._search = search
        self._policy = policy
        self._coupled = coupled
        self.num_nodes = num_nodes
        self.max_depth = search.length
        step_L = torch.arange(1, search.length + 1, device=search.device)
        self._depth_M = step_L.repeat_interleave(search.width)
        self._compiled = None
        if compiler is not None and compiler.is_on:
            self._compiled = compiler(self._propose_greedily, ((0,), (0,)))

    def propose(self, rows: RowState, noise_BLV: Tensor | None) -> Candidates:
        """Search a beam for every row and pack its nodes (see :class:`drafter.decoding.proposer.Proposer`)."""
        if self._compiled is not None and not rows.warp.flags.has_noise:
            return Candidates(*self._compiled(rows.root_B, rows.context_BC))
        return self._pack(rows.root_B, *self._search.search(rows, noise_BLV if self._coupled else None))

    def _propose_greedily(self, root_B: Tensor, context_BC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four tensors of the candidates."""
        found = self._pack(root_B, *self._search.search_greedily(root_B, context_BC))
        return found.token_BN, found.parent_BN, found.depth_BN, found.is_node_BN

    def _pack(self, root_B: Tensor, token_BM: Tensor, parent_BM: Tensor, score_BM: Tensor) -> Candidates:
        if self._policy == "final-beams":
            score_BM = keep_final_beams(parent_BM, score_BM, self._search.width)
        return pack_nodes(root_B, token_BM, parent_BM, self._depth_M.expand_as(token_BM), score_BM, self.num_nodes)


def keep_final_beams(parent_BM: Tensor, score_BM: Tensor, width: int) -> Tensor:
    """Scores of the nodes on a path to one of the last ``width`` nodes; -inf for all others.

    With W = 2, L = 2 and parents [-1, -1, 0, 0], node 1 has no final beam and is dropped.

    Args:
        parent_BM: int64 [B, M], M = L * W nodes step after step.
        score_BM: float [B, M].
        width: W.

    Returns:
        float [B, M].
    """
    num_drafted = parent_BM.shape[1]
    is_kept_BM = torch.zeros_like(parent_BM, dtype=torch.bool)
    is_kept_BM[:, -width:] = score_BM[:, -width:] > -torch.inf
    for start in range(num_drafted - width, 0, -width):
        step_BW = parent_BM[:, start : start + width]
        is_kept_BM |= torch.zeros_like(is_kept_BM).scatter_reduce(
            1, step_BW, is_kept_BM[:, start : start + width], reduce="amax", include_self=True
        )
    return score_BM.masked_fill(~is_kept_BM, -torch.inf)
