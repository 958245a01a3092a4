"""Copies from the text in vLLM's chain: where the text is kept, and how its copies change the logits.

vLLM hands a draft model no memory but keys and values. The attention layer of the draft model is never called, so
:class:`Text` keeps token ids in its slots. Input ids arrive shifted by one: slot s holds the token of position s + 1. A
rejected draft is overwritten when vLLM reaches its position again, and the blocks of a cached prefix hold their tokens
already. Four numbers behind [h; s] carry the slot of the root and how many tokens were drafted behind it
(:func:`encode_place`) from one draft token to the next.

Shapes: B rows · T tokens of a forward · P blocks of the cache · H key/value heads · J slots of a block · X elements of
a slot · M blocks of a row · S slots of a text · R draft vocabulary · V vocabulary.
"""

import torch
from torch import Tensor

from drafter.proposers.copying import SHARES, Copies, mix
from drafter.proposers.lookup import match_lengths

_SHIFTS = (0, 8, 16)  # of a slot's bytes: every number format of two bytes holds the integers up to 256
PLACE_SIZE = 1 + len(_SHIFTS)


class Text:
    """The texts of a forward's rows: token ids in the slots of a layer's key/value cache of any number format. The
    blocks of every row stand in order; ``num_slots`` are those of the longest row, or more.
    """

    def __init__(self, cache_PHJX: Tensor, block_BM: Tensor, num_slots: int) -> None:
        self._token_PJ = cache_PHJX[:, 0].view(torch.int32)[..., 0]
        self.block_BM, self._num_slots = block_BM, num_slots

    def write(self, slot_T: Tensor, token_T: Tensor) -> None:
        """Put token ids into slots; -1 names no slot, and its token goes to block 0, which vLLM gives to no text."""
        slot_T, num_slots = slot_T.clamp_min(0), self._token_PJ.shape[1]
        self._token_PJ[slot_T // num_slots, slot_T % num_slots] = token_T.int()

    def read(self) -> Tensor:
        """The tokens of every row by slot: int64 [B, S]."""
        num_blocks = -(-self._num_slots // self._token_PJ.shape[1])
        return self._token_PJ[self.block_BM[:, :num_blocks].long()].flatten(1)[:, : self._num_slots].long()


def encode_place(before_TX: Tensor, position_T: Tensor) -> Tensor:
    """The numbers [T, 4] of a state that has read one more token, from those before and the token's slot. Zeros are a
    state that has read nothing: its first token is a root.

    >>> first = encode_place(torch.zeros(1, 4), torch.tensor([70000]))
    >>> first
    tensor([[  1., 112.,  17.,   1.]])
    >>> decode_place(encode_place(first, torch.tensor([70001])))
    (tensor([70000]), tensor([1]))
    """
    byte_TX = (position_T[:, None] >> torch.tensor(_SHIFTS, device=before_TX.device) & 255).to(before_TX.dtype)
    return torch.cat([before_TX[:, :1] + 1, before_TX[:, 1:].where(before_TX[:, :1] > 0, byte_TX)], dim=1)


def decode_place(number_BX: Tensor) -> tuple[Tensor, Tensor]:
    """Where the text of a state ends, from the numbers of :func:`encode_place`, [B, 4]: the slot of the root, and how
    many tokens of the chain behind the root the state has read, int64 [B] each.
    """
    number_BX = number_BX.long()
    root_B = (number_BX[:, 1:] << torch.tensor(_SHIFTS, device=number_BX.device)).sum(1)
    return root_B, (number_BX[:, 0] - 1).clamp_min(0)


class CopyMixer:
    """Mixes copies into logits by the rule of :mod:`drafter.proposers.copying`."""

    def __init__(self, token_R: Tensor, vocab_size: int) -> None:
        self._token_R = token_R
        self._index_V = torch.full((vocab_size,), -1, device=token_R.device)
        self._index_V[token_R] = torch.arange(len(token_R), device=token_R.device)
        self._odds_X = torch.tensor((0.0, *SHARES), device=token_R.device).logit()

    def mix_copies(self, logits_BR: Tensor, token_BS: Tensor, number_BX: Tensor) -> Tensor:
        """Logits of the mixture over the target's vocabulary, float32 [B, V]; -inf for tokens that cannot follow. As in
        our engine, the last tokens may be drafted, and their earlier occurrences end before the root.

        float32 logits are changed in place; ``token_BS`` is int64 by slot, undefined behind the last drafted token;
        ``number_BX`` are the states' [B, 4] of :func:`encode_place`.
        """
        vocab_size, last_slot = len(self._index_V), token_BS.shape[1] - 1
        # A window of the target frees blocks, and their slots hold anything.
        token_BS = token_BS.where((token_BS >= 0) & (token_BS < vocab_size), -1)
        root_B, num_drafted_B = decode_place(number_BX)
        root_B = root_B.clamp_max(last_slot)
        copies = Copies.of(token_BS, root_B, self._odds_X)
        length_BS = match_lengths(token_BS, (root_B + num_drafted_B).clamp_max(last_slot), len(SHARES))
        token_B1, odds_B1 = copies._replace(length_BWS=(length_BS * (copies.next_BS >= 0))[:, None]).best()
        logits_B1R, copied_B11, _ = mix(logits_BR[:, None].float(), self._index_V[token_B1], odds_B1)
        logits_BV = logits_B1R.new_full((len(logits_BR), vocab_size), -torch.inf)
        logits_BV.index_copy_(1, self._token_R, logits_B1R[:, 0])
        # Without a match, the mixture has no place for a copy: the named token keeps its own logit.
        return logits_BV.scatter_(1, token_B1, copied_B11[:, 0])
