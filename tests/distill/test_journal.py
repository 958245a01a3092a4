"""The journal: whatever a kill leaves behind, the next run continues it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafter.distill.journal import Journal

ROWS = [{"id": f"{number}", "text": "ä\u2028" * number} for number in range(5)]


def fill(path: Path, rows: list[dict] = ROWS) -> None:
    with Journal(path, {"seed": 1}) as journal:
        for row in rows:
            journal.append(row)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_anywhere_keeps_its_whole_rows(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "deep" / "a.jsonl"
    path.unlink(missing_ok=True)
    fill(path)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    with Journal(path, {"seed": 1}) as journal:
        assert journal.rows == ROWS[: whole[:cut].count(b"\n")]
        assert path.read_bytes() == whole[: whole.rfind(b"\n", 0, cut) + 1]
        for row in ROWS[len(journal.rows) :]:
            journal.append(row)
    assert path.read_bytes() == whole


def test_foreign_and_damaged_files_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text("{}\n")
    with pytest.raises(ValueError, match="holds rows but no foreign.jsonl.settings.json"):
        Journal(foreign, {})
    fill(tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(lines[0] + b"{broken\n" + lines[1])
    with pytest.raises(ValueError, match="line 2: broken JSON"):
        Journal(tmp_path / "a.jsonl", {"seed": 1})
    (tmp_path / "a.jsonl").write_bytes(lines[0] + b'{"id": 1}\n')
    with pytest.raises(ValueError, match="line 2 has no id, or one that is no str"):
        Journal(tmp_path / "a.jsonl", {"seed": 1}, {"id": str})
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError):
            Journal(place, {})


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.jsonl", {}), pytest.raises(ValueError, match="another run is writing this file"):
        Journal(tmp_path / "a.jsonl", {})
    Journal(tmp_path / "a.jsonl", {}).close()


def test_a_full_disk_is_an_error_and_the_rows_before_it_stay(tmp_path: Path) -> None:
    """A file size limit stands for the disk: the write comes back short, then fails."""
    code = """
import resource, signal, sys
from drafter.distill.journal import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (250, 250))
with Journal(sys.argv[1], {}) as journal:
    for number in range(100):
        journal.append({"id": number, "text": "x" * 40})
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.jsonl")], capture_output=True, text=True)
    assert done.returncode != 0 and "the disk is full" in done.stderr
    with Journal(tmp_path / "a.jsonl", {}) as journal:
        assert [row["id"] for row in journal.rows] == [0, 1, 2, 3]
