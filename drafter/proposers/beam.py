"""BeamProposer: beam search with the recurrent drafter; the nodes of the search form the tree.

Shapes: B rows · W beam width (1 at the first step) · L draft length · R draft vocabulary · V target vocabulary ·
D hidden size · C context size · T tokens of a text · M drafted nodes · K children of a beam.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.decoding.proposer import Proposer, RowState
from drafter.decoding.sampling import Noise, Warp, warp_logits
from drafter.decoding.tree import NodeList
from drafter.kernels import native
from drafter.models.drafter import RecurrentDrafter, RnnCell
from drafter.proposers.copying import SHARES, Copies, mix
from drafter.proposers.options import COPY_DEPTH, Drafting
from drafter.targets.target import Target
from drafter.utils.validate import within

_TRIAL_TEXTS = ("Why is the sea salty?", "def add(a, b):\n    return a + b\n", "1 2 3 4 5 6 7 8 9 10")
_TRIAL_TOKENS = 16  # of each text


@dataclass(frozen=True, kw_only=True)
class BeamDrafting(Drafting):
    """Numbers and switches of a beam search of the drafter: :class:`BeamProposer` says what each does."""

    method: ClassVar = "drafter"
    beam_width: int = within(8, low=1, high=256)
    draft_length: int = within(4, low=1, high=32)
    tree_size: int = within(24, low=1, high=1024)
    copying: bool = True
    coupled: bool = True  # rank drafts by the noise of sampling, which decides the target's next picks
    tau: float = within(1.0, above=0.0)
    noise_weight: float = within(0.8, low=0.0)  # below 1, because the drafter's q is flatter than the target's p

    @classmethod
    def choose(cls, config: Any, default: Mapping[str, int], drafter: RecurrentDrafter | None) -> Self:
        """Given numbers stay; an open number follows the given ones (ValueError: they contradict each other)."""
        copying = config.copying is not False
        width, length, size = config.beam_width, config.draft_length, config.tree_size
        if length is not None and size is not None and length > size - 1:
            raise ValueError(f"--draft-length {length} is deeper than trees of --tree-size {size}: lower it")
        num_tokens = 1 if drafter is None else len(drafter.draft_token_ids_R)
        width = width or min(default["beam_width"], num_tokens)
        length = length or (default["draft_length"] if size is None else min(default["draft_length"], size - 1))
        most = 1 + width * length + (max(0, COPY_DEPTH - length) if copying else 0)  # copies lengthen the best beam
        if size is not None and size > most:
            raise ValueError(
                f"--tree-size {size}: trees of --beam-width {width} and --draft-length {length} have at most {most} "
                "nodes: leave --tree-size out, or change one of them"
            )
        size = size or min(max(default["tree_size"], length + 1), most)
        return cls(beam_width=width, draft_length=length, tree_size=size, copying=copying)

    @property
    def tree(self) -> tuple[int, int, int]:
        return self.beam_width, self.draft_length, self.tree_size

    def sized(self, width: int, length: int, size: int) -> Self:
        return replace(self, beam_width=width, draft_length=length, tree_size=size)

    def build(self, target: Target, drafter: RecurrentDrafter | None, draft_model: Target | None) -> Proposer:
        assert drafter is not None, "method drafter without a drafter"
        return BeamProposer(drafter, target, self)

    def describe(self) -> str:
        switch = "" if self.copying else ", no copies"
        return f"W {self.beam_width} L {self.draft_length} N {self.tree_size}{switch}"


class _Level(NamedTuple):
    token_BW: Tensor
    beam_BW: Tensor  # places of the parents among the beams above
    total_BW: Tensor  # cumulative scores


class BeamProposer(Proposer):
    """Beam search of a recurrent drafter: L steps, each keeps the W best of all (parent, token) pairs. The tree is the
    N - 1 most probable nodes of all steps, nodes of abandoned beams included. (ReDrafter, arXiv 2403.09919, section 3.)

    Children are ranked by the log of softmax((log q / temperature + weight * noise) / tau). With the noise of the
    target's coming picks (docs/sampling.md), the rank is the probability that the child is the target's next pick;
    without noise and with tau = 1 it is log q. Greedy rows have temperature 1 and no noise here. With ``copying``, q is
    a mixture, and copies alone lengthen the best beam (:mod:`drafter.proposers.copying`).

    ValueError: another target's drafter or device, layers that the target lacks, or fewer tokens than beams.
    """

    def __init__(self, drafter: RecurrentDrafter, target: Target, drafting: BeamDrafting) -> None:
        self.width = drafting.beam_width
        self.length = min(drafting.draft_length, drafting.tree_size - 1)  # a tree of N nodes is at most N - 1 deep
        self._drafting = drafting
        deepest = min(drafting.tree_size - 1, COPY_DEPTH) if drafting.copying else 0
        super().__init__((self.width,) * self.length + (1,) * (deepest - self.length), drafting.tree_size)
        if drafter.draft_token_ids_R.device.type != target.device.type:
            raise ValueError(
                f"the drafter is on {drafter.device} but the target on {target.device}: drafter.to(...) first"
            )
        self.drafter = drafter.bind(target)
        self.context_layers = layers = tuple(drafter.config.context_layers)
        if any(layer > target.num_layers for layer in layers):
            raise ValueError(f"the drafter reads layers {list(layers)} but {target.name!r} has {target.num_layers}")
        self._embed = target.runtime.embed
        self._dtype = drafter.dtype  # kept, because transformers searches all modules for the dtype
        self._token_R = drafter.draft_token_ids_R
        num_tokens = len(self._token_R)
        if self.width > num_tokens:
            raise ValueError(
                f"--beam-width {self.width} exceeds the drafter's vocabulary of {num_tokens} tokens: lower it"
            )
        self._index_V = torch.full((target.vocab_size,), -1, device=self._token_R.device)
        self._index_V[self._token_R] = torch.arange(num_tokens, device=self._token_R.device)
        shares = SHARES if drafting.copying else [0.0] * len(SHARES)
        self._odds_X = torch.tensor((0.0, *shares), device=self._token_R.device).logit()
        is_here = drafter.is_packed and native.takes(self._token_R) and type(drafter.cell) is RnnCell
        is_native = is_here and self.width <= native.MOST_BEAMS and drafting.tau == 1.0
        self._native = self._rounded(target) if is_native else None

    def _rounded(self, target: Target) -> native.Drafter:
        """The drafter with weights rounded to 4 bits, which changes drafts alone, for :meth:`_search`."""
        config = self.drafter.config
        log_odds_X = self._odds_X.float()
        cell, downs, blocks, head, output = self.drafter.rounded()
        own = getattr(target.runtime, "embedding_matrix", None)
        embedding_VD = target.runtime.embedding_weight_VD.float().contiguous() if own is None else None
        return native.Drafter(
            hidden_size=config.hidden_size, num_blocks=len(blocks), num_tokens=len(self._token_R),
            embedding_scale=config.embedding_scale, hidden_scale=config.hidden_scale,
            cell=cell, down=(native.Matrix * len(downs))(*downs) if downs else None,
            blocks=(native.Matrix * len(blocks))(*blocks), head=head, rows=output,
            token=self._token_R.data_ptr(), index=self._index_V.data_ptr(), log_odds=log_odds_X.data_ptr(),
            copies=self._drafting.copying, embedding=None if embedding_VD is None else embedding_VD.data_ptr(),
            embedding_matrix=None if own is None else ctypes.pointer(own),
            embedding_matrix_scale=1.0 if own is None else target.runtime.embedding_scale,
        ).keep(cell, head, output, *blocks, *downs, log_odds_X, embedding_VD, own)  # fmt: skip

    def _search(self, drafter: native.Drafter, rows: RowState, noise: Noise | None) -> NodeList:
        """:meth:`draft` in one native call."""
        num_rows = len(rows.root_B)
        is_fused = self.drafter.fuse_context is not None  # a module's dtype costs a walk over its parts
        hidden_BD = (self.drafter.fuse(rows.context_BC) if is_fused else rows.context_BC).float().contiguous()
        history_BS, position_B = (each.contiguous() for each in rows.text())
        root_B = rows.root_B.contiguous()
        if rows.prediction_BP is not None:
            noise = None  # the search counts the noise's places from the beginning of the text
        token_BM = torch.zeros(num_rows, sum(self.level_sizes), dtype=torch.int64)
        parent_BM, score_BM = torch.zeros_like(token_BM), torch.full(token_BM.shape, -torch.inf)
        sampling = None if noise is None else ctypes.pointer(native.Sampling.of(rows.warp, noise.seed_B))
        weight = self._drafting.noise_weight if self._drafting.coupled else 0.0
        native.search(
            drafter,
            native.Search(
                num_rows, self.width, self.length, self.max_depth, root_B.data_ptr(), position_B.data_ptr(),
                hidden_BD.data_ptr(), history_BS.data_ptr(), history_BS.stride(0), token_BM.data_ptr(),
                parent_BM.data_ptr(), score_BM.data_ptr(), sampling, weight, self.least_score,
            ),
        )  # fmt: skip
        return NodeList(token_BM, parent_BM, score_BM)

    @torch.inference_mode()
    def check(self, target: Target) -> None:
        """Draft after every token of some texts: finite weights may give numbers that are not finite (ValueError)."""
        encode: Any = target.tokenizer
        texts = [encode(text, add_special_tokens=False)["input_ids"] for text in _TRIAL_TEXTS] if encode else []
        if (most := max((max(ids, default=0) for ids in texts), default=0)) >= target.vocab_size:
            raise ValueError(
                f"the tokenizer of {target.name!r} makes token id {most:,}, and the model has {target.vocab_size:,}"
            )
        spread = torch.arange(_TRIAL_TOKENS) * (target.vocab_size // _TRIAL_TOKENS)
        for ids in (*filter(None, texts), spread.tolist()):
            token_BT = torch.tensor([ids[: min(_TRIAL_TOKENS, target.max_length)]], device=target.device)
            context_BTC = target.forward(token_BT, context_layers=self.context_layers).context_BTC
            embedding_BTLD = self._embed(token_BT)[:, :, None].expand(-1, -1, self.length, -1)
            try:
                is_finite = bool(self.drafter(context_BTC, embedding_BTLD).isfinite().all())
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                is_finite = False
            if not is_finite:
                raise ValueError(
                    "the drafter's numbers are not finite after real text: its weights are too large; train it again"
                )

    def draft(self, rows: RowState, noise: Noise | None) -> NodeList:
        """All nodes of the search; the score is the cumulative log-probability."""
        if self._native is not None:
            return self._search(self._native, rows, noise)
        noise = noise if self._drafting.coupled else None
        copies = Copies.of(*rows.text(), self._odds_X)
        levels, copies = self._drafted_levels(rows, copies, noise)
        levels += self._copied_levels(levels[-1], copies, rows.warp, noise)
        starts = [-1, 0, *accumulate(self.level_sizes)]  # where the level above begins; the root is -1
        parents = [level.beam_BW + start for level, start in zip(levels, starts, strict=False)]
        tokens, scores = [level.token_BW for level in levels], [level.total_BW for level in levels]
        return NodeList(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1))

    def _drafted_levels(self, rows: RowState, copies: Copies, noise: Noise | None) -> tuple[list[_Level], Copies]:
        """The beams of every drafting step, and the copies of the beams before the last step."""
        context_B1C = rows.context_BC[:, None].to(self._dtype)
        state_BWD = self.drafter.init_state(context_B1C)
        token_BW = rows.root_B[:, None]
        levels: list[_Level] = []
        total_BW = torch.zeros_like(token_BW, dtype=torch.float32)
        for step in range(self.length):
            context_BWC = context_B1C.expand(-1, token_BW.shape[1], -1)
            state_BWD = self.drafter.step(state_BWD, self._embed(token_BW).to(self._dtype))
            logits_BWR = self.drafter.logits(context_BWC, state_BWD)
            value_BWK, token_BWK = self._rank_children(logits_BWR, copies, step, rows.warp, noise)
            # W children of each parent are enough: no parent can have more among the W best of all.
            total_BW, best_BW = (total_BW[:, :, None] + value_BWK).flatten(1).topk(self.width, dim=1)
            beam_BW = best_BW // value_BWK.shape[2]
            token_BW = token_BWK.flatten(1).gather(1, best_BW)
            levels.append(_Level(token_BW, beam_BW, total_BW))
            if step + 1 < self.length:
                state_BWD = state_BWD.gather(1, beam_BW[:, :, None].expand(-1, -1, state_BWD.shape[2]))
                copies = copies.follow(beam_BW, token_BW)
        return levels, copies

    def _copied_levels(self, last: _Level, copies: Copies, warp: Warp, noise: Noise | None) -> list[_Level]:
        """Copies alone lengthen the best beam of the last drafting step, one node a level."""
        levels = []
        for step in range(self.length, self.max_depth):
            best = _Level(*(item[:, :1] for item in last))
            copies = copies.follow(best.beam_BW, best.token_BW)
            value_B1, token_B1 = self._rank_copies(copies, step, warp, noise)
            last = _Level(token_B1, torch.zeros_like(token_B1), best.total_BW + value_B1)
            levels.append(last)
        return levels

    def _rank_children(
        self, logits_BWR: Tensor, copies: Copies, step: int, warp: Warp, noise: Noise | None
    ) -> tuple[Tensor, Tensor]:
        """The W best children of every beam and the copied token: log-probabilities and tokens, each [B, W, K]."""
        rank_BWR = warp_logits(logits_BWR, warp) if warp.has_noise else logits_BWR.float()
        token_BW, odds_BW = copies.best()
        rank_BWR, copied_BW1, total_BW1 = mix(rank_BWR, self._index_V[token_BW], odds_BW)
        if noise is not None:
            weight_B1 = ((warp.temperature_B > 0) * self._drafting.noise_weight)[:, None]
            rank_BWR = rank_BWR + (noise.at(step, self._token_R) * weight_B1)[:, None]
            copied_BW1 = copied_BW1 + (noise.at(step, token_BW) * weight_B1)[:, :, None]
        tau = self._drafting.tau
        if noise is not None or tau != 1.0:
            rank_BWR, copied_BW1 = rank_BWR / tau, copied_BW1 / tau
            total_BW1 = torch.logaddexp(rank_BWR.logsumexp(dim=2, keepdim=True), copied_BW1)
        value_BWK, index_BWK = rank_BWR.topk(self.width, dim=2)
        value_BWK = torch.cat([value_BWK, copied_BW1], dim=2) - total_BW1
        return value_BWK, torch.cat([self._token_R[index_BWK], token_BW[:, :, None]], dim=2)

    def _rank_copies(self, copies: Copies, step: int, warp: Warp, noise: Noise | None) -> tuple[Tensor, Tensor]:
        """The copied token of the one beam that is left: log-probability and token, each [B, 1]. With its noise g,
        log(share) + g exceeds a Gumbel number around log(1 - share) with probability exp(-exp(log(1 - share) -
        log(share) - g)).
        """
        token_B1, odds_B1 = copies.best()
        value_B1 = -F.softplus(-odds_B1)
        if noise is not None:
            ranked_B1 = -(-odds_B1 - self._drafting.noise_weight * noise.at(step, token_B1)).exp()
            value_B1 = ranked_B1.where(warp.temperature_B[:, None] > 0, value_B1)
        return value_B1, token_B1
