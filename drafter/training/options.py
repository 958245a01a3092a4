"""Options of `drafter train` and `drafter adapt`. Frozen, checked on construction."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from drafter.data.options import DataOptions
from drafter.utils.options import Options
from drafter.utils.validate import Checked, within


@dataclass(frozen=True)
class DrafterOptions:
    """Shape of the drafter.

    Attributes:
        context: ``last`` hidden state, or ``fused`` hidden states of ``context_layers``.
        context_layers: indices into the target's hidden states, for ``fused`` (0 = embeddings).
        head: ``full`` (own output matrix, as published), or ``tied`` (a projection before the target's output rows).
        num_res_blocks: residual blocks before the head.
        block_rank: rank of these blocks' matrices; None = full matrices. Keeps the drafter of a wide target small.
        draft_vocab_size: number of tokens that can be drafted, the most frequent in the training answers; None = all.
        draft_length: depth to which the drafter is trained.
    """

    context: Literal["last", "fused"] = "last"
    context_layers: tuple[int, ...] = ()
    head: Literal["full", "tied"] = "tied"
    num_res_blocks: int = 2
    block_rank: int | None = None
    draft_vocab_size: int | None = None
    draft_length: int = 4


@dataclass(frozen=True)
class Objective(Checked):
    """Weights and settings of the losses of :mod:`drafter.training.losses`.

    Attributes:
        cross_entropy: weight of -log q[next token of the text].
        kl: weight of the forward KL from the target's distribution.
        depth_rates: share of starts trained at each depth, not rising; None = all 1. Saves work on depths that decoding
            seldom reaches.
        shared_tokens: number of tokens of the draft vocabulary, chosen for each batch, from which losses are estimated
            together with each position's ``top_tokens``; 0 = all tokens, without estimates. Needs a tied head.
        top_tokens: number of the target's likeliest tokens at each position in an estimate.
        memory_mib: budget for logits held at once.
    """

    prefix: ClassVar[str] = "--model.objective."
    cross_entropy: float = within(0.0, low=0.0)
    kl: float = within(1.0, low=0.0)
    depth_rates: tuple[float, ...] | None = within(None, above=0.0, high=1.0)
    shared_tokens: int = within(0, low=0)
    top_tokens: int = within(32, low=1)
    memory_mib: int = within(64, low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.cross_entropy, self.kl) <= 0:
            raise ValueError("--model.objective.cross_entropy and kl are both 0: one of the weights must be above 0")
        rates = self.depth_rates
        if rates is not None and sorted(rates, reverse=True) != list(rates):
            raise ValueError(f"--model.objective.depth_rates {list(rates)} must not rise")

    def rates(self, draft_length: int) -> tuple[float, ...]:
        """Share of starts at each of ``draft_length`` depths."""
        if self.depth_rates is None:
            return (1.0,) * draft_length
        if len(self.depth_rates) != draft_length:
            raise ValueError(
                f"--model.objective.depth_rates has {len(self.depth_rates)} values, but --model.drafter.draft_length "
                f"is {draft_length}: give one for each depth"
            )
        return self.depth_rates


@dataclass(frozen=True)
class OptimOptions(Checked):
    """The optimizer, and the learning rate over the steps of the run.

    Attributes:
        optimizer: muon steps matrices by Muon and other weights by Adam, adam everything by Adam.
        lr: peak learning rate.
        warmup_steps: steps of linear rise from 0.
        schedule: ``wsd`` stays at the peak and falls linearly over the last ``decay_share`` of the steps; ``cosine``
            falls from the peak on.
        decay_share: share of the steps over which ``wsd`` falls; 1 falls from the peak on, 0 stays at the peak.
        minutes: the run ends after this time, of all its starts together, and the schedule falls with the time where
            the time runs out before the steps; 0 = no limit. The making of cached hidden states counts too.
    """

    prefix: ClassVar[str] = "--model.optim."
    optimizer: Literal["muon", "adam"] = "adam"
    lr: float = within(1e-3, above=0.0)
    warmup_steps: int = within(100, low=0)
    schedule: Literal["wsd", "cosine"] = "wsd"
    decay_share: float = within(0.4, low=0.0, high=1.0)
    minutes: float = within(0.0, low=0.0)

    def factor(self, num_steps: int | float, time_share: Callable[[], float] = lambda: 0.0) -> Callable[[int], float]:
        """Step (0-based) -> share of the peak learning rate, for a run of ``num_steps`` steps.

        ``time_share`` is the passed share of ``minutes``; the schedule follows the steps or the time, whichever is
        further. An endless run (``num_steps`` infinite, without ``minutes``) is a ValueError.

        >>> factor = OptimOptions(warmup_steps=2, decay_share=1.0).factor(6)
        >>> [factor(step) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
        """
        if math.isinf(num_steps):
            if not self.minutes:
                raise ValueError(
                    "the learning rate falls until the last step, and this run has none: give --trainer.max_steps, "
                    "--trainer.max_epochs or --model.optim.minutes"
                )
            num_steps = 10**9  # the time ends the run
        warmup = min(self.warmup_steps, max(num_steps - 1, 0))
        start = max(warmup, num_steps * (1 - self.decay_share)) if self.schedule == "wsd" else warmup

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            done = min(1.0, max(0.0, max(step, time_share() * num_steps) - start) / max(1, num_steps - start))
            return (1 + math.cos(math.pi * done)) / 2 if self.schedule == "cosine" else 1 - done

        return factor


@dataclass(frozen=True)
class ModelOptions:
    """The drafter of a training, how the drafter learns, and the form of the target.

    Attributes:
        target_dtype: float32, bfloat16, float16, stored, or auto, as the target is decoded.
        quantization: int8 or int4 rounds the target's weights after loading; none.
        revision: hub revision of the target.
        trust_remote_code: run code of a hub model.
        shard_target: spread the target's layers over the devices of a node, for a target larger than one device.
        drafter: shape of the drafter.
        objective: the losses and their weights.
        optim: optimizer and learning rate.
        init_from: exported drafter or checkpoint for the weights, and for a draft vocabulary of the same size.
    """

    target_dtype: Literal["auto", "float32", "bfloat16", "float16", "stored"] = "auto"
    quantization: Literal["none", "int8", "int4"] = "none"
    revision: str | None = None
    trust_remote_code: bool = False
    shard_target: bool = False
    drafter: DrafterOptions = field(default_factory=DrafterOptions)
    objective: Objective = field(default_factory=Objective)
    optim: OptimOptions = field(default_factory=OptimOptions)
    init_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """Train a recurrent drafter for a frozen target.

    The command prints the checkpoint; `drafter export CHECKPOINT --out DIR` turns the checkpoint into a drafter. Other
    settings have longer names: --model.drafter.draft_vocab_size, --model.optim.lr, --data.cache_hidden_states,
    --trainer.max_epochs and others, which --help-all explains and the files of the package use.

    Attributes:
        target: the language model to draft for: alias, hub id, folder or .gguf file
        train: answers of the target, as `drafter distill` writes them: .jsonl, .json, both also .gz; .parquet, .csv; or
            a hub data set (owner/name:split)
        out: folder of checkpoints and logs
        ckpt_path: resume from this checkpoint; last: from the newest one of the run, or from the start if there is none
        wandb: Weights & Biases project to log to, beside the CSV files; offline where no key is configured
        decode_prompts: held-out prompts to decode after each validation, for val/tokens_per_step; 0: none
        decode_tokens: tokens of each of these answers
        seed: of the weights, the order of the rows, and samples
        model: drafter, losses and optimizer
        data: rows and batches
        trainer: settings of Lightning's trainer, such as --trainer.max_epochs 4
        checkpoint: settings of Lightning's ModelCheckpoint, such as --checkpoint.monitor val/tokens_per_step
    """

    common: ClassVar = ("target", "train", "out", "ckpt_path", "wandb", "decode_prompts", "decode_tokens", "seed")
    rare: ClassVar = ("model", "data", "trainer", "checkpoint")
    kept: ClassVar = "--ckpt-path last goes on from the newest checkpoint"
    target: str
    train: tuple[str, ...]
    out: Path = Path("runs/drafter")
    ckpt_path: str | None = None
    wandb: str | None = None
    decode_prompts: int = within(0, low=0)
    decode_tokens: int = within(64, low=1)
    seed: int = within(0, low=0, high=2**32 - 1)
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    trainer: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AdaptOptions(Options):
    """Let a drafter learn recorded traffic.

    Rows of `drafter serve --record` are traffic, and so are answers of `drafter decode --out` and `drafter distill`.
    A tenth of the prompts is held out, at least 8: so about 80 different prompts are needed. Old and new drafter decode
    these prompts, and the new one is written to --out only if it gained more than two standard errors; otherwise the
    exit code is 3. After a stop the same command goes on with the answers that it began with. No answer of the target
    changes, whatever the drafter has learned.

    Attributes:
        target: alias, hub id, folder or .gguf file of the language model
        drafter: folder of the drafter to begin with, or name of a drafter that comes with the package
        traffic: folder or file of recorded answers
        out: folder of the new drafter; an earlier drafter in it is replaced
        minutes: time of the training; decoding with both drafters comes on top
        general: rows of other answers to mix in against forgetting (default: those of the package for its own target)
        threads: threads of the processor (default: all), to leave some to a server
        device: device of the decoding: auto, cpu, cuda or cuda:1
        revision: hub revision of the target
        trust_remote_code: run code of a hub model
        trainer: a setting of Lightning's trainer, such as --trainer.accelerator gpu
    """

    kept: ClassVar = "the work so far is kept; the same command goes on"
    target: str
    drafter: str
    traffic: Path
    out: Path
    minutes: float = within(10.0, above=0.0, high=10**5)
    general: Path | None = None
    threads: int | None = within(None, low=1, high=1024)
    device: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)
