"""Rules of one request about the logits of a node, given the node's path: the text, and the drafted tokens above.

A rule is a pure function of the path, so that plain and drafted decoding pick the same tokens. Rules read the target's
logits before temperature and filters. A rule of numbers is an entry of ``_RULES``; its numbers are fields of
:class:`Rules` and of ``SamplingParams``.

Shapes: B rows · N tree nodes · S cache slots · V vocabulary · K biased tokens · M = S + N tokens of text and tree.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafter.decoding.params import MAX_BIASED, SamplingParams

_NEUTRAL = SamplingParams()
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


class Rules(NamedTuple):
    """The numbers of the rules of B rows as tensors. A row without a rule has numbers that change no logit."""

    presence_penalty_B: Tensor  # float32
    frequency_penalty_B: Tensor
    repetition_penalty_B: Tensor
    bias_BK: Tensor  # float32, 0 behind the last biased token
    biased_BK: Tensor  # token ids, int64


class Paths(NamedTuple):
    """The paths of the nodes of B rows, integers int64."""

    token_BN: Tensor
    ancestor_BNN: Tensor  # of :func:`drafter.decoding.tree.ancestors`
    history_BS: Tensor  # the text, root included; entries after the root are undefined
    length_B: Tensor  # position of the root
    num_prompt_B: Tensor  # tokens of the prompt


def rules_of(params: Sequence[SamplingParams]) -> tuple[str, ...]:
    """The names of the rules that some row has, in their order."""
    used = {"bias": any(row.logit_bias for row in params)}
    used["penalties"] = any(getattr(row, name) != getattr(_NEUTRAL, name) for row in params for name in _PENALTIES)
    return tuple(name for name in _RULES if used[name])


def numbers_of(params: Sequence[SamplingParams]) -> Rules:
    """B sampling parameters -> the numbers of their rules, on the CPU."""
    presence_B, frequency_B, repetition_B = torch.tensor(
        [[getattr(row, name) for row in params] for name in _PENALTIES]
    )
    bias_BK = torch.zeros(len(params), MAX_BIASED)
    biased_BK = torch.zeros(len(params), MAX_BIASED, dtype=torch.int64)
    for row, each in enumerate(params):
        if each.logit_bias:
            bias_BK[row, : len(each.logit_bias)] = torch.tensor(list(each.logit_bias.values()))
            biased_BK[row, : len(each.logit_bias)] = torch.tensor(list(each.logit_bias))
    return Rules(presence_B, frequency_B, repetition_B, bias_BK, biased_BK)


def apply_rules(names: Sequence[str], logits_BNV: Tensor, rules: Rules, paths: Paths) -> Tensor:
    """The logits under the rules of these names, float32; changes float32 logits in place."""
    logits_BNV = logits_BNV.float()
    for name in names:
        _RULES[name](logits_BNV, rules, paths)
    return logits_BNV


def _bias(logits_BNV: Tensor, rules: Rules, paths: Paths) -> None:
    """Add the bias of each biased token."""
    shape = (-1, logits_BNV.shape[1], -1)
    logits_BNV.scatter_add_(2, rules.biased_BK[:, None].expand(shape), rules.bias_BK[:, None].expand(shape))


def _penalise(logits_BNV: Tensor, rules: Rules, paths: Paths) -> None:
    """Lower the logits of tokens of the path, as vLLM and transformers do.

    The repetition penalty divides positive logits of all tokens of the path, and multiplies negative ones. Then each
    token of the answer loses the frequency penalty for every occurrence, and the presence penalty once.
    """
    slot_S = torch.arange(paths.history_BS.shape[1], device=logits_BNV.device)
    is_text_BS = slot_S <= paths.length_B[:, None]
    is_answer_BS = is_text_BS & (slot_S >= paths.num_prompt_B[:, None])
    token_BM = torch.cat([paths.history_BS, paths.token_BN], dim=1)  # a token may be listed again: the value is equal
    same_BNM = (paths.token_BN[:, :, None] == token_BM[:, None]).float()
    above_BNN = paths.ancestor_BNN.float()
    above_BNN[:, :, 0] = 0.0  # the root belongs to the text
    drafted_BNM = above_BNN @ same_BNM

    def count(is_counted_BS: Tensor) -> Tensor:
        count_BV = torch.zeros(len(token_BM), logits_BNV.shape[2], device=logits_BNV.device)
        count_BV.scatter_add_(1, paths.history_BS, is_counted_BS.float())
        return drafted_BNM + count_BV.gather(1, token_BM)[:, None]

    presence_B11, frequency_B11, repetition_B11 = (number_B[:, None, None] for number_B in rules[:3])
    index_BNM = token_BM[:, None].expand_as(drafted_BNM)
    own_BNM, num_answered_BNM = logits_BNV.gather(2, index_BNM), count(is_answer_BS)
    factor_BNM = repetition_B11.where(count(is_text_BS) > 0, 1.0)
    own_BNM = torch.where(own_BNM > 0, own_BNM / factor_BNM, own_BNM * factor_BNM)
    own_BNM = own_BNM - frequency_B11 * num_answered_BNM - presence_B11 * (num_answered_BNM > 0)
    logits_BNV.scatter_(2, index_BNM, own_BNM)


# The rules in their order, vLLM's.
_RULES = {"bias": _bias, "penalties": _penalise}
