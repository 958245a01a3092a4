"""Rules of one request about the logits of a node, given the node's path: the text, and the drafted tokens above.

A rule is a pure function of the path, so that plain and drafted decoding pick the same tokens. Rules read the target's
logits before temperature and filters. A rule is an entry of ``_RULES``; its numbers are fields of :class:`Rules` and of
``SamplingParams``. A grammar is a rule that the host computes: a :class:`Guide` makes masks of allowed tokens.

Shapes: B rows · N tree nodes · S cache slots · V vocabulary · K biased tokens · M = S + N tokens of text and tree ·
X = V / 8 bytes of a mask.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafter.decoding.params import MAX_BIASED, PENALTIES, SamplingParams

_MOST_SECONDS = 0.5  # for the mask of one node


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
    mask_BNX: Tensor | None = None  # uint8: bit k of byte x says whether a grammar allows token 8 x + k after a node


def numbers_of(params: Sequence[SamplingParams]) -> Rules:
    """B sampling parameters -> the numbers of their rules, on the CPU."""
    numbers = [[getattr(row, name) for row in params] for name in PENALTIES]
    presence_B, frequency_B, repetition_B = torch.tensor(numbers, dtype=torch.float32)
    bias_BK = torch.zeros(len(params), MAX_BIASED)
    biased_BK = torch.zeros(len(params), MAX_BIASED, dtype=torch.int64)
    for row, each in enumerate(params):
        if each.logit_bias:
            bias_BK[row, : len(each.logit_bias)] = torch.tensor(list(each.logit_bias.values()))
            biased_BK[row, : len(each.logit_bias)] = torch.tensor(list(each.logit_bias))
    return Rules(presence_B, frequency_B, repetition_B, bias_BK, biased_BK)


def apply_rules(names: Collection[str], logits_BNV: Tensor, rules: Rules, paths: Paths) -> Tensor:
    """The logits under the rules of these names, float32; changes float32 logits in place."""
    logits_BNV = logits_BNV.float()
    for name, rule in _RULES.items():
        if name in names:
            rule(logits_BNV, rules, paths)
    return logits_BNV


def _bias(logits_BNV: Tensor, rules: Rules, paths: Paths) -> None:
    """Add the bias of each biased token."""
    shape = (-1, logits_BNV.shape[1], -1)
    logits_BNV.scatter_add_(2, rules.biased_BK[:, None].expand(shape), rules.bias_BK[:, None].expand(shape))


def _penalise(logits_BNV: Tensor, rules: Rules, paths: Paths) -> None:
    """Divide positive logits of the path's tokens by the repetition penalty, and multiply negative ones; then subtract
    the frequency penalty for every occurrence in the answer, and the presence penalty once (vLLM, transformers).
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


def _mask(logits_BNV: Tensor, rules: Rules, paths: Paths) -> None:
    """Forbid what the grammars of the rows do not allow."""
    assert paths.mask_BNX is not None
    bit_8 = torch.arange(8, dtype=torch.uint8, device=logits_BNV.device)
    is_allowed_BNV = (paths.mask_BNX[..., None] >> bit_8).bitwise_and_(1).flatten(2)[..., : logits_BNV.shape[2]]
    logits_BNV.masked_fill_(is_allowed_BNV == 0, -torch.inf)


# The rules in their order, vLLM's; no bias brings a forbidden token back.
_RULES = {"bias": _bias, "penalties": _penalise, "grammar": _mask}


class TreeNode(NamedTuple):
    """A node of a tree on the host."""

    token: int
    parent: int  # place in the list; the root, at place 0, is its own parent
    depth: int


def _children_of(nodes: Sequence[TreeNode]) -> dict[int | None, dict[int, int]]:
    """The children of each node of a tree: places by token. A place that is no node has none."""
    children: dict[int | None, dict[int, int]] = defaultdict(dict)
    for place, node in enumerate(nodes[1:], start=1):
        children[node.parent][node.token] = place
    return children


class Guide:
    """The state of a grammar behind the text of one request, which grows by :meth:`take`.

    ``matcher``: an ``llguidance.LLMatcher`` at the beginning of the answer. ``ends``: the tokens that end an answer,
    where the grammar lets a text end. ``error``: why the grammar fails, by a limit of time or size, if so.
    """

    def __init__(self, matcher: Any, ends: Sequence[int]) -> None:
        self._matcher, self._ends = matcher, tuple(ends)
        self._is_over = False  # an end was taken; only ends follow
        self.error = ""

    def take(self, token_ids: Sequence[int]) -> None:
        """Go on behind tokens that the grammar allows."""
        for token in token_ids:
            self._is_over = self._is_over or token in self._ends
            if not self._is_over and not self._matcher.consume_token(token):
                self._fail(self._matcher.get_error())

    def grow(
        self, nodes: Sequence[TreeNode], num_nodes: int, most_nodes: int, max_depth: int
    ) -> tuple[list[TreeNode], int]:
        """The nodes of a drafted tree that the grammar allows, and the tokens that the grammar forces behind them.

        Where the grammar leaves one text, its tokens are certain: they cost no drafter. If the tree is full, certain
        tokens go before drafted ones, and drafted ones of small depth before deeper ones. A tree has ``num_nodes``, or
        up to ``most_nodes`` where more are certain; the other result is the number of certain ones below the root.
        """
        children, found, doubts = _children_of(nodes), [nodes[0]], [0]

        def visit(parent: int, drafted: int | None) -> None:
            if found[parent].depth == max_depth:
                return
            forced, own = self._forced(), children[drafted]
            for token in [forced] if forced is not None else own:
                if self._matcher.try_consume_tokens([token]) != 1:
                    continue
                found.append(TreeNode(token, parent, found[parent].depth + 1))
                doubts.append(doubts[parent] + (forced is None))
                if token not in self._ends:
                    visit(len(found) - 1, own.get(token))
                self._matcher.rollback(1)

        if not self.error and not self._is_over:
            visit(0, 0)
        num_certain = min(doubts.count(0), most_nodes)
        best = sorted(range(len(found)), key=lambda place: (doubts[place], found[place].depth))
        best = best[: max(num_nodes, num_certain)]
        kept = sorted(best, key=lambda place: found[place].depth)
        place_of = {old: new for new, old in enumerate(kept)}
        return [found[old]._replace(parent=place_of[found[old].parent]) for old in kept], num_certain - 1

    def fill(self, nodes: Sequence[TreeNode], mask_NX: np.ndarray) -> None:
        """Write the masks of the tokens allowed behind each node of a tree that :meth:`grow` made."""
        children = _children_of(nodes)

        def visit(place: int) -> None:
            started = time.perf_counter()
            mask_NX[place] = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: mask_NX.shape[1]]  # whole words
            if self._matcher.is_error() or time.perf_counter() - started > _MOST_SECONDS:
                self._fail(self._matcher.get_error() or "a mask takes too long")
            for token, child in children[place].items():
                if token in self._ends:
                    self._fill_ends(mask_NX[child])
                elif self._matcher.try_consume_tokens([token]) == 1:
                    visit(child)
                    self._matcher.rollback(1)

        if self.error or self._is_over:
            self._fill_ends(mask_NX[0])
        else:
            visit(0)

    def _forced(self) -> int | None:
        """The only token that the grammar allows next, if there is one."""
        if self._matcher.is_stopped():  # at the end of the text; where several tokens end an answer, the first
            return None if self._matcher.is_error() else self._ends[0]
        return next(iter(self._matcher.compute_ff_tokens()), None)

    def _fill_ends(self, mask_X: np.ndarray) -> None:
        mask_X[:] = 0
        for end in self._ends:
            mask_X[end // 8] |= 1 << end % 8

    def _fail(self, reason: str) -> None:
        self.error = self.error or " ".join(reason.split())
