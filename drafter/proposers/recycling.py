"""RecyclingProposer: drafts the tokens that the target ranked highest at the last occurrence of a token.

Shapes: B rows · N tree nodes · V target vocabulary · K followers kept of a token · L greatest depth · P parents (nodes
of the level above) · X nodes of one level · M drafted nodes of all levels.
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafter.decoding.compile import Compiler
from drafter.decoding.host import NodeLists, is_few, no_nodes
from drafter.decoding.proposer import Proposer, RowState, StepOutcome
from drafter.decoding.sampling import Warp, warp_logits
from drafter.decoding.tree import NodeList
from drafter.proposers.parts import FollowerTable, Parts

_MAX_DEPTH = 6
_SPARE_DRAFTS = 3

# Frequency of the target's pick being the stored follower of rank 0, 1, ...: counted on 250 greedy answers of a 135M
# chat model (26,000 positions), with a table filled by the earlier tokens of the same answer.
RANK_RATES = (
    0.542, 0.106, 0.0427, 0.0260, 0.0190, 0.0139, 0.0110, 0.0100, 0.0072, 0.0066, 0.0063, 0.0059,
    0.0048, 0.0043, 0.0040, 0.0038, 0.0036, 0.0030, 0.0027, 0.0026, 0.0025, 0.0023, 0.0022, 0.0021,
    0.0020, 0.0018, 0.0016, 0.0015, 0.0015, 0.0015, 0.0014, 0.0014,
)  # fmt: skip
# The probability of a node is rank rate ^ (1 - a) * stored probability ^ a. Tokens per step on those answers, N = 24:
# 1.815 at a = 0 (a fixed tree), 1.824 at 0.25, 1.820 at 0.5, 1.797 at 1.
_STORED_WEIGHT = 0.25
_LEARNED_ROWS = 4  # rows of a plain step that the table learns from: learning must stay cheaper than its gain
_LOWEST = -20.0  # log-probability of followers that the filters of a request exclude


class Template(NamedTuple):
    """The fixed shape of the drafted tree: node i of level l is the follower ``ranks[l][i]`` of node ``parents[l][i]``.

    Parents are numbered within the level above; the root is level 0.
    """

    parents: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[int, ...], ...]


def best_template(num_nodes: int, max_depth: int, rates: Sequence[float]) -> Template:
    """The tree with the most expected accepted tokens when a follower of rank r is correct with rate ``rates[r]``.

    The probability of a node is the product of the rates on its path. The expectation is the sum over the nodes, so the
    best tree holds the ``num_nodes`` most probable nodes (root not counted). With rates (0.6, 0.3) and four nodes::

        root -> 0 (0.6), 1 (0.3);  0 -> 0 (0.36);  0 -> 0 -> 0 (0.216)

    Args:
        num_nodes: at least 1; fewer are made when depth and ranks allow no more.
        max_depth: L.
        rates: falling, each below 1.

    Returns:
        The template; nodes of a level in order of their probability.
    """
    parents: list[list[int]] = []
    ranks: list[list[int]] = []
    heap = [(-rates[0], 1, 0, 0)]  # (-probability, depth, parent, rank)
    made = 0
    while heap and made < num_nodes:
        value, depth, parent, rank = heapq.heappop(heap)
        made += 1
        if depth > len(parents):
            parents.append([])
            ranks.append([])
        node = len(parents[depth - 1])
        parents[depth - 1].append(parent)
        ranks[depth - 1].append(rank)
        if rank + 1 < len(rates):
            heapq.heappush(heap, (value / rates[rank] * rates[rank + 1], depth, parent, rank + 1))
        if depth < max_depth:
            heapq.heappush(heap, (value * rates[0], depth + 1, node, 0))
    return Template(tuple(map(tuple, parents)), tuple(map(tuple, ranks)))


class RecyclingProposer(Proposer):
    """Drafts followers of followers of the root (Token Recycling: Luo et al., arXiv 2408.08696).

    The tree is grown level by level in a fixed shape. Greedy rows rank followers by their stored logits. Sampled rows
    rank followers by logit / temperature plus the noise of the target's coming pick, under the filters of the row.

    Args:
        table: the followers of every token.
        num_drafted: M, drafted nodes of which the best are kept.
        max_depth: L.
        num_nodes: N; None: all nodes.
        coupled: rank with the noise.
        compiler: see :class:`Proposer`.
    """

    def __init__(
        self,
        table: FollowerTable,
        num_drafted: int,
        max_depth: int,
        num_nodes: int | None = None,
        *,
        coupled: bool = True,
        compiler: Compiler | None = None,
    ) -> None:
        device = table.token_VK.device
        rates = RANK_RATES[: table.num_followers]
        template = best_template(num_drafted, max_depth, rates)
        super().__init__([len(level) for level in template.ranks], num_nodes, compiler)
        self.table = table
        self._coupled = coupled
        self._parents = [torch.tensor(level, device=device) for level in template.parents]
        self._ranks = [torch.tensor(level, device=device) for level in template.ranks]
        self._log_rate_K = torch.tensor([math.log(rate) for rate in rates], device=device)
        self._template = template
        self._log_rates = [math.log(rate) for rate in rates]
        self._first_row = 0

    def draft(self, rows: RowState, noise_BLV: Tensor | None) -> NodeList:
        """The whole template; nodes below a token that never occurred have score -inf."""
        token_BX = rows.root_B[:, None]
        score_BX = torch.zeros_like(token_BX, dtype=torch.float32)
        tokens, parents, scores = [], [], []
        start = -1  # of the level above; the root is -1
        for level, (parent_X, rank_X) in enumerate(zip(self._parents, self._ranks, strict=True)):
            noise_BV = None if noise_BLV is None or not self._coupled else noise_BLV[:, level]
            follower_BPK, log_rate_BPK = self._followers(token_BX, noise_BV, rows.warp)
            token_BX = follower_BPK[:, parent_X, rank_X]
            score_BX = score_BX[:, parent_X] + log_rate_BPK[:, parent_X, rank_X]
            tokens.append(token_BX)
            parents.append((start + parent_X).expand_as(token_BX))
            scores.append(score_BX)
            start = start + 1 if level == 0 else start + self.level_sizes[level - 1]
        return NodeList(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), self.level_sizes)

    def draft_lists(self, rows: RowState, noise_BLV: Tensor | None) -> list[NodeLists]:
        """The same nodes from the table in host memory; rows with noise take the tensor form."""
        if rows.warp.flags.has_noise:
            return super().draft_lists(rows, noise_BLV)
        return [self._draft_row(root) for root in rows.root_B.tolist()]

    def _draft_row(self, root: int) -> NodeLists:
        nodes = no_nodes()
        token_VK, logit_VK = self.table.token_VK.numpy(), self.table.logit_VK.numpy()
        followers: dict[int, tuple[list[int], list[float], float]] = {}
        above: list[int | None] = [-1]  # nodes of the level above; None: no node
        for parents, ranks in zip(self._template.parents, self._template.ranks, strict=True):
            level: list[int | None] = []
            for parent_place, rank in zip(parents, ranks, strict=True):
                parent = above[parent_place]
                if parent is None:
                    level.append(None)
                    continue
                token = nodes.tokens[parent] if parent >= 0 else root
                if token not in followers:
                    logits = logit_VK[token].tolist()
                    best = logits[0]
                    total = (
                        best + math.log(sum(math.exp(logit - best) for logit in logits)) if best > -math.inf else 0.0
                    )
                    followers[token] = token_VK[token].tolist(), logits, total
                tokens, logits, total = followers[token]
                if logits[0] == -math.inf:  # the token never occurred
                    level.append(None)
                    continue
                stored = max(logits[rank] - total, _LOWEST)
                score = (1 - _STORED_WEIGHT) * self._log_rates[rank] + _STORED_WEIGHT * stored
                level.append(nodes.add(tokens[rank], parent, score + (nodes.scores[parent] if parent >= 0 else 0.0)))
            above = level
        return nodes

    def observe(self, rows: RowState, outcome: StepOutcome) -> None:
        """Store the followers of every verified node; in plain steps of many rows, of some rows in turn."""
        candidates = outcome.candidates
        if is_few(rows.root_B):
            self._observe_few(rows, outcome)
            return
        is_known_BN = candidates.is_node_BN & rows.is_active_B[:, None]
        is_certain_BN = torch.zeros_like(is_known_BN).scatter_(1, outcome.path_BL, True)
        num_rows, num_nodes = candidates.token_BN.shape
        if num_nodes == 1 and num_rows > _LEARNED_ROWS:
            self._first_row = first = self._first_row % num_rows
            part = slice(first, first + _LEARNED_ROWS)
            self._first_row += _LEARNED_ROWS
        else:
            part = slice(None)
        self.table.update(candidates.token_BN[part], outcome.logits_BNV[part], is_known_BN[part], is_certain_BN[part])

    def _observe_few(self, rows: RowState, outcome: StepOutcome) -> None:
        tokens = outcome.candidates.token_BN.tolist()
        paths, flags = outcome.path_BL.tolist(), outcome.candidates.is_node_BN.tolist()
        first, num_rows = 0, len(tokens)
        if len(tokens[0]) == 1 and num_rows > _LEARNED_ROWS:
            first, num_rows = self._first_row % num_rows, _LEARNED_ROWS
            self._first_row = first + _LEARNED_ROWS
        part = slice(first, first + num_rows)
        active = rows.is_active_B.tolist()[part]
        is_known = [[flag and is_active for flag in row] for row, is_active in zip(flags[part], active, strict=True)]
        is_certain = [
            [node in path for node in range(len(row))] for row, path in zip(flags[part], paths[part], strict=True)
        ]
        self.table.update_few(tokens[part], outcome.logits_BNV[part], is_known, is_certain)

    def _followers(self, token_BP: Tensor, noise_BV: Tensor | None, warp: Warp) -> tuple[Tensor, Tensor]:
        """Followers in order of rank, int64 [B, P, K], and the log of the estimated probability of each."""
        follower_BPK = self.table.token_VK[token_BP].long()
        logit_BPK = self.table.logit_VK[token_BP]
        if warp.flags.has_noise:
            logit_BPK = warp_logits(logit_BPK, warp)
        if noise_BV is not None:
            is_sampled_B11 = (warp.temperature_B > 0).float()[:, None, None]
            noise_BPK = noise_BV.gather(1, follower_BPK.flatten(1)).view(follower_BPK.shape)
            logit_BPK, order_BPK = (logit_BPK + noise_BPK * is_sampled_B11).sort(dim=2, descending=True, stable=True)
            follower_BPK = follower_BPK.gather(2, order_BPK)
        # -inf at the first rank: the token never occurred. Filters cause -inf at later ranks only.
        is_seen_BP1 = logit_BPK[:, :, :1] > -torch.inf
        log_stored_BPK = logit_BPK.log_softmax(dim=2).clamp_min(_LOWEST)
        log_rate_BPK = (1 - _STORED_WEIGHT) * self._log_rate_K + _STORED_WEIGHT * log_stored_BPK
        return follower_BPK, log_rate_BPK.where(is_seen_BP1, -torch.inf)


def make(parts: Parts) -> Proposer:
    """The proposer of ``method="recycling"``."""
    config = parts.config
    assert parts.memory is not None
    # The stored logits decide which nodes are best, so more nodes are drafted than kept.
    return RecyclingProposer(
        parts.memory.followers,
        _SPARE_DRAFTS * config.num_nodes,
        min(_MAX_DEPTH, config.num_nodes - 1),
        config.num_nodes,
        coupled=config.coupled,
        compiler=parts.compiler,
    )
