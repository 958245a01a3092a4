"""A training step waits for nothing, and all copies to the device come from pinned memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device

from drafter.data.rows import collate
from drafter.training.module import DrafterModule, Teacher
from drafter.training.options import Objective, OptimOptions
from tests.accelerator.cuda.device import counted
from tests.accelerator.cuda.models import CUDA, TINY, drafter_of, target_of


@pytest.mark.parametrize("settings", [{}, {"shared_tokens": 64}, {"kl": 0.0, "cross_entropy": 1.0}])
def test_a_training_step_waits_for_nothing(settings: dict[str, Any]) -> None:
    """From the batch on the CPU to the step of the optimizer; torch calls every wait of its own an error."""
    target = target_of(TINY)
    drafter = drafter_of(target).float().train().requires_grad_(True)
    teacher = Teacher(target, drafter, torch.bfloat16)
    module: Any = DrafterModule(drafter, teacher, Objective(**settings), OptimOptions())
    module._trainer = SimpleNamespace(
        global_step=0, log_every_n_steps=1000, world_size=1, training=True, fit_loop=SimpleNamespace(total_batch_idx=0)
    )
    module.log = lambda *args, **kwargs: None
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-3)
    for _ in range(3):
        rows = [(torch.randint(2048, (size,)), torch.arange(size) >= 8) for size in (64, 48, 40)]
        with counted() as counts:
            torch.cuda.set_sync_debug_mode("error")
            try:
                paired = move_data_to_device(module.on_before_batch_transfer(collate(rows), 0), CUDA)
                with torch.autocast("cuda", torch.bfloat16):
                    loss = module.training_step(paired, 0)
                loss.backward()
                module.on_before_optimizer_step(optimizer)
                torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        # The norm of the step before was copied long ago; its event is asked once.
        assert counts["h2d_pageable"] == 0 and counts["d2h"] == 1 and counts["sync"] <= 1, counts
        assert counts["launch"] < 1500, counts
