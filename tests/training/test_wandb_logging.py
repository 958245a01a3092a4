"""``drafter train --wandb`` without a key: the run's file, read back."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from lightning.pytorch.loggers import CSVLogger

from drafter.training import run
from drafter.training.run import train
from tests.training.test_run import TOKENS_PER_STEP, place, words
from tests.training.test_run import logged as csv_of

__all__ = ["place"]


@pytest.fixture(scope="module", autouse=True)
def no_key(place: Path) -> Iterator[pytest.MonkeyPatch]:
    """A user who never heard of Weights & Biases."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(place / "netrc"))
        patch.setenv("WANDB_DATA_DIR", str(place / "staging"))
        yield patch


def assert_holds(file: Path, *texts: str) -> None:
    """A run's file holds texts; wandb's own process may still be writing when ``finish`` returns."""
    deadline = time.monotonic() + 60
    while missing := [text for text in texts if text.encode() not in file.read_bytes()]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.1)


def run_files(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))


@pytest.fixture(scope="module")
def logged(place: Path, no_key: pytest.MonkeyPatch) -> Path:
    """A run of eight steps, logged offline, then continued for four more."""
    folder = place / "wandb-run"
    train(words(place, folder, *TOKENS_PER_STEP, "--wandb", "tests"))
    more = ("--trainer.max_steps", "12", "--ckpt_path", "last")
    train(words(place, folder, *TOKENS_PER_STEP, "--wandb", "tests", *more))
    return folder


def test_metrics_and_config_are_in_the_file(logged: Path) -> None:
    names = ("train/loss", "train/lr", "train/positions_per_s", "val/loss", "val/top8_d2", "val/tokens_per_step")
    assert_holds(run_files(logged)[0], *names, "val/accepted_d3", "max_length", "versions")
    tokens, *accepted = (
        csv_of(logged, f"val/{name}") for name in ("tokens_per_step", *(f"accepted_d{d}" for d in (1, 2, 3)))
    )
    assert [step for step, _ in tokens] == [3, 7, 11]
    # An answer's last step may end with an accepted draft token, so the target's own token is not always there.
    for (_, rate), *shares in zip(tokens, *accepted, strict=True):
        assert 1 <= rate <= 1 + sum(share for _, share in shares)


def test_a_resumed_training_goes_on_in_the_last_run(logged: Path) -> None:
    first, second = run_files(logged)
    assert first.name == second.name
    assert [step for step, _ in csv_of(logged, "train/loss")] == [1, 3, 5, 7, 9, 11], "as in a run without a stop"


def test_a_key_or_a_mode_of_the_users_leaves_the_mode_to_wandb(place: Path, tmp_path: Path, monkeypatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(run, "WandbLogger", lambda **options: made.append(options) or CSVLogger(tmp_path))
    given = words(place, tmp_path / "run", "--wandb")
    for has_key, mode in ((True, ""), (False, "disabled"), (False, "")):
        monkeypatch.setenv("WANDB_MODE", mode)
        monkeypatch.setattr(wandb, "login", lambda has_key=has_key, **_: has_key)
        run._parse([*given, "tests"])
    assert [options["mode"] for options in made] == [None, "disabled", "offline"]
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ValueError, match="WANDB_MODE=online, but no Weights & Biases key is configured"):
        run._parse([*given, "tests"])
    with pytest.raises(ValueError, match="--wandb 'me/mine' is no project name"):
        run._parse([*given, "me/mine"])
