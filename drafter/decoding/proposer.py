"""The protocol of whatever proposes draft tokens, and what a proposer is told.

Shapes: B rows · N tree nodes · L draft length · V target vocabulary · D hidden size · C context size · S slots.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from drafter.decoding.sampling import Warp
from drafter.decoding.tree import Candidates


class Contexts(NamedTuple):
    """What a proposer wants to know of the text so far, beyond its tokens.

    Attributes:
        layers: hidden states of the target that make up the context; empty is the final one.
        size: C.
        read: contexts [B, T, C] after T more committed tokens from the context before them [B, C], the target's hidden
            states at them and their ids [B, T]; None: those hidden states are the contexts.
    """

    layers: tuple[int, ...]
    size: int
    read: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None


class RowState(NamedTuple):
    """What is known of the running rows when a step begins; tensors stay on the device.

    Attributes:
        root_B: last chosen token, not yet in the cache, int64 [B].
        length_B: committed slots = absolute position of the root, int64 [B].
        context_BC: the target's hidden state(s) at the last committed token, or what :class:`Contexts` makes of them
            and of those before [B, C].
        history_BS: token ids by absolute position, root included; what stands behind it means nothing, int64 [B, S].
        seed_B: int64 [B].
        is_active_B: rows that decode; the others (in prefill, or padding) only keep the shape, bool [B].
        warp: per-row temperature and filters, with flags of what any row uses.
        num_visible: slots that the longest row may use in this step, its tree included: known to the host and rounded
            up, so that few values occur. No row has history from there on.
    """

    root_B: Tensor
    length_B: Tensor
    context_BC: Tensor
    history_BS: Tensor
    seed_B: Tensor
    is_active_B: Tensor
    warp: Warp
    num_visible: int


class StepOutcome(NamedTuple):
    """What a step found out, for proposers that learn from it.

    Attributes:
        candidates: the verified tree.
        logits_BNV: the target's logits at every node.
        pick_BN: the target's own pick at every node, int64.
        path_BL: node index at each depth 0 .. L of the accepted path (deeper entries repeat the last), int64 [B, L+1].
        num_accepted_B: accepted draft tokens, root excluded, int64 [B].
        bonus_B: the pick after the last accepted node: the next root, int64 [B].
    """

    candidates: Candidates
    logits_BNV: Tensor
    pick_BN: Tensor
    path_BL: Tensor
    num_accepted_B: Tensor
    bonus_B: Tensor


class Proposer(Protocol):
    """Whatever proposes candidates. A proposer can change how many tokens a step keeps, never which ones.

    Rows are numbered 0 .. B-1 within a step; a proposer with state per row keeps it for ``max_rows`` rows and is told
    when a row starts, moves or is released. All tensors live on the target's device; no method may wait for the device.
    """

    @property
    def num_nodes(self) -> int:
        """N of the candidates it makes."""
        ...

    @property
    def max_depth(self) -> int:
        """L, the greatest depth of a node."""
        ...

    @property
    def plain(self) -> "Proposer | None":
        """Who takes over for steps of plain decoding, and has what comes of them learnt; None: it has to see all steps
        itself, because it keeps something of every token.
        """
        ...

    def propose(self, rows: RowState, noise_BLV: Tensor | None) -> Candidates:
        """Draft a tree for every row.

        Args:
            rows: state of the B running rows.
            noise_BLV: keyed Gumbel noise of the picks at depth 0 .. L, [B, L + 1, V]; None when every row is greedy.
        """
        ...

    def observe(self, rows: RowState, outcome: StepOutcome) -> None:
        """Learn from a verified step (``rows`` is the state before it)."""
        ...

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """Make room for rows 0 .. ``num_rows`` - 1 of ``num_slots`` slots; what was known of earlier rows is void."""
        ...

    def admit(self, row: int, prompt_ids: list[int]) -> None:
        """A request starts in ``row``; called before its prefill."""
        ...

    def move(self, source: int, destination: int) -> None:
        """The request of row ``source`` goes on in row ``destination``."""
        ...


class Learner(Protocol):
    """Learns from steps."""

    def observe(self, rows: RowState, outcome: StepOutcome) -> None:
        """What came of a step (``rows`` is the state before it)."""
        ...


class StatelessRows:
    """The part of the protocol that proposers without state per row share: nothing to do."""

    @property
    def plain(self) -> Proposer | None:
        """Steps may be left out, and nothing is learnt from them."""
        return RootOnly()

    def observe(self, rows: RowState, outcome: StepOutcome) -> None:
        """Nothing is learnt."""

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """No state to make room for."""

    def admit(self, row: int, prompt_ids: list[int]) -> None:
        """No state to start."""

    def move(self, source: int, destination: int) -> None:
        """No state to move."""


class RootOnly(StatelessRows):
    """Autoregressive decoding: the tree is its root, and padding up to ``num_nodes`` nodes.

    Args:
        num_nodes: N.
        learners: what came of the steps is of use to them.
    """

    max_depth = 0

    def __init__(self, num_nodes: int = 1, learners: Sequence[Learner] = ()) -> None:
        self.num_nodes = num_nodes
        self._learners = tuple(learners)

    @property
    def plain(self) -> Proposer:
        """It is plain."""
        return self

    def propose(self, rows: RowState, noise_BLV: Tensor | None) -> Candidates:
        """A tree of one node per row."""
        node_N = torch.arange(self.num_nodes, device=rows.root_B.device)
        node_BN = node_N.expand(rows.root_B.shape[0], -1)
        return Candidates(
            token_BN=rows.root_B[:, None].expand_as(node_BN).contiguous(),
            parent_BN=node_BN.contiguous(),
            depth_BN=torch.zeros_like(node_BN),
            is_node_BN=node_BN == 0,
        )

    def observe(self, rows: RowState, outcome: StepOutcome) -> None:
        """Hand it on."""
        for learner in self._learners:
            learner.observe(rows, outcome)
