"""TunedSizes sized by measurement: the file, the choice between steps, the guard, and that no token changes."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from drafter.decoding.params import SamplingParams
from drafter.engine import tuned
from drafter.engine.engine import Engine
from drafter.engine.request import RequestOptions
from drafter.engine.settings import EngineConfig, resolve
from drafter.engine.tuned import COPIES, DRAFTS, MANY_COPIES, PLAIN, MeasuredTree, RowPlan, Sizer, Tree, TunedSizes
from drafter.models.drafter import RecurrentDrafter
from drafter.runtimes.torch.runtime import TorchRuntime
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.engine.oracle import assert_lossless, requests

SMALL, LARGE = Tree(2, 2, 4), Tree(4, 4, 12)
# One row: break-even of LARGE at ratio 0.6, SMALL is best between 0.4 and 0.8.
ONE_ROW = RowPlan(1, (MeasuredTree(*PLAIN, 1.0, 1.0), MeasuredTree(*SMALL, 1.5, 1.2), MeasuredTree(*LARGE, 2.0, 1.5)))


def conditions() -> dict[str, Any]:
    return tuned.conditions_of(shared_target(), trained_drafter(), is_compiled=False)


def sizes_of(*plans: RowPlan) -> TunedSizes:
    return TunedSizes(**conditions(), plans=plans or (ONE_ROW,))


def write(path: Path, content: TunedSizes, **changes: object) -> str:
    fields = {**asdict(content), **changes}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return str(path)


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    other = RowPlan(8, (MeasuredTree(*PLAIN, 1.0, 2.0), MeasuredTree(*SMALL, 1.4, 2.5)))
    found = tuned.read_tuned(Path(write(tmp_path / "s.json", sizes_of(other, ONE_ROW))))
    assert found == sizes_of(ONE_ROW, other)
    assert set(Sizer(found.plans).trees) == {PLAIN, SMALL, LARGE}
    assert found.summary() == "drafter, trees by rows: 1: W 4 L 4 N 12; 8: W 2 L 2 N 4"


def measured(**changes: object) -> dict[str, object]:
    return {**PLAIN._asdict(), "tokens_per_step": 1, "step_seconds": 1, **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": "other/1"}, "schema: Input should be 'drafter-tuned/1'"),
        ({"plans": [{"num_rows": 1, "choices": []}]}, "plain"),
        ({"plans": [{"num_rows": 1, "choices": [measured(tree_size=9999)]}]}, "should be less than or equal to 4096"),
        ({"device": 3}, "device: Input should be a valid string"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    path = write(tmp_path / "s.json", sizes_of(), **changes)
    with pytest.raises(ValueError, match=reason) as caught:
        tuned.read_tuned(Path(path))
    assert path in str(caught.value)


@pytest.mark.parametrize("changes", [{"target_fingerprint": "other"}, {"compile": True}])
def test_a_file_of_another_machine_is_refused_by_the_engine_and_passed_over_beside_the_drafter(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    path = write(tmp_path / "tuned.json", sizes_of(), **changes)
    with pytest.raises(ValueError, match="was measured for another"):
        Engine(shared_target(), trained_drafter(), EngineConfig(tuned=path))
    found = resolve(None, shared_target(), loaded_drafter(tmp_path))
    assert found.tuned is None and "the measured sizes do not fit" in found.reason


def test_a_target_of_stored_integers_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = sizes_of()
    stored = shared_target().traits._replace(number_format="stored")
    monkeypatch.setattr(TorchRuntime, "traits", stored)  # dtype and fingerprint are those of the unpacked weights
    assert tuned.misfit(plain, conditions()) == "was measured for another dtype (float32, not stored)"


def loaded_drafter(folder: Path) -> RecurrentDrafter:
    """The trained drafter as it is loaded from a folder, which it remembers."""
    trained_drafter().save_pretrained(folder)
    return RecurrentDrafter.from_pretrained(folder).eval().bind(shared_target())


@pytest.mark.parametrize("is_of_any_drafter", [False, True], ids=["own", "any"])
def test_measured_sizes_are_the_default_unless_the_tree_is_given(tmp_path: Path, is_of_any_drafter: bool) -> None:
    target, drafter = shared_target(), loaded_drafter(tmp_path)
    changes = {"drafter_fingerprint": None} if is_of_any_drafter else {}  # as after an export over the folder
    path = write(tmp_path / "tuned.json", sizes_of(), **changes)
    found = resolve(EngineConfig(max_num_seqs=3), target, drafter)
    assert (found.method, found.tuned, found.max_num_seqs, found.sizes) == ("drafter", path, 3, (ONE_ROW,))
    assert found.reason == f"drafter, trees by rows: 1: W 4 L 4 N 12: measured, {path}, measured further while it runs"
    assert resolve(EngineConfig(tuned=path), target, trained_drafter()).tuned == path
    assert resolve(EngineConfig(tuned="none"), target, drafter).tuned is None
    assert resolve(EngineConfig(tree_size=9), target, drafter).tuned is None
    alone = resolve(EngineConfig(copying=False), target, drafter)  # a measured tree may need the copies' nodes
    assert alone.tuned is None and alone.reason.endswith("the measured sizes are for drafts with copies")


def test_the_tree_follows_the_rows_and_is_plain_where_nothing_was_measured() -> None:
    many = RowPlan(4, (MeasuredTree(*PLAIN, 1, 2.0), MeasuredTree(*SMALL, 1.4, 2.5), MeasuredTree(*LARGE, 1.9, 5.0)))
    sizer = Sizer((ONE_ROW, many))
    assert [sizer.choose(rows) for rows in (1, 2, 4, 5, 1)] == [LARGE, SMALL, SMALL, PLAIN, LARGE]


def test_the_tree_shrinks_while_fewer_drafts_are_kept_and_grows_again() -> None:
    sizer = Sizer((ONE_ROW,))
    assert sizer.choose(1) == LARGE
    seen = _drive(sizer, 400, kept_per_step={SMALL: 0.25, LARGE: 0.5})  # ratio 0.5: SMALL gives 1.25 / 1.2
    assert seen[-1] == SMALL and sizer._seen[False].ratio == pytest.approx(0.5, abs=0.05)
    seen = _drive(sizer, 800, kept_per_step={SMALL: 0.5, LARGE: 1.0})
    assert seen[-1] == LARGE and sizer._seen[False].ratio == pytest.approx(1.0, abs=0.05)


def test_rejected_drafts_lead_to_plain_decoding_and_are_tried_again_now_and_then() -> None:
    sizer = Sizer((ONE_ROW,))
    seen = _drive(sizer, 20000, kept_per_step={SMALL: 0.0, LARGE: 0.0})
    first_plain = seen.index(PLAIN)
    assert first_plain < 60
    assert 0.97 < Counter(seen[first_plain:])[PLAIN] / len(seen[first_plain:]) < 1
    # The text becomes easy again: the next try sees it, and drafting goes on.
    assert _drive(sizer, 5000, kept_per_step={SMALL: 0.5, LARGE: 1.0})[-1] == LARGE


def _drive(
    sizer: Sizer,
    num_steps: int,
    kept_per_step: dict[Tree, float],
    seconds: dict[Tree, float] | None = None,
    slowness: Callable[[int], float] = lambda step: 1.0,
) -> list[Tree]:
    """Steps of one row that keep drafts at a steady rate."""
    seen, owed = [], 0.0
    for step in range(num_steps):
        tree = sizer.choose(1)
        owed += kept_per_step.get(tree, 0.0)
        sizer.observe([int(owed)], (seconds or {}).get(tree, 1.0) * slowness(step), tree.tree_size)
        owed -= int(owed)
        seen.append(tree)
    return seen


TWO, FOUR, EIGHT = Tree(1, 1, 2), Tree(2, 2, 4), Tree(4, 3, 8)
TREES = {FOUR: 1.9, PLAIN: 1.0, **tuned.LIVE_COPIES, TWO: 1.5, EIGHT: 2.3}
VAIN_COPIES = {COPIES: 1.05, MANY_COPIES: 1.05}  # nothing is copied
KEPT = {tree: number - 1 for tree, number in TREES.items() if tree not in VAIN_COPIES}


@pytest.mark.parametrize(
    ("seconds", "wanted"),  # tokens per step with 2, 4 and 8 nodes: 1.5, 1.9, 2.3
    [
        pytest.param((1.0, 1.6, 2.2, 3.0), PLAIN, id="no tree pays"),
        pytest.param((1.0, 1.4, 2.0, 3.0), TWO, id="a small one"),
        pytest.param((1.0, 1.1, 1.2, 1.3), EIGHT, id="a large one"),
    ],
)
def test_without_measurements_the_fastest_steps_win_and_cost_no_more_than_plain_decoding(
    seconds: tuple[float, ...], wanted: Tree
) -> None:
    seconds_of = dict(zip((PLAIN, TWO, FOUR, EIGHT), seconds, strict=True)) | VAIN_COPIES
    sizer = Sizer(tries=TREES)
    seen = _drive(sizer, 4000, KEPT, seconds_of)
    assert {PLAIN, FOUR, COPIES} <= set(seen[:40])
    assert (EIGHT in seen) == (wanted == EIGHT), "no step of a tree that cannot pay"
    later = seen[150:]
    assert Counter(later)[wanted] / len(later) > 0.8
    others = [len(list(run)) for is_wanted, run in groupby(later, wanted.__eq__) if not is_wanted]
    assert max(others) <= 6, "one trial at a time, so that a short answer pays for few"
    best = (1 + KEPT[wanted]) / seconds_of[wanted]
    assert sum(1 + KEPT.get(tree, 0) for tree in seen) / sum(seconds_of[tree] for tree in seen) > 0.98 * best
    # The machine changes, or the text does.
    assert Counter(_drive(sizer, 4000, KEPT, {tree: 1.0 for tree in seconds_of})[-1000:])[EIGHT] > 900
    assert Counter(_drive(sizer, 4000, {}, {**seconds_of, PLAIN: 0.9})[-1000:])[PLAIN] > 900


def test_slow_first_steps_and_a_drift_are_not_blamed_on_the_trees_that_had_them() -> None:
    seconds_of = dict(zip((PLAIN, TWO, FOUR, EIGHT), (1.0, 1.1, 1.2, 1.3), strict=True)) | VAIN_COPIES
    sizer = Sizer(tries=TREES)
    seen = _drive(sizer, 300, KEPT, seconds_of, lambda step: (1 + 2 ** -(step / 3)) * 1.001**step)
    assert Counter(seen[80:])[EIGHT] / len(seen[80:]) > 0.9


def test_copies_alone_win_where_trees_do_not_pay_whatever_the_file_says() -> None:
    """A file that chose plain decoding, dear trees, and a text of which every fourth token begins a copy of seven."""
    plain = RowPlan(1, (MeasuredTree(*PLAIN, 1.0, 0.02),))
    sizer = Sizer([plain], tuned.trees_to_try(EIGHT, copying=True, is_drafter=True))
    seen = []
    for step in range(600):
        tree = sizer.choose(1)
        is_hit = tree.is_copies and step % 4 == 0
        num_nodes = tree.tree_size if is_hit or not tree.is_copies else 1
        sizer.observe([7 if is_hit else 0], 0.02 * (1 + 0.2 * (num_nodes - 1)), num_nodes)
        seen.append(tree)
    assert set(seen[:12]) == {COPIES} and sum(tree.is_copies for tree in seen[100:]) > 450
    assert sizer.loss(PLAIN) > 0.5


def test_many_rows_begin_with_plain_decoding_and_a_trial_that_loses_by_far_ends_at_its_first_step() -> None:
    sizer, seen = Sizer(tries=TREES), []
    for _ in range(80):
        seen.append(tree := sizer.choose(8))
        sizer.observe([0] * 8, 1 + 0.8 * (tree.tree_size - 1), tree.tree_size)
    assert set(seen[:12]) == {PLAIN} and EIGHT not in seen
    assert Counter(seen)[FOUR] == 1 and Counter(seen)[PLAIN] > 70


def test_a_first_copy_that_costs_much_makes_no_drafts_look_cheap() -> None:
    """Steps behind a trial that ended at once are measured in the pace of before the trial."""
    sizer, seen = Sizer(tries=TREES), []
    for step in range(400):
        tree = sizer.choose(1)
        num_nodes = 1 if tree.is_copies and COPIES in seen else tree.tree_size  # the first tree of copies is full
        sizer.observe([(step % 10 < 8) * (num_nodes == 4)], 0.6 + 0.4 * num_nodes, num_nodes)
        seen.append(tree)
    assert Counter(seen[12:])[FOUR] < 40


def test_copies_wait_for_something_to_copy_at_the_cost_of_plain_decoding() -> None:
    """A tree without copies is a plain step, so that vain steps are no reason to stop looking; vain copies are."""
    sizer, seen = Sizer(tries=tuned.LIVE_COPIES), []
    for step in range(900):
        tree = sizer.choose(1)
        is_match = tree.is_copies and step >= 100
        num_nodes = tree.tree_size if is_match else 1
        kept = 5 if is_match and step < 300 else 0
        sizer.observe([kept], 1 + 0.1 * (num_nodes - 1) + 0.03 * tree.is_copies, num_nodes)
        seen.append(tree.is_copies)
    assert sum(seen[:100]) > 80 and sum(seen[100:300]) > 180 and sum(seen[500:]) < 80
    assert sizer.node_cost == pytest.approx(0.1, abs=0.01)


def test_an_engine_on_a_cpu_sizes_its_trees_by_its_own_steps_and_changes_no_token() -> None:
    engine = Engine(shared_target(), trained_drafter(), EngineConfig(max_num_seqs=2))
    assert_lossless(engine, requests(12, seed=3))
    assert isinstance(engine._sizer, Sizer) and {PLAIN, DRAFTS, COPIES} <= set(engine._sizer._times[2].used)
    assert "plain" in engine.what_ran() and not engine.what_ran(), "the steps since the last call"


def test_muted_requests_are_no_evidence() -> None:
    sizer = Sizer([RowPlan(4, ONE_ROW.choices)])
    sizer.observe = observe = Mock(wraps=sizer.observe)  # type: ignore[method-assign]
    engine = Engine(shared_target(), trained_drafter(), EngineConfig(max_num_seqs=2), sizer=sizer)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    for prompt, speculate in zip(prompts_for(2, seed=5), (True, False), strict=True):
        engine.add(engine.make_request(prompt, params, RequestOptions(speculate=speculate), want_text=False))
    while engine.has_work:
        engine.step()
    num_observed = {len(call.args[0]) for call in observe.call_args_list}
    assert 1 in num_observed and num_observed <= {0, 1}
