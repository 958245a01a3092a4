"""Results files, the report's bytes, and the pictures."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from drafter.bench.figures import histogram, median, quantile, spread_apart, survival
from drafter.bench.plots import draw_all
from drafter.bench.records import append_record, read_records, resume_records
from drafter.bench.report import report, table
from drafter.bench.summary import summarise
from tests.bench.synthetic import grid, loads, run, sweep


def test_figures() -> None:
    assert [quantile([4, 1, 3, 2], share) for share in (0.5, 0.95, 0.01)] == [2, 4, 1]
    assert quantile([], 0.5) == 0.0
    assert median([3, 1, 2]) == 2 and median([4, 1, 3, 2]) == 2.5
    assert histogram([0, 2, 2]) == [1, 0, 2] and histogram([]) == []
    assert survival([1, 0, 3]) == [0.75, 0.75] and survival([]) == []


def test_labels_are_pushed_apart_and_keep_their_order() -> None:
    places = spread_apart([10.0, 11.0, 50.0, 10.5], 5.0)
    assert places[2] == 50.0 and places[0] < places[3] < places[1]
    ordered = sorted(places)
    assert all(b - a >= 5.0 - 1e-3 for a, b in zip(ordered, ordered[1:], strict=False))


def test_the_report_is_a_function_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for record in grid() + loads():
        append_record(path, record)
    assert report(read_records([path])).encode() == report(read_records([path])).encode()


def test_speedups_are_ratios_within_a_round() -> None:
    records = [
        run("autoregressive", rate=10.0, tokens_per_step=1.0, round_number=0),
        run("lookup", rate=20.0, tokens_per_step=2.0, round_number=0),
        run("autoregressive", rate=5.0, tokens_per_step=1.0, round_number=1),
        run("lookup", rate=10.0, tokens_per_step=2.0, round_number=1),
    ]
    (methods,) = summarise(records).values()
    lookup = methods[1]
    assert lookup.speedup is not None and tuple(lookup.speedup) == pytest.approx((2.0, 2.0, 2.0))
    assert tuple(lookup.rate) == pytest.approx((15.0, 10.0, 20.0)) and lookup.speedup_over_peer is None
    assert lookup.tokens_per_step == pytest.approx(2.0)


def test_the_table_says_what_was_measured() -> None:
    text = report(grid())
    assert "## mtbench, batch size 1, greedy" in text
    line = next(line for line in text.splitlines() if line.startswith("| redrafter "))
    assert [cell.strip() for cell in line.split("|")[6:10]] == ["2.20", "33/40", "0.031 (max 0.062)", "90"]
    assert "### Speedup over autoregressive by category" in text
    assert "## Speedup over autoregressive by batch size: mtbench, greedy" in text


def test_drafters_of_one_file_are_told_apart() -> None:
    records = [
        run("autoregressive", rate=10.0, tokens_per_step=1.0),
        run("redrafter", rate=12.0, tokens_per_step=1.5, drafter="runs/with"),
        run("redrafter", rate=11.0, tokens_per_step=1.4, drafter="runs/without"),
    ]
    (methods,) = summarise(records).values()
    assert [method.label for method in methods] == ["autoregressive", "redrafter (with)", "redrafter (without)"]


def test_a_table_is_aligned_and_safe() -> None:
    assert table(["a", "bc"], [["x|y", "1"]]) == "| a    |  bc |\n|------|----:|\n| x\\|y |   1 |\n"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"schema": "other/1"}', "not a benchmark result of schema 'drafter-bench/1' but of 'other/1'"),
        ("[]", "but of None"),
        ('{"schema": "drafter-bench/1", "kind": "else"}', "kind is 'else'"),
        ('{"schema": "drafter-bench/1", "kind": "run"}', "lacks run_id"),
        ("{", "broken JSON"),
    ],
)
def test_other_files_are_refused_with_their_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "r.jsonl"
    append_record(path, run("lookup", rate=1.0, tokens_per_step=1.0))
    with path.open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(ValueError, match=f"r.jsonl, line 2: .*{reason}"):
        read_records([path])


def test_an_empty_file_holds_no_results(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no results"):
        read_records([tmp_path / "r.jsonl"])


def test_a_line_cut_by_a_crash_is_dropped_on_resuming(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert resume_records(path) == []
    record = run("lookup", rate=1.0, tokens_per_step=1.0)
    append_record(path, record)
    whole = path.read_bytes()
    with path.open("ab") as stream:
        stream.write(json.dumps(record).encode()[:50])
    assert len(resume_records(path)) == 1 and path.read_bytes() == whole


def test_every_picture_is_drawn_as_png_and_svg(tmp_path: Path) -> None:
    small = [record for record in grid() if record["batch_size"] in (1, 8)]
    drawn = draw_all(summarise(small + sweep()), tmp_path)
    names = {path.stem for path in drawn}
    assert {
        "speedup-by-category-mtbench-t0-batch1",
        "acceptance-by-depth-mtbench-t0-batch1",
        "tokens-per-second-by-batch-mtbench-t0",
        "latency-by-batch-mtbench-t0",
        "speedup-by-width-and-length-sweep-t0-batch1",
        "speed-by-tree-size-sweep-t0-batch1",
    } <= names
    for path in drawn:
        with Image.open(path) as image:
            assert 500 < image.width < 1800 and 300 < image.height < 1500, (path, image.size)
    text = "".join(ElementTree.parse(tmp_path / "latency-by-batch-mtbench-t0.svg").getroot().itertext())
    assert "redrafter: an answer takes" in text and "batch size" in text


def test_results_without_a_baseline_are_drawn_as_far_as_they_go(tmp_path: Path) -> None:
    assert draw_all(summarise([run("lookup", rate=9.0, tokens_per_step=1.2)]), tmp_path) == []


def test_the_committed_report_is_made_of_the_committed_results() -> None:
    results = Path(__file__).parents[2] / "docs" / "results"
    made = report(read_records([results / "smollm2-135m-cpu.jsonl"]))
    assert made == (results / "smollm2-135m-cpu.md").read_text(encoding="utf-8")
