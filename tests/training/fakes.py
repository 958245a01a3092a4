"""A tiny target, its own greedy text, and a data module that hands it out."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch.utils.data import DataLoader

from drafter.data.rows import ChatBatch, collate
from drafter.decoding.params import SamplingParams
from drafter.targets.target import Target
from drafter.training.module import DrafterModule
from drafter.training.options import DrafterOptions, Objective, OptimOptions
from tests.engine.drafters import answers_of, prompts_for
from tests.engine.oracle import tiny_target

PROMPT_LENGTH = 3
ANSWER = SamplingParams(max_new_tokens=13, ignore_eos=True)


class Losses(Callback):
    """The loss of every training step, and of validation."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        self.seen.append(float(outputs["loss"]))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["val/loss"]))


class FakeData(LightningDataModule):
    """Every batch holds all rows; loss on everything behind the prompt."""

    def __init__(self, rows: Sequence[list[int]], num_batches: int) -> None:
        super().__init__()
        self.rows, self.num_batches = list(rows), num_batches
        pairs = [(torch.tensor(row), torch.arange(len(row)) >= PROMPT_LENGTH) for row in self.rows]
        self.batch: ChatBatch = collate(pairs)

    def train_dataloader(self) -> Any:
        return DataLoader([self.batch] * self.num_batches, batch_size=None)

    def val_dataloader(self) -> Any:
        return DataLoader([self.batch], batch_size=None)

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        return torch.bincount(self.batch.token_BT[self.batch.loss_mask_BT], minlength=vocab_size)

    summary: ClassVar[dict[str, Any]] = {}

    def cache_states(self, *_: Any, **__: Any) -> None: ...

    def val_prompts(self, num: int) -> list[list[int]]:
        return [row[:PROMPT_LENGTH] for row in self.rows[:num]]


def make_target() -> Target:
    """Random weights; the greedy text is varied."""
    return tiny_target(35, vocab_size=128)


def greedy_rows(target: Target, num_rows: int = 6) -> list[list[int]]:
    """Random prompts, continued by the target's own picks."""
    prompts = prompts_for(num_rows, seed=5, sizes=(PROMPT_LENGTH,))
    return [prompt + answer for prompt, answer in zip(prompts, answers_of(target, prompts, ANSWER), strict=True)]


def make_module(target: Target, **changes: Any) -> DrafterModule:
    """A module with small settings; ``drafter``, ``objective`` and ``optim`` take keyword dictionaries."""
    module = DrafterModule(
        changes.pop("data", None) or FakeData(greedy_rows(target), 1),
        target.name,
        drafter=DrafterOptions(**{"head": "tied", "draft_length": 3, **changes.pop("drafter", {})}),
        objective=Objective(**changes.pop("objective", {})),
        optim=OptimOptions(**{"lr": 0.01, "warmup_steps": 5, **changes.pop("optim", {})}),
        **changes,
    )
    module.load_target = lambda **_: target
    return module


def make_trainer(folder: Any, **changes: Any) -> Trainer:
    """A silent trainer on the CPU that writes nothing unless told to."""
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "gradient_clip_val": 1.0}
    return Trainer(**{"default_root_dir": str(folder), **silent, **settings, **changes})


def fit(folder: Any, target: Target, num_steps: int, **changes: Any) -> DrafterModule:
    """Learn the target's own greedy text by heart, by cross-entropy unless told otherwise."""
    trainer_changes = changes.pop("trainer", {})
    by_heart: dict[str, Any] = {"objective": {"cross_entropy": 1.0, "kl": 0.0}, "optim": {"lr": 0.02}}
    module = make_module(target, **{**by_heart, **changes})
    data = FakeData(greedy_rows(target), num_steps)
    make_trainer(folder, max_steps=num_steps, limit_val_batches=0, **trainer_changes).fit(module, datamodule=data)
    return module
