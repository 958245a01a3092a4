"""``drafter adapt``: learns recorded rows, and writes the new drafter only where held-out prompts gained."""

import contextlib
import io
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from drafter.cli.main import main
from drafter.data.formats import TrafficRow, read_traffic
from drafter.integrations import export as export_module
from drafter.models.drafter import RecurrentDrafter
from drafter.training import adapt as module
from drafter.training.adapt import Figure, affordable, compared, prompts_of, split
from drafter.training.module import DrafterModule
from tests.conftest import Refused
from tests.tiny_files import SMALL_ADAPT, answered_prompts, make_drafter, make_target


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A target, an untrained drafter, and recorded answers of the target; settings with which little is enough."""
    folder = tmp_path_factory.mktemp("adapt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTER_HOME", str(folder / "home"))
        (folder / "target").symlink_to(make_target(folder))
        make_drafter(str(folder / "target"), folder / "drafter")
        (folder / "traffic").mkdir()
        lines = [json.dumps(row) + "\n" for row in answered_prompts(str(folder / "target"))]
        (folder / "traffic" / "traffic-1.jsonl").write_text("".join(lines[:60]) + lines[0] + '{"prompt_token')
        (folder / "traffic" / "traffic-2.jsonl").write_text("".join(lines[60:]))
        for name, value in SMALL_ADAPT.items():
            patch.setattr(module, name, value)
        yield folder


class Gained(NamedTuple):
    """The folder of a call that gained, what it showed, and whether it left the handlers of signals as they were."""

    out: Path
    shown: str
    is_undisturbed: bool


@pytest.fixture(scope="module")
def gained(place: Path) -> Gained:
    """Over an older drafter with its measured sizes."""
    out, shown = place / "gained" / "new", io.StringIO()
    shutil.copytree(place / "drafter", out)
    (out / "tuned.json").write_text('{"method": "drafter", "drafter_fingerprint": "of the old weights"}')
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with contextlib.redirect_stdout(shown):
        assert main(words(place, out)) == 0
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return Gained(out, shown.getvalue(), after == before)


def words(place: Path, out: Path, *more: str) -> list[str]:
    """The command, with so many minutes that no clock decides over rows and learning rates."""
    return [
        *("adapt", "--target", str(place / "target"), "--drafter", str(place / "drafter"), "--out", str(out)),
        *("--traffic", str(place / "traffic"), "--trainer.accelerator", "cpu"),
        *("--trainer.enable_progress_bar=false", "--minutes", "1000", *more),
    ]


def test_a_prompt_is_on_one_side_for_ever() -> None:
    rows = [TrafficRow([index % 200, 5], [index]) for index in range(600)]
    kept, held_out = split(rows)
    sides = [{row.prompt_token_ids[0] for row in side} for side in (kept, held_out)]
    assert not sides[0] & sides[1] and 8 <= len(sides[1]) <= 40 and len(kept) + len(held_out) == 600
    assert split(rows[:300])[1] == [row for row in held_out if row.token_ids[0] < 300]
    assert prompts_of(held_out, 5) == prompts_of(held_out[::-1], 5) and len(prompts_of(held_out, 1000)) == len(sides[1])


def test_the_newest_rows_that_fit() -> None:
    """A long prompt costs time once: the general rows are as many as the answer's tokens need."""
    rows = [TrafficRow([index] * 90, [index] * 10) for index in range(20)]
    general = [TrafficRow([1], [index, 2, 3, 4, 5]) for index in range(200)]  # 1.2 tokens for each of an answer
    chosen, mixed_in = affordable(rows, general, 10 * (90 + 10 + 12))
    assert chosen == rows[:9:-1] and len(mixed_in) == 20 and all(row in general for row in mixed_in)
    assert affordable(rows, [], 1000) == (rows[:9:-1], [])
    assert affordable(rows, general, 0) == ([rows[-1]], affordable(rows, general, 112)[1]), "at least one"


def test_worked_example_of_a_paired_difference() -> None:
    assert compared([(4, 4), (6, 4)], [(4, 2), (6, 3)]) == Figure(before=1.25, after=2.0, error=0.25)
    assert Figure(1.0, 1.2, 0.09).has_gained and not Figure(1.0, 1.2, 0.11).has_gained
    same = compared([(4, 4), (6, 3)], [(4, 4), (6, 3)])
    assert same.error == 0 and not same.has_gained


def test_a_gain_is_written_and_measured_sizes_stay(place: Path, gained: Gained) -> None:
    out, shown, is_undisturbed = gained
    assert "traffic (8 prompts), with copies" in shown and "the new drafter is in" in shown and is_undisturbed
    record = json.loads((out / "run.json").read_text())["settings"]["adapted"]
    assert record["answers"] == len(split(read_traffic(place / "traffic"))[0])
    figure = record["tokens_per_step"]["traffic, with copies"]
    assert figure["after"] > figure["before"] + 2 * figure["error"] > 1
    old, new = (RecurrentDrafter.from_pretrained(folder) for folder in (place / "drafter", out))
    assert old.config.draft_length == new.config.draft_length and not new.head.weight.equal(old.head.weight)
    assert json.loads((out / "tuned.json").read_text()) == {"method": "drafter"}
    assert [path.name for path in out.parent.iterdir()] == ["new"]


def test_without_a_gain_nothing_is_changed(place: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(module, "_LR", 1e-30)
    monkeypatch.setattr(module, "_EPOCHS", 1)
    assert main(words(place, tmp_path / "new")) == 3
    assert "nothing was changed" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_an_interrupted_call_goes_on_with_its_rows(place: Path, gained: Gained, tmp_path, monkeypatch, capsys) -> None:
    """Although a server has recorded more in the meantime; the end is that of a call without a stop."""
    traffic, out, work = tmp_path / "traffic", tmp_path / "new", tmp_path / ".new.adapt"
    shutil.copytree(place / "traffic", traffic)
    command = words(place, out, "--traffic", str(traffic))
    steps: list[int] = []

    def note(trained: DrafterModule, *_: object) -> None:
        steps.append(trained.trainer.global_step)
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(DrafterModule, "on_train_batch_start", note)
    assert main(command) == 130
    assert not out.exists() and (work / "checkpoints" / "last.ckpt").is_file()
    assert work.stat().st_mode & 0o777 == 0o700, "the rows are in it"
    (traffic / "traffic-3.jsonl").write_text('{"prompt_token_ids": [9, 9], "token_ids": [9]}\n')
    assert "going on" not in capsys.readouterr().err
    assert main(command) == 0
    assert "going on with an earlier call" in capsys.readouterr().err
    assert steps[:5] == [0, 1, 2, 3, 4] and not work.exists()
    assert (out / "model.safetensors").read_bytes() == (gained.out / "model.safetensors").read_bytes()


def test_a_call_that_was_stopped_at_its_end_does_not_train_again(place: Path, tmp_path: Path, monkeypatch) -> None:
    """The new drafter is in its own folder already, and stays the only version."""
    out = tmp_path / "drafter"
    shutil.copytree(place / "drafter", out)
    command = words(place, out, "--drafter", str(out))

    def stop(*found: object, **facts: object) -> None:
        write(*found, **facts)
        if "facts" in facts:
            raise KeyboardInterrupt

    write: Any = export_module.export
    with monkeypatch.context() as patch:
        patch.setattr(export_module, "export", stop)
        assert main(command) == 130
    weights = (out / "model.safetensors").read_bytes()
    assert weights != (place / "drafter" / "model.safetensors").read_bytes()
    monkeypatch.setattr(module, "train", lambda *_: pytest.fail("trains again"))
    assert main(command) == 0
    assert (out / "model.safetensors").read_bytes() == weights and os.listdir(tmp_path) == ["drafter"]


def test_another_command_begins_anew_and_a_second_one_at_the_same_time_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        assert main(words(place, tmp_path / "new")) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "train", stop)
    drafter = RecurrentDrafter.from_pretrained(place / "drafter")
    mark = tmp_path / ".new.adapt" / "mark"
    for minutes, shift, goes_on in (("5", 0.0, False), ("5", 0.0, True), ("5", 1.0, False), ("6", 0.0, False)):
        next(drafter.parameters()).data.add_(shift)
        drafter.save_pretrained(tmp_path / "old")
        assert main(words(place, tmp_path / "new", "--drafter", str(tmp_path / "old"), "--minutes", minutes)) == 130
        assert "error: another `drafter adapt` works on --out" in capsys.readouterr().err
        assert mark.exists() == goes_on
        mark.touch()


def test_mistakes_are_one_line(place: Path, tmp_path: Path, refused: Refused) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text(json.dumps({"prompt_token_ids": [1, 2], "token_ids": [3]}) + "\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for more, message in (
        (["--traffic", str(few)], "1 different prompts: about 80 are needed"),
        (["--out", str(tmp_path / "mine")], "is no exported drafter"),
    ):
        refused(words(place, tmp_path / "new", *more), message)
