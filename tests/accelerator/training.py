"""A step of training and a validation on the device of :mod:`tests.accelerator.device`."""

from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from drafter.data.batch import collate
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target
from drafter.training.module import DrafterModule, PairedBatch, Teacher
from drafter.training.options import DrafterOptions, Objective
from drafter.training.pairs import Pairs, draft_index_of
from tests.accelerator.device import DEVICE


def module_of(target: Target, drafter: RecurrentDrafter, *, is_logged: bool, **objective: Any) -> DrafterModule:
    """A module as after ``configure_model``, and with Lightning's log going nowhere."""
    draft_length = drafter.config.draft_length
    module = DrafterModule(
        "target", drafter=DrafterOptions(draft_length=draft_length), objective=Objective(**objective)
    )
    trainer: Any = SimpleNamespace(  # what the module asks Lightning's trainer in a step
        global_step=0,
        log_every_n_steps=1 if is_logged else 1000,
        world_size=1,
        training=True,
        fit_loop=SimpleNamespace(total_batch_idx=0),
        optimizers=[SimpleNamespace(param_groups=[{"lr": 1.0}])],
        strategy=SimpleNamespace(reduce=lambda value, reduce_op: value),
    )
    module._trainer = trainer
    module.log = module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    module.drafter = drafter.train().requires_grad_(True)
    with unset_fake_temporarily():
        module._draft_index_V = draft_index_of(torch.arange(drafter.config.num_outputs), target.vocab_size)
    module.teacher = Teacher(target, drafter.draft_token_ids_R, torch.float32)
    return module


def batch_of(module: DrafterModule) -> PairedBatch:
    """A batch whose pairs were chosen on the CPU, on the device."""
    with unset_fake_temporarily():
        rows = [(torch.arange(3, 3 + size), torch.arange(size) >= 4) for size in (24, 20, 16)]
        paired: PairedBatch = module.on_before_batch_transfer(collate(rows), 0)

    def move(part: Any) -> Any:
        return part.to(DEVICE, non_blocking=True) if isinstance(part, torch.Tensor) else part

    batch = type(paired.batch)(*map(move, paired.batch))
    return PairedBatch(batch, Pairs(*map(move, paired.pairs)))


def train_step(module: DrafterModule) -> None:
    """Loss, gradient, clipping, and a step of the optimizer."""
    paired = batch_of(module)
    optimizer = torch.optim.AdamW(module.drafter.parameters(), fused=True)
    module.training_step(paired, 0).backward()
    module.on_before_optimizer_step(optimizer)
    torch.nn.utils.clip_grad_norm_(module.drafter.parameters(), 1.0)
    optimizer.step()


def validate(module: DrafterModule) -> None:
    """Two batches of a validation, and its end."""
    module._trainer.training = False  # type: ignore[union-attr, misc]
    with torch.no_grad():
        for index in range(2):
            module.validation_step(batch_of(module), index)
        module.on_validation_epoch_end()
