"""HybridProposer: merges the nodes of several proposers into one tree, weighted by their recent hit rates.

Shapes: B rows · M drafted nodes of all proposers · X nodes of one level · C classes of nodes · N tree nodes ·
L greatest depth.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import zip_longest

import torch
from torch import Tensor

from drafter.decoding.compile import Compiler
from drafter.decoding.proposer import Proposer, RootOnly, RowState, StepOutcome
from drafter.decoding.tree import NodeList, concatenate, conditional, cumulative, level_spans, merge_equal
from drafter.decoding.verify import Accepted
from drafter.proposers import beam, lookup, recycling
from drafter.proposers.parts import NUM_CLASSES, HitRates, Parts

# Upper ends of the classes of a node's estimated probability given its parent.
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.55, 0.75)
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
        # Below 1, so that a child never scores above its parent.
        log_BM = (expected_BM * factor_BM).clamp(max=0.98).log()
        return merge_equal(nodes._replace(score_BM=cumulative(nodes, log_BM)))

    def observe(self, rows: RowState, outcome: StepOutcome) -> None:
        """Let the proposers observe the step, and count hits."""
        for part in self.parts:
            part.observe(rows, outcome)
        self.count_hits(rows, outcome)

    def count_hits(self, rows: RowState, outcome: StepOutcome) -> None:
        """Count every drafted node with a correct parent as hit or miss, whether the node was verified or not."""
        assert self._drafted is not None
        nodes, class_BM, expected_BM = self._drafted
        picked_BL = Accepted(outcome.path_BL, outcome.num_accepted_B, outcome.bonus_B).emitted(outcome.candidates)
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


def make(parts: Parts) -> Proposer:
    """The proposer of ``method="hybrid"``: beam search if there is a drafter, lookup, and recycling."""
    members = [lookup.make(parts), recycling.make(parts)]
    if parts.drafter is not None:
        members.insert(0, beam.make(parts))
    assert parts.memory is not None
    return HybridProposer(members, parts.config.num_nodes, parts.target.device, parts.memory.rates, parts.compiler)
