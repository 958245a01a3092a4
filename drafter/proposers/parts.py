"""The parts that proposers are made from: models, settings, and the memory that they share.

Shapes: B rows · N tree nodes · V target vocabulary · K followers kept of a token · X writers of one step · C classes of
nodes · M drafted nodes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from drafter.decoding.compile import Compiler
from drafter.kernels.largest import topk
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers.options import DraftOptions
from drafter.targets.target import Target

NUM_FOLLOWERS = 32
NUM_CLASSES = 16  # of the nodes of one proposer in a hybrid

_ROW_DECAY = 0.95  # per step: the weight of a row's hits is a third after 20 steps
_SHARED_DECAY = 0.999
_ROW_PRIOR = 2.0  # expected hits at which a row's own sums weigh as much as the sums of all rows
_SHARED_PRIOR = 5.0


class FollowerTable:
    """The target's K most probable next tokens after every token, from the token's last occurrence.

    One table serves all rows. The table affects the speed of decoding, never the output.

    Attributes:
        token_VK: followers, best first, int32 [V + 1, K]; row V is a dump for entries that are not kept.
        logit_VK: logits of the followers, float32 [V + 1, K]; -inf for tokens that never occurred.
    """

    def __init__(self, vocab_size: int, num_followers: int, device: torch.device) -> None:
        num_followers = min(num_followers, vocab_size)
        self.token_VK = torch.zeros(vocab_size + 1, num_followers, dtype=torch.int32, device=device)
        self.logit_VK = torch.full((vocab_size + 1, num_followers), -torch.inf, device=device)
        # The stamp of a token's last writer. Later steps, and stronger claims within a step, have larger stamps.
        self._stamp_V = torch.full((vocab_size + 1,), -1, dtype=torch.int64, device=device)
        self._clock = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def num_followers(self) -> int:
        """K."""
        return self.token_VK.shape[1]

    def clear(self) -> None:
        """Empty the table."""
        self.token_VK.zero_()
        self.logit_VK.fill_(-torch.inf)
        self._stamp_V.fill_(-1)
        self._clock.zero_()

    def update(self, token_BN: Tensor, logits_BNV: Tensor, is_known_BN: Tensor, is_certain_BN: Tensor) -> None:
        """Store the followers of the given tokens.

        One of several nodes with the same token writes: nodes of the accepted path take precedence over rejected nodes,
        later nodes over earlier ones. The table therefore does not depend on the order in which a device scatters.

        Args:
            token_BN: int64 [B, N].
            logits_BNV: the target's logits after each token.
            is_known_BN: nodes that may write, bool [B, N].
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
        self._write(token_X, logits_BNV)

    def update_few(
        self, tokens: list[list[int]], logits_BNV: Tensor, is_known: list[list[bool]], is_certain: list[list[bool]]
    ) -> None:
        """:meth:`update` with the writers chosen in host memory, for a few rows on a CPU."""
        nodes = [node for row in zip(tokens, is_known, is_certain, strict=True) for node in zip(*row, strict=True)]
        writer: dict[int, int] = {}
        for wanted in (False, True):
            writer.update(
                (token, index) for index, (token, known, certain) in enumerate(nodes) if known and certain == wanted
            )
        trash = len(self.token_VK) - 1
        token_X = [token if writer.get(token) == index else trash for index, (token, _, _) in enumerate(nodes)]
        self._write(torch.tensor(token_X), logits_BNV)

    def _write(self, token_X: Tensor, logits_BNV: Tensor) -> None:
        logit_BNK, follower_BNK = topk(logits_BNV, self.num_followers)
        self.token_VK[token_X] = follower_BNK.flatten(0, 1).int()
        self.logit_VK[token_X] = logit_BNK.flatten(0, 1).float()


class HitRates:
    """Ratio of correct nodes to expected correct nodes, by class of node.

    Hits and expected hits of every class are summed with decay, for each row and for all rows together. The factor of
    a class for a row is hits / expected, regularised towards the factor of all rows, which is regularised towards 1.

    Attributes:
        hits_BC, expected_BC: sums of each row.

    Args:
        num_classes: C.
        device: the target's.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self._device = device
        self.num_classes = num_classes
        self._hits_C = torch.zeros(num_classes, device=device)
        self._expected_C = torch.zeros(num_classes, device=device)
        self.reserve(0)

    def reserve(self, num_rows: int) -> None:
        """Allocate empty sums for ``num_rows`` rows."""
        self.hits_BC = torch.zeros(num_rows, self.num_classes, device=self._device)
        self.expected_BC = torch.zeros(num_rows, self.num_classes, device=self._device)

    def clear_row(self, row: int) -> None:
        """Reset the sums of a row."""
        self.hits_BC[row] = 0
        self.expected_BC[row] = 0

    def clear(self) -> None:
        """Reset all sums."""
        for sums in (self._hits_C, self._expected_C, self.hits_BC, self.expected_BC):
            sums.zero_()

    def move(self, source: int, destination: int) -> None:
        """Copy the sums of a row to another row."""
        self.hits_BC[destination] = self.hits_BC[source]
        self.expected_BC[destination] = self.expected_BC[source]

    def factor(self, num_rows: int) -> Tensor:
        """The factor of each class for rows 0 .. B-1, [B, C]."""
        shared_C = (self._hits_C + _SHARED_PRIOR) / (self._expected_C + _SHARED_PRIOR)
        return (self.hits_BC[:num_rows] + _ROW_PRIOR * shared_C) / (self.expected_BC[:num_rows] + _ROW_PRIOR)

    def observe(self, class_BM: Tensor, expected_BM: Tensor, hit_BM: Tensor, is_trial_BM: Tensor) -> None:
        """Add the results of the nodes of rows 0 .. B-1.

        Args:
            class_BM: int64 [B, M].
            expected_BM: probability of each node given its parent, according to its proposer.
            hit_BM: the node is correct, bool [B, M].
            is_trial_BM: the parent is correct, so that the node counts, bool [B, M].
        """
        zeros_BC = torch.zeros_like(self.hits_BC[: class_BM.shape[0]])
        self.add(
            zeros_BC.scatter_add(1, class_BM, (hit_BM & is_trial_BM).float()),
            zeros_BC.scatter_add(1, class_BM, expected_BM * is_trial_BM),
        )

    def add(self, hits_BC: Tensor, expected_BC: Tensor) -> None:
        """Add the hits and expected hits of a step of rows 0 .. B-1 to the sums, with decay."""
        for sums_BC, sums_C, new_BC in (
            (self.hits_BC, self._hits_C, hits_BC),
            (self.expected_BC, self._expected_C, expected_BC),
        ):
            sums_BC[: len(new_BC)] = sums_BC[: len(new_BC)] * _ROW_DECAY + new_BC
            sums_C.mul_(_SHARED_DECAY).add_(new_BC.sum(dim=0))


class DraftMemory(NamedTuple):
    """The state that recycling and hybrid proposers learn while decoding. Proposers of one engine share one memory."""

    followers: FollowerTable
    rates: HitRates

    def clear(self) -> None:
        """Reset the memory in place, for all proposers that hold a part of it."""
        self.followers.clear()
        self.rates.clear()


def new_memory(target: Target) -> DraftMemory:
    """An empty memory for a target."""
    followers = FollowerTable(target.vocab_size, NUM_FOLLOWERS, target.device)
    return DraftMemory(followers, HitRates(NUM_CLASSES * 2, target.device))


class Parts(NamedTuple):
    """The arguments of a proposer's ``make`` function.

    Attributes:
        config: settings.
        target: the target.
        drafter: a trained drafter, if any.
        draft_model: a smaller model of the same tokenizer, if any.
        compiler: the compiler of the engine's steps.
        memory: learned state, for methods that learn.
        prefill_chunk: prompt tokens per forward of a draft model.
    """

    config: DraftOptions
    target: Target
    drafter: RecurrentDrafter | None
    draft_model: Target | None
    compiler: Compiler | None
    memory: DraftMemory | None
    prefill_chunk: int
