"""Copying: mixes the drafter's distribution with the token that followed the same tokens earlier in the text.

The longest earlier occurrence of a beam's last tokens names one token: the token after the occurrence. The beam's
distribution becomes (1 - share) q + share [the named token], with a share that grows with the length of the occurrence
(a pointer mixture: Merity et al., arXiv 1609.07843, with the match of prompt lookup as its pointer). All earlier
occurrences of the last token have a vote: the odds of the share are multiplied by agreeing^2 / occurrences, where
``agreeing`` counts the occurrences in front of the named token.

In the text "a b c x a b" a beam at its end names c, by a match of two tokens. The beam behind c names x, by a match of
three tokens; a beam behind any other token names nothing. In "b c b d b" the last b names d, by a match of one token
out of two occurrences, so the odds of the share are halved.

After the last drafting step, named tokens alone lengthen the best beam, without a forward of the drafter.

Shapes: B rows · W beams · S cache slots · R draft vocabulary · X lengths of a match, 0 first.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.proposers.lookup import match_lengths

# Shares of matches of 1, 2, ..., 32 or more tokens where the last token occurred once: rounded maximum-likelihood
# values with the shipped drafters, on 160 greedy answers of a 135M chat model to questions, chat and tasks (20,000
# tokens), and from 8 tokens on, where odds grow with the square, on 150 of a 1.5B (20,000 tokens, two thirds code).
SHARES = (0.14, 0.41, 0.55, 0.7, 0.74, 0.74, 0.78, *(1 - 1 / (1 + 6 * (size / 8) ** 2) for size in range(8, 33)))


class Copies(NamedTuple):
    """Earlier occurrences of the last tokens of every beam, and the odds of the tokens that follow them."""

    token_BS: Tensor  # the text's token ids by position, int64
    next_BS: Tensor  # the token behind each position; -1 from the root on
    length_BWS: Tensor  # length of the match that ends at each position and continues at the next, 0 = none, int64
    odds_X: Tensor  # log(share / (1 - share)) by the length of an only match; -inf for 0

    @classmethod
    def of(cls, token_BS: Tensor, position_B: Tensor, odds_X: Tensor) -> Self:
        """Copies of the text up to the root at ``position``, for one beam of each row; later tokens are undefined."""
        slot_S = torch.arange(token_BS.shape[1], device=token_BS.device)
        next_BS = token_BS.roll(-1, dims=1).where(slot_S < position_B[:, None], -1)
        return cls(token_BS, next_BS, match_lengths(token_BS, position_B, len(SHARES))[:, None], odds_X)

    def follow(self, beam_BW: Tensor, token_BW: Tensor) -> Self:
        """Copies of new beams, each given by its parent beam and its own token."""
        old_BWS = self.length_BWS.gather(1, beam_BW[:, :, None].expand(-1, -1, self.token_BS.shape[1]))
        before_BWS = torch.cat([torch.zeros_like(old_BWS[:, :, :1]), old_BWS[:, :, :-1]], dim=2)
        is_same_BWS = (self.token_BS[:, None] == token_BW[:, :, None]) & (self.next_BS >= 0)[:, None]
        return self._replace(length_BWS=(before_BWS + 1).clamp_max(len(SHARES)) * is_same_BWS)

    def best(self) -> tuple[Tensor, Tensor]:
        """The token after each beam's longest, then latest match, int64 [B, W], and its log odds, -inf without one."""
        num_slots = self.token_BS.shape[1]
        key_BW = (self.length_BWS * num_slots + torch.arange(num_slots, device=self.token_BS.device)).amax(dim=2)
        token_BW = self.next_BS.gather(1, key_BW % num_slots).clamp_min(0)
        is_match_BWS = self.length_BWS > 0
        num_agreeing_BW = (is_match_BWS & (self.next_BS[:, None] == token_BW[:, :, None])).sum(dim=2)
        votes_BW = num_agreeing_BW.square() / is_match_BWS.sum(dim=2).clamp_min(1)
        return token_BW, self.odds_X[key_BW // num_slots] + votes_BW.log()


def mix(logits_BWR: Tensor, index_BW: Tensor, odds_BW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(1 - share) q + share [copied token], as logits on one scale, for q = softmax(logits), float32, changed in place.

    ``index_BW`` is the copied token's draft index or -1, ``odds_BW`` log(share / (1 - share)) or -inf. Returned are the
    logits without the copied token, whose place holds -inf [B, W, R]; the copied token's logit [B, W, 1], inside or
    outside the draft vocabulary; and the log-sum-exp of all [B, W, 1].
    """
    total_BW1 = logits_BWR.logsumexp(dim=2, keepdim=True)
    place_BW1, odds_BW1 = index_BW.clamp_min(0)[:, :, None], odds_BW[:, :, None]
    is_inside_BW1 = (index_BW >= 0)[:, :, None]
    own_BW1 = logits_BWR.gather(2, place_BW1)
    logits_BWR.scatter_(2, place_BW1, own_BW1.masked_fill(is_inside_BW1, -torch.inf))
    copied_BW1 = torch.logaddexp(own_BW1.masked_fill(~is_inside_BW1, -torch.inf), total_BW1 + odds_BW1)
    # Rounding must not make a copy likelier than certain, because no child may score above its parent.
    return logits_BWR, copied_BW1, (total_BW1 + F.softplus(odds_BW1)).maximum(copied_BW1)
