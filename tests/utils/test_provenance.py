"""run.json: what it holds, what it leaves out, and files that are whole or as before."""

import pytest

from drafter.utils.provenance import run_record


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
