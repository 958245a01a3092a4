"""Recorded traffic: what a row holds, how files rotate, and what a slow disk, a full disk and a kill leave."""

import json
import logging
import multiprocessing
import threading
import time
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from drafter.serving import record
from drafter.serving.metrics import Metrics
from drafter.serving.record import Recorder, traffic_files, traffic_row

ROW = traffic_row([1, 2], [3], {"temperature": 0.5, "stop": ("a secret",), "seed": 7})


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in traffic_files(folder) for line in file.read_text().splitlines()]


def test_files_rotate_and_the_oldest_go(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("x" * 2**21)
    # Of a clock that went back since: no new file is taken for an older one.
    (tmp_path / f"traffic-{time.time_ns():020d}.jsonl").write_text(json.dumps(ROW | {"number": -1}) + "\n")
    recorder, row = Recorder(tmp_path, 1, Metrics()), traffic_row(range(10_000, 10_500), [0], {})
    for number in range(1000):
        recorder.add(row | {"number": number})
    recorder.add(traffic_row(range(10**6), [], {}))  # larger than a file
    recorder.close()
    numbers = [row["number"] for row in rows_of(tmp_path)]
    assert numbers == list(range(numbers[0], 1000)) and 0 < numbers[0] < 900, "the newest rows, in order"
    files = traffic_files(tmp_path)
    assert len(files) == 4 and sum(file.stat().st_size for file in files) <= 2**20
    assert (tmp_path / "mine.jsonl").exists(), "no file of another kind goes"


def test_a_recorder_whose_file_was_removed_begins_another(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 1024, Metrics())
    traffic_files(tmp_path)[0].unlink()
    recorder.add(ROW)
    recorder.close()
    assert len(rows_of(tmp_path)) == 1


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_full_disk_ends_the_recording_with_one_line(tmp_path: Path, monkeypatch, caplog, is_partial: bool) -> None:
    class Full(FileIO):
        def write(self, data: Any) -> int:
            if self.tell() == 0:
                return super().write(data)
            if is_partial:
                return super().write(data[:10])
            raise OSError(28, "No space left on device")

    metrics = Metrics()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(record, "FileIO", Full)
        recorder = Recorder(tmp_path, 1024, metrics)
        for _ in range(3):
            recorder.add(ROW)
        recorder.close()
    assert len(caplog.records) == 1 and str(tmp_path) in caplog.text
    value_of = metrics.registry.get_sample_value
    assert value_of("drafter_is_recording") == 0 and value_of("drafter_unrecorded_answers_total") == 2
    assert len(rows_of(tmp_path)) == 1, "no part of a line is left"


def test_a_slow_disk_costs_rows_and_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_free, metrics = threading.Event(), Metrics()
    monkeypatch.setattr(record, "_MAX_WAITING", 2)
    monkeypatch.setattr(Recorder, "_write", lambda *_: is_free.wait(60))
    recorder = Recorder(tmp_path, 1, metrics)
    for _ in range(10):  # one is being written, two wait
        recorder.add(ROW)
    is_free.set()
    recorder.close()
    names = "drafter_recorded_answers_total", "drafter_unrecorded_answers_total"
    written, left_out = map(metrics.registry.get_sample_value, names)
    assert written in (2, 3) and written + left_out == 10


def write_for_ever(folder: Path) -> None:
    recorder = Recorder(folder, 4, Metrics())
    while True:
        recorder.add(traffic_row(range(3000), range(3000), {"seed": 1}))
        time.sleep(0.0005)


def test_a_killed_recorder_leaves_at_most_a_torn_last_line(tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = multiprocessing.get_context("spawn").Process(target=write_for_ever, args=(folder,))
        process.start()
        while sum(file.stat().st_size for file in traffic_files(folder)) < 2**20:
            assert process.is_alive()
            time.sleep(0.01)
        process.kill()
        process.join()
    for file in tmp_path.glob("*/*.jsonl"):
        *whole, last = file.read_bytes().split(b"\n")
        assert whole and all(len(json.loads(line)["token_ids"]) == 3000 for line in whole)
        assert not last or last.startswith(b'{"prompt')
