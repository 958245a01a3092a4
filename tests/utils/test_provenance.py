"""run.json: what it holds, what it leaves out, and files that are whole or as before."""

import json
from pathlib import Path

import pytest

from drafter.utils.provenance import run_record, write_run_record


def test_record_tells_how_an_output_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/drafter", "distill", "--seed", "7"])
    record = run_record(seed=7, settings={"rows": 3})
    assert record["argv"] == ["drafter", "distill", "--seed", "7"]
    assert (record["seed"], record["settings"]) == (7, {"rows": 3})
    assert {"python", "drafter", "torch", "transformers"} <= record["versions"].keys()
    assert record["machine"]["num_cpus"] >= 1
    assert record["date"].endswith("+00:00")
    revision = record["git_revision"]
    assert revision is None or len(revision.removesuffix("+changes")) == 40


def test_record_lies_in_a_folder_or_beside_a_file(tmp_path: Path) -> None:
    assert write_run_record(tmp_path) == tmp_path / "run.json"
    (tmp_path / "answers.jsonl").write_text("{}\n")
    beside = write_run_record(tmp_path / "answers.jsonl", settings={"path": tmp_path})
    assert beside == tmp_path / "answers.run.json"
    assert json.loads(beside.read_text())["settings"] == {"path": str(tmp_path)}
