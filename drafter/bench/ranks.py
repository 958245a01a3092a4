"""Acceptance of every tree size from one decode: where among the drafted nodes did the target's own text stand?

The target's text does not depend on what is drafted, so the same text, drafted from each of its positions once with the
widest and longest search, tells how far every smaller tree would have gone from there: a search of width w keeps, of
the nodes that a wider search kept, those under its own beams, w at each depth; a tree of n nodes keeps the n - 1 of
highest score. Stepping through the text then counts the target forwards exactly as a decode would make them.

Exact where the wide search kept at least w nodes under the narrow one's beams, always for the widest itself. Where it
kept fewer, a narrow search would have found further nodes of low score: there the count is an approximation.

Shapes: S positions of one text · T its tokens · W widest beam · L longest draft · C context size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafter.decoding.params import SamplingParams
from drafter.decoding.proposer import RowState
from drafter.decoding.sampling import make_warp
from drafter.proposers.beam import BeamProposer
from drafter.targets.target import Target

UNREACHED = 2**30  # rank of a token that no beam holds
_LOGITS_AT_ONCE = 2**24  # numbers: 64 MiB in float32


class Drafts(NamedTuple):
    """The widest search from every position of an answer, and what came there.

    Attributes:
        token_SLW, parent_SLW: the kept nodes of each step, best first; the parent is a place in the step before.
        score_SLW: cumulative log-probability.
        true_SL: the tokens that followed; -1 behind the end.
    """

    token_SLW: Tensor
    parent_SLW: Tensor
    score_SLW: Tensor
    true_SL: Tensor

    @property
    def width(self) -> int:
        return self.token_SLW.shape[2]

    @property
    def length(self) -> int:
        return self.token_SLW.shape[1]


@torch.inference_mode()
def draft_everywhere(
    target: Target, search: BeamProposer, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> Drafts:
    """Search a beam from every position of an answer as its root.

    One plain forward gives all contexts. (In bfloat16 they differ by rounding from those of single steps.)

    Args:
        target: wrote the answer, greedily.
        search: the widest and longest search.
        prompt_ids: at least one token.
        answer_ids: at least one token.

    Returns:
        Drafts at as many positions as the answer has tokens; the first root is the prompt's last token.
    """
    device = target.device
    text_T = torch.tensor([*prompt_ids, *answer_ids], device=device)
    drafter = search.drafter
    hidden_1TH = target.forward(text_T[None], context_layers=drafter.config.context_layers).context_BTC
    start_1C = hidden_1TH.new_zeros(1, drafter.config.context_size)
    context_TC = drafter.read(start_1C, hidden_1TH, target.embed(text_T[None]))[0]
    before_C = torch.zeros_like(context_TC[:1])
    context_SC = torch.cat([before_C, context_TC])[len(prompt_ids) - 1 : -2]
    root_S = text_T[len(prompt_ids) - 1 : -1]
    num_at_once = max(1, _LOGITS_AT_ONCE // (search.width * search.drafter.config.num_outputs))
    parts = [
        search.draft(_rows(root_X, context_XC), None)[:3]
        for root_X, context_XC in zip(root_S.split(num_at_once), context_SC.split(num_at_once), strict=True)
    ]
    token_SM, parent_SM, score_SM = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    shape = (len(answer_ids), search.max_depth, search.width)
    # Parents come as places in the whole list, -1 = root; here they count within the step before.
    parent_SLW = parent_SM.view(shape) - torch.arange(-1, search.max_depth - 1)[:, None] * search.width
    parent_SLW[:, 0] = 0
    behind_T = torch.cat([text_T[len(prompt_ids) :].cpu(), torch.full((search.max_depth,), -1)])
    true_SL = behind_T.unfold(0, search.max_depth, 1)[: len(answer_ids)]
    return Drafts(token_SM.view(shape), parent_SLW, score_SM.view(shape), true_SL)


def _rows(root_X: Tensor, context_XC: Tensor) -> RowState:
    """Greedy rows, as far as a search looks at them."""
    zero_X = torch.zeros_like(root_X)
    return RowState(
        root_B=root_X,
        length_B=zero_X,
        context_BC=context_XC,
        history_BS=zero_X[:, None],
        seed_B=zero_X,
        is_active_B=torch.ones_like(root_X, dtype=torch.bool),
        warp=make_warp([SamplingParams()] * len(root_X), root_X.device),
        num_visible=1,
    )


def ranks_of(drafts: Drafts, width: int) -> Tensor:
    """The true text's places among the nodes of a narrower search.

    For W = 2, L = 2 with the nodes a, b (scores -1, -2) and below them x under b (-3), y under a (-4): the true text
    ``b x`` has rank 1 at depth 1, and rank 2 among the nodes of both depths.

    Args:
        drafts: the wide search.
        width: w, at most the wide search's.

    Returns:
        int64 [S, L, L]: [s, d, l] is how many nodes of the steps 0 .. l come before the true node of step d; a large
        number where the true text has left the beams before.
    """
    assert 1 <= width <= drafts.width, (width, drafts.width)
    num_positions, length, wide = drafts.token_SLW.shape
    is_beam_SW = torch.ones(num_positions, wide, dtype=torch.bool)
    kept, is_true, on_path_SW = [], [], is_beam_SW
    for step in range(length):
        parent_SW = drafts.parent_SLW[:, step]
        if step:
            # Nodes are listed best first, so that the first w under the beams are the narrow search's own.
            under_SW = is_beam_SW.gather(1, parent_SW)
            is_beam_SW = under_SW & (under_SW.long().cumsum(1) <= width)
            on_path_SW = on_path_SW.gather(1, parent_SW)
        else:
            is_beam_SW = (torch.arange(wide) < width).expand(num_positions, -1)
        on_path_SW = on_path_SW & is_beam_SW & (drafts.token_SLW[:, step] == drafts.true_SL[:, step, None])
        kept.append(is_beam_SW)
        is_true.append(on_path_SW)
    score_SLW = drafts.score_SLW.masked_fill(~torch.stack(kept, 1), -torch.inf)
    true_SLW = torch.stack(is_true, 1)
    own_SL = score_SLW.masked_fill(~true_SLW, -torch.inf).amax(2)
    # Before it come higher scores; of equal ones those that were found earlier (the sort is stable).
    order_LW = torch.arange(length * wide).view(length, wide)
    place_SL = torch.where(true_SLW, order_LW, 0).amax(2)
    higher_SDLW = score_SLW[:, None] > own_SL[:, :, None, None]
    equal_SDLW = (score_SLW[:, None] == own_SL[:, :, None, None]) & (order_LW < place_SL[:, :, None, None])
    rank_SDL = (higher_SDLW | equal_SDLW).sum(3).cumsum(2)
    return rank_SDL.masked_fill(~true_SLW.any(2)[:, :, None], UNREACHED)


def num_kept(rank_SDL: Tensor, length: int, tree_size: int) -> Tensor:
    """Drafted tokens that a step from each position keeps, with trees of ``tree_size`` nodes drafted ``length`` deep.

    As in the engine, a tree of n nodes is drafted no deeper than n - 1.

    Returns:
        int64 [S].
    """
    length = min(length, tree_size - 1)
    if length < 1:
        return torch.zeros(rank_SDL.shape[0], dtype=torch.int64)
    is_kept_SD = rank_SDL[:, :length, length - 1] < tree_size - 1
    return is_kept_SD.long().cumprod(1).sum(1)


def count_steps(kept: Sequence[int]) -> int:
    """Target forwards that an answer takes when a step from its i-th position keeps ``kept[i]`` drafted tokens.

    [2, 0, 0, 1] takes two: the first step gives three tokens, the second the fourth.
    """
    position = steps = 0
    while position < len(kept):
        position += kept[position] + 1
        steps += 1
    return steps


class Acceptance:
    """Tokens per step of every tree size on some answers.

    Args:
        drafts: of each answer.
    """

    def __init__(self, drafts: Sequence[Drafts]) -> None:
        assert drafts
        self._drafts = list(drafts)
        self._ranks: dict[int, list[Tensor]] = {}
        self.num_positions = sum(len(item.true_SL) for item in drafts)

    def tokens_per_step(self, width: int, length: int, tree_size: int) -> float:
        """Generated tokens / target forwards with beam width, draft length and tree size."""
        if tree_size == 1:
            return 1.0
        if width not in self._ranks:
            self._ranks[width] = [ranks_of(item, width) for item in self._drafts]
        steps = sum(count_steps(num_kept(rank, length, tree_size).tolist()) for rank in self._ranks[width])
        return self.num_positions / steps
