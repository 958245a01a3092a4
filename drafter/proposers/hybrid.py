"""HybridProposer: merges the nodes of several proposers into one tree, weighted by their recent hit rates.

Shapes: B rows · M drafted nodes of all proposers · X nodes of one level · C classes of nodes · N tree nodes ·
L greatest depth.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import zip_longest

import torch
from torch import Tensor

from drafter.decoding.compile import Compiler
from drafter.decoding.host import NodeLists, merge
from drafter.decoding.proposer import Proposer, RootOnly, RowState, StepOutcome
from drafter.decoding.tree import NodeList, concatenate, conditional, cumulative, level_spans, merge_equal
from drafter.decoding.verify import AcceptedPath
from drafter.proposers import beam, lookup, recycling
from drafter.proposers.parts import NUM_CLASSES, HitRates, Parts

# Upper ends of the classes of a node's estimated probability given its parent.
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.55, 0.75)
_LARGEST = 0.98  # below 1, so that a child never scores above its parent
_SMALLEST = 1e-30
assert 2 * (len(_EDGES) + 1) == NUM_CLASSES


class HybridProposer(Proposer):
    """One tree with one node budget from several proposers.

    A node's probability is its proposer's estimate, times the recent hit rate of the node's class. The class is given
    by the proposer, by being a child of the root or not, and by the estimate. Equal nodes are merged (the more probable
    one stays), and the N - 1 most probable of all nodes form the tree.

    Args:
        parts: the proposers; of equal nodes the node of the first proposer stays.
        num_nodes: N.
        device: the target's.
        rates: hit rates, shared by the hybrids of one engine; None: new ones.
        compiler: see :class:`Proposer`.
    """

    def __init__(
        self,
        parts: Sequence[Proposer],
        num_nodes: int,
        device: torch.device,
        rates: HitRates | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        levels = list(zip_longest(*(part.level_sizes for part in parts), fillvalue=0))
        super().__init__([sum(level) for level in levels], num_nodes, compiler)
        self.parts = tuple(parts)
        first_class = [
            NUM_CLASSES * index + (depth > 0) * (len(_EDGES) + 1)
            for depth, level in enumerate(levels)
            for index, size in enumerate(level)
            for _ in range(size)
        ]
        self._first_class_M = torch.tensor(first_class, device=device)
        self._edges = torch.tensor(_EDGES, device=device)
        self._rates = rates or HitRates(NUM_CLASSES * len(parts), device)
        self._drafted: tuple[NodeList, Tensor, Tensor] | None = None
        self._drafted_lists: list[list[tuple[NodeLists, list[int], list[float]]]] = []

    @cached_property
    def plain(self) -> Proposer:
        """Plain steps that the parts observe. Plain steps say nothing about hit rates."""
        return RootOnly(learners=self.parts)

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """Allocate the hit rates of ``num_rows`` rows."""
        self._rates.reserve(num_rows)

    def admit(self, row: int, prompt_ids: list[int]) -> None:
        """Reset the hit rates of the row."""
        self._rates.clear_row(row)

    def move(self, source: int, destination: int) -> None:
        """Move the hit rates of the row."""
        self._rates.move(source, destination)

    def draft(self, rows: RowState, noise_BLV: Tensor | None) -> NodeList:
        """All nodes of all proposers, weighted and merged."""
        nodes = concatenate([part.draft(rows, noise_BLV) for part in self.parts])
        expected_BM = conditional(nodes)
        class_BM = self._first_class_M + torch.bucketize(expected_BM, self._edges)
        self._drafted = nodes, class_BM, expected_BM
        factor_BM = self._rates.factor(class_BM.shape[0]).gather(1, class_BM)
        log_BM = (expected_BM * factor_BM).clamp(max=_LARGEST).log()
        return merge_equal(nodes._replace(score_BM=cumulative(nodes, log_BM)))

    def draft_lists(self, rows: RowState, noise_BLV: Tensor | None) -> list[NodeLists]:
        """The same nodes, weighted and merged in host memory."""
        by_part = [part.draft_lists(rows, noise_BLV) for part in self.parts]
        factors = self._rates.factor(len(rows.root_B)).tolist()
        self._drafted, self._drafted_lists, merged = None, [], []
        for row, factor_C in enumerate(factors):
            drafted = [
                (nodes, *_classify(nodes, NUM_CLASSES * index))
                for index, nodes in enumerate(lists[row] for lists in by_part)
            ]
            self._drafted_lists.append(drafted)
            weighted = []
            for nodes, classes, expected in drafted:
                scores: list[float] = []
                for parent, class_, value in zip(nodes.parents, classes, expected, strict=True):
                    own = math.log(min(max(value * factor_C[class_], _SMALLEST), _LARGEST))
                    scores.append(own + scores[parent] if parent >= 0 else own)
                weighted.append(nodes._replace(scores=scores))
            merged.append(merge(weighted))
        return merged

    def observe(self, rows: RowState, outcome: StepOutcome) -> None:
        """Let the proposers observe the step, and count hits."""
        for part in self.parts:
            part.observe(rows, outcome)
        self.count_hits(rows, outcome)

    def count_hits(self, rows: RowState, outcome: StepOutcome) -> None:
        """Count every drafted node with a correct parent as hit or miss, whether the node was verified or not."""
        if self._drafted is None:
            self._count_hits_few(rows, outcome)
            return
        nodes, class_BM, expected_BM = self._drafted
        picked_BL = AcceptedPath(outcome.path_BL, outcome.num_accepted_B, outcome.bonus_B).emitted(outcome.candidates)
        depth_L = torch.arange(picked_BL.shape[1], device=picked_BL.device)
        is_known_BL = (depth_L <= outcome.num_accepted_B[:, None]) & rows.is_active_B[:, None]
        is_right_BM = torch.zeros_like(class_BM, dtype=torch.bool)
        is_trial_BM = torch.zeros_like(is_right_BM)
        for level, span in enumerate(level_spans(nodes)):
            is_trial_BX = is_known_BL[:, level, None] & (expected_BM[:, span] > 0)
            if level:
                is_trial_BX = is_trial_BX & is_right_BM.gather(1, nodes.parent_BM[:, span])
            is_trial_BM[:, span] = is_trial_BX
            is_right_BM[:, span] = is_trial_BX & (nodes.token_BM[:, span] == picked_BL[:, level, None])
        self._rates.observe(class_BM, expected_BM, is_right_BM, is_trial_BM)

    def _count_hits_few(self, rows: RowState, outcome: StepOutcome) -> None:
        emitted = AcceptedPath(outcome.path_BL, outcome.num_accepted_B, outcome.bonus_B).emitted(outcome.candidates)
        columns = zip(
            self._drafted_lists,
            emitted.tolist(),
            outcome.num_accepted_B.tolist(),
            rows.is_active_B.tolist(),
            strict=True,
        )
        sums = []
        for drafted, picked, num_accepted, is_active in columns:
            hits, trials = [0.0] * self._rates.num_classes, [0.0] * self._rates.num_classes
            for nodes, classes, expected in drafted if is_active else ():
                is_right: list[bool] = []
                for index, parent in enumerate(nodes.parents):
                    level = nodes.depths[index] - 1
                    is_trial = level <= num_accepted and (parent < 0 or is_right[parent])
                    is_right.append(is_trial and nodes.tokens[index] == picked[level])
                    if is_trial:
                        hits[classes[index]] += is_right[index]
                        trials[classes[index]] += expected[index]
            sums.append((hits, trials))
        self._rates.add(*torch.tensor(sums).unbind(1))


def _classify(nodes: NodeLists, first_class: int) -> tuple[list[int], list[float]]:
    """Class and probability given the parent of each node of one proposer."""
    classes, expected = [], []
    for parent, score in zip(nodes.parents, nodes.scores, strict=True):
        value = math.exp(score - nodes.scores[parent] if parent >= 0 else score)
        expected.append(value)
        classes.append(first_class + (parent >= 0) * (len(_EDGES) + 1) + bisect_left(_EDGES, value))
    return classes, expected


def make(parts: Parts) -> Proposer:
    """The proposer of ``method="hybrid"``: beam search with copies, or without a drafter lookup and recycling."""
    if parts.drafter is not None:  # copies replace lookup, and recycling adds no accepted tokens (docs/notebook.md)
        return beam.make(parts)
    assert parts.memory is not None
    members = (lookup.make(parts), recycling.make(parts))
    return HybridProposer(members, parts.config.num_nodes, parts.target.device, parts.memory.rates, parts.compiler)
