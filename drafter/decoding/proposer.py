"""Proposer: the base class of every way to draft, and the tensors that a proposer reads.

Shapes: B rows · N tree nodes · L draft length · V target vocabulary · D hidden size · C context size · S cache slots ·
P tokens of a prediction.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafter.decoding.sampling import Noise, Warp
from drafter.decoding.tree import Candidates, NodeList, depths_of, pack_nodes


class RowState(NamedTuple):
    """The state of the running rows at the beginning of a step, on the target's device; integers are int64."""

    root_B: Tensor  # last chosen token, not yet in the cache
    length_B: Tensor  # committed slots = absolute position of the root
    context_BC: Tensor  # the target's hidden states that the drafter reads, at the last committed token
    history_BS: Tensor  # token ids by absolute position, root included; entries after the root are undefined
    seed_B: Tensor
    is_active_B: Tensor  # True for rows that decode; rows in prefill and padding rows are False
    warp: Warp  # temperature and filters of each row
    num_visible: int  # slots that the longest row may use in this step, its tree included, rounded up; no history there
    prediction_BP: Tensor | None = None  # text that copies are taken from, besides prompt and answer

    def text(self) -> tuple[Tensor, Tensor]:
        """What copies are taken from, token ids [B, S], and the root's place in it [B]: prediction, prompt, answer."""
        history_BS = self.history_BS[:, : self.num_visible]
        if self.prediction_BP is None:
            return history_BS, self.length_B
        return torch.cat([self.prediction_BP, history_BS], dim=1), self.length_B + self.prediction_BP.shape[1]


class Proposer:
    """Base class of the proposers. A proposer changes how many tokens a step emits, never which tokens.

    A subclass implements :meth:`draft`. Rows are numbered 0 .. B-1 within a step. A proposer with state per row keeps
    the state for the rows of :meth:`reserve` and follows :meth:`admit` and :meth:`move`. All tensors live on the
    target's device, and no method may wait for an accelerator.

    Node lists have ``level_sizes`` places at depth 1, 2, ..., ``max_depth``; trees have at most ``num_nodes`` nodes
    (None: a node for each place).
    """

    context_layers: tuple[int, ...] = ()  # of the target, whose hidden states are the contexts; empty: the final one
    reads_every_token: bool = False  # the engine calls :meth:`admit` before a step for the tokens that are not read
    least_probability: float = 0.1  # of a node, on a CPU where sizes are chosen
    least_score: float = -math.inf  # nodes below are left out on a CPU, where a smaller tree costs less
    node_cost: float = 0.0  # plain steps that a node costs, in all rows: so large a share of them must need the node

    def __init__(self, level_sizes: Sequence[int], num_nodes: int | None = None) -> None:
        self.level_sizes = tuple(level_sizes)
        self.max_depth = len(self.level_sizes)
        most = 1 + sum(self.level_sizes)
        self.num_nodes = most if num_nodes is None else min(num_nodes, most)

    def draft(self, rows: RowState, noise: Noise | None) -> NodeList | None:
        """Draft nodes for every running row; no two nodes of a row may have the same path. ``noise`` is the keyed
        Gumbel noise of the target's picks at depth 0 .. L; None when every row is greedy. Returns None where no node is
        worth its cost.
        """
        raise NotImplementedError

    def propose(self, rows: RowState, noise: Noise | None) -> Candidates:
        """Draft, and pack the N - 1 best nodes behind every root; a row with a score that is no number is marked."""
        if (drafted := self.draft(rows, noise)) is None:
            return RootOnly().propose(rows, noise)
        token_BM, parent_BM, score_BM = drafted
        has_failed_B = score_BM.isnan().any(dim=1)
        score_BM = score_BM.masked_fill(has_failed_B[:, None], -torch.inf)
        depth_BM = depths_of(self.level_sizes, token_BM.device).expand_as(token_BM)
        num_nodes = self.num_nodes
        if score_BM.device.type == "cpu":
            is_worth_BM = (score_BM > self.least_score) & rows.is_active_B[:, None]
            most_B = is_worth_BM.sum(dim=1).sort(descending=True).values
            num_nodes = min(num_nodes, 1 + int(most_B[self.num_sharing(rows) - 1]))
        found = pack_nodes(rows.root_B, token_BM, parent_BM, depth_BM, score_BM, num_nodes)
        return found._replace(has_failed_B=has_failed_B)

    def num_sharing(self, rows: RowState) -> int:
        """How many rows must have use for one more node, on a CPU."""
        return max(math.ceil(self.node_cost * int(rows.is_active_B.sum())), 1)

    def expect_cost(self, plain_steps: float) -> None:
        """One more node costs so much: nodes that are accepted less often are left out, on a CPU."""
        self.node_cost = min(plain_steps, 1.0)
        least = max(self.least_probability, self.node_cost)
        self.least_score = math.log(least) if least else -math.inf

    def check(self, target: Any) -> None:
        """Draft over some real texts of the target, if drafts can fail (ValueError: they fail)."""

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """Allocate state for rows 0 .. ``num_rows`` - 1 of ``num_slots`` slots and drop the state of earlier rows."""

    def admit(self, row: int, token_ids: list[int], num_known: int = 0) -> None:
        """Read the tokens of ``row`` before its root, but for the first ``num_known``, which the proposer knows."""

    def move(self, source: int, destination: int) -> None:
        """Move the state of row ``source`` to row ``destination``."""


class RootOnly(Proposer):
    """Plain decoding: the tree is its root, padded to ``num_nodes`` nodes."""

    def __init__(self, num_nodes: int = 1) -> None:
        super().__init__(())
        self.num_nodes = num_nodes

    def propose(self, rows: RowState, noise: Noise | None) -> Candidates:
        node_BN = torch.arange(self.num_nodes, device=rows.root_B.device).expand(rows.root_B.shape[0], -1)
        return Candidates(
            token_BN=rows.root_B[:, None].expand_as(node_BN).contiguous(),
            parent_BN=node_BN.contiguous(),
            depth_BN=torch.zeros_like(node_BN),
            is_node_BN=node_BN == 0,
        )


def to_device(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """CPU tensors of one dtype on a device, in one copy from pinned memory; on a CPU the tensors themselves."""
    if device.type == "cpu":
        return list(tensors)
    sizes = [tensor.numel() for tensor in tensors]
    pinned = torch.empty(sum(sizes), dtype=tensors[0].dtype, pin_memory=True)
    torch.cat([tensor.flatten() for tensor in tensors], out=pinned)
    parts = pinned.to(device, non_blocking=True).split(sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
