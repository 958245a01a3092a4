"""A tiny target, its own greedy text, and a data module that hands it out."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch.utils.data import DataLoader

from drafter.data.batch import ChatBatch, collate
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.targets.target import Target
from drafter.training.module import DrafterModule
from drafter.training.options import DrafterOptions, Objective, OptimOptions
from tests.data.tiny import tiny_target

PROMPT_LENGTH = 3


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
        self.batch: ChatBatch = collate(
            [(torch.tensor(row), torch.arange(len(row)) >= PROMPT_LENGTH) for row in self.rows]
        )

    def train_dataloader(self) -> Any:
        return DataLoader([self.batch] * self.num_batches, batch_size=None)

    def val_dataloader(self) -> Any:
        return DataLoader([self.batch], batch_size=None)

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        return torch.bincount(self.batch.token_BT[self.batch.loss_mask_BT], minlength=vocab_size)

    def cache_states(self, *_: Any, **__: Any) -> None: ...

    def val_prompts(self, num: int) -> list[list[int]]:
        return [row[:PROMPT_LENGTH] for row in self.rows[:num]]


@torch.no_grad()
def greedy_rows(target: Target, num_rows: int = 6, length: int = 16) -> list[list[int]]:
    """Random prompts, continued by the target's own picks."""
    token_BT = torch.randint(
        4, target.vocab_size, (num_rows, PROMPT_LENGTH), generator=torch.Generator().manual_seed(5)
    )
    while token_BT.shape[1] < length:
        pick_B = target.logits(target.forward(token_BT).hidden_BTD[:, -1]).argmax(dim=-1)
        token_BT = torch.cat([token_BT, pick_B[:, None]], dim=1)
    rows: list[list[int]] = token_BT.tolist()
    return rows


def make_target() -> Target:
    """Random weights, made larger so that the greedy text is varied."""
    target = tiny_target(hidden_size=32)
    with torch.no_grad():
        for parameter in target.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return Target.from_model(target.model, target.tokenizer, name="tiny")


def make_module(target: Target, **changes: Any) -> DrafterModule:
    """A module with small settings; ``drafter``, ``objective`` and ``optim`` take keyword dictionaries."""
    drafter = {"head": "tied", "draft_length": 3, **changes.pop("drafter", {})}
    objective = changes.pop("objective", {})
    optim = {"lr": 0.01, "warmup_steps": 5, **changes.pop("optim", {})}
    module = DrafterModule(
        target=target.name,
        drafter=DrafterOptions(**drafter),
        objective=Objective(**objective),
        optim=OptimOptions(**optim),
        **changes,
    )
    module._load_target = lambda **_: target
    return module


def make_trainer(folder: Any, **changes: Any) -> Trainer:
    """A silent trainer on the CPU that writes nothing unless told to."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "gradient_clip_val": 1.0,
        "default_root_dir": str(folder),
        **changes,
    }
    return Trainer(**settings)


def fit(folder: Any, target: Target, num_steps: int, **changes: Any) -> DrafterModule:
    """Learn the target's own greedy text by heart, by cross-entropy unless told otherwise."""
    trainer_changes = changes.pop("trainer", {})
    by_heart: dict[str, Any] = {"objective": {"cross_entropy": 1.0, "kl": 0.0}, "optim": {"lr": 0.02}}
    module = make_module(target, **{**by_heart, **changes})
    data = FakeData(greedy_rows(target), num_steps)
    make_trainer(folder, max_steps=num_steps, limit_val_batches=0, **trainer_changes).fit(module, datamodule=data)
    return module


def tokens_per_step(module: DrafterModule, target: Target, rows: list[list[int]]) -> float:
    """How many tokens a step of the engine writes of the target's own rows, by the drafts of a module."""
    drafter = copy.deepcopy(module.drafter).eval()
    engine = Engine(target, drafter, EngineConfig(beam_width=2, draft_length=3, tree_size=7, copying=False))
    params = SamplingParams(max_new_tokens=len(rows[0]) - PROMPT_LENGTH, ignore_eos=True)
    answers = engine.generate([row[:PROMPT_LENGTH] for row in rows], params)
    assert [answer.token_ids for answer in answers] == [row[PROMPT_LENGTH:] for row in rows]
    return sum(len(answer.token_ids) for answer in answers) / sum(answer.num_target_forwards for answer in answers)
