"""LookupProposer: drafts the tokens that followed earlier occurrences of the last tokens, prompt included.

Shapes: B rows · S slots of history · M matches · L tokens that a match proposes · G tokens of the longest match ·
N tree nodes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.decoding.proposer import Proposer, RowState
from drafter.decoding.sampling import Noise
from drafter.decoding.tree import NodeList
from drafter.proposers.options import Drafting

# Odds that the text continues like a match of 1, 2, ..., 8 or more tokens, when there is no other match.
# Counted on 496 greedy answers of a 135M chat model to questions, summaries and chat (75,000 positions).
_ODDS = (0.48, 1.36, 1.92, 2.6, 2.75, 3.2, 4.3, 8.5)
# Relative weight of a match against a match that is one token shorter and continues differently.
_WEIGHT_PER_TOKEN = 2.0


def match_lengths(history_BS: Tensor, position_B: Tensor, max_ngram: int) -> Tensor:
    """How many of the last tokens end at each earlier position, int64 [B, S]; arguments as of :func:`find_matches`.

    In "1 2 3 1 2" with the root at position 4, the match that ends at position 1 has two tokens; the others have none.
    """
    slot_S = torch.arange(history_BS.shape[1], device=history_BS.device)
    back_G = torch.arange(max_ngram - 1, -1, -1, device=history_BS.device)
    suffix_BG = history_BS.gather(1, (position_B[:, None] - back_G).clamp_min(0))
    # The tokens that end at each slot, padded with -1, which equals no token, before the start of the text.
    window_BSG = F.pad(history_BS, (max_ngram - 1, 0), value=-1).unfold(1, max_ngram, 1)
    is_same_BSG = (window_BSG == suffix_BG[:, None]).flip(2)  # the last token first
    return is_same_BSG.cumprod(dim=2).sum(dim=2) * (slot_S < position_B[:, None])


def find_matches(history_BS: Tensor, position_B: Tensor, max_ngram: int, num_matches: int) -> tuple[Tensor, Tensor]:
    """Earlier occurrences of the last tokens: the longest matches first, the latest first among equally long ones.

    In "1 2 3 1 2 4 1 2" with the root at position 7, the best match of two tokens ends at position 4, the next at 1.

    Args:
        history_BS: token ids by position; entries after ``position`` are undefined. int64 [B, S].
        position_B: position of the last token (the root), int64 [B].
        max_ngram: longer matches count as this long.
        num_matches: M.

    Returns:
        Position of the match's last token, int64 [B, M], and its length in tokens, 0 = no match, int64 [B, M].
    """
    num_slots = history_BS.shape[1]
    slot_S = torch.arange(num_slots, device=history_BS.device)
    length_BS = match_lengths(history_BS, position_B, max_ngram)
    key_BM, index_BM = (length_BS * num_slots + slot_S).topk(min(num_matches, num_slots), dim=1)
    if num_slots < num_matches:  # the text has fewer places: the rest is padding without matches
        key_BM, index_BM = (F.pad(column, (0, num_matches - num_slots)) for column in (key_BM, index_BM))
    # Places without a match may lie beyond the end of the text.
    return torch.minimum(index_BM, (position_B[:, None] - 1).clamp_min(0)), key_BM // num_slots


def follow_matches(history_BS: Tensor, position_B: Tensor, match_BM: Tensor, num_tokens: int) -> Tensor:
    """The tokens after each match. Beyond the end of the text, the text continues periodically.

    After "1 2 3 1 2 3" the match that ends at position 2 proposes 1 2 3, and then 1 2 3 again.

    Args:
        history_BS, position_B: as of :func:`find_matches`.
        match_BM: position of each match's last token, before ``position``; int64 [B, M].
        num_tokens: L.

    Returns:
        int64 [B, M, L].
    """
    step_L = torch.arange(num_tokens, device=history_BS.device)
    period_BM1 = (position_B[:, None] - match_BM).clamp_min(1)[:, :, None]
    source_BML = match_BM[:, :, None] + 1 + step_L % period_BM1
    return history_BS.gather(1, source_BML.flatten(1)).view(source_BML.shape)


class LookupProposer(Proposer):
    """Drafts the continuations of earlier occurrences of the last 1 .. ``max_ngram`` tokens.

    Every match votes for its continuation with a weight that grows with the length of the match. The probability of a
    node is its share of the votes, some of which are for "none of the matches". (Prompt lookup decoding without votes
    and tree: Saxena, 2023.)

    Args:
        drafting: number of matches (M, 1 drafts a chain), tokens of each (L), and the longest match that counts.
        device: the target's.
    """

    def __init__(self, drafting: Drafting, device: torch.device) -> None:
        self.num_matches, self.max_ngram = drafting.num_matches, drafting.max_ngram
        self.length = min(drafting.lookup_length, drafting.tree_size - 1)
        super().__init__((self.num_matches,) * self.length, drafting.tree_size)
        # Index n - 1 for a match of n tokens; the last entry holds for all longer matches.
        self._odds_X = torch.tensor(_ODDS, device=device)

    def draft(self, rows: RowState, noise: Noise | None = None) -> NodeList:
        """Place l * M + m holds token l of match m, and no node where an earlier match proposes the same tokens.

        The noise is not used.
        """
        history_BS = rows.history_BS[:, : rows.num_visible]
        match_BM, size_BM = find_matches(history_BS, rows.length_B, self.max_ngram, self.num_matches)
        token_BLM = follow_matches(history_BS, rows.length_B, match_BM, self.length).transpose(1, 2)
        # same[b, l, i, j]: match j, if there is one, proposes the same l + 1 tokens as match i.
        equal_BLMM = token_BLM[:, :, :, None] == token_BLM[:, :, None, :]
        same_BLMM = equal_BLMM.cumprod(dim=1).bool() & (size_BM > 0)[:, None, None, :]
        # Of the matches that propose the same tokens, the first has the node, and the others have none.
        first_BLM = same_BLMM.int().argmax(dim=3)
        match_M = torch.arange(self.num_matches, device=match_BM.device)
        step_L1 = torch.arange(self.length, device=match_BM.device)[:, None]
        parent_BLM = (step_L1 - 1) * self.num_matches + first_BLM.roll(1, dims=1)
        score_BLM = self._score(same_BLMM, size_BM).masked_fill(first_BLM != match_M, -torch.inf)
        return NodeList(
            token_BM=token_BLM.flatten(1),
            parent_BM=parent_BLM.where(step_L1 > 0, -1).flatten(1),
            score_BM=score_BLM.flatten(1),
        )

    def _score(self, same_BLMM: Tensor, size_BM: Tensor) -> Tensor:
        """Cumulative log-probability of token l of every match, -inf without a match, [B, L, M]."""
        is_match_BM = size_BM > 0
        before_BLMM = torch.cat([is_match_BM[:, None, None, :].expand_as(same_BLMM[:, :1]), same_BLMM[:, :-1]], dim=1)
        # A match that was right so far is longer by that many tokens now.
        size_B11M = size_BM[:, None, None, :]
        best_BLM1 = (size_B11M * before_BLMM).amax(dim=3, keepdim=True)
        weight_BLMM = before_BLMM * _WEIGHT_PER_TOKEN ** (size_B11M - best_BLM1).float()
        step_L1 = torch.arange(self.length, device=size_BM.device)[:, None]
        none_BLM = 1 / self._odds_X[(best_BLM1[..., 0] + step_L1 - 1).clamp(0, len(_ODDS) - 1)]
        share_BLM = (weight_BLMM * same_BLMM).sum(dim=3) / (weight_BLMM.sum(dim=3) + none_BLM)
        return share_BLM.log().cumsum(dim=1).masked_fill(~is_match_BM[:, None], -torch.inf)
