"""Callbacks of a run: real decoding as a validation metric, and checkpoints that survive stops."""

import copy
import resource
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tqdm import tqdm

from drafter.data.loader import TrainLoader
from drafter.decoding.acceptance import reached, tokens_per_step
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.request import Prompt
from drafter.engine.settings import EngineConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target
from drafter.utils.io import replacing

_MEASURED_TOGETHER = 8  # prompts
_PACE_STEPS = 3  # batches that tell the pace, behind the first one
_FEW_POSITIONS = 10_000
_MODES = {"drafter alone": False, "with copies": True}


def count_forwards(
    target: Target, drafter: RecurrentDrafter, prompts: Mapping[str, Sequence[Prompt]], num_tokens: int
) -> dict[str, list[tuple[int, int]]]:
    """(tokens, forwards) of each greedy answer of at most ``num_tokens``, by "set, mode", with trees of 8 nodes."""
    tree = EngineConfig(method="drafter", compile=False, beam_width=4, draft_length=3, tree_size=8)
    params = SamplingParams(max_new_tokens=num_tokens)
    found: dict[str, list[tuple[int, int]]] = {}
    for (name, own), (mode, copying) in product(prompts.items(), _MODES.items()):
        engine = Engine(target, drafter, replace(tree, copying=copying))
        for start in tqdm(range(0, len(own), _MEASURED_TOGETHER), desc=f"measuring {name}, {mode}"):
            answers = engine.generate(own[start : start + _MEASURED_TOGETHER], params)
            counts = [(len(answer.token_ids), answer.num_target_forwards) for answer in answers]
            found.setdefault(f"{name}, {mode}", []).extend(counts)
    return found


class TokensPerStep(Callback):
    """Decodes ``prompts`` with the real engine after each validation and logs ``val/tokens_per_step``.

    ``val/accepted_d2`` is the share of forwards that accepted a draft token at depth 2. Decoding is greedy, with trees
    of 24 nodes as deep as the drafter is trained, so the figures depend on the drafter alone. Every process decodes the
    same prompts: a sharded target's processes run each forward together.
    """

    rising = ("val/tokens_per_step", "val/accepted")  # as of DrafterModule

    def __init__(self, prompts: Sequence[Prompt], num_tokens: int) -> None:
        self._prompts, self._params = prompts, SamplingParams(max_new_tokens=num_tokens)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.sanity_checking:
            return
        target, length = module.teacher.target, module.drafter.config.draft_length
        drafter = copy.deepcopy(module.drafter).to(target.device, target.dtype).eval()  # the original goes on training
        config = EngineConfig(
            beam_width=8, draft_length=length, tree_size=24, max_num_seqs=len(self._prompts),
            compile=False,  # the same layers run in training
        )  # fmt: skip
        with torch.autocast(target.device.type, enabled=False):
            answers = Engine(target, drafter, config).generate(self._prompts, self._params)
        torch.set_num_threads(target.traits.num_threads)  # the engine leaves the cores to a native target's threads
        rate = tokens_per_step([(len(answer.token_ids), answer.num_target_forwards) for answer in answers]).value
        module.log("val/tokens_per_step", rate, prog_bar=True, sync_dist=True)
        num_accepted = [num for answer in answers for num in answer.num_accepted]
        for depth, num in enumerate([*reached(num_accepted), *[0] * length][:length], 1):
            module.log(f"val/accepted_d{depth}", num / len(num_accepted), sync_dist=True)


class Forecast(Callback):
    """Says before the first step what a run takes, and after the first steps how long.

    Args:
        num_positions: of a pass over the rows.
        is_new: the weights are new ones.
    """

    def __init__(self, num_positions: int, *, is_new: bool) -> None:
        self._num_positions, self._is_new = num_positions, is_new
        self._seen: list[tuple[float, int]] = []  # time and positions after the first steps

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        num_steps, folder = trainer.estimated_stepping_batches, Path(trainer.default_root_dir)
        num_weights = sum(weight.numel() for weight in pl_module.drafter.parameters())
        state, free = 12 * num_weights / 1e9, shutil.disk_usage(folder).free / 1e9  # weights and Adam's two means
        lines = [
            f"{self._num_positions:,} positions a pass, {num_steps:,} steps in all; memory: {_peak_memory():.1f} GB so "
            f"far and about {16 * num_weights / 1e9 + 0.3:.1f} GB more; checkpoints: 2 x {state:.2f} GB in {folder} "
            f"({free:.1f} GB free)"
        ]
        if self._is_new and self._num_positions < _FEW_POSITIONS:
            lines.append(
                f"{self._num_positions:,} positions are too few for new weights to gain anything: make more answers "
                f"({_FEW_POSITIONS:,} and more), or begin at a trained drafter with --model.init_from"
            )
        print("\n".join(lines), flush=True)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if len(self._seen) > _PACE_STEPS:
            return
        self._seen.append((time.monotonic(), pl_module.num_positions))
        if len(self._seen) == _PACE_STEPS + 1:
            (began, before), (now, positions) = self._seen[0], self._seen[-1]
            num_batches = (trainer.estimated_stepping_batches - trainer.global_step) * trainer.accumulate_grad_batches
            seconds, speed = (now - began) / _PACE_STEPS, (positions - before) / max(1e-9, now - began)
            pl_module.print(
                f"{speed:,.0f} positions/s: {num_batches * seconds / 3600:.2f} hours to go, validations and limits of "
                f"time left out; peak memory {_peak_memory():.1f} GB"
            )


def _peak_memory() -> float:
    """GB of main memory that this process has taken at most, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def last_checkpoint(trainer: Any) -> Path:
    """The place of a run's newest checkpoint, which may not be written yet."""
    return Path(trainer.checkpoint_callback.dirpath, "last.ckpt")


class SaveWhenStopped(Callback):
    """Writes ``last.ckpt`` after each validation, at the end of a run, and after Ctrl-C or SIGTERM.

    A stop waits for the end of the step or validation: a checkpoint in the middle of a step would lose the batch of the
    step. A run that goes on with ``--ckpt-path last`` takes the next batch. A second Ctrl-C stops at once and saves
    nothing. A run that fails saves nothing, because its weights may be the reason.

    Args:
        loader: whose position every checkpoint holds, also one at the end of an epoch, where Lightning forgets.
        facts: what every checkpoint says beside the module's own fields.
    """

    def __init__(self, loader: TrainLoader, facts: Mapping[str, Any]) -> None:
        self._loader, self._facts = loader, facts
        self._signal = 0
        self._step = 0  # of the last whole step
        self.has_stepped = False  # before, an error is one of the checkpoint that a run resumes from
        self._saved_step = -1

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {"loader": self._loader.state_dict(), **self._facts}

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loader.load_state_dict(checkpoint["loader"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take_note)  # Lightning puts the earlier handlers back at the end

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        # Between optimizer steps gradients accumulate, and a checkpoint holds no gradients.
        if trainer.global_step != self._step:
            self._step, self.has_stepped = trainer.global_step, True
            self._stop_if_told(trainer)
        if trainer.should_stop:  # by --trainer.max_time: at its end the epoch would count as finished
            self._save_last(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning saves at a new best only. Without a new best, a crash would cost more than one interval.
        if not trainer.sanity_checking:
            self._save_last(trainer)
            self._stop_if_told(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The steps after the last validation belong to the run.
        if not trainer.interrupted and self._saved_step != trainer.global_step:
            self._save_last(trainer)

    def _save_last(self, trainer: Trainer) -> None:
        self._saved_step = trainer.global_step
        trainer.save_checkpoint(last_checkpoint(trainer))

    def _take_note(self, number: int, frame: Any) -> None:
        if self._signal == number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
        print("\nstopping after this step; a checkpoint is written (Ctrl-C again stops at once)", file=sys.stderr)

    def _stop_if_told(self, trainer: Trainer) -> None:
        # Every process takes part, so that all stop after the same step, whichever process got the signal.
        if not trainer.strategy.reduce_boolean_decision(bool(self._signal), all=False):
            return
        self._save_last(trainer)
        rank_zero_warn(
            f"stopped at step {trainer.global_step}; saved {last_checkpoint(trainer)}. Go on with --ckpt-path last"
        )
        raise KeyboardInterrupt if self._signal == signal.SIGINT else SIGTERMException


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it.

    Lightning writes into the folder for temporary files and moves from there: from another disk, a full disk or a kill
    leaves half a checkpoint at the place of the last whole one.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """OSError with the file's name if the disk is full; an earlier file at ``path`` stays."""
        place = Path(path)
        try:
            with replacing(place, follows_links=False) as new, new.open("wb") as stream:
                torch.save(checkpoint, stream)
        except (OSError, RuntimeError) as error:
            # torch.save reports a failed write as a RuntimeError of its own.
            raise OSError(f"checkpoint {place} could not be written ({error}); the one before it is intact") from error
