"""DrafterModule: the frozen target gives hidden states and distributions, and the drafter learns to predict them.

Shapes: B rows · T tokens · L depths · A starts · P pairs · M teacher positions · R draft vocabulary · D hidden size ·
F feature size of the head.
"""

import math
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Timer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import functional as F

from drafter.data.rows import ChatBatch
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.slots import TargetOutput
from drafter.targets.target import Target
from drafter.training.build import expect_same_shape
from drafter.training.callbacks import last_checkpoint
from drafter.training.losses import count_better, exact_loss, sampled_loss
from drafter.training.optimizer import MuonAdam
from drafter.training.options import Objective, OptimOptions
from drafter.training.pairs import Pairs, draft_index_of, select_pairs

_TOP_K = (1, 8)  # drafted tokens among which the text's token is looked for


class Teacher:
    """The frozen target of a training, without gradients.

    Attributes:
        target: the model, as it is decoded.
        weight_RD: its output rows over the drafter's vocabulary in ``dtype``, that of the loss. No other rows are held
            as plain numbers, unless the target's weights are.
    """

    def __init__(self, target: Target, drafter: RecurrentDrafter, dtype: torch.dtype) -> None:
        self.target = target
        self._ids_R = drafter.draft_token_ids_R.to(target.device)
        rows_RD = drafter.output_rows_RD  # of a tied head: the same rows
        if rows_RD is None:
            is_whole = len(self._ids_R) == target.vocab_size
            rows_RD = target.runtime.output_weight_VD if is_whole else target.runtime.output_rows(self._ids_R)
        self.weight_RD = rows_RD.to(dtype).contiguous()

    @torch.no_grad()
    def forward(self, token_BT: Tensor, context_layers: tuple[int, ...]) -> TargetOutput:
        """The target's forward in the target's dtype, without autocast."""
        with torch.autocast(token_BT.device.type, enabled=False):
            return self.target.forward(token_BT, context_layers=context_layers)

    @torch.no_grad()
    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Final hidden states -> the target's logits over the draft vocabulary [C, R], in the dtype of the rows."""
        if self.target.traits.has_plain_logits:
            return F.linear(hidden_CD.to(self.weight_RD.dtype), self.weight_RD)
        with torch.autocast(hidden_CD.device.type, enabled=False):
            return self.target.logits(hidden_CD.to(self.target.dtype))[:, self._ids_R].to(self.weight_RD.dtype)


class DrafterModule(LightningModule):
    """Trains a RecurrentDrafter. The teacher is no module: no state dict, gradient or mode reaches the target.

    Attributes:
        drafter: the trained drafter, on the device of the training, bound to the target.
        teacher: the frozen target.
        num_positions: text positions (starts of at least depth 1) trained on so far, by all processes; the other
            processes count like this one.

    Raises:
        ValueError: the objective does not fit the drafter or the target.
    """

    rising = ("val/top",)  # beginnings of the names of logged metrics of which more is better

    def __init__(self, drafter: RecurrentDrafter, teacher: Teacher, objective: Objective, optim: OptimOptions) -> None:
        super().__init__()
        self.drafter, self.teacher, self.objective, self.optim_options = drafter, teacher, objective, optim
        self._draft_index_V = draft_index_of(drafter.draft_token_ids_R.cpu(), teacher.target.vocab_size)
        self._rates = objective.rates(drafter.config.draft_length)
        self._seed = torch.initial_seed()
        self.num_positions = 0
        self._clock = (0.0, 0)
        self._began = time.monotonic()
        self._norm: tuple[int, Tensor, torch.cuda.Event | None] | None = None  # of a gradient: step, value, when copied
        if objective.shared_tokens and not (drafter.config.head == "tied" and teacher.target.traits.has_plain_logits):
            raise ValueError(
                f"--model.objective.shared_tokens {objective.shared_tokens} needs a tied head and a target whose "
                "logits are products with its output matrix: give 0"
            )

    def configure_optimizers(self) -> Any:
        """The schedule runs over the steps of the whole run."""
        options, parameters = self.optim_options, self.drafter.parameters()
        if options.optimizer == "muon":
            optimizer: torch.optim.Adam = MuonAdam(parameters, options.lr, self.teacher.weight_RD.dtype)
        else:
            optimizer = torch.optim.Adam(parameters, lr=options.lr, betas=(0.9, 0.99))
        factor = options.factor(self.trainer.estimated_stepping_batches, self._time_share)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _seconds(self) -> float:
        """Seconds of the run so far, with those of earlier starts."""
        return time.monotonic() - self._began

    def _time_share(self) -> float:
        """Passed share of ``optim.minutes``; 0 without a limit."""
        minutes = self.optim_options.minutes
        return self._seconds() / (60 * minutes) if minutes else 0.0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the fields that export reads, as plain data: the drafter's config, the trained positions, the metrics."""
        self._expect_finite()
        metrics = {
            name: float(value) for name, value in self.trainer.callback_metrics.items() if name.startswith("val/")
        }
        checkpoint |= {
            "drafter_config": self.drafter.config.to_dict(),
            "num_positions": self.num_positions,
            "seconds": self._seconds(),
            "num_processes": self.trainer.world_size,
            "optimizer": self.optim_options.optimizer,
            "metrics": {name: value for name, value in metrics.items() if math.isfinite(value)},
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the measured constants of the interrupted run; refuse one of another shape or optimizer."""
        num_before, num_now = checkpoint["num_processes"], self.trainer.world_size
        if num_before != num_now:
            raise ValueError(
                f"the checkpoint was written by {num_before} process(es) and this run has {num_now}: resume with as "
                "many, or start a new run from its weights with --model.init_from"
            )
        before, now = checkpoint["optimizer"], self.optim_options.optimizer
        if before != now:
            raise ValueError(
                f"the checkpoint was written with the optimizer {before}, and --model.optim.optimizer is {now}: resume "
                f"with {before}, or start a new run from its weights with --model.init_from"
            )
        # --trainer.max_time counts from each start; the time of earlier starts would stop the run at once.
        checkpoint["callbacks"].pop(Timer.__qualname__, None)
        saved = checkpoint["drafter_config"]
        expect_same_shape(self.drafter.config, saved)
        self.drafter.set_scales(saved["hidden_scale"], saved["embedding_scale"])
        self.num_positions = int(checkpoint["num_positions"])
        self._began = time.monotonic() - float(checkpoint["seconds"])
        ids_R = checkpoint["state_dict"]["drafter.draft_token_ids_R"]
        if not torch.equal(ids_R.cpu(), self.drafter.draft_token_ids_R.cpu()):
            raise ValueError(
                "the checkpoint has another draft vocabulary than these training data give: resume with the same data, "
                "or start a new run with --model.init_from"
            )

    def inputs(self, batch: ChatBatch, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Features of each pair [P, F], and the target's final hidden states where it predicts [M, D].

        The drafter is unrolled from every start to its own depth. The output rows turn features into logits.
        """
        hidden_BTD, context_BTC = batch.hidden_BTD, batch.context_BTC
        if hidden_BTD is None:
            hidden_BTD, context_BTC = self.teacher.forward(batch.token_BT, tuple(self.drafter.config.context_layers))
        token_X = batch.token_BT.flatten()
        context_AC = (hidden_BTD if context_BTC is None else context_BTC).flatten(0, 1)[pairs.start_A]
        hidden_AD, state_AD = self.drafter.fuse(context_AC), self.drafter.init_state(context_AC)
        states, hiddens = [], []
        for depth, num in enumerate(pairs.num_starts, 1):
            next_A = (pairs.start_A[:num] + depth).clamp(max=len(token_X) - 1)
            state_AD = self.drafter.step(state_AD[:num], self.teacher.target.runtime.embed(token_X[next_A]))
            states.append(state_AD)
            hiddens.append(hidden_AD[:num])
        feature_PF = self.drafter.features(torch.cat(hiddens), torch.cat(states))
        return feature_PF, hidden_BTD.flatten(0, 1)[pairs.position_M]

    def loss(self, feature_PF: Tensor, hidden_MD: Tensor, pairs: Pairs, *, is_exact: bool) -> Tensor:
        """The mean loss of the pairs over the draft vocabulary; ``shared_tokens`` estimate it unless ``is_exact``."""
        objective, label_P, teacher_P = self.objective, pairs.label_P, pairs.teacher_P
        if is_exact or not objective.shared_tokens:

            def teacher_logits(here: slice) -> Tensor:
                return self.teacher.logits(hidden_MD[teacher_P[here]])

            return exact_loss(feature_PF, self._output_rows(), label_P, teacher_logits, objective)
        rows_RD, generator = self.teacher.weight_RD, self._generator()
        return sampled_loss(feature_PF, rows_RD, label_P, teacher_P, hidden_MD, objective, generator=generator)

    def _output_rows(self) -> Tensor:
        return self.teacher.weight_RD if self.drafter.config.head == "tied" else self.drafter.output_rows()

    def _generator(self) -> torch.Generator:
        """A generator keyed by the number of the batch, so that a resumed run makes the same choices."""
        seed = self._seed * 1_000_003 + self.trainer.fit_loop.total_batch_idx
        return torch.Generator().manual_seed(seed % 2**63)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> tuple[ChatBatch, Pairs]:
        """The batch and its pairs, chosen on the CPU, so that no step waits for their number; in validation all."""
        rates = self._rates if self.trainer.training else (1.0,) * len(self._rates)
        pairs = select_pairs(batch.token_BT, batch.loss_mask_BT, self._draft_index_V, rates, self._generator())
        if self.teacher.target.device.type != "cuda":
            return batch, pairs
        # The host waits for a copy to the device unless the copy begins in pinned memory.
        pinned: tuple[ChatBatch, Pairs] = apply_to_collection((batch, pairs), Tensor, Tensor.pin_memory)
        return pinned

    def training_step(self, paired: tuple[ChatBatch, Pairs], batch_idx: int) -> Tensor:
        trainer: Any = self.trainer
        batch, pairs = paired
        loss = self.loss(*self.inputs(batch, pairs), pairs, is_exact=False)
        self.num_positions += pairs.num_starts[0] * trainer.world_size
        self.log("train/loss", loss, prog_bar=True)
        # All processes end after the same step, whichever clock is ahead.
        if self.optim_options.minutes and trainer.strategy.reduce_boolean_decision(self._time_share() >= 1, all=False):
            trainer.should_stop = True
        if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            self.log("train/lr", float(trainer.optimizers[0].param_groups[0]["lr"]))
            (before, old), self._clock = self._clock, (time.perf_counter(), self.num_positions)
            if before > 0:
                speed = (self.num_positions - old) / (self._clock[0] - before)  # of all processes
                self.log("train/positions_per_s", speed, prog_bar=True)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Stop before a gradient that is not finite changes the weights.

        On CUDA the stop comes one step later, so that no step waits for the device, but before a checkpoint is written.
        """
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.drafter.parameters() if p.grad is not None])
        self._expect_finite()
        host_norm = norm.to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if norm.is_cuda else None
        self._norm = self.trainer.global_step, host_norm, copied
        if copied is None:
            self._expect_finite()
        self.log("train/grad_norm", norm)

    def _expect_finite(self) -> None:
        """Refuse (ValueError) a last gradient that is not finite."""
        if self._norm is None:
            return
        (step, norm, copied), self._norm = self._norm, None
        if copied is not None:
            copied.synchronize()
        if not math.isfinite(norm.item()):
            last = last_checkpoint(self.trainer)
            good = f"the last good checkpoint is {last}" if last.is_file() else "no checkpoint was written yet"
            raise ValueError(
                f"training diverged: a gradient is not finite at step {step}; {good}. "
                f"Resume from it with a lower --model.optim.lr than {self.optim_options.lr}"
            )

    def validation_step(self, paired: tuple[ChatBatch, Pairs], batch_idx: int) -> None:
        """Log the loss, and ``top8_d2``: the share of pairs at depth 2 whose token is among the drafter's first 8."""
        batch, pairs = paired
        feature_PF, hidden_MD = self.inputs(batch, pairs)
        loss = self.loss(feature_PF, hidden_MD, pairs, is_exact=True)
        self.log("val/loss", loss, prog_bar=True, batch_size=max(1, len(pairs.label_P)), sync_dist=True)
        all_ranks_P = count_better(feature_PF, self._output_rows(), pairs.label_P, self.objective)
        for depth, rank_P in enumerate(all_ranks_P.split(list(pairs.num_starts)), 1):
            num = max(1, len(rank_P))
            for top in _TOP_K:
                self.log(f"val/top{top}_d{depth}", (rank_P < top).sum() / num, batch_size=num, sync_dist=True)
