"""DrafterModule: the frozen target makes hidden states and distributions, the drafter learns to foresee them.

Shapes: B rows · T tokens · K depths · N starts · P pairs · M teacher positions · R draft vocabulary · D hidden size ·
F feature size of the head.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Timer
from torch import Tensor
from torch.nn import functional as F

from drafter.data.batch import ChatBatch
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target, TargetOutput
from drafter.training.build import build_drafter, describe, expect_same_shape
from drafter.training.checkpoint import reopen_epoch, rescale_progress
from drafter.training.losses import LossOutput, PairTargets, chunked_loss
from drafter.training.metrics import NUM_RANKS, AnswerRanks, DepthCounts, best_tree
from drafter.training.options import DrafterOptions, Objective, OptimOptions
from drafter.training.pairs import Pairs, draft_index_of, per_depth, select_pairs
from drafter.training.schedule import learning_rate_factor
from drafter.training.teacher import Teacher
from drafter.training.watch import DivergenceWatch

# Trees for which the expected tokens per step are logged: (W, L, N).
TREES = ((8, 4, 24), (12, 5, 63))

_NO_CROP = 2**31 - 1  # positions before an answer that are kept: more than any text has


class BatchResult(NamedTuple):
    """What one batch gives: the loss to minimise, each pair's loss and rank (when asked for), and the pairs."""

    loss: Tensor
    output: LossOutput
    pairs: Pairs


class DrafterModule(LightningModule):
    """Trains a RecurrentDrafter. The target is outside the module tree: no state dict, gradient or mode reaches it.

    Attributes:
        drafter: what is trained; exists after ``configure_model``.
        teacher: the frozen target; likewise.
        num_positions: text positions (starts of at least depth 1) trained on so far, by all processes, if each had as
            many as this one.
    """

    drafter: RecurrentDrafter
    teacher: Teacher
    _draft_index_V: Tensor
    _features: Callable[[Tensor, Tensor], Tensor]

    def __init__(
        self,
        target: str,
        target_dtype: str = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        shard_target: bool = False,
        drafter: DrafterOptions = DrafterOptions(),  # noqa: B008 (frozen)
        objective: Objective = Objective(),  # noqa: B008 (frozen)
        optim: OptimOptions = OptimOptions(),  # noqa: B008 (frozen)
        init_from: str | None = None,
        compile: bool = False,
        seed: int = 0,
    ) -> None:
        """
        Args:
            target: alias, hub id, folder or .gguf file.
            target_dtype: float32, bfloat16, float16, or auto (bfloat16 on CUDA, float32 on CPU).
            revision: of the target on the hub.
            trust_remote_code: run the target's own code.
            shard_target: spread the target's layers over the devices of a node, when it fits no single one.
            drafter: shape of the drafter.
            objective: what is minimised.
            optim: optimizer and learning rate.
            init_from: exported drafter or checkpoint to start the weights (and the draft vocabulary) from.
            compile: compile the drafter's layers with torch.compile.
            seed: of the choice of positions when depth_rates are below 1.
        """
        super().__init__()
        self.save_hyperparameters(
            {
                "target": target,
                "target_dtype": target_dtype,
                "revision": revision,
                "shard_target": shard_target,
                "drafter": asdict(drafter),
                "objective": asdict(objective),
                "optim": asdict(optim),
                "init_from": init_from,
                "compile": compile,
                "seed": seed,
            }
        )
        self.options, self.objective, self.optim_options = drafter, objective, optim
        self._rates = objective.rates(drafter.draft_length)
        self._depth_weight_K = torch.tensor(objective.weights(drafter.draft_length))
        self._load_target: Callable[[str], Target] = lambda device: Target.load(
            target,
            dtype=target_dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            num_shards=self.trainer.num_devices if shard_target else 1,
            pack=False,
        )
        self._compile = compile
        self._seed = seed
        self.num_positions = 0
        self._num_tokens = 0
        self._val_counts: DepthCounts | None = None
        self._val_ranks: list[AnswerRanks] = []
        self._watch = DivergenceWatch()
        self._clock: tuple[float, int, int, float] = (0.0, 0, 0, 0.0)

    @classmethod
    def with_target(cls, target: Target, **options: Any) -> "DrafterModule":
        """A module for a target that is already in memory; options as in the constructor."""
        module = cls(target=target.name, **options)
        module._load_target = lambda device: target
        return module

    # -- set-up ----------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the target, choose the draft vocabulary, measure the scales, make the drafter."""
        if hasattr(self, "drafter"):
            return
        precision = str(self.trainer.precision)
        if precision.startswith("16"):
            # A fused optimizer takes the scale of 16-mixed off the gradients by itself, after they were clipped.
            raise ValueError(f"--trainer.precision {precision} is not supported: use bf16-mixed or 32-true")
        target = self._load_target(str(self.trainer.strategy.root_device))
        data: Any = getattr(self.trainer, "datamodule", None)
        built = build_drafter(target, data, self.options, self.hparams["init_from"])
        self.drafter = built.drafter
        dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
        ids_R = self.drafter.draft_token_ids_R
        teacher = Teacher(target, ids_R.to(target.device), dtype)
        index_V = draft_index_of(ids_R.to(target.device), target.vocab_size)
        # Neither is a module or a buffer: not saved, not moved, not broadcast.
        self.teacher, self._draft_index_V = teacher, index_V
        self._features = torch.compile(self.drafter.features, dynamic=True) if self._compile else self.drafter.features
        if self.trainer.is_global_zero:
            # Not self.print, which gives lines to a progress bar that is not there yet.
            print("\n".join([*built.notes, *describe(self.drafter)]), flush=True)
        self._cache_states(data)

    def _cache_states(self, data: Any) -> None:
        """Fill the data module's cache of hidden states, if it has one: the first process does, the others read."""
        if not hasattr(data, "cache_states"):
            return
        layers = tuple(self.drafter.config.context_layers)
        # A memory begins with the text, and so must the rows that it is made of; others can use them as they are.
        draft_length = len(self._rates) if self.drafter.history is None else _NO_CROP
        for is_turn in (self.trainer.is_global_zero, not self.trainer.is_global_zero):
            if is_turn:
                data.cache_states(self.teacher.target, draft_length=draft_length, context_layers=layers)
            self.trainer.strategy.barrier()

    def configure_optimizers(self) -> Any:
        """AdamW with weight decay on matrices only; the schedule runs over the steps of this run."""
        options = self.optim_options
        matrices = [p for p in self.drafter.parameters() if p.ndim > 1]
        others = [p for p in self.drafter.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=options.lr,
            betas=options.betas,
            fused=True,
        )
        factor = learning_rate_factor(options, self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what export needs: the drafter's config, how much it has seen, how well it did. Plain data only."""
        checkpoint["drafter_config"] = self.drafter.config.to_dict()
        checkpoint["num_positions"] = self.num_positions
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        checkpoint["metrics"] = {
            name: value for name, value in metrics.items() if name.startswith("val/") and math.isfinite(value)
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the measured constants of the interrupted run; refuse a checkpoint of another shape."""
        rescale_progress(checkpoint, self.trainer.world_size)
        reopen_epoch(checkpoint)
        # --trainer.max_time is for each start: with the time that is used up already no step would be made.
        checkpoint.get("callbacks", {}).pop(Timer.__qualname__, None)
        saved = checkpoint["drafter_config"]
        expect_same_shape(self.drafter.config, saved)
        self.drafter.set_scales(saved["hidden_scale"], saved["embedding_scale"])
        self.num_positions = int(checkpoint["num_positions"])
        ids_R = checkpoint["state_dict"]["drafter.draft_token_ids_R"]
        if not torch.equal(ids_R.cpu(), self.drafter.draft_token_ids_R.cpu()):
            raise ValueError(
                "the checkpoint has another draft vocabulary than these training data give: resume with the same data, "
                "or start a new run with --model.init_from"
            )

    # -- one batch -------------------------------------------------------------------------------------------------

    def run_batch(self, batch: ChatBatch, *, rates: tuple[float, ...], with_ranks: bool) -> BatchResult:
        """Target forward, pairs, drafter, loss."""
        target_output = self._target_states(batch)
        pairs = select_pairs(batch.token_BT, batch.loss_mask_BT, self._draft_index_V, rates, self._generator())
        feature_PF = self._pair_features(batch.token_BT, target_output.context_BTC, pairs)
        weight_P = pairs.is_valid_P * self._depth_weight_K.to(feature_PF.device)[pairs.depth_P]
        weight_P = weight_P / weight_P.sum().clamp_min(1e-9)
        hidden_SD = target_output.hidden_BTD.flatten(0, 1)
        position_M, teacher_P = pairs.teacher_P.unique(return_inverse=True)
        hidden_MD = hidden_SD[position_M]
        ranked_P = self._draft_index_V[self.teacher.picks(hidden_MD)][teacher_P] if with_ranks else None
        is_tied = self.drafter.config.head == "tied"
        # Guesses are counted at depths of weight 0 as well.
        is_used_P = pairs.is_valid_P if with_ranks else None
        targets = PairTargets(pairs.label_P, weight_P, teacher_P, hidden_MD, self.teacher.logits, ranked_P, is_used_P)
        output = chunked_loss(
            feature_PF,
            self.teacher.rows_RD if is_tied else self.drafter.output_rows(),
            targets,
            self.objective.mix,
            memory_mib=self.objective.memory_mib,
        )
        loss = output.loss
        if self.objective.feature and is_tied:
            # In the units of rms 1, so that its weight means the same for every target.
            scale = self.drafter.config.hidden_scale
            gap_PD = F.smooth_l1_loss(feature_PF * scale, hidden_MD[teacher_P] * scale, reduction="none")
            loss = loss + self.objective.feature * (gap_PD.mean(dim=-1, dtype=torch.float32) * weight_P).sum()
        return BatchResult(loss, output, pairs)

    def _target_states(self, batch: ChatBatch) -> TargetOutput:
        if batch.hidden_BTD is not None:
            context_BTC = batch.hidden_BTD if batch.context_BTC is None else batch.context_BTC
            return TargetOutput(batch.hidden_BTD, context_BTC)
        return self.teacher.forward(batch.token_BT, tuple(self.drafter.config.context_layers))

    def _pair_features(self, token_BT: Tensor, context_BTC: Tensor, pairs: Pairs) -> Tensor:
        """Unroll the drafter from every start, each to its own depth (leading slices, see Pairs)."""
        token_S = token_BT.flatten()
        if self.drafter.history is not None:
            start_BC = context_BTC.new_zeros(len(context_BTC), self.drafter.config.context_size)
            context_BTC = self.drafter.read(start_BC, context_BTC, self.teacher.target.embed(token_BT))
        context_NC = context_BTC.flatten(0, 1)[pairs.start_N]
        hidden_ND = self.drafter.fuse(context_NC)
        state_ND = self.drafter.init_state(context_NC)
        states, hiddens = [], []
        for depth, num in enumerate(pairs.num_starts, 1):
            next_N = (pairs.start_N[:num] + depth).clamp(max=len(token_S) - 1)
            embedding_ND = self.teacher.target.embed(token_S[next_N])
            state_ND = self.drafter.step(context_NC[:num], state_ND[:num], embedding_ND)
            states.append(state_ND)
            hiddens.append(hidden_ND[:num])
        return self._features(torch.cat(hiddens), torch.cat(states))

    def _generator(self) -> torch.Generator:
        """Keyed by the batch's number, so that a resumed run chooses as the uninterrupted one."""
        return torch.Generator().manual_seed(self._seed * 1_000_003 + self.trainer.fit_loop.total_batch_idx)

    # -- Lightning's hooks -----------------------------------------------------------------------------------------

    def training_step(self, batch: ChatBatch, batch_idx: int) -> Tensor:
        trainer: Any = self.trainer
        is_logged = (trainer.global_step + 1) % trainer.log_every_n_steps == 0
        result = self.run_batch(batch, rates=self._rates, with_ranks=is_logged)
        complaint = self._watch.complaint(result.loss.detach().item())
        if complaint is not None:
            self._stop_diverged(complaint)
        self.num_positions += result.pairs.num_starts[0] * trainer.world_size
        self._num_tokens += int(batch.length_B.sum()) * trainer.world_size
        self.log("train/loss", result.loss, prog_bar=True)
        if is_logged:
            self._log_details("train", result)
            self._log_speed()
        return result.loss

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the global norm, or by value if told to (Lightning refuses to for a fused optimizer, though bfloat16
        needs no unscaling).

        Called before every optimizer step, so a gradient that is not finite stops the run before it spoils the weights.
        """
        limit, is_by_value = gradient_clip_val or math.inf, gradient_clip_algorithm == "value"
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), math.inf if is_by_value else limit)
        if not torch.isfinite(norm):
            self._stop_diverged("a gradient is not finite")
        if is_by_value:
            torch.nn.utils.clip_grad_value_(self.drafter.parameters(), limit)
        self.log("train/grad_norm", norm)

    def validation_step(self, batch: ChatBatch, batch_idx: int) -> None:
        result = self.run_batch(batch, rates=(1.0,) * len(self._rates), with_ranks=True)
        num_pairs = max(1, int(result.pairs.is_valid_P.sum()))
        self.log("val/loss", result.loss, prog_bar=True, batch_size=num_pairs, sync_dist=True)
        counts = self._counts(result)
        self._val_counts = counts if self._val_counts is None else self._val_counts.plus(counts)
        rank_NK = per_depth(result.output.rank_P, result.pairs.num_starts, NUM_RANKS)
        self._val_ranks.append(AnswerRanks.of(rank_NK, result.pairs.start_N, batch.loss_mask_BT))

    def on_validation_epoch_end(self) -> None:
        if self._val_counts is None:
            return
        counts = DepthCounts(*(self.trainer.strategy.reduce(part, reduce_op="sum") for part in self._val_counts))
        ranks, self._val_counts, self._val_ranks = self._val_ranks, None, []
        self.log_dict({f"val/{name}": value for name, value in counts.accuracies().items()})
        shares = counts.rank_shares()
        for width, length, size in TREES:
            tree = best_tree(shares[:length], size - 1, width)
            walked = torch.tensor([part.walk(tree) for part in ranks], dtype=torch.float64).sum(dim=0)
            tokens, steps = self.trainer.strategy.reduce(walked.to(self.device), reduce_op="sum").tolist()
            self.log(f"val/expected_tokens_per_step_n{size}", tokens / max(1, steps))
        self.log("val/positions", float(self.num_positions))

    def _counts(self, result: BatchResult) -> DepthCounts:
        pairs = result.pairs
        rank_NK = per_depth(result.output.rank_P, pairs.num_starts, 0)
        return DepthCounts.of(rank_NK, per_depth(pairs.is_valid_P, pairs.num_starts, False))

    def _log_details(self, stage: str, result: BatchResult) -> None:
        accuracies = self._counts(result).accuracies()
        self.log_dict(
            {f"{stage}/{name}": value for name, value in accuracies.items() if name.startswith(("top1", "top8"))}
        )
        pairs = result.pairs
        for depth, loss_P in enumerate(result.output.loss_P.split(list(pairs.num_starts)), 1):
            num_valid = pairs.is_valid_P.split(list(pairs.num_starts))[depth - 1].sum().clamp_min(1)
            self.log(f"{stage}/loss_d{depth}", loss_P.sum() / num_valid)

    def _log_speed(self) -> None:
        """Speed since the last logged step, of all processes, if each has as many tokens as this one."""
        now = (time.perf_counter(), self._num_tokens, self.num_positions, self.teacher.seconds)
        seconds, tokens, positions, in_target = (new - old for new, old in zip(now, self._clock, strict=True))
        if self._clock[0] > 0:
            self.log("train/tokens_per_s", tokens / seconds)
            self.log("train/positions_per_s", positions / seconds, prog_bar=True)
            self.log("train/target_share", in_target / seconds)
        self._clock = now
        self.log("train/lr", float(self.trainer.optimizers[0].param_groups[0]["lr"]))

    def _stop_diverged(self, what: str) -> None:
        checkpoint: Any = self.trainer.checkpoint_callback
        last = getattr(checkpoint, "last_model_path", "") or getattr(checkpoint, "best_model_path", "")
        good = f"the last good checkpoint is {last}" if last else "no checkpoint was written yet"
        raise ValueError(
            f"training diverged: {what} at step {self.trainer.global_step}; {good}. "
            f"Resume from it with a lower --model.optim.lr than {self.optim_options.lr}"
        )
