"""HybridProposer: one tree and one node budget for several sources, weighed by how often each has been right of late.

Shapes: B rows · M drafted nodes of all sources · X nodes of one level · C classes of nodes (source, depth,
probability) · N tree nodes · L greatest depth.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from drafter.decoding.compile import Compiler
from drafter.decoding.proposer import Learner, Proposer, RootOnly, RowState, StepOutcome
from drafter.decoding.tree import Candidates, NodeList, concatenate, conditional, merge_equal
from drafter.decoding.verify import Accepted
from drafter.proposers.beam import BeamSearch

# Upper ends of the classes of a node's probability given its parent, as its source sees it.
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.55, 0.75)
_ROW_DECAY = 0.95  # per step: a row's hits of 20 steps ago count a third
_SHARED_DECAY = 0.999
_ROW_PRIOR = 2.0  # expected hits after which a row's own record counts as much as all rows'
_SHARED_PRIOR = 5.0
_PER_PLACE = len(_EDGES) + 1  # classes of a source's nodes at the root, and of those further down


class Source(Learner, Protocol):
    """Drafts nodes and says how likely it thinks them; learns from verified steps, those of plain decoding included."""

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Of the lists it makes."""
        ...

    def draft(self, rows: RowState, noise_BLV: Tensor | None) -> NodeList:
        """Nodes for every row, no two of them equal (see :class:`drafter.decoding.proposer.Proposer`)."""
        ...


class BeamSource:
    """The nodes of the recurrent drafter's beam search; their score is the cumulative log q.

    Args:
        search: the beam search.
        coupled: it knows the noise of the target's coming picks.
        compiler: compiles the search of steps in which no row samples.
    """

    def __init__(self, search: BeamSearch, *, coupled: bool = True, compiler: Compiler | None = None) -> None:
        self._search = search
        self._coupled = coupled
        self.level_sizes = (search.width,) * search.length
        self._compiled = None
        if compiler is not None and compiler.is_on:
            self._compiled = compiler(search.search_greedily, ((0,), (0,)))

    def draft(self, rows: RowState, noise_BLV: Tensor | None) -> NodeList:
        """Search a beam for every row."""
        if self._compiled is not None and not rows.warp.flags.has_noise:
            return NodeList(*self._compiled(rows.root_B, rows.context_BC), self.level_sizes)
        return NodeList(*self._search.search(rows, noise_BLV if self._coupled else None), self.level_sizes)

    def observe(self, rows: RowState, outcome: StepOutcome) -> None:
        """Nothing is learnt."""


class HitRates:
    """How much more or less often than its source expects a node is right, by class of node.

    For every class hits and expected hits are summed up, of each row and of all rows together, the old ones fading. A
    class's factor for a row is hits / expected, drawn towards the factor of all rows, which is drawn towards 1.

    Attributes:
        hits_BC, expected_BC: sums of each row.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self._device = device
        self.num_classes = num_classes
        self._hits_C = torch.zeros(num_classes, device=device)
        self._expected_C = torch.zeros(num_classes, device=device)
        self.reserve(0)

    def reserve(self, num_rows: int) -> None:
        """Rows without a record."""
        self.hits_BC = torch.zeros(num_rows, self.num_classes, device=self._device)
        self.expected_BC = torch.zeros(num_rows, self.num_classes, device=self._device)

    def forget(self, row: int) -> None:
        """A new request starts in ``row``."""
        self.hits_BC[row] = 0
        self.expected_BC[row] = 0

    def forget_all(self) -> None:
        """No row has a record, nor have all rows together."""
        for sums in (self._hits_C, self._expected_C, self.hits_BC, self.expected_BC):
            sums.zero_()

    def move(self, source: int, destination: int) -> None:
        """A row's record goes along with it."""
        self.hits_BC[destination] = self.hits_BC[source]
        self.expected_BC[destination] = self.expected_BC[source]

    def factor(self, num_rows: int) -> Tensor:
        """Factor of each class for rows 0 .. B-1, [B, C]."""
        shared_C = (self._hits_C + _SHARED_PRIOR) / (self._expected_C + _SHARED_PRIOR)
        return (self.hits_BC[:num_rows] + _ROW_PRIOR * shared_C) / (self.expected_BC[:num_rows] + _ROW_PRIOR)

    def observe(self, class_BM: Tensor, expected_BM: Tensor, hit_BM: Tensor, is_trial_BM: Tensor) -> None:
        """Add what came of the nodes of rows 0 .. B-1.

        Args:
            class_BM: int64 [B, M].
            expected_BM: their probability given their parent, as their source saw it.
            hit_BM: right, bool [B, M].
            is_trial_BM: it was seen whether they are right (their parent was), bool [B, M].
        """
        num_rows = class_BM.shape[0]
        for sums_BC, sums_C, value_BM in (
            (self.hits_BC, self._hits_C, hit_BM.float()),
            (self.expected_BC, self._expected_C, expected_BM),
        ):
            new_BC = torch.zeros_like(sums_BC[:num_rows]).scatter_add_(1, class_BM, value_BM * is_trial_BM)
            sums_BC[:num_rows] = sums_BC[:num_rows] * _ROW_DECAY + new_BC
            sums_C.mul_(_SHARED_DECAY).add_(new_BC.sum(dim=0))


class HybridProposer:
    """One tree out of the nodes of several sources: what each source expects of a node, times how right it was of late.

    A node is classed by its source, by being a child of the root or not, and by how likely its source thinks it. Equal
    nodes are merged (the likelier one stays), and the N - 1 likeliest of all make the tree.

    Args:
        sources: in order of trust; of equal nodes the first source's stays.
        num_nodes: N.
        device: the target's.
        rates: hits so far, of as many sources; hybrids that take turns share them. None: none so far.
    """

    def __init__(
        self, sources: Sequence[Source], num_nodes: int, device: torch.device, rates: HitRates | None = None
    ) -> None:
        self._sources = tuple(sources)
        self._plain = RootOnly(learners=sources)
        self.max_depth = max(len(source.level_sizes) for source in sources)
        self.num_nodes = min(num_nodes, 1 + sum(sum(source.level_sizes) for source in sources))
        first_class = [
            (2 * index + (level > 0)) * _PER_PLACE
            for level in range(self.max_depth)
            for index, source in enumerate(sources)
            for _ in range(source.level_sizes[level] if level < len(source.level_sizes) else 0)
        ]
        self._first_class_M = torch.tensor(first_class, device=device)
        self._edges = torch.tensor(_EDGES, device=device)
        self._rates = rates or no_hits(len(sources), device)
        self._drafted: tuple[NodeList, Tensor, Tensor] | None = None

    @property
    def plain(self) -> Proposer:
        """Plain steps teach the sources (lookup reads their text anyway), but say nothing about drafts."""
        return self._plain

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """Room for the records of ``num_rows`` rows."""
        self._rates.reserve(num_rows)

    def admit(self, row: int, prompt_ids: list[int]) -> None:
        """A new request has no record."""
        self._rates.forget(row)

    def move(self, source: int, destination: int) -> None:
        """The record moves with its row."""
        self._rates.move(source, destination)

    def propose(self, rows: RowState, noise_BLV: Tensor | None) -> Candidates:
        """Draft with every source and pack the likeliest nodes (see :class:`drafter.decoding.proposer.Proposer`)."""
        return self.draft(rows, noise_BLV).pack(rows.root_B, self.num_nodes)

    def draft(self, rows: RowState, noise_BLV: Tensor | None) -> NodeList:
        """All nodes of all sources, weighed and merged."""
        nodes = concatenate([source.draft(rows, noise_BLV) for source in self._sources])
        expected_BM = conditional(nodes)
        class_BM = self._first_class_M + torch.bucketize(expected_BM, self._edges)
        self._drafted = nodes, class_BM, expected_BM
        factor_BM = self._rates.factor(class_BM.shape[0]).gather(1, class_BM)
        # Below 1, so that a child never scores above its parent.
        log_BM = (expected_BM * factor_BM).clamp(max=0.98).log()
        return merge_equal(nodes._replace(score_BM=cumulative(nodes, log_BM)))

    def observe(self, rows: RowState, outcome: StepOutcome) -> None:
        """Let the sources learn, and count hits."""
        for source in self._sources:
            source.observe(rows, outcome)
        self.count_hits(rows, outcome)

    def count_hits(self, rows: RowState, outcome: StepOutcome) -> None:
        """Note, for every drafted node whose parent was right, whether it was right, verified or not."""
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


def no_hits(num_sources: int, device: torch.device) -> HitRates:
    """The record of a hybrid of so many sources that has not decoded yet."""
    return HitRates(2 * _PER_PLACE * num_sources, device)


def level_spans(nodes: NodeList) -> list[slice]:
    """Where each level's places lie in a list."""
    ends = list(accumulate(nodes.level_sizes))
    return [slice(end - size, end) for end, size in zip(ends, nodes.level_sizes, strict=True)]


def cumulative(nodes: NodeList, log_BM: Tensor) -> Tensor:
    """Sum of ``log_BM`` over a node and its ancestors, [B, M]."""
    total_BM = log_BM.clone()
    for span in level_spans(nodes)[1:]:
        total_BM[:, span] += total_BM.gather(1, nodes.parent_BM[:, span].clamp_min(0))
    return total_BM
