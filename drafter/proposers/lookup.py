"""LookupProposer: drafts the tokens that followed earlier occurrences of the last tokens, prompt included.

Shapes: B rows · S cache slots · W matches, the beams of a lookup · L draft length · M drafted nodes · G tokens of the
longest match · N tree nodes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.decoding.proposer import Proposer, RowState
from drafter.decoding.sampling import Noise
from drafter.decoding.tree import NodeList
from drafter.proposers.options import Drafting
from drafter.targets.target import Target
from drafter.utils.validate import within

# Odds that the text continues like a match of 1, 2, ..., 8 or more tokens, when there is no other match.
# Counted on 496 greedy answers of a 135M chat model to questions, summaries and chat (75,000 positions).
# Behind matches of more tokens, which a copy makes that goes on: 8.5 at 8 tokens, 25 at 16, 68 at 32.
_LONG_MATCH = 16  # tokens, from which on a chain may have more nodes than the usual tree
_MAX_NGRAM = 8  # of the search; longer matches are measured afterwards
_ODDS = (0.48, 1.36, 1.92, 2.6, 2.75, 3.2, 4.3, *(8.5 * (size / 8) ** 1.5 for size in range(8, 33)))
# Relative weight of a match against a match that is one token shorter and continues differently.
_WEIGHT_PER_TOKEN = 2.0


def match_lengths(history_BS: Tensor, position_B: Tensor, max_ngram: int) -> Tensor:
    """How many of the last tokens end at each earlier position, int64 [B, S]: in "1 2 3 1 2" with the root at position
    4, two at position 1. Arguments as of :func:`find_matches`.
    """
    slot_S = torch.arange(history_BS.shape[1], device=history_BS.device)
    back_G = torch.arange(max_ngram - 1, -1, -1, device=history_BS.device)
    suffix_BG = history_BS.gather(1, (position_B[:, None] - back_G).clamp_min(0))
    # The tokens that end at each slot, padded with -1, which equals no token, before the start of the text.
    ending_BSG = F.pad(history_BS, (max_ngram - 1, 0), value=-1).unfold(1, max_ngram, 1)
    return (ending_BSG == suffix_BG[:, None]).flip(2).cumprod(dim=2).sum(dim=2) * (slot_S < position_B[:, None])


def find_matches(history_BS: Tensor, position_B: Tensor, max_ngram: int, num_matches: int) -> tuple[Tensor, Tensor]:
    """Earlier occurrences of the last tokens: the longest matches first, the latest first among equally long ones. In
    "1 2 3 1 2 4 1 2" with the root at position 7, the best match of two tokens ends at position 4, the next at 1.

    ``history_BS`` has token ids by position, undefined behind ``position_B``, the root's; matches longer than
    ``max_ngram`` count as this long. Returned are the position of each match's last token, and its length in tokens, 0
    = no match, each int64 [B, W].
    """
    num_slots = history_BS.shape[1]
    slot_S = torch.arange(num_slots, device=history_BS.device)
    length_BS = match_lengths(history_BS, position_B, max_ngram)
    key_BW, index_BW = (length_BS * num_slots + slot_S).topk(min(num_matches, num_slots), dim=1)
    if num_slots < num_matches:  # the text has fewer places: the rest is padding without matches
        key_BW, index_BW = (F.pad(column, (0, num_matches - num_slots)) for column in (key_BW, index_BW))
    # Places without a match may lie beyond the end of the text.
    return torch.minimum(index_BW, (position_B[:, None] - 1).clamp_min(0)), key_BW // num_slots


def lengthen(history_BS: Tensor, position_B: Tensor, match_BW: Tensor, size_BW: Tensor, most: int) -> Tensor:
    """The sizes of matches, up to ``most`` tokens where the search stopped at fewer: int64 [B, W]."""
    back_G = torch.arange(most, device=history_BS.device)
    place_BWG = match_BW[:, :, None] - back_G
    token_BWG = history_BS.gather(1, place_BWG.clamp_min(0).flatten(1)).view(place_BWG.shape)
    is_same_BWG = token_BWG == history_BS.gather(1, (position_B[:, None] - back_G).clamp_min(0))[:, None]
    return (is_same_BWG & (place_BWG >= 0)).cumprod(dim=2).sum(dim=2).maximum(size_BW) * (size_BW > 0)


def follow_matches(history_BS: Tensor, position_B: Tensor, match_BW: Tensor, num_tokens: int) -> Tensor:
    """The L tokens after each match, int64 [B, W, L]. Beyond its end, the text continues periodically: after "1 2 3 1 2
    3" the match that ends at position 2 proposes 1 2 3, and then 1 2 3 again.
    """
    period_BW1 = (position_B[:, None] - match_BW).clamp_min(1)[:, :, None]
    source_BWL = match_BW[:, :, None] + 1 + torch.arange(num_tokens, device=history_BS.device) % period_BW1
    return history_BS.gather(1, source_BWL.flatten(1)).view(source_BWL.shape)


def _most(sizes: list[int]) -> float:
    """The log-probability of the next token where all matches, of these sizes, agree; 0 for matches of unknown size."""
    if not 0 < (best := sizes[0]) < _MAX_NGRAM:
        return 0.0 if best else -math.inf
    votes = sum(_WEIGHT_PER_TOKEN ** (size - best) for size in sizes if size)
    return math.log(votes / (votes + 1 / _ODDS[best - 1]))


@dataclass(frozen=True, kw_only=True)
class LookupDrafting(Drafting):
    method: ClassVar = "lookup"
    tree_size: int = within(24, low=1, high=1024)
    num_matches: int = within(8, low=1, high=256)  # that are followed; 1 drafts a chain
    lookup_length: int = within(32, low=1, high=64)  # tokens that one match proposes
    least_probability: float = within(0.1, low=0.0)  # of a node, where a tree of fewer nodes costs less

    @classmethod
    def choose(cls, config: Any, default: Mapping[str, int], drafter: Any) -> Self:
        """The given size of the tree; as many matches as a drafter would have beams."""
        return cls(tree_size=config.tree_size or default["tree_size"], num_matches=default["beam_width"])

    @property
    def tree(self) -> tuple[int, int, int]:
        return self.num_matches, 0, self.tree_size

    def build(self, target: Target, drafter: Any, draft_model: Any) -> Proposer:
        return LookupProposer(self, target.device)


class LookupProposer(Proposer):
    """Drafts the continuations of earlier occurrences of the last tokens. Every match votes for its continuation with a
    weight that grows with its length. The probability of a node is its share of the votes, some of which are for "none
    of the matches". (Prompt lookup decoding without votes and tree: Saxena, 2023.)
    """

    def __init__(self, drafting: LookupDrafting, device: torch.device) -> None:
        self.num_matches, self._num_usual = drafting.num_matches, drafting.tree_size
        # On a CPU, where a smaller tree costs less, a long match may have a chain of this length.
        num_nodes = drafting.tree_size if device.type != "cpu" else max(drafting.tree_size, drafting.lookup_length + 1)
        self.length = min(drafting.lookup_length, num_nodes - 1)
        super().__init__((self.num_matches,) * self.length, num_nodes)
        self.least_probability = drafting.least_probability
        self.expect_cost(0.0)
        # Index n - 1 for a match of n tokens; the last entry holds for all longer matches.
        self._odds_X = torch.tensor(_ODDS, device=device)

    def draft(self, rows: RowState, noise: Noise | None = None) -> NodeList | None:
        """Place l * W + w holds token l of match w, and no node where an earlier match proposes the same tokens."""
        history_BS, position_B = rows.text()
        match_BW, size_BW = find_matches(history_BS, position_B, _MAX_NGRAM, self.num_matches)
        if size_BW.device.type == "cpu":  # most steps have nothing to copy
            is_worth = [_most(sizes) > self.least_score for sizes in size_BW[rows.is_active_B].tolist()]
            if sum(is_worth) < self.num_sharing(rows):
                return None
        size_BW = lengthen(history_BS, position_B, match_BW, size_BW, len(_ODDS))
        token_BLW = follow_matches(history_BS, position_B, match_BW, self.length).transpose(1, 2)
        # same[b, l, i, j]: match j, if there is one, proposes the same l + 1 tokens as match i.
        equal_BLWW = token_BLW[:, :, :, None] == token_BLW[:, :, None, :]
        same_BLWW = equal_BLWW.cumprod(dim=1).bool() & (size_BW > 0)[:, None, None, :]
        # Of the matches that propose the same tokens, the first has the node, and the others have none.
        first_BLW = same_BLWW.int().argmax(dim=3)
        match_W = torch.arange(self.num_matches, device=match_BW.device)
        place_L1 = torch.arange(self.length, device=match_BW.device)[:, None]
        parent_BLW = (place_L1 - 1) * self.num_matches + first_BLW.roll(1, dims=1)
        score_BM = self._score(same_BLWW, size_BW).masked_fill(first_BLW != match_W, -torch.inf).flatten(1)
        if self._num_usual < self.num_nodes:
            least_B1 = score_BM.topk(self._num_usual, dim=1).values[:, -1:]
            is_short_B1 = (size_BW < _LONG_MATCH).all(dim=1, keepdim=True)
            score_BM = score_BM.masked_fill((score_BM <= least_B1) & is_short_B1, -torch.inf)
        return NodeList(token_BLW.flatten(1), parent_BLW.where(place_L1 > 0, -1).flatten(1), score_BM)

    def _score(self, same_BLWW: Tensor, size_BW: Tensor) -> Tensor:
        """Cumulative log-probability of token l of every match, -inf without a match, [B, L, W]."""
        is_match_BW = size_BW > 0
        before_BLWW = torch.cat([is_match_BW[:, None, None, :].expand_as(same_BLWW[:, :1]), same_BLWW[:, :-1]], dim=1)
        # A match that was right so far is longer by that many tokens now.
        size_B11W = size_BW[:, None, None, :]
        best_BLW1 = (size_B11W * before_BLWW).amax(dim=3, keepdim=True)
        weight_BLWW = before_BLWW * _WEIGHT_PER_TOKEN ** (size_B11W - best_BLW1).float()
        place_L1 = torch.arange(self.length, device=size_BW.device)[:, None]
        none_BLW = 1 / self._odds_X[(best_BLW1[..., 0] + place_L1 - 1).clamp(0, len(_ODDS) - 1)]
        share_BLW = (weight_BLWW * same_BLWW).sum(dim=3) / (weight_BLWW.sum(dim=3) + none_BLW)
        return share_BLW.log().cumsum(dim=1).masked_fill(~is_match_BW[:, None], -torch.inf)
