"""The target as a teacher: its own logits, over a part of the vocabulary."""

import pytest
import torch

from drafter.targets.target import Target
from drafter.training.module import Teacher
from tests.targets.zoo import TARGETS, build


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Cohere", "GPTJ"])
@torch.no_grad()
def test_logits_are_the_targets_own_where_they_are_large(name: str) -> None:
    """Plain, soft-capped, scaled, with a bias. A soft cap shows in large logits alone: this norm makes such."""
    model = build(TARGETS[name]())
    norm = getattr(model.base_model, "norm", None) or model.base_model.ln_f
    norm.weight.fill_(40.0)
    if model.get_output_embeddings().bias is not None:
        model.get_output_embeddings().bias.copy_(torch.arange(96) / 8)
    target = Target.from_model(model, name=name)
    ids_R = torch.arange(3, 90, 3)
    hidden_CD = target.forward(torch.arange(1, 21)[None]).hidden_BTD[0]
    wanted_CR = target.model(torch.arange(1, 21)[None]).logits[0, :, ids_R]
    assert name != "Gemma2" or 29 < wanted_CR.abs().max() <= 30
    teacher = Teacher(target, ids_R, torch.float32)
    torch.testing.assert_close(teacher.logits(hidden_CD), wanted_CR, rtol=1e-4, atol=1e-4)
