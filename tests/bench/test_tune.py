"""Tuning: fixed trees are trees, the plan follows the measured times, the file comes out and is picked up."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafter.bench.steptime import Budget, FixedTree, StepClock, Timed
from drafter.bench.tune import COLUMNS, TuneSettings, _RowCurves, table_rows, tune
from drafter.cli.main import main
from drafter.decoding.proposer import RootOnly, RowState
from drafter.decoding.tree import Candidates
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.sizes import PLAIN, Tree, read_tuned
from drafter.proposers.options import Method
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.engine.oracle import assert_lossless, requests, rows_of
from tests.tiny_files import make_drafter, make_target

SETTINGS = TuneSettings(
    batch_sizes=(2, 1),
    beam_widths=(2, 4),
    draft_lengths=(1, 3),
    tree_sizes=(2, 4, 8),
    max_new_tokens=24,
    context_length=8,
    num_rounds=2,
    seconds=20,
)


@pytest.mark.parametrize("num_nodes", [2, 3, 7, 8, 25, 64])
def test_fixed_trees_are_trees(num_nodes: int) -> None:
    proposer = FixedTree(num_nodes, 61, torch.device("cpu"))
    candidates = proposer.propose(rows_of([[1, 2, 3], [4, 5]]), None)
    parent, depth = candidates.parent_BN[0].tolist(), candidates.depth_BN[0].tolist()
    assert candidates.token_BN.shape == (2, num_nodes) and candidates.token_BN[:, 0].tolist() == [3, 5]
    assert parent[0] == depth[0] == 0 and max(depth) == proposer.max_depth <= 6
    for node in range(1, num_nodes):
        assert parent[node] < node and depth[node] == depth[parent[node]] + 1
    children = list(zip(parent[1:], candidates.token_BN[0, 1:].tolist(), strict=True))
    assert len(set(children)) == len(children)


def test_fixed_trees_change_no_token() -> None:
    engine = Engine(shared_target(), config=EngineConfig(method="lookup", max_rows=4, tree_size=16))
    engine.proposer = FixedTree(16, 61, torch.device("cpu"))
    assert_lossless(engine, requests(5))


def test_proposers_take_turns_and_medians_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock(shared_target(), None, 2, context_length=8, largest=4, num_steps=30)
    order: list[int] = []
    durations = iter([9.0, 9.0, 1.0, 5.0, 3.0, 6.0, 2.0, 4.0])

    def step(proposer: RootOnly) -> float:
        order.append(proposer.num_nodes)
        return next(durations)

    monkeypatch.setattr(clock, "step", step)
    monkeypatch.setattr(clock, "restart", lambda: None)
    tree = FixedTree(4, 61, torch.device("cpu"))
    found = clock.compare({"plain": RootOnly(), "tree": tree}, 3, Budget(60), lambda: None)
    assert order == [1, 4] * 4 and found == {"plain": 2.0, "tree": 5.0}


def test_every_comparison_begins_with_the_same_context() -> None:
    clock = StepClock(shared_target(), None, 2, context_length=8, largest=1, num_steps=30)
    lengths: list[list[int]] = []

    class Watched(RootOnly):
        def propose(self, rows: RowState, noise_BLV: torch.Tensor | None) -> Candidates:
            lengths.append(rows.length_B.tolist())
            return super().propose(rows, noise_BLV)

    for _ in range(2):
        clock.compare({"watched": Watched()}, 2, Budget(60), lambda: None)
    assert len(lengths) == 6 and lengths[:3] == lengths[3:]
    assert lengths[0][0] < lengths[2][0] and lengths[0][0] <= 8 + 2


def test_a_spent_budget_leaves_two_rounds() -> None:
    clock = StepClock(shared_target(), None, 1, context_length=8, largest=1, num_steps=30)
    rounds: list[int] = []
    clock.compare({"plain": RootOnly()}, 9, Budget(0.0), lambda: rounds.append(1))
    assert len(rounds) == 3  # the one that does not count is the first


def test_drafting_is_timed_apart() -> None:
    class Slow(RootOnly):
        def propose(self, rows: object, noise_BLV: object) -> object:  # type: ignore[override]
            time.sleep(0.01)
            return super().propose(rows, noise_BLV)  # type: ignore[arg-type]

        def observe(self, rows: object, outcome: object) -> None:
            time.sleep(0.01)

    clock = StepClock(shared_target(), None, 1, context_length=8, largest=1, num_steps=9)
    timed = Timed(Slow(), torch.device("cpu"))
    whole = clock.step(timed)
    assert 0.02 <= timed.seconds[0] <= whole


def test_a_context_too_short_to_measure_in_is_said() -> None:
    clock = StepClock(shared_target(), None, 1, context_length=240, largest=8, num_steps=100)
    with pytest.raises(ValueError, match="too short for so many steps"):
        for _ in range(40):
            clock.step(RootOnly())


def test_a_steps_time_is_predicted_from_its_parts() -> None:
    curves = _RowCurves({1: 1.0, 8: 1.5}, {(4, 1): 0.1, (4, 5): 0.5, (2, 1): 0.1, (2, 5): 0.3})
    assert curves.step_seconds(PLAIN) == 1.0
    assert curves.step_seconds(Tree(4, 3, 8)) == pytest.approx(1.5 + 0.3)
    assert curves.step_seconds(Tree(2, 5, 8)) == pytest.approx(1.5 + 0.3)
    hybrid = curves._replace(base=6, draft_per_node=0.01)
    assert hybrid.step_seconds(Tree(4, 3, 8)) == pytest.approx(1.5 + 0.3 + 0.02)


def _scaled_steps(monkeypatch: pytest.MonkeyPatch, seconds_per_node: float) -> None:
    """Steps that take 10 ms and so much more for every node and row: a machine whose costs are known."""
    step = StepClock.step

    def timed(self: StepClock, proposer: RootOnly) -> float:
        step(self, proposer)
        if isinstance(proposer, Timed):
            proposer.seconds[-1] = 1e-4 * proposer.max_depth
        return 0.01 + seconds_per_node * self.num_rows * proposer.num_nodes

    monkeypatch.setattr(StepClock, "step", timed)


@pytest.mark.parametrize("method", ["redrafter", "hybrid"])
def test_cheap_nodes_make_large_trees_and_dear_ones_none(monkeypatch: pytest.MonkeyPatch, method: Method) -> None:
    prompts = prompts_for(6, seed=21)
    settings = replace(SETTINGS, method=method)
    _scaled_steps(monkeypatch, 1e-7)
    cheap = tune(shared_target(), trained_drafter(), prompts, settings)
    assert cheap.sizes.method == method
    assert [plan.num_rows for plan in cheap.sizes.plans] == [1, 2]
    for plan in cheap.sizes.plans:
        best = plan.best()
        assert best.tree.tree_size == 8 and best.tokens_per_step > 1.1
        assert best.step_seconds == pytest.approx(0.01 + 1e-7 * plan.num_rows * 8)
    monkeypatch.undo()
    _scaled_steps(monkeypatch, 3e-2)
    dear = tune(shared_target(), trained_drafter(), prompts, settings)
    assert [plan.choices for plan in dear.sizes.plans] == [plan.choices[:1] for plan in dear.sizes.plans]
    assert all(plan.best().tree == PLAIN for plan in dear.sizes.plans)
    assert table_rows(dear.sizes)[0][:4] == ["1", "1", "-", "-"] and len(table_rows(dear.sizes)[0]) == len(COLUMNS)


def test_curves_hold_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    _scaled_steps(monkeypatch, 1e-6)
    found = tune(shared_target(), trained_drafter(), prompts_for(3, seed=4), SETTINGS)
    assert [1, 8, pytest.approx(0.010008)] in found.curves["verify_seconds"]
    assert [2, 4, 3, pytest.approx(3e-4)] in found.curves["draft_seconds"]
    assert {tuple(row[:3]) for row in found.curves["tokens_per_step"]} == set(SETTINGS.trees())
    assert found.num_prompts == 3 and found.num_positions <= 3 * 24
    hybrid = replace(SETTINGS, method="hybrid", batch_sizes=(1,))
    found = tune(shared_target(), trained_drafter(), prompts_for(3, seed=4), hybrid)
    assert [row[:3] for row in found.curves["draft_seconds"]] == [[1, 2, 1], [1, 2, 3], [1, 4, 1], [1, 4, 3]]
    assert {tuple(row[:3]) for row in found.curves["tokens_per_step"]} == set(hybrid.trees())


def test_each_method_has_its_own_sizes_to_choose_from() -> None:
    assert TuneSettings.for_method("redrafter", beam_widths=None, seconds=9.0) == TuneSettings(seconds=9.0)
    hybrid = TuneSettings.for_method("hybrid", beam_widths=None, draft_lengths=(4,))
    assert (hybrid.method, hybrid.beam_widths, hybrid.draft_lengths) == ("hybrid", (2, 4), (4,))
    # The other sources fill what the beam leaves free, down to a tree of two nodes.
    assert {Tree(2, 4, 2), Tree(2, 4, 64)} <= set(hybrid.trees())
    assert not {Tree(2, 4, 2), Tree(2, 4, 64)} & set(replace(hybrid, method="redrafter").trees())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"batch_sizes": ()}, "--batch-sizes is empty"),
        ({"beam_widths": (0,)}, "--beam-widths is 0"),
        ({"tree_sizes": (1,)}, "--tree-sizes is 1 but must be at least 2"),
        ({"seconds": 0}, "--seconds"),
        ({"method": "lookup"}, "--method is 'lookup' but must be one of redrafter, hybrid"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TuneSettings(**changes)  # type: ignore[arg-type]


def test_sizes_that_nothing_can_draft_are_refused() -> None:
    with pytest.raises(ValueError, match="--tree-sizes hold none"):
        tune(shared_target(), trained_drafter(), [[1]], TuneSettings(beam_widths=(1,), tree_sizes=(64,)))


@pytest.mark.parametrize(
    ("flags", "method"),
    [(["--device", "cpu"], "hybrid"), (["--method", "hybrid"], "hybrid"), (["--method", "redrafter"], "redrafter")],
)
def test_the_command_writes_a_file_that_other_commands_take(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    flags: list[str],
    method: str,
) -> None:
    monkeypatch.setenv("DRAFTER_HOME", str(tmp_path / "home"))
    target = make_target(tmp_path)
    drafter = make_drafter(target, tmp_path / "drafter")
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    words = ["tune", "--target", target, "--drafter", drafter, "--prompts", str(tmp_path / "p.jsonl")]
    words += ["--batch-sizes", "1", "--beam-widths", "4", "--draft-lengths", "1", "--tree-sizes", "4"]
    assert main([*words, *flags, "--max-new-tokens", "8", "--seconds", "5"]) == 0
    shown = capsys.readouterr()
    path = tmp_path / "drafter" / "tuned.json"
    assert str(path) in shown.err and "| rows |" in shown.out
    content = json.loads(path.read_text())
    assert content["calibration"]["num_prompts"] == 2 and content["curves"]["tokens_per_step"]
    found = read_tuned(path)
    assert [plan.num_rows for plan in found.plans] == [1] and found.method == method
    assert _decoded_with(["--target", target, "--drafter", drafter], tmp_path) == (method, str(path))
    # Who names a method gets it, with the file only where it is for that method.
    other = "redrafter" if method == "hybrid" else "hybrid"
    named = ["--target", target, "--drafter", drafter, "--method", other]
    assert _decoded_with(named, tmp_path) == (other, None)
    assert caplog.text.count("was measured for another method") == 1
    capsys.readouterr()


@pytest.mark.parametrize("number", ["0", "-3"])
def test_a_number_of_prompts_below_one_is_refused(capsys: pytest.CaptureFixture[str], number: str) -> None:
    assert main(["tune", "--target", "no-target", "--drafter", "no-drafter", "--num-prompts", number]) == 2
    assert f"--num-prompts is {number} but must be at least 1" in capsys.readouterr().err


def _decoded_with(words: list[str], folder: Path) -> tuple[str, str | None]:
    """Method and file of measured sizes that `drafter decode` used."""
    out = folder / "answers.jsonl"
    assert main(["decode", *words, "--device", "cpu", "--prompt", "x", "--max-new-tokens", "2", "--out", str(out)]) == 0
    engine = json.loads((folder / "answers.run.json").read_text())["settings"]["engine"]
    return engine["method"], engine["tuned"]
