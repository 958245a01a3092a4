"""Runs: who answers when, what is recorded, what is compared, what is not repeated."""

import json
import re
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.bench import run as run_module
from drafter.bench.backends import peak_memory
from drafter.bench.report import summarise
from drafter.bench.results import read_results
from drafter.bench.settings import BenchOptions
from drafter.bench.workload import Item, Workload
from drafter.engine.loading import LoadedModels
from drafter.engine.tuned import PLAIN, MeasuredTree, RowPlan, Tree, TunedSizes, conditions_of
from tests.serving.tiny import tiny_drafter, tiny_target

QUESTIONS = (("math", "What is one and one?"), ("writing", "Write a word."), ("math", "Count."))
WORKLOAD = Workload("mine", tuple(Item(name, ({"role": "user", "content": text},)) for name, text in QUESTIONS))
METHODS = ("none", "drafter:W16:L2:N24", "lookup", "hf-generate")
FILES: dict[str, Any] = {"out": Path("r.jsonl"), "prompts": ("mine.jsonl",), "drafter": "runs/drafter"}
SETTINGS = BenchOptions(target="tiny", **FILES, methods=METHODS, max_new_tokens=10, rounds=2)


@pytest.fixture
def models() -> LoadedModels:
    drafter = tiny_drafter().bind(tiny_target())
    drafter.name_or_path = "runs/drafter"
    return LoadedModels(tiny_target(), drafter, None)


def run_benchmark(options: BenchOptions, models: LoadedModels, out: Path) -> int:
    return run_module.run_benchmark(replace(options, out=out), models, [WORKLOAD])


def test_methods_take_turns_and_agree_with_plain_decoding(tmp_path: Path, models: LoadedModels) -> None:
    out = tmp_path / "r.jsonl"
    assert run_benchmark(SETTINGS, models, out) == 8
    records = read_results([out])
    assert [record["method"] for record in records] == [*SETTINGS.methods, *SETTINGS.methods]
    assert [record["round"] for record in records] == [0] * 4 + [1] * 4
    for record in records:
        assert record["identical"] == {"num_prompts": 3, "num_identical": 3}
        assert 0 < record["first_token_seconds"] <= record["latency_seconds"] <= record["seconds"]
        parts = record["by_category"]
        assert list(parts) == ["math", "writing"] and parts["math"]["num_answers"] == 2
        assert sum(part["num_tokens"] for part in parts.values()) == record["num_tokens"]
    plain, drafted, _, peer = records[:4]
    assert plain["num_forwards"] == plain["num_tokens"] == peer["num_tokens"] == peer["num_forwards"]
    assert drafted["num_forwards"] < drafted["num_tokens"]


def test_batches_and_temperatures_are_points_of_a_grid(tmp_path: Path, models: LoadedModels, capsys) -> None:
    methods = ("drafter:W16:L2:N24", "hf-generate", "llama-cpp")
    settings = replace(SETTINGS, methods=methods, batch_sizes=(2, 3), temperatures=(0.0, 0.7), rounds=1)
    assert run_benchmark(settings, models, tmp_path / "r.jsonl") == 8
    shown = capsys.readouterr().err
    assert "llama-cpp answers one prompt at a time: left out at batch size 2" in shown
    assert re.search(r"^hf-generate B=2 round 1: \d+ answers in [\d.]+ s$", shown, re.MULTILINE)  # no bar in a pipe
    records = read_results([tmp_path / "r.jsonl"])
    conditions = [(record["temperature"], record["batch_size"]) for record in records[::2]]
    assert conditions == [(0.0, 2), (0.0, 3), (0.7, 2), (0.7, 3)]
    for record in records:
        is_sampled_peer = record["method"] == "hf-generate" and record["temperature"] > 0
        assert ("identical" in record) != is_sampled_peer
        assert is_sampled_peer or record["identical"]["num_identical"] == 3
        assert "seconds" not in record["by_category"]["math"]
    with pytest.raises(ValueError, match="--batch-sizes 4 exceeds the 3 prompts of mine"):
        run_benchmark(replace(SETTINGS, batch_sizes=(1, 4)), models, tmp_path / "r.jsonl")


def test_what_is_done_is_not_repeated(tmp_path: Path, models: LoadedModels) -> None:
    out = tmp_path / "r.jsonl"
    settings = replace(SETTINGS, methods=("lookup", "none"), max_new_tokens=4, rounds=2)
    assert run_benchmark(settings, models, out) == 4
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:2]) + lines[2][:40])  # broken off within the third run
    assert run_benchmark(settings, models, out) == 2
    assert [record["method"] for record in read_results([out])] == ["lookup", "none"] * 2
    # Also where plain decoding, which was decoded for this comparison alone, comes later.
    assert all(record["identical"]["num_identical"] == 3 for record in read_results([out]))
    assert run_benchmark(settings, models, out) == 0
    assert run_benchmark(replace(settings, max_new_tokens=3, rounds=1), models, out) == 2
    assert run_benchmark(replace(settings, quantization="int8", rounds=1), models, out) == 2
    assert read_results([out])[-1]["target"]["dtype"] == "float32, int8 weights"


def test_other_weights_in_the_same_folder_are_another_run(tmp_path: Path, models: LoadedModels) -> None:
    out = tmp_path / "r.jsonl"
    settings = replace(SETTINGS, methods=("none", "drafter"), max_new_tokens=4, rounds=1)
    assert run_benchmark(settings, models, out) == 2
    trained = deepcopy(models.drafter)
    assert trained is not None
    with torch.no_grad():
        next(trained.parameters()).mul_(1.5)
    assert run_benchmark(settings, models._replace(drafter=trained), out) == 1  # plain decoding has none
    _, *drafted = read_results([out])
    assert len({record["drafter_fingerprint"] for record in drafted}) == len({r["run_id"] for r in drafted}) == 2
    assert len({method.label for methods in summarise(drafted) for method in methods}) == 2


def test_a_tuned_method_goes_by_its_file(tmp_path: Path, models: LoadedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the drafter's name is no folder there
    assert models.drafter is not None

    def write(tree: Tree) -> None:
        plan = RowPlan(1, (MeasuredTree(*PLAIN, 1.0, 1.0), MeasuredTree(*tree, 1.5, 1.1)))
        sizes = TunedSizes(**conditions_of(models.target, models.drafter, is_compiled=False), plans=(plan,))
        (tmp_path / "tuned.json").write_text(json.dumps(asdict(sizes)))

    tuned = replace(SETTINGS, methods=("none", "drafter:tuned"), rounds=1)
    with pytest.raises(ValueError, match="drafter:tuned needs .*runs--drafter/tuned.json"):
        run_benchmark(tuned, models, tmp_path / "no.jsonl")
    write(Tree(16, 2, 24))
    models.drafter.name_or_path = str(tmp_path)
    run_benchmark(tuned, models, tmp_path / "r.jsonl")
    record = read_results([tmp_path / "r.jsonl"])[1]
    assert record["identical"]["num_identical"] == 3 and "1: W 16 L 2 N 24" in record["settings"]["reason"]
    assert record["settings"]["tuned"] == "tuned.json"
    assert str(tmp_path) not in json.dumps(record["settings"])  # no paths of this machine
    assert run_benchmark(tuned, models, tmp_path / "r.jsonl") == 0
    write(Tree(8, 2, 12))
    assert run_benchmark(tuned, models, tmp_path / "r.jsonl") == 1
    assert read_results([tmp_path / "r.jsonl"])[2]["tuned_digest"] != record["tuned_digest"]


def test_peak_memory_sees_what_was_allocated_within() -> None:
    with peak_memory(torch.device("cpu")) as before:
        pass
    with peak_memory(torch.device("cpu")) as after:
        block = torch.ones(2**26, dtype=torch.uint8)
        assert block[-1] == 1
        del block
    assert after["bytes"] - before["bytes"] > 2**25
