"""The journal: whatever a kill leaves behind, the next run continues it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafter.distill.journal import open_journal

ROWS = [{"id": f"{number}", "text": "ä\u2028" * number} for number in range(5)]


def fill(path: Path, rows: list[dict] = ROWS) -> None:
    with open_journal(path, {"seed": 1}, {}) as journal:
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
    with open_journal(path, {"seed": 1}, {}) as journal:
        assert journal.rows == ROWS[: whole[:cut].count(b"\n")]
        assert path.read_bytes() == whole[: whole.rfind(b"\n", 0, cut) + 1]
        for row in ROWS[len(journal.rows) :]:
            journal.append(row)
    assert path.read_bytes() == whole


def test_foreign_and_damaged_files_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "a.jsonl"
    fill(place)
    line = place.read_bytes().splitlines(keepends=True)[0]
    os.mkfifo(tmp_path / "pipe")
    for file, data, kind, message in (
        (tmp_path / "foreign.jsonl", b"{}\n", ValueError, "holds rows but no foreign.jsonl.settings.json"),
        (place, line + b"{broken\n" + line, ValueError, "line 2: broken JSON"),
        (place, line + b'{"id": 1}\n', ValueError, "line 2 has no id, or one that is no str"),
        (tmp_path / "pipe", b"", OSError, None),
        (tmp_path, b"", OSError, None),
    ):
        if data:
            file.write_bytes(data)
        with pytest.raises(kind, match=message), open_journal(file, {"seed": 1}, {"id": str}):
            pass


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    place = tmp_path / "a.jsonl"
    with open_journal(place, {"seed": 1}, {}), pytest.raises(ValueError, match="another run is writing this file"):
        fill(place)
    fill(place)


def test_a_full_disk_is_an_error_and_the_rows_before_it_stay(tmp_path: Path) -> None:
    """A file size limit stands for the disk: the write comes back short, then fails."""
    code = """
import resource, signal, sys
from drafter.distill.journal import open_journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (250, 250))
with open_journal(sys.argv[1], {}, {}) as journal:
    for number in range(100):
        journal.append({"id": number, "text": "x" * 40})
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.jsonl")], capture_output=True, text=True)
    assert done.returncode != 0 and "the disk is full" in done.stderr
    with open_journal(tmp_path / "a.jsonl", {}, {}) as journal:
        assert [row["id"] for row in journal.rows] == [0, 1, 2, 3]
