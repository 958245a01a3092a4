"""RecyclingProposer: what the target thought likely after a token the last time is drafted when the token comes again.

Shapes: B rows · N tree nodes · V target vocabulary · K followers kept of a token · L greatest depth · P parents (nodes
of the level above) · X nodes of one level, or writers of one step · M drafted nodes of all levels.
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafter.decoding.proposer import Proposer, RootOnly, RowState, StatelessRows, StepOutcome
from drafter.decoding.sampling import Warp, warp_logits
from drafter.decoding.tree import Candidates, NodeList
from drafter.kernels.largest import topk

NUM_FOLLOWERS = 32
MAX_DEPTH = 6

# How often the target's pick is the stored follower of rank 0, 1, ...: counted on 250 greedy answers of a 135M chat
# model (26,000 places), with a table that knew what the same answer had shown before.
RANK_RATES = (
    0.542, 0.106, 0.0427, 0.0260, 0.0190, 0.0139, 0.0110, 0.0100, 0.0072, 0.0066, 0.0063, 0.0059,
    0.0048, 0.0043, 0.0040, 0.0038, 0.0036, 0.0030, 0.0027, 0.0026, 0.0025, 0.0023, 0.0022, 0.0021,
    0.0020, 0.0018, 0.0016, 0.0015, 0.0015, 0.0015, 0.0014, 0.0014,
)  # fmt: skip
# A node's probability is rank rate ^ (1 - a) * stored probability ^ a. Tokens per step on those answers, N = 24:
# 1.815 at a = 0 (a fixed tree), 1.824 at 0.25, 1.820 at 0.5, 1.797 at 1.
_STORED_WEIGHT = 0.25
# Rows of a plain step that are learnt from, in turn: what is learnt must not cost more than it can bring.
_TAUGHT_ROWS = 4
_LOWEST = -20.0  # log-probability of followers that the request's filters leave out: drafted last


class Template(NamedTuple):
    """The fixed shape of the drafted tree: node i of level l is the follower ``ranks[l][i]`` of node ``parents[l][i]``.

    Parents are numbered within the level above; the root is level 0.
    """

    parents: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[int, ...], ...]


def best_template(num_nodes: int, max_depth: int, rates: Sequence[float]) -> Template:
    """The tree with the most accepted tokens to be expected when a follower of rank r is right with ``rates[r]``.

    A node is accepted with the product of the rates on its way; the expectation is the sum over nodes, so the best tree
    holds the ``num_nodes`` likeliest nodes (root not counted). With rates (0.6, 0.3) and four nodes::

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


class FollowerTable:
    """The target's K likeliest tokens after every token, as of the last time it was seen; one table for all rows.

    Outputs do not depend on it, only speed does.

    Attributes:
        token_VK: followers, best first, int32 [V + 1, K]; row V takes what is not to be kept.
        logit_VK: their logits, float32 [V + 1, K]; -inf for tokens never seen.
    """

    def __init__(self, vocab_size: int, num_followers: int, device: torch.device) -> None:
        num_followers = min(num_followers, vocab_size)
        self.token_VK = torch.zeros(vocab_size + 1, num_followers, dtype=torch.int32, device=device)
        self.logit_VK = torch.full((vocab_size + 1, num_followers), -torch.inf, device=device)
        # When a token was last written: the step, and within the step the writer's claim.
        self._stamp_V = torch.full((vocab_size + 1,), -1, dtype=torch.int64, device=device)
        self._clock = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def num_followers(self) -> int:
        """K."""
        return self.token_VK.shape[1]

    def forget(self) -> None:
        """No token was ever seen."""
        self.token_VK.zero_()
        self.logit_VK.fill_(-torch.inf)
        self._stamp_V.fill_(-1)
        self._clock.zero_()

    def update(self, token_BN: Tensor, logits_BNV: Tensor, is_known_BN: Tensor, is_certain_BN: Tensor) -> None:
        """Store what follows the given tokens.

        Of several nodes that hold the same token one writes: a node of the accepted path before one that was drafted in
        vain, then the last. So the table does not depend on the order in which a device scatters.

        Args:
            token_BN: int64 [B, N].
            logits_BNV: the target's logits after each of them.
            is_known_BN: nodes that count, bool [B, N].
            is_certain_BN: nodes of the accepted path, bool [B, N].
        """
        num_writers = token_BN.numel()
        writer_X = torch.arange(num_writers, device=token_BN.device)
        stamp_X = self._clock + writer_X + num_writers * is_certain_BN.flatten()
        self._clock += 2 * num_writers
        trash = self._stamp_V.shape[0] - 1
        token_X = token_BN.flatten().where(is_known_BN.flatten(), trash)
        self._stamp_V.scatter_reduce_(0, token_X, stamp_X, reduce="amax")
        token_X = token_X.where(self._stamp_V[token_X] == stamp_X, trash)
        logit_BNK, follower_BNK = topk(logits_BNV, self.num_followers)
        self.token_VK[token_X] = follower_BNK.flatten(0, 1).int()
        self.logit_VK[token_X] = logit_BNK.flatten(0, 1).float()


class RecyclingSource:
    """Drafts followers of followers of the root (Token Recycling: Luo et al., arXiv 2408.08696).

    The tree is grown level by level in a fixed shape. Followers are ranked by what the table holds of them: by logit
    when the row is greedy, else by logit / temperature plus the noise of the target's coming pick, under its filters.

    Args:
        table: who follows whom.
        num_drafted: M, drafted nodes of which the best are kept.
        max_depth: L.
        coupled: rank with the noise.
    """

    def __init__(self, table: FollowerTable, num_drafted: int, max_depth: int, *, coupled: bool = True) -> None:
        device = table.token_VK.device
        rates = RANK_RATES[: table.num_followers]
        template = best_template(num_drafted, max_depth, rates)
        self.table = table
        self.level_sizes = tuple(len(level) for level in template.ranks)
        self._coupled = coupled
        self._parents = [torch.tensor(level, device=device) for level in template.parents]
        self._ranks = [torch.tensor(level, device=device) for level in template.ranks]
        self._log_rate_K = torch.tensor([math.log(rate) for rate in rates], device=device)
        self._first_row = 0

    @property
    def max_depth(self) -> int:
        """L."""
        return len(self.level_sizes)

    def draft(self, rows: RowState, noise_BLV: Tensor | None) -> NodeList:
        """The whole template; nodes below a token never seen have score -inf."""
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

    def observe(self, rows: RowState, outcome: StepOutcome) -> None:
        """Take the target's followers of every verified node into the table; of plain steps over many rows, of some."""
        candidates = outcome.candidates
        is_known_BN = candidates.is_node_BN & rows.is_active_B[:, None]
        is_certain_BN = torch.zeros_like(is_known_BN).scatter_(1, outcome.path_BL, True)
        num_rows, num_nodes = candidates.token_BN.shape
        if num_nodes == 1 and num_rows > _TAUGHT_ROWS:
            self._first_row = first = self._first_row % num_rows
            part = slice(first, first + _TAUGHT_ROWS)
            self._first_row += _TAUGHT_ROWS
        else:
            part = slice(None)
        self.table.update(candidates.token_BN[part], outcome.logits_BNV[part], is_known_BN[part], is_certain_BN[part])

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
        # -inf at the first rank: the token was never seen. (Further on it is a filter's doing.)
        is_seen_BP1 = logit_BPK[:, :, :1] > -torch.inf
        log_stored_BPK = logit_BPK.log_softmax(dim=2).clamp_min(_LOWEST)
        log_rate_BPK = (1 - _STORED_WEIGHT) * self._log_rate_K + _STORED_WEIGHT * log_stored_BPK
        return follower_BPK, log_rate_BPK.where(is_seen_BP1, -torch.inf)


class RecyclingProposer(StatelessRows):
    """Drafts from what the target thought likely before. Nothing is trained and no row has a state of its own.

    Args:
        source: the table and the shape of the tree.
        num_nodes: N; places that the table cannot fill yet are padding.
    """

    def __init__(self, source: RecyclingSource, num_nodes: int) -> None:
        self._source = source
        self.num_nodes = min(num_nodes, 1 + sum(source.level_sizes))
        self.max_depth = source.max_depth
        self._plain = RootOnly(learners=[source])

    @property
    def plain(self) -> Proposer:
        """Plain steps go into the table as well."""
        return self._plain

    def propose(self, rows: RowState, noise_BLV: Tensor | None) -> Candidates:
        """Grow a tree for every row (see :class:`drafter.decoding.proposer.Proposer`)."""
        return self._source.draft(rows, noise_BLV).pack(rows.root_B, self.num_nodes)

    def observe(self, rows: RowState, outcome: StepOutcome) -> None:
        """Refresh the table."""
        self._source.observe(rows, outcome)
