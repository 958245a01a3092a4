"""The published format from the command line, and flags that do not fit."""

import json
from pathlib import Path

import pytest
import torch

from drafter.cli.main import main
from drafter.models.drafter import RecurrentDrafter
from tests.tiny_files import make_drafter


@pytest.fixture
def drafter(target: str, tmp_path: Path) -> Path:
    """An exported drafter with a tied head over a part of the vocabulary."""
    shape = {"head": "tied", "draft_vocab_size": 50, "hidden_scale": 0.5, "target_name": target}
    return Path(make_drafter(target, tmp_path / "drafter", **shape))


def test_export_to_the_published_format(drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a drafter and from a trainer's checkpoint. The logits: tests/golden/test_apple.py."""
    out = tmp_path / "published"
    words = ["--format", "apple", "--out", str(out)]
    assert main(["export", str(drafter), *words]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((out / "config.json").read_text())["model_type"] == "recurrent_drafting_drafter"
    assert RecurrentDrafter.from_apple(out).dtype == torch.bfloat16
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1, "others may read all files or none"
    # Over the same place, in 32 bits; nothing else is left beside it.
    trained = RecurrentDrafter.from_pretrained(drafter)
    state = {f"drafter.{name}": tensor for name, tensor in trained.state_dict().items()}
    torch.save({"drafter_config": trained.config.to_dict(), "state_dict": state}, tmp_path / "last.ckpt")
    states = []
    for source in (drafter, tmp_path / "last.ckpt"):
        assert main(["export", str(source), *words, "--dtype", "float32"]) == 0
        states.append(RecurrentDrafter.from_apple(out).state_dict())
    assert states[0]["head.weight"].dtype == torch.float32
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["drafter", "last.ckpt", "published"]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--target", "x"], "--target belongs to the formats for other programs"),
        (["--format", "apple", "--target", "nobody-knows-it"], "unknown target"),
        (["--format", "pear"], "pear"),
    ],
)
def test_flags_that_do_not_fit_are_refused(words: list[str], match: str, drafter: Path, tmp_path, refused) -> None:
    refused(["export", str(drafter), "--out", str(tmp_path / "out"), *words], match)
    assert not (tmp_path / "out").exists()
