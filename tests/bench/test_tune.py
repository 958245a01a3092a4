"""Tuning: the plan follows the measured steps, and other commands take the file."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from drafter.bench.settings import TuneOptions
from drafter.bench.tune import Tour, candidates, tune, tuned_table
from drafter.cli.main import main
from drafter.engine.tuned import COPIES, MANY_COPIES, PLAIN, Tree, read_tuned
from drafter.runtimes.torch.runtime import TorchRuntime
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.tiny_files import make_drafter

MODELS = {"target": "tiny", "drafter": "tiny"}
SETTINGS = TuneOptions(**MODELS, batch_sizes=(2, 1), tree_sizes=(2, 4, 8), max_new_tokens=24, seconds=20)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.bench.tune._NUM_ROUNDS", 12)


def _scaled_steps(monkeypatch: pytest.MonkeyPatch, seconds_per_node: float) -> None:
    """Steps that take 10 ms and so much more for every node and row: a machine whose costs are known."""
    observe = Tour.observe

    def timed(self: Tour, num_accepted: Sequence[int], seconds: float, num_nodes: int) -> None:
        observe(self, num_accepted, 0.01 + seconds_per_node * self._rows * self._tree.tree_size, num_nodes)

    monkeypatch.setattr(Tour, "observe", timed)


def test_cheap_nodes_make_large_trees_and_dear_ones_none(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, tours = prompts_for(6, seed=21), list[Tour]()
    _scaled_steps(monkeypatch, 1e-7)
    cheap = tune(shared_target(), trained_drafter(), prompts, SETTINGS)
    assert [plan.num_rows for plan in cheap.plans] == [1, 2]
    for plan in cheap.plans:
        best = plan.best()
        assert best.tree.tree_size > 2 and best.tokens_per_step > 1.1
        assert best.step_seconds == pytest.approx(0.01 + 1e-7 * plan.num_rows * best.tree.tree_size)
    monkeypatch.undo()
    monkeypatch.setattr("drafter.bench.tune.Tour", lambda trees: tours.append(Tour(trees)) or tours[-1])
    _scaled_steps(monkeypatch, 3e-2)
    monkeypatch.setattr(TorchRuntime, "traits", shared_target().traits._replace(number_format="stored"))
    dear = tune(shared_target(), trained_drafter(), prompts, SETTINGS)
    assert [plan.choices for plan in dear.plans] == [plan.choices[:1] for plan in dear.plans]
    assert all(plan.best().tree == PLAIN for plan in dear.plans)
    assert [each.dtype for each in (cheap, dear)] == ["float32", "stored"]
    assert tuned_table(dear).splitlines()[2].replace(" ", "").startswith("|1|1|-|-|1.00|")
    assert {tree.tree_size for tree in tours[0].seconds[1]} == {1, 2, 4, 8, 16}
    assert list(tours[0].seconds[2]) == [PLAIN], "what cannot pay for one row is not measured for two"


def test_candidates_suit_the_device_and_the_drafter() -> None:
    assert [tree.tree_size for tree in candidates(None, "cpu", 1000)] == [8, 16, 2, 4, 6, 8, 12, 16]
    assert candidates(None, "cuda", 1000)[-1] == Tree(16, 5, 64)
    assert candidates((8, 8, 2), "cpu", 3) == [COPIES, MANY_COPIES, Tree(2, 1, 2), Tree(3, 3, 8)]


def test_what_allows_no_measurement_is_refused() -> None:
    with pytest.raises(ValueError, match="--prompts hold none of at most 128 tokens"):
        tune(shared_target(), trained_drafter(), [[1] * 10**4], SETTINGS)


def test_the_command_writes_a_file_that_other_commands_take(target: str, tmp_path: Path, capsys) -> None:
    models = ["--target", target, "--drafter", make_drafter(target, tmp_path / "drafter"), "--device", "cpu"]
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    words = ["tune", *models, "--prompts", str(tmp_path / "p.jsonl"), "--batch-sizes", "1", "--tree-sizes", "4"]
    assert main([*words, "--max-new-tokens", "8", "--seconds", "5"]) == 0
    shown = capsys.readouterr()
    path = tmp_path / "drafter" / "tuned.json"
    assert str(path) in shown.err and "tokens/step" in shown.out
    assert json.loads(path.read_text())["calibration"]["num_prompts"] == 2
    assert [plan.num_rows for plan in read_tuned(path).plans] == [1]
    out = tmp_path / "answers.jsonl"
    assert main(["decode", *models, "--prompt", "x", "--max-new-tokens", "2", "--out", str(out)]) == 0
    engine = json.loads((tmp_path / "answers.run.json").read_text())["settings"]["engine"]
    assert engine["tuned"] == str(path)


def test_the_check_of_a_machine_needs_neither_network_nor_the_packages_of_other_rooms(tmp_path: Path) -> None:
    """Every stage on a CPU."""
    out = tmp_path / "check.jsonl"
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('jsonargparse', 'datasets', 'gguf', 'wandb')))\n"
        "from scripts.gpu_check import STAGES, main\n"
        f"words = '--small --shapes tiny --no-real --device cpu --dtype float32 --out {out}'.split()\n"
        "sys.exit(sum(main([stage, *words]) for stage in STAGES))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = [row for row in map(json.loads, out.read_text().splitlines()) if "run" not in row]
    assert all(row.get(name, 1) > 0 for row in rows for name in ("ms", "tokens_per_s")), rows
    texts = [row for row in rows if row["stage"] == "identity"]
    assert len(texts) == 8 and all(row["equal_texts"] == row["texts"] == 2 for row in texts)
    assert {row["stage"] for row in rows} == {"identity", "steps", "prefill", "answers", "train"}
