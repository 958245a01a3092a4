"""Results files, the report's bytes, and the pictures."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from drafter.bench.plots import draw_all, plot_speedups
from drafter.bench.report import report
from drafter.bench.results import SCHEMA, append_result, read_results, resume_results, spread
from drafter.bench.summary import summarise
from tests.bench.synthetic import grid, loads, run


def test_figures() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0]) == {"median": 2.5, "p95": 4.0, "p99": 4.0}
    assert spread(list(range(1, 101))) == {"median": 50.5, "p95": 95.0, "p99": 99.0}
    assert spread([]) == {"median": 0.0, "p95": 0.0, "p99": 0.0}


def test_speedups_are_ratios_within_a_round() -> None:
    records = [
        run("none", rate=10.0, tokens_per_step=1.0, round_number=0),
        run("lookup", rate=20.0, tokens_per_step=2.0, round_number=0),
        run("none", rate=5.0, tokens_per_step=1.0, round_number=1),
        run("lookup", rate=10.0, tokens_per_step=2.0, round_number=1),
    ]
    (methods,) = summarise(records).values()
    lookup = methods[1]
    assert lookup.speedup is not None and tuple(lookup.speedup) == pytest.approx((2.0, 2.0, 2.0))
    assert tuple(lookup.rate) == pytest.approx((15.0, 10.0, 20.0))
    assert lookup.tokens_per_step == pytest.approx(2.0)


def test_the_table_says_what_was_measured() -> None:
    text = report(grid())
    assert "## mtbench, greedy" in text
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| drafter ")]
    assert [line[2] for line in lines if len(line) == len(lines[0])] == ["1", "4", "32"]
    assert lines[0][6:10] == ["2.20", "33/40", "0.031 (max 0.062)", "90"]
    assert "### Speedup over plain decoding by category" in text and "batch size" not in report(grid()[:5])


def test_other_drafters_weights_and_sizes_are_no_rounds_of_each_other() -> None:
    def labels(*files: dict[str, Any]) -> list[tuple[str, int]]:
        records = [run("none", rate=1.0, tokens_per_step=1.0)]
        records += [run("drafter:tuned", rate=2.0, tokens_per_step=1.5, **changes) for changes in files]
        (methods,) = summarise(records).values()
        return [(method.label.removeprefix("drafter:tuned"), method.num_rounds) for method in methods[1:]]

    first, second = {"drafter_fingerprint": "a" * 16}, {"drafter_fingerprint": "b" * 16}
    assert labels(first, first) == [("", 2)]
    assert labels(first, second) == [
        (" (runs/drafter, weights aaaaaaaa, sizes unknown, compile auto)", 1),
        (" (runs/drafter, weights bbbbbbbb, sizes unknown, compile auto)", 1),
    ]
    assert len(labels(first, first | {"tuned_digest": "1" * 16}, first | {"drafter": "runs/kd/drafter"}, {})) == 4


def test_seeds_are_corners_of_their_own(tmp_path: Path) -> None:
    records = [
        run(method, rate=rate * (1 + seed), tokens_per_step=1.0, seed=seed, temperature=1.0)
        for seed in (3, 7)
        for method, rate in (("none", 10.0), ("lookup", 20.0))
    ]
    tables = summarise(records)
    assert [condition.seed for condition in tables] == [3, 7]
    for _, lookup in tables.values():
        assert lookup.num_rounds == 1 and lookup.speedup is not None and lookup.speedup.middle == pytest.approx(2.0)
    assert "## mtbench, temperature 1, seed 3\n" in report(records)
    names = {path.stem for path in draw_all(tables, tmp_path)}
    assert names == {f"speedup-mtbench-t1-seed{seed}" for seed in (3, 7)}


LOOKUP = run("lookup", rate=1.0, tokens_per_step=1.0)


def line_of(**changes: Any) -> str:
    return json.dumps({"schema": SCHEMA, **LOOKUP, **changes})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"schema": "other/1"}', "not a benchmark result of schema 'drafter-bench/1' but of 'other/1'"),
        ("[]", "but of None"),
        ('{"schema": "drafter-bench/1", "kind": "else"}', "kind is 'else'"),
        ('{"schema": "drafter-bench/1", "kind": "run"}', "lacks run_id"),
        ("{", "broken JSON"),
        (line_of(batch_size=[1]), "the record, batch_size is a list, but must be an integer"),
        (line_of(versions={"torch": None}), "the record, versions, torch is null, but must be a text"),
        (line_of(seconds=float("nan")), "the record, seconds is a number, but must be a finite number"),
        (line_of(identical={"num_prompts": 1}), "the record, identical lacks num_identical, margins"),
    ],
)
def test_other_files_are_refused_with_their_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "r.jsonl"
    append_result(path, LOOKUP)
    with path.open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(ValueError, match=f"r.jsonl, line 2: .*{reason}"):
        read_results([path])
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no results"):
        read_results([path])


def test_runs_of_no_time_and_of_other_categories_have_a_report() -> None:
    plain = run("none", rate=1.0, tokens_per_step=1.0, categories={"a": 1.0, "b": 1.0})
    records = [plain | {"num_tokens": 0}, run("lookup", rate=2.0, tokens_per_step=2.0, categories={"a": 1.0, "b": 1.0})]
    records.append(run("lookup", rate=2.0, tokens_per_step=2.0, categories={"a": 1.0}, round_number=1))
    assert "lookup" in report([*records, {**loads()[0], "seconds": 0}])


def test_a_line_cut_by_a_crash_is_dropped_on_resuming(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert resume_results(path) == []
    append_result(path, LOOKUP)
    whole = path.read_bytes()
    for length in (1, 8, 29, 50, len(whole) - 1):
        path.write_bytes(whole + whole[:length])
        assert len(resume_results(path)) == 1 and path.read_bytes() == whole
    path.write_bytes(whole[:8])  # the very first line
    assert resume_results(path) == [] and path.read_bytes() == b""


OURS = f'{{"schema": "{SCHEMA}"'


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"prompt": "the only line"}', "r.jsonl: the last line has no line feed and is not the beginning of a"),
        ('{"prompt": "one"}\n{"prompt": "two"}', "r.jsonl, line 1: not a benchmark result"),
        ('{"prompt": "one"}\n' + OURS, "r.jsonl, line 1: not a benchmark result"),
        ('RECORD\n{"schema": "drafter-steps/1"', "the last line has no line feed"),
        (f'{OURS[:-1]}0"', "the last line has no line feed"),  # schema 10 begins like schema 1
        (OURS + ', "kind": "newer"}\n', "r.jsonl, line 1: kind is 'newer'"),
        ("\ud8ff\n", "r.jsonl is not UTF-8 text"),
    ],
)
def test_other_files_are_refused_and_left_as_they_are(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "r.jsonl"
    before = content.replace("RECORD", line_of()).encode(errors="surrogatepass")
    path.write_bytes(before)
    with pytest.raises(ValueError, match=reason):
        resume_results(path)
    assert path.read_bytes() == before


def test_a_picture_is_drawn_as_png_and_svg(tmp_path: Path) -> None:
    (path,) = draw_all(summarise(grid()), tmp_path)
    assert path.stem == "speedup-mtbench-t0"
    with Image.open(path) as image:
        assert 500 < image.width < 1800 and 300 < image.height < 2000, image.size
    text = "".join(ElementTree.parse(path.with_suffix(".svg")).getroot().itertext())
    for shown in ("Speed over plain decoding", "drafter:tuned", "all, batch size 32", "all prompts", "humanities"):
        assert shown in text
    many = [run(f"drafter:W{width}", rate=float(width), tokens_per_step=1.0) for width in range(1, 10)]
    (path,) = draw_all(summarise([run("none", rate=1.0, tokens_per_step=1.0), *many]), tmp_path)
    text = path.with_suffix(".svg").read_text()
    assert "the 7 fastest of 9 methods" in text and ">drafter:W9<" in text and ">drafter:W2<" not in text


def test_marks_stand_apart_and_have_the_ranges_of_the_rounds() -> None:
    records = [
        run(method, rate=rate * (1 + 0.1 * number), tokens_per_step=1.0, round_number=number,
            categories={"a": 1.0, "b": factor})
        for number, factor in enumerate((1.0, 1.5))
        for method, rate in (("none", 10.0), ("lookup", 20.0), ("drafter", 20.0))
    ]  # fmt: skip
    ((condition, methods),) = summarise(records).items()
    figure = plot_speedups(condition, methods)
    assert figure is not None
    marks, bars = [], 0
    for container in figure.axes[0].containers:
        line, _, (bar,) = container
        marks += [tuple(point) for point in line.get_xydata().tolist()]
        bars += len(bar.get_segments())
    assert len(marks) == len(set(marks)) == bars == 6, "two methods; two categories and all prompts"


def test_results_without_a_baseline_are_drawn_as_far_as_they_go(tmp_path: Path) -> None:
    assert draw_all(summarise([run("lookup", rate=9.0, tokens_per_step=1.2)]), tmp_path) == []


def test_other_engines_are_named_and_set_beside_llama_cpp() -> None:
    ours = run("none", rate=40.0, tokens_per_step=1.0)
    versions = {**ours["versions"], "xllamacpp": "2026.10.11549"}
    peers = [
        run("llama-cpp:BF16", rate=50.0, tokens_per_step=1.0, versions=versions, build="AVX AVX2"),
        run("openvino-genai:F16", rate=60.0, tokens_per_step=1.0),
    ]
    text = report([ours, *peers])
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert "engine" in rows["method"] and "over llama.cpp BF16" in rows["method"]
    assert "OpenVINO GenAI" in rows["openvino-genai:F16"] and "1.20x (1.20 to 1.20)" in rows["openvino-genai:F16"]
    assert "0.80x (0.80 to 0.80)" in rows["none"] and "xllamacpp 2026.10.11549" in text
    assert "llama-cpp:BF16 was built for AVX AVX2." in text
    assert "engine" not in report([ours]) and "llama.cpp" not in report([ours, peers[1]])
