"""Results files, and the report's bytes; the records are those of docs/results, some changed."""

from pathlib import Path
from typing import Any

import pytest

from drafter.bench.report import report, summarise
from drafter.bench.results import SCHEMA, BenchRecord, append_result, read_results, resume_results

PEERS = read_results([Path(__file__).resolve().parents[2] / "docs" / "results" / "peers-cpu-zen5.jsonl"])
PLAIN = next(record for record in PEERS if record["method"] == "none")


def run(method: str, *, rate: float, categories: dict[str, float] | None = None, **changes: Any) -> BenchRecord:
    """A record of plain decoding as another method of 1,000 tokens; ``categories``: speed relative to ``rate``."""
    parts = {
        name: {"num_answers": 1, "seconds": 100 / rate / factor, "num_tokens": 100, "num_forwards": 50}
        for name, factor in (categories or {}).items()
    }
    sums = {"seconds": 1000 / rate, "num_tokens": 1000, "num_forwards": 500, "by_category": parts}
    return {**PLAIN, "method": method, **sums, **changes}


def pair(round: int = 0, factor: float = 1.0, **changes: Any) -> list[BenchRecord]:
    """A run of plain decoding, and one of `lookup` that is twice as fast."""
    return [run(method, rate=rate * factor, round=round, **changes) for method, rate in (("none", 10), ("lookup", 20))]


def test_speedups_are_ratios_within_a_round() -> None:
    ((_, lookup),) = summarise([*pair(), *pair(1, factor=0.5)])
    assert lookup.over("none") == pytest.approx((2.0, 2.0, 2.0))
    assert lookup.rate == pytest.approx((15.0, 10.0, 20.0))
    assert lookup.tokens_per_step == pytest.approx(2.0)


def test_tables_have_baselines_of_their_own() -> None:
    """Settings of plain decoding that differ between tables are no two kinds of plain decoding."""
    tables = summarise([*pair(), *pair(max_new_tokens=7)])
    assert [[method.label for method in methods] for methods in tables] == [["none", "lookup"]] * 2


def test_the_table_says_what_was_measured() -> None:
    text = report(PEERS)
    assert "## prompts-mtbench, greedy\n" in text and "llama-cpp:BF16 was built for" in text
    table, _, categories = text.partition("### Speedup over plain decoding by category")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    assert lines[0][3] == "over llama.cpp BF16" and lines[2][:5] == [
        "drafter", "314.6 (309.8 to 319.3)", "1.14x (1.05 to 1.24)", "2.36x (2.16 to 2.57)", "1.83",
    ]  # fmt: skip
    assert lines[3][5] == "0/16" and "humanities" in categories
    many = report([{**record, "batch_size": size, "by_category": {}} for record in PEERS for size in (2, 4)])
    assert "| batch size |" in many and "by category" not in many


def test_other_drafters_weights_and_sizes_are_no_rounds_of_each_other() -> None:
    def labels(*files: dict[str, Any]) -> list[tuple[str, int]]:
        records = [run("none", rate=1.0), *(run("drafter:tuned", rate=2.0, **changes) for changes in files)]
        (methods,) = summarise(records)
        return [(method.label.removeprefix("drafter:tuned"), len(method.rounds)) for method in methods[1:]]

    first, second = ({"drafter": "d", "drafter_fingerprint": letter * 16} for letter in "ab")
    assert labels(first, first) == [("", 2)]
    assert labels(first, second) == [
        (" (d, weights aaaaaaaa, sizes unknown)", 1),
        (" (d, weights bbbbbbbb, sizes unknown)", 1),
    ]
    assert len(labels(first, first | {"tuned_digest": "1" * 16}, first | {"drafter": "other"}, {})) == 4


def test_seeds_are_corners_of_their_own() -> None:
    records = [*pair(seed=3, temperature=1.0), *pair(seed=7, temperature=1.0, factor=3.0)]
    tables = summarise(records)
    assert [methods[0].rounds[0]["seed"] for methods in tables] == [3, 7]
    assert all(lookup.over("none") == pytest.approx((2.0, 2.0, 2.0)) for _, lookup in tables)
    assert "## prompts-mtbench, temperature 1, seed 3\n" in report(records)


def test_runs_of_no_time_and_of_other_categories_have_a_report() -> None:
    records = [run("none", rate=1.0, categories={"a": 1.0, "b": 1.0}, num_tokens=0)]
    records.append(run("lookup", rate=2.0, categories={"a": 1.0, "b": 1.0}))
    records.append(run("lookup", rate=2.0, categories={"a": 1.0}, round=1))
    assert "lookup" in report(records)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"batch_size": [1]}, "batch_size: Input should be a valid integer"),
        ({"num_tokens": 10**400}, "num_tokens: Input should be less than"),
        ({"identical": {"num_prompts": 1}}, "identical.num_identical: Field required"),
    ],
)
def test_other_files_are_refused_with_their_line(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = tmp_path / "r.jsonl"
    append_result(path, PLAIN)
    append_result(path, {**PLAIN, **changes})
    with pytest.raises(ValueError, match=f"r.jsonl, line 2: .*{reason}"):
        read_results([path])
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no results"):
        read_results([path])


def test_resuming_drops_a_line_cut_by_a_crash_and_leaves_other_files_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert resume_results(path) == []
    append_result(path, PLAIN)
    whole = path.read_bytes()
    for length in (1, 29, len(whole) - 1):
        path.write_bytes(whole + whole[:length])
        assert len(resume_results(path)) == 1 and path.read_bytes() == whole
    path.write_bytes(whole[:8])  # the very first line
    assert resume_results(path) == [] and path.read_bytes() == b""
    for other, reason in (
        (f'{{"schema": "{SCHEMA}0"'.encode(), "the last line has no line feed"),  # schema 10 begins like schema 1
        (b"\xed\xa3\xbf\n", "r.jsonl, line 1: the text is not UTF-8"),
    ):
        path.write_bytes(other)
        with pytest.raises(ValueError, match=reason):
            resume_results(path)
        assert path.read_bytes() == other
