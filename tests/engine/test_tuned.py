"""TunedSizes sized by measurement: the file, the choice between steps, the guard, and that no token changes."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.runner import Runner
from drafter.engine.settings import EngineConfig, resolve
from drafter.engine.tuned import (
    PLAIN,
    MeasuredTree,
    RowPlan,
    Tree,
    TreeSizer,
    TunedSizes,
    device_name,
    fingerprint_of_weights,
    misfit,
    number_format,
    read_tuned,
)
from drafter.models.drafter import RecurrentDrafter
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.engine.oracle import assert_lossless, requests

SMALL, LARGE = Tree(2, 2, 4), Tree(4, 4, 12)
# One row: break-even of LARGE at ratio 0.6, SMALL is best between 0.4 and 0.8.
ONE_ROW = RowPlan(1, (MeasuredTree(PLAIN, 1.0, 1.0), MeasuredTree(SMALL, 1.5, 1.2), MeasuredTree(LARGE, 2.0, 1.5)))


def sizes_of(*plans: RowPlan) -> TunedSizes:
    target = shared_target()
    return TunedSizes(device_name(target.device), "float32", False, target.fingerprint, plans or (ONE_ROW,))


def write(path: Path, content: TunedSizes, **changes: object) -> str:
    path.write_text(json.dumps({**content.as_json(), **changes}))
    return str(path)


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    other = RowPlan(8, (MeasuredTree(PLAIN, 1.0, 2.0), MeasuredTree(SMALL, 1.4, 2.5)))
    found = read_tuned(Path(write(tmp_path / "s.json", sizes_of(other, ONE_ROW))))
    assert found.plans == (ONE_ROW, other)
    assert found.trees == [PLAIN, SMALL, LARGE]
    assert found.summary() == "drafter, trees by rows: 1: W 4 L 4 N 12; 8: W 2 L 2 N 4"
    assert [found.plan_for(rows) for rows in (1, 2, 8, 9)] == [ONE_ROW, other, other, None]


def measured(**changes: object) -> dict[str, object]:
    return {**PLAIN._asdict(), "tokens_per_step": 1, "step_seconds": 1, **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": "other/1"}, "schema is 'other/1'"),
        ({"plans": [{"num_rows": 1, "choices": []}]}, "plain"),
        ({"plans": [{"num_rows": 1, "choices": [measured(step_seconds=0)]}]}, "impossible"),
        ({"plans": [{"num_rows": 1, "choices": [measured(tree_size=9999)]}]}, "impossible"),
        ({"device": 3}, "device is a number, but must be a text"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    path = write(tmp_path / "s.json", sizes_of(), **changes)
    with pytest.raises(ValueError, match=reason) as caught:
        read_tuned(Path(path))
    assert path in str(caught.value)


@pytest.mark.parametrize("key", ["device", "target_fingerprint", "drafter_fingerprint", "compile"])
def test_a_file_of_another_machine_is_refused_by_the_engine_and_passed_over_beside_the_drafter(
    tmp_path: Path, key: str
) -> None:
    changes = {"compile": True} if key == "compile" else {key: "other"}
    path = write(tmp_path / "tuned.json", sizes_of(), **changes)
    with pytest.raises(ValueError, match="was measured for another"):
        Engine(shared_target(), trained_drafter(), EngineConfig(tuned=path))
    drafter = loaded_drafter(tmp_path)
    found = resolve(None, shared_target(), drafter)
    assert found.tuned is None and "the measured sizes do not fit" in found.reason


def test_a_target_of_stored_integers_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fingerprint, runtime and dtype are those of the unpacked weights."""
    target, plain = shared_target(), sizes_of()
    with monkeypatch.context() as patch:
        patch.setattr(target, "is_stored", True)
        stored = replace(plain, dtype=number_format(target))
        assert misfit(stored, target, is_compiled=False) == ""
        assert misfit(plain, target, is_compiled=False) == "was measured for another dtype (float32, not stored)"
    assert misfit(plain, target, is_compiled=False) == ""
    assert misfit(stored, target, is_compiled=False) == "was measured for another dtype (stored, not float32)"


def loaded_drafter(folder: Path) -> RecurrentDrafter:
    """The trained drafter as it is loaded from a folder, which it remembers."""
    trained_drafter().save_pretrained(folder)
    return RecurrentDrafter.from_pretrained(folder).eval().bind(shared_target())


def test_a_fitting_file_beside_the_drafter_is_found(tmp_path: Path) -> None:
    drafter = loaded_drafter(tmp_path)
    for fingerprint in ("", fingerprint_of_weights(drafter)):
        path = write(tmp_path / "tuned.json", sizes_of(), drafter_fingerprint=fingerprint)
        engine = Engine(shared_target(), drafter)
        assert (engine.plan.tuned, engine.plan.method) == (path, "drafter")


def test_measured_sizes_are_the_default_unless_the_tree_is_given(tmp_path: Path) -> None:
    target, drafter = shared_target(), loaded_drafter(tmp_path)
    path = write(tmp_path / "tuned.json", sizes_of())
    found = resolve(EngineConfig(max_num_seqs=3), target, drafter)
    assert (found.tuned, found.max_num_seqs, found.max_drafted_rows) == (path, 3, None)
    assert found.reason == f"drafter, trees by rows: 1: W 4 L 4 N 12: measured, {path}"
    assert resolve(EngineConfig(tuned=path), target, trained_drafter()).tuned == path
    assert resolve(EngineConfig(tuned="none"), target, drafter).tuned is None
    assert resolve(EngineConfig(tree_size=9), target, drafter).tuned is None
    alone = resolve(EngineConfig(copying=False), target, drafter)  # a measured tree may need the copies' nodes
    assert alone.tuned is None and alone.reason.endswith("the measured sizes are for drafts with copies")


def test_the_tree_follows_the_rows_and_is_plain_where_nothing_was_measured() -> None:
    many = RowPlan(4, (MeasuredTree(PLAIN, 1.0, 2.0), MeasuredTree(SMALL, 1.4, 2.5), MeasuredTree(LARGE, 1.9, 5.0)))
    sizer = TreeSizer(sizes_of(ONE_ROW, many))
    assert [sizer.choose(rows) for rows in (1, 2, 4, 5, 1)] == [LARGE, SMALL, SMALL, PLAIN, LARGE]


def test_the_tree_shrinks_while_fewer_drafts_are_kept_and_grows_again() -> None:
    sizer = TreeSizer(sizes_of())
    assert sizer.choose(1) == LARGE
    seen = _drive(sizer, 400, kept_per_step={SMALL: 0.25, LARGE: 0.5})  # ratio 0.5: SMALL gives 1.25 / 1.2
    assert seen[-1] == SMALL and sizer.ratio == pytest.approx(0.5, abs=0.05)
    seen = _drive(sizer, 800, kept_per_step={SMALL: 0.5, LARGE: 1.0})
    assert seen[-1] == LARGE and sizer.ratio == pytest.approx(1.0, abs=0.05)


def test_rejected_drafts_lead_to_plain_decoding_and_are_tried_again_now_and_then() -> None:
    sizer = TreeSizer(sizes_of())
    seen = _drive(sizer, 20000, kept_per_step={SMALL: 0.0, LARGE: 0.0})
    first_plain = seen.index(PLAIN)
    assert first_plain < 60
    assert 0.97 < Counter(seen[first_plain:])[PLAIN] / len(seen[first_plain:]) < 1
    # The text becomes easy again: the next try sees it, and drafting goes on.
    assert _drive(sizer, 5000, kept_per_step={SMALL: 0.5, LARGE: 1.0})[-1] == LARGE


def _drive(sizer: TreeSizer, num_steps: int, kept_per_step: dict[Tree, float]) -> list[Tree]:
    """Steps of one row that keep drafts at a steady rate."""
    seen, owed = [], 0.0
    for _ in range(num_steps):
        tree = sizer.choose(1)
        owed += kept_per_step.get(tree, 0.0)
        sizer.observe([int(owed)])
        owed -= int(owed)
        seen.append(tree)
    return seen


def test_switching_trees_between_steps_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [
        RowPlan(rows, (MeasuredTree(PLAIN, 1.0, 1.0), MeasuredTree(tree, 1.2, 1.02), MeasuredTree(SMALL, 1.1, 1.01)))
        for rows, tree in ((1, LARGE), (2, Tree(3, 3, 10)), (4, Tree(1, 1, 2)))
    ]
    path = write(tmp_path / "s.json", sizes_of(*plans))
    used: Counter[int] = Counter()
    step = Runner.step

    def counted(runner: Runner, proposer: object, *args: object) -> object:
        used[proposer.num_nodes] += 1  # type: ignore[attr-defined]
        return step(runner, proposer, *args)  # type: ignore[arg-type]

    engine = Engine(shared_target(), trained_drafter(), EngineConfig(max_num_seqs=5, tuned=path))
    monkeypatch.setattr(Runner, "step", counted)
    assert assert_lossless(engine, requests(12, seed=3)) > 1.0
    assert len(used) >= 4, used  # plain decoding (five rows, and the oracle), and at least three sizes of trees


def test_muted_requests_are_no_evidence(tmp_path: Path) -> None:
    from drafter.engine.request import RequestOptions

    path = write(tmp_path / "s.json", sizes_of(replace(ONE_ROW, num_rows=4)))
    engine = Engine(shared_target(), trained_drafter(), EngineConfig(max_num_seqs=2, tuned=path))
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    for prompt, speculate in zip(prompts_for(2, seed=5), (True, False), strict=True):
        engine.add(prompt, params, RequestOptions(speculate=speculate), want_text=False)
    seen: list[int] = []
    assert engine._sizer is not None
    observe = engine._sizer.observe
    engine._sizer.observe = lambda kept: (seen.append(len(kept)), observe(kept))[1]  # type: ignore[method-assign, func-returns-value]
    while engine.has_work:
        engine.step()
    assert set(seen) <= {0, 1} and 1 in seen
