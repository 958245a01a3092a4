"""Speculation sized by measurement: the file, the choice between steps, the guard, and that no token changes."""

import json
import logging
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.engine.config import EngineConfig
from drafter.engine.defaults import device_name, file_beside, fingerprint_of_weights, settle
from drafter.engine.engine import Engine
from drafter.engine.runner import Runner
from drafter.engine.sizes import PLAIN, Choice, RowPlan, Speculation, Tree, TreeSizer, read_speculation
from drafter.proposers.hybrid import HybridProposer
from drafter.proposers.options import Method, default_method
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.engine.oracle import assert_lossless, requests

SMALL, LARGE = Tree(2, 2, 4), Tree(4, 4, 12)
# One row: break-even of LARGE at ratio 0.6, SMALL is best between 0.4 and 0.8.
ONE_ROW = RowPlan(1, (Choice(PLAIN, 1.0, 1.0), Choice(SMALL, 1.5, 1.2), Choice(LARGE, 2.0, 1.5)))


def speculation(*plans: RowPlan, method: Method = "redrafter") -> Speculation:
    target = shared_target()
    return Speculation(
        device_name(target.device), "float32", False, target.fingerprint, plans or (ONE_ROW,), method=method
    )


def write(path: Path, content: Speculation, **changes: object) -> str:
    path.write_text(json.dumps({**content.as_json(), **changes}))
    return str(path)


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    other = RowPlan(8, (Choice(PLAIN, 1.0, 2.0), Choice(SMALL, 1.4, 2.5)))
    found = read_speculation(Path(write(tmp_path / "s.json", speculation(other, ONE_ROW))))
    assert found.plans == (ONE_ROW, other)
    assert found.trees == [PLAIN, SMALL, LARGE]
    assert found.summary() == "redrafter, trees by rows: 1: W 4 L 4 N 12; 8: W 2 L 2 N 4"
    assert [found.plan_for(rows) for rows in (1, 2, 8, 9)] == [ONE_ROW, other, other, None]


def test_the_file_says_whose_trees_it_sizes(tmp_path: Path) -> None:
    wide = RowPlan(1, (Choice(PLAIN, 1.0, 1.0), Choice(Tree(2, 2, 16), 1.5, 1.2)))  # more than the beam can draft
    hybrid = speculation(wide, method="hybrid")
    assert read_speculation(Path(write(tmp_path / "s.json", hybrid))) == hybrid
    older = {key: value for key, value in speculation().as_json().items() if key != "method"}
    (tmp_path / "s.json").write_text(json.dumps(older))
    assert read_speculation(tmp_path / "s.json").method == "redrafter"


def measured(**changes: object) -> dict[str, object]:
    return {**PLAIN._asdict(), "tokens_per_step": 1, "step_seconds": 1, **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": "other/1"}, "schema is 'other/1'"),
        ({"plans": []}, "damaged"),
        ({"plans": [{"num_rows": 1, "choices": []}]}, "plain"),
        ({"plans": [{"num_rows": 0, "choices": [measured()]}]}, "num_rows"),
        ({"plans": [{"num_rows": 1, "choices": [measured(step_seconds=0)]}]}, "measured"),
        ({"plans": [{"num_rows": 1, "choices": [measured(tree_size=99)]}]}, "tree"),
        ({"device": 3}, "wrong kind"),
        ({"method": "lookup"}, "method 'lookup'"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    path = write(tmp_path / "s.json", speculation(), **changes)
    with pytest.raises(ValueError, match=reason) as caught:
        read_speculation(Path(path))
    assert path in str(caught.value)


def test_text_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON"):
        read_speculation(tmp_path / "s.json")


@pytest.mark.parametrize("key", ["device", "dtype", "target_fingerprint", "drafter_fingerprint", "compile"])
def test_a_file_of_another_machine_is_refused_by_the_engine_and_passed_over_beside_the_drafter(
    tmp_path: Path, key: str
) -> None:
    changes = {"compile": True} if key == "compile" else {key: "other"}
    path = write(tmp_path / "speculation.json", speculation(), **changes)
    with pytest.raises(ValueError, match="was measured for another"):
        Engine(shared_target(), trained_drafter(), EngineConfig(speculation=path))
    assert file_beside(str(tmp_path), shared_target(), trained_drafter()) is None
    assert file_beside(str(tmp_path / "nowhere"), shared_target()) is None


def test_a_fitting_file_beside_the_drafter_is_found(tmp_path: Path) -> None:
    own = fingerprint_of_weights(trained_drafter())
    for fingerprint in ("", own):
        path = write(tmp_path / "speculation.json", speculation(), drafter_fingerprint=fingerprint)
        assert file_beside(str(tmp_path), shared_target(), trained_drafter()) == path


def test_a_file_for_another_method_is_refused_or_passed_over_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "speculation.json", speculation(method="hybrid"))
    with pytest.raises(ValueError, match=r"another method \(hybrid, not redrafter\)"):
        Engine(shared_target(), trained_drafter(), EngineConfig(speculation=path))
    with pytest.raises(ValueError, match="give --drafter"):
        Engine(shared_target(), None, EngineConfig(method="hybrid", speculation=path))
    found = [file_beside(tmp_path, shared_target(), method=method) for method in (None, "hybrid", "redrafter")]
    assert found == [path, path, None]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "measured for another method (hybrid, not redrafter)" in caplog.text


def test_what_was_left_open_is_settled(tmp_path: Path) -> None:
    """A plan that fits goes first, then what suits the device; nothing that was given is changed."""
    target, drafter, given = shared_target(), trained_drafter(), EngineConfig(max_rows=3, max_ngram=5)
    small = replace(given, beam_width=4, draft_length=3, tree_size=8)
    nowhere = tmp_path / "nowhere"
    assert settle(given, target, drafter, nowhere, is_method_open=True) == replace(small, method="hybrid")
    assert settle(given, target, drafter, nowhere) == small
    assert settle(replace(given, method="lookup"), target, None, nowhere) == replace(given, method="lookup")
    sized = settle(given, target, drafter, nowhere, is_method_open=True, is_size_open=False)
    assert sized == replace(given, method="hybrid")
    assert settle(given, target, drafter, nowhere, is_size_open=False) == given
    assert (default_method("cpu"), default_method("cuda")) == ("hybrid", "redrafter")
    for method in ("redrafter", "hybrid"):
        path = write(tmp_path / "speculation.json", speculation(method=method))  # type: ignore[arg-type]
        planned = replace(given, method=method, speculation=path)  # type: ignore[arg-type]
        assert settle(given, target, drafter, tmp_path, is_method_open=True) == planned
        assert settle(given, target, drafter, nowhere, speculation=path, is_method_open=True) == planned
        off = settle(given, target, drafter, tmp_path, speculation="off", is_method_open=True)
        assert off == replace(small, method="hybrid")
        assert settle(given, target, drafter, tmp_path, is_method_open=True, is_size_open=False) == sized
    assert settle(given, target, drafter, tmp_path) == small  # the file is for the hybrid
    with pytest.raises(ValueError, match="goes with no other method"):
        settle(replace(given, method="lookup"), target, None, None, speculation=path)


def test_every_change_of_the_drafters_weights_changes_its_fingerprint() -> None:
    drafter = deepcopy(trained_drafter())
    before = fingerprint_of_weights(drafter)
    assert before == fingerprint_of_weights(trained_drafter())
    with torch.no_grad():
        drafter.head.weight[0, 0] += 1
    assert fingerprint_of_weights(drafter) != before


def test_settings_that_contradict_the_file_are_refused() -> None:
    for settings in ({"method": "lookup"}, {"tree_size": 8}, {"tree_policy": "final-beams"}):
        with pytest.raises(ValueError, match="--speculation"):
            EngineConfig(speculation="s.json", **settings)  # type: ignore[arg-type]


def test_the_tree_follows_the_rows_and_is_plain_where_nothing_was_measured() -> None:
    many = RowPlan(4, (Choice(PLAIN, 1.0, 2.0), Choice(SMALL, 1.4, 2.5), Choice(LARGE, 1.9, 5.0)))
    sizer = TreeSizer(speculation(ONE_ROW, many))
    assert [sizer.choose(rows) for rows in (1, 2, 4, 5, 1)] == [LARGE, SMALL, SMALL, PLAIN, LARGE]


def test_the_tree_shrinks_while_fewer_drafts_are_kept_and_grows_again() -> None:
    sizer = TreeSizer(speculation())
    assert sizer.choose(1) == LARGE
    seen = _drive(sizer, 400, kept_per_step={SMALL: 0.25, LARGE: 0.5})  # ratio 0.5: SMALL gives 1.25 / 1.2
    assert seen[-1] == SMALL and sizer.ratio == pytest.approx(0.5, abs=0.05)
    seen = _drive(sizer, 800, kept_per_step={SMALL: 0.5, LARGE: 1.0})
    assert seen[-1] == LARGE and sizer.ratio == pytest.approx(1.0, abs=0.05)


def test_rejected_drafts_lead_to_plain_decoding_and_ever_rarer_probes() -> None:
    sizer = TreeSizer(speculation())
    seen = _drive(sizer, 20000, kept_per_step={SMALL: 0.0, LARGE: 0.0})
    first_plain = seen.index(PLAIN)
    assert first_plain < 60
    probes = [i for i in range(first_plain, len(seen)) if seen[i] != PLAIN and seen[i - 1] == PLAIN]
    pauses = [later - earlier for earlier, later in zip(probes, probes[1:], strict=False)]
    assert pauses == sorted(pauses) and pauses[1] > 1.8 * pauses[0] and pauses[-1] <= 4096 + 16
    drafted = Counter(seen[first_plain:])
    assert drafted[PLAIN] > 0.97 * len(seen[first_plain:])
    # The text becomes easy again: the next probe sees it, and drafting goes on.
    assert _drive(sizer, 5000, kept_per_step={SMALL: 0.5, LARGE: 1.0})[-1] == LARGE


def test_where_calibration_chose_plain_decoding_nothing_is_probed() -> None:
    useless = RowPlan(1, (Choice(PLAIN, 1.0, 1.0), Choice(SMALL, 1.1, 2.0)))
    assert set(_drive(TreeSizer(speculation(useless)), 1000, kept_per_step={})) == {PLAIN}


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


@pytest.mark.parametrize("method", ["redrafter", "hybrid"])
def test_switching_trees_between_steps_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Method
) -> None:
    plans = [
        RowPlan(rows, (Choice(PLAIN, 1.0, 1.0), Choice(tree, 1.2, 1.02), Choice(SMALL, 1.1, 1.01)))
        for rows, tree in ((1, LARGE), (2, Tree(3, 3, 10)), (4, Tree(1, 1, 2)))
    ]
    path = write(tmp_path / "s.json", speculation(*plans, method=method))
    used: Counter[int] = Counter()
    step = Runner.step

    def counted(runner: Runner, proposer: object, *args: object) -> object:
        used[proposer.num_nodes] += 1  # type: ignore[attr-defined]
        return step(runner, proposer, *args)  # type: ignore[arg-type]

    engine = Engine(shared_target(), trained_drafter(), EngineConfig(method=method, max_rows=5, speculation=path))
    monkeypatch.setattr(Runner, "step", counted)
    assert assert_lossless(engine, requests(12, seed=3)) > 1.0
    assert len(used) >= 4, used  # plain decoding (five rows, and the oracle), and at least three sizes of trees


def test_hybrids_of_all_sizes_learn_together_also_from_plain_steps(tmp_path: Path) -> None:
    plans = [
        RowPlan(rows, (Choice(PLAIN, 1.0, 1.0), Choice(tree, 1.2, 1.02))) for rows, tree in ((1, SMALL), (2, LARGE))
    ]
    path = write(tmp_path / "s.json", speculation(*plans, method="hybrid"))
    engine = Engine(shared_target(), trained_drafter(), EngineConfig(method="hybrid", max_rows=4, speculation=path))
    assert engine._sized is not None
    small, large = (proposer for proposer in engine._sized.proposers if isinstance(proposer, HybridProposer))
    table = small.parts[-1].table  # type: ignore[attr-defined]
    assert large.parts[-1].table is table and large._rates is small._rates  # type: ignore[attr-defined]
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    prompts = prompts_for(4, seed=6, sizes=(3,))
    assert all(item.tokens_per_step == 1 for item in engine.generate(prompts, params))  # nobody measured four rows
    assert (table.logit_VK[:-1, 0] > -torch.inf).sum() > 1 and not small._rates.expected_BC.any()


def test_muted_requests_are_no_evidence(tmp_path: Path) -> None:
    from drafter.engine.config import RequestOptions

    path = write(tmp_path / "s.json", speculation(replace(ONE_ROW, num_rows=4)))
    engine = Engine(shared_target(), trained_drafter(), EngineConfig(max_rows=2, speculation=path))
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    for prompt, speculate in zip(prompts_for(2, seed=5), (True, False), strict=True):
        engine.add(prompt, params, RequestOptions(speculate=speculate), want_text=False)
    seen: list[int] = []
    assert engine._sized is not None
    observe = engine._sized.observe
    engine._sized.observe = lambda kept: (seen.append(len(kept)), observe(kept))[1]  # type: ignore[method-assign, func-returns-value]
    while engine.has_work:
        engine.step()
    assert set(seen) <= {0, 1} and 1 in seen
