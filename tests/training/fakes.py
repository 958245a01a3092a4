"""A tiny target, its own greedy text, and what trains on it."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from drafter.data.loader import TrainLoader, ValLoader
from drafter.data.options import DataOptions
from drafter.data.parts import Parts, read_parts, with_states
from drafter.data.rows import ChatBatch, collate
from drafter.decoding.params import SamplingParams
from drafter.targets.target import Target
from drafter.training.build import build_drafter
from drafter.training.module import DrafterModule, Teacher
from drafter.training.options import DrafterOptions, Objective, OptimOptions
from tests.data.tiny import token_rows
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


def batch_of(rows: Sequence[list[int]]) -> ChatBatch:
    """All rows; loss on everything behind the prompt."""
    return collate([(torch.tensor(row), torch.arange(len(row)) >= PROMPT_LENGTH) for row in rows])


def loader_of(*batches: ChatBatch) -> DataLoader[ChatBatch]:
    """Hands out the batches as they are."""
    return DataLoader(list(batches), batch_size=None)


def make_target() -> Target:
    """Random weights; the greedy text is varied."""
    return tiny_target(35, vocab_size=128)


def greedy_rows(target: Target, num_rows: int = 6) -> list[list[int]]:
    """Random prompts, continued by the target's own picks."""
    prompts = prompts_for(num_rows, seed=5, sizes=(PROMPT_LENGTH,))
    return [prompt + answer for prompt, answer in zip(prompts, answers_of(target, prompts, ANSWER), strict=True)]


def make_module(
    target: Target,
    parts: Parts | None = None,
    *,
    precision: str = "32-true",
    drafter: Any = (),
    objective: Any = (),
    optim: Any = (),
) -> DrafterModule:
    """A module with small settings; ``drafter``, ``objective`` and ``optim`` are changes of them by name."""
    options = DrafterOptions(**{"head": "tied", "draft_length": 3, **dict(drafter)})
    if parts is None:
        masks = ((row, [place >= PROMPT_LENGTH for place in range(len(row))]) for row in greedy_rows(target))
        parts = Parts(*[token_rows(masks)] * 2)
    made, _ = build_drafter(target, parts, options, None)
    teacher = Teacher(target, made, torch.bfloat16 if precision.startswith("bf16") else torch.float32)
    small = OptimOptions(**{"lr": 0.01, "warmup_steps": 5, **dict(optim)})
    return DrafterModule(made, teacher, Objective(**dict(objective)), small)


def make_trainer(folder: Any, **changes: Any) -> Trainer:
    """A silent trainer on the CPU that writes nothing unless told to."""
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "gradient_clip_val": 1.0}
    return Trainer(**{"default_root_dir": str(folder), **silent, **settings, **changes})


def fit(folder: Any, target: Target, num_steps: int, *, precision: str = "32-true") -> DrafterModule:
    """Learn the target's own greedy text by heart, by cross-entropy."""
    by_heart: dict[str, Any] = {"objective": {"cross_entropy": 1.0, "kl": 0.0}, "optim": {"lr": 0.02}}
    module = make_module(target, precision=precision, **by_heart)
    trainer = make_trainer(folder, max_steps=num_steps, limit_val_batches=0, precision=precision)
    trainer.fit(module, loader_of(*[batch_of(greedy_rows(target))] * num_steps))
    return module


def losses_of(folder: Any, names: Sequence[str], target: Target, drafter: dict[str, Any], **data: Any) -> list[float]:
    """Losses of six steps over files, and of each validation."""
    options, seen, layers = DataOptions(**data), Losses(), drafter.get("context_layers", ())
    parts = read_parts(names, target, options)
    torch.manual_seed(3)
    module = make_module(target, parts, drafter=drafter)
    parts = with_states(parts, target, options, 3, layers)
    loaders = TrainLoader(parts.train, batch_tokens=200, seed=0), ValLoader(parts.val, batch_tokens=200)
    make_trainer(folder, max_steps=6, check_val_every_n_epoch=1, callbacks=[seen]).fit(module, *loaders)
    return seen.seen
