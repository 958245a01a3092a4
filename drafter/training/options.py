"""Options of a training run, as they stand in the YAML under ``model:``. Frozen, and checked on construction."""

from dataclasses import dataclass
from typing import Literal

from drafter.training.losses import LossMix


@dataclass(frozen=True)
class DrafterOptions:
    """Shape of the drafter.

    Attributes:
        cell: ``rnn`` (as published), ``gru``, or ``rnn2`` (two layers of the published cell).
        context: ``last`` hidden state, ``fused`` hidden states of ``context_layers``, or the last one with a memory of
            the text before it (``history``).
        context_layers: indices into the target's hidden states, for ``fused`` (0 = embeddings).
        head: ``full`` (own output matrix, as published), ``tied`` (a projection before the target's output rows), or
            ``low-rank`` (own output matrix as a product of two).
        head_rank: rank of a low-rank head.
        num_res_blocks: residual blocks before the head.
        block_rank: rank of these blocks' matrices; None = full matrices. Keeps the drafter of a wide target small.
        draft_vocab_size: number of tokens that can be drafted, the most frequent in the training answers; None = all.
        draft_length: depth to which the drafter is trained.
        token_counts: JSON file {token id: count} to choose the draft vocabulary by, instead of the training data.
    """

    cell: Literal["rnn", "gru", "rnn2"] = "rnn"
    context: Literal["last", "fused", "history"] = "last"
    context_layers: tuple[int, ...] = ()
    head: Literal["full", "tied", "low-rank"] = "tied"
    head_rank: int | None = None
    num_res_blocks: int = 2
    block_rank: int | None = None
    draft_vocab_size: int | None = None
    draft_length: int = 4
    token_counts: str | None = None


@dataclass(frozen=True)
class Objective:
    """What is minimised. The losses are defined in :mod:`drafter.training.losses`.

    Attributes:
        cross_entropy: weight of -log q[next token of the text].
        kl: weight of the forward KL from the target's distribution.
        total_variation: weight of the rejection probability.
        temperature: of both distributions.
        feature: weight of a smooth L1 loss between the head's feature and the target's hidden state it stands for (tied
            head only); helps in the first thousand steps.
        depth_weights: weight of each depth; None = all 1.
        depth_rates: share of starts trained at each depth, not rising; None = all 1. Saves work on depths that decoding
            seldom reaches.
        memory_mib: budget for logits held at once.
    """

    cross_entropy: float = 0.0
    kl: float = 1.0
    total_variation: float = 0.0
    temperature: float = 1.0
    feature: float = 0.0
    depth_weights: tuple[float, ...] | None = None
    depth_rates: tuple[float, ...] | None = None
    memory_mib: int = 64

    def __post_init__(self) -> None:
        if self.feature < 0:
            raise ValueError(f"--model.objective.feature {self.feature} must not be negative")
        if self.memory_mib < 1:
            raise ValueError(f"--model.objective.memory_mib {self.memory_mib} must be at least 1")
        if self.depth_weights is not None and (min(self.depth_weights) < 0 or max(self.depth_weights) <= 0):
            raise ValueError(f"--model.objective.depth_weights {list(self.depth_weights)}: none below 0, one above")
        rates = self.depth_rates
        if rates is not None and (
            not all(0 < rate <= 1 for rate in rates) or sorted(rates, reverse=True) != list(rates)
        ):
            raise ValueError(f"--model.objective.depth_rates {list(rates)} must lie in (0, 1] and not rise")
        _ = self.mix

    @property
    def mix(self) -> LossMix:
        """Weights for the fused loss."""
        return LossMix(self.cross_entropy, self.kl, self.total_variation, self.temperature)

    def rates(self, draft_length: int) -> tuple[float, ...]:
        """Share of starts at each of ``draft_length`` depths."""
        return self._per_depth("depth_rates", self.depth_rates, draft_length)

    def weights(self, draft_length: int) -> tuple[float, ...]:
        """Weight of each of ``draft_length`` depths."""
        return self._per_depth("depth_weights", self.depth_weights, draft_length)

    def _per_depth(self, name: str, values: tuple[float, ...] | None, draft_length: int) -> tuple[float, ...]:
        if values is None:
            return (1.0,) * draft_length
        if len(values) != draft_length:
            raise ValueError(
                f"--model.objective.{name} has {len(values)} values, but --model.drafter.draft_length is "
                f"{draft_length}: give one for each depth"
            )
        return tuple(values)


@dataclass(frozen=True)
class OptimOptions:
    """AdamW and its learning rate over the steps of the run.

    Attributes:
        lr: peak learning rate.
        warmup_steps: steps of linear rise from 0.
        schedule: ``cosine`` or ``linear`` fall to ``final_share`` of the peak at the last step, or ``constant``.
        final_share: what is left of the learning rate at the end.
        weight_decay: decoupled, on matrices only.
        betas: of Adam.
    """

    lr: float = 1e-3
    warmup_steps: int = 100
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_share: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"--model.optim.lr {self.lr} must be above 0")
        if self.warmup_steps < 0 or not 0 <= self.final_share <= 1:
            raise ValueError(
                f"--model.optim.warmup_steps {self.warmup_steps} must not be negative and "
                f"--model.optim.final_share {self.final_share} must lie in 0 .. 1"
            )
