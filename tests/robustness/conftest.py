"""One folder of valid files for all tests: target, drafter, data, checkpoint."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.data.tiny import write_jsonl
from tests.robustness.harness import Spawner
from tests.tiny_files import make_drafter
from tests.training.test_run import make_place
from tests.training.test_run import words as words_of_training


class Place(NamedTuple):
    """Valid files, and what runs commands."""

    folder: Path
    target: str
    drafter: str
    prompts: str
    run: Spawner

    def training(self, run: Path, *more: str) -> list[str]:
        """The words of a short training into the folder ``run``."""
        return ["train", *words_of_training(self.folder, run, *more)]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = make_place(tmp_path_factory.mktemp("valid"))
    prompts = write_jsonl(folder / "prompts.jsonl", [{"id": f"q{i}", "prompt": f"Question {i}?"} for i in range(12)])
    drafter = make_drafter(str(folder / "target"), folder / "drafter")
    return Place(folder, str(folder / "target"), drafter, prompts, Spawner(folder / "run"))


@pytest.fixture(scope="session")
def checkpoints(place: Place) -> list[Path]:
    """Two checkpoints of different weights."""
    found = []
    for number, steps in enumerate((1, 3)):
        run = place.folder / f"trained-{number}"
        place.run.must(place.training(run, "--trainer.max_steps", str(steps), "--trainer.val_check_interval", "1"))
        found.append(run / "checkpoints" / "last.ckpt")
    return found
