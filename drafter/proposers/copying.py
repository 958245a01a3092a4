"""Copying: a token that followed the same tokens earlier in the text is likelier than the drafter knows.

A drafter reads one hidden state and does not see the text. At each beam, the longest earlier occurrence of the beam's
last tokens names one token: the token behind the occurrence. The beam's distribution becomes

    (1 - share) q + share [the named token]

with a share that grows with the length of the occurrence (a pointer mixture: Merity et al., arXiv 1609.07843, with the
match of prompt lookup as its pointer).

In the text "a b c x a b" a beam at its end names c, by a match of two tokens. The beam behind c names x, by a match of
three tokens; a beam behind any other token names nothing.

Shapes: B rows · W beams · S slots of history · R draft vocabulary · V target vocabulary.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from drafter.proposers.lookup import match_lengths

# Shares of matches of 1, 2, ..., 8 or more tokens: the likeliest ones, rounded, beside the shipped drafter,
# for 80 greedy answers of a 135M chat model to questions, chat and tasks (10,000 tokens).
SHARES = (0.11, 0.41, 0.49, 0.59, 0.66, 0.7, 0.7, 0.9)


class Matches(NamedTuple):
    """Earlier occurrences of the last tokens of every beam.

    Attributes:
        token_BS: the text's token ids by position, int64.
        next_BS: draft index of the token behind each position; -1 outside the draft vocabulary, and from the root on.
        length_BWS: length of the match that ends at each position and continues at the next, 0 = none, int64.
    """

    token_BS: Tensor
    next_BS: Tensor
    length_BWS: Tensor

    @classmethod
    def of(cls, token_BS: Tensor, position_B: Tensor, draft_index_V: Tensor) -> Self:
        """Matches of the text up to the root, for one beam of each row.

        Args:
            token_BS: token ids by position; entries after ``position`` are undefined. int64.
            position_B: position of the root, int64.
            draft_index_V: target token id -> draft index, -1 outside, int64.
        """
        slot_S = torch.arange(token_BS.shape[1], device=token_BS.device)
        behind_BS = draft_index_V[torch.cat([token_BS[:, 1:], token_BS[:, :1]], dim=1)]
        next_BS = behind_BS.where(slot_S < position_B[:, None], -1)
        return cls(token_BS, next_BS, match_lengths(token_BS, position_B, len(SHARES))[:, None])

    def follow(self, beam_BW: Tensor, token_BW: Tensor) -> Self:
        """Matches of new beams: of each the old beam it comes from and its own token."""
        num_slots = self.token_BS.shape[1]
        old_BWS = self.length_BWS.gather(1, beam_BW[:, :, None].expand(-1, -1, num_slots))
        before_BWS = torch.cat([torch.zeros_like(old_BWS[:, :, :1]), old_BWS[:, :, :-1]], dim=2)
        is_same_BWS = (self.token_BS[:, None] == token_BW[:, :, None]) & (self.next_BS >= 0)[:, None]
        return self._replace(length_BWS=(before_BWS + 1).clamp_max(len(SHARES)) * is_same_BWS)

    def best(self) -> tuple[Tensor, Tensor]:
        """Of each beam the draft index behind the longest match, the latest of equals, and the match's length.

        Returns:
            Index int64 [B, W], any where there is no match; length int64 [B, W].
        """
        num_slots = self.token_BS.shape[1]
        slot_S = torch.arange(num_slots, device=self.token_BS.device)
        length_BWS = self.length_BWS * (self.next_BS >= 0)[:, None]
        key_BW = (length_BWS * num_slots + slot_S).amax(dim=2)
        index_BW = self.next_BS.gather(1, key_BW % num_slots)
        return index_BW.clamp_min(0), key_BW // num_slots


class Mixture(NamedTuple):
    """``logits_BWR``: float32; ``total_BW1``: their log-sum-exp."""

    logits_BWR: Tensor
    total_BW1: Tensor


def mix(logits_BWR: Tensor, index_BW: Tensor, share_BW: Tensor) -> Mixture:
    """Logits of the mixture (1 - share) softmax(logits) + share [index]; a share below 1.

    Only the logit of the copied token changes, so the new log-sum-exp needs no second pass.
    """
    logits_BWR = logits_BWR.float()
    total_BW1 = logits_BWR.logsumexp(dim=2, keepdim=True)
    share_BW1 = share_BW[:, :, None]
    copied_BW1 = total_BW1 + (share_BW1 / (1 - share_BW1)).log()
    own_BW1 = logits_BWR.gather(2, index_BW[:, :, None])
    mixed_BWR = logits_BWR.scatter(2, index_BW[:, :, None], torch.logaddexp(own_BW1, copied_BW1))
    return Mixture(mixed_BWR, total_BW1 - torch.log1p(-share_BW1))
