import math
from pathlib import Path

import pytest
import torch
import yaml

from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.training.build import choose_draft_vocabulary, summary_lines
from drafter.training.options import Objective, OptimOptions


@pytest.mark.parametrize(
    ("options", "last"),
    [({"schedule": "cosine"}, 0.0), ({}, 0.0), ({"decay_share": 1.0}, 0.0), ({"decay_share": 0.0}, 1.0)],
)
def test_learning_rate_rises_then_falls_to_its_end(options: dict, last: float) -> None:
    factor = OptimOptions(warmup_steps=10, **options).factor(100)
    values = [factor(step) for step in range(100)]
    assert values[0] == pytest.approx(0.1) and values[9] == values[10] == 1
    assert values[99] == pytest.approx(last, abs=0.03)
    assert all(a >= b for a, b in zip(values[10:], values[11:], strict=False))
    assert OptimOptions(warmup_steps=1000).factor(5)(4) <= 1
    with pytest.raises(ValueError, match="this run has none: give --trainer.max_steps"):
        OptimOptions(**options).factor(math.inf)


def test_the_draft_vocabulary_holds_the_most_frequent_tokens() -> None:
    assert choose_draft_vocabulary(torch.tensor([5, 0, 9, 7, 0]), 3, always=[1]).tolist() == [1, 2, 3]
    assert choose_draft_vocabulary(torch.tensor([1, 1, 1, 2]), 2).tolist() == [0, 3]


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="above 0"):
        Objective(kl=0.0)
    with pytest.raises(ValueError, match="depth_rates"):
        Objective(depth_rates=(0.5, 0.7))
    with pytest.raises(ValueError, match="draft_length is 3"):
        Objective(depth_rates=(1.0, 0.5)).rates(3)


def test_the_light_head_of_an_8b_target_stays_below_250_megabytes() -> None:
    """What `drafter train` prints, for the shipped config and the sizes of Llama 3 8B; on no memory at all."""
    config = Path(__file__).resolve().parents[2] / "drafter" / "configs" / "train" / "llama-3.1-8b-light.yaml"
    shape = yaml.safe_load(config.read_text())["model"]["drafter"]
    with torch.device("meta"):
        drafter = RecurrentDrafter(DrafterConfig(vocab_size=128256, hidden_size=4096, **shape))
    (line,) = [line for line in summary_lines(drafter) if line.startswith("exported checkpoint")]
    assert 150 < float(line.split()[2]) < 250
