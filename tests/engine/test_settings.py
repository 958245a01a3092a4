"""resolve: what an engine does where the user leaves settings open, and every refusal by its flag."""

from doctest import DocTestParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig, EngineOptions, Plan, resolve
from drafter.engine.tuned import COPIES, DRAFTS, PLAIN, Tree
from drafter.proposers.options import METHODS, Way
from drafter.runtimes.base import Traits
from drafter.runtimes.torch.runtime import TorchRuntime
from tests.engine.drafters import shared_target, trained_drafter
from tests.engine.oracle import tiny_target

OF_NINE = {"beam_width": 2, "draft_length": 4, "copying": False}  # a tree of at most nine nodes
CUDA: Any = SimpleNamespace(
    name="big", device=torch.device("cuda"), dtype=torch.bfloat16, traits=Traits("bfloat16", is_compilable=True)
)  # as much of a target as resolve reads


def on(device: str, models: str, **given: Any) -> Plan:
    """The plan for ``models``: the names of the models beside the target."""
    target = shared_target() if device == "cpu" else CUDA
    drafter = trained_drafter() if "drafter" in models else None
    return resolve(EngineConfig(**given), target, drafter, tiny_target(1) if "draft-model" in models else None)


@pytest.mark.parametrize(
    ("device", "models", "given", "wanted"),
    [
        # method: (W, L, N); trees to try, or rows above which decoding is plain
        ("cpu", "", {}, ("lookup", None, 8, [PLAIN, COPIES])),
        ("cpu", "drafter", {}, ("drafter", (3, 3), 12, [PLAIN, COPIES, DRAFTS])),
        ("cpu", "drafter", {"copying": False}, ("drafter", (3, 3), 12, [PLAIN, DRAFTS])),
        ("cpu", "draft-model", {}, ("draft-model", None, 6, [PLAIN, COPIES, Tree(1, 5, 6)])),
        ("cpu", "draft-model", {"num_speculative_tokens": 5}, ("draft-model", None, 6, None)),
        ("cuda", "", {}, ("none", None, 1, None)),
        ("cuda", "drafter", {}, ("drafter", (8, 4), 24, 10)),
        ("cuda", "drafter", {"max_num_seqs": 64}, ("drafter", (4, 3), 8, 32)),
        # One given number leaves the other numbers to the device.
        ("cpu", "drafter", {"draft_length": 9}, ("drafter", (4, 9), 10, None)),
        ("cuda", "drafter", {"tree_size": 12}, ("drafter", (8, 4), 12, None)),
        ("cpu", "drafter", {"tree_size": 3}, ("drafter", (4, 2), 3, None)),
        ("cpu", "drafter", {"beam_width": 2, "copying": False}, ("drafter", (2, 3), 7, None)),
        ("cpu", "drafter", {"method": "lookup", "tree_size": 5}, ("lookup", None, 5, None)),
        ("cpu", "drafter draft-model", {"method": "drafter"}, ("drafter", (3, 3), 12, [PLAIN, COPIES, DRAFTS])),
    ],
)
def test_the_choice(device: str, models: str, given: dict[str, Any], wanted: tuple[Any, ...]) -> None:
    plan = on(device, models, **given)
    drafting: Any = plan.drafting
    tree = (drafting.beam_width, drafting.draft_length) if plan.method == "drafter" else None
    limit = next((each.num_rows for each in plan.sizes), None)
    wanted_trees = wanted[3] if isinstance(wanted[3], list) else []
    assert (plan.method, tree, drafting.tree_size) == wanted[:3]
    assert limit == (None if wanted_trees else wanted[3]) and set(wanted_trees) <= set(plan.tries)
    assert bool(plan.tries) == bool(wanted_trees) and (COPIES in plan.tries) == (COPIES in wanted_trees)
    wanted_dtype, is_cuda = ("float32", False) if device == "cpu" else ("bfloat16", True)
    assert plan.dtype == wanted_dtype and plan.compile == is_cuda != plan.enable_prefix_caching


def test_few_cheap_tokens_refuse_no_tree_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchRuntime, "traits", shared_target().traits._replace(cheap_tokens=2))  # as with AVX2
    drafting: Any = on("cpu", "drafter", tree_size=12).drafting
    assert (drafting.beam_width, drafting.draft_length, drafting.tree_size) == (4, 3, 12)


def test_the_reason_says_what_was_given() -> None:
    trees = "drafter, W 3 L 3 N 12, a smaller tree, copies alone or plain, whatever is fastest while it runs"
    assert on("cpu", "drafter", max_num_seqs=2).reason == f"{trees}; nothing was measured (`drafter tune` measures)"
    assert on("cpu", "drafter", tree_size=6).reason == "drafter, W 4 L 3 N 6"
    few = on("cpu", "drafter", beam_width=2, draft_length=2, copying=False)
    assert few.reason == "drafter, W 2 L 2 N 5, no copies"


@pytest.mark.parametrize(
    ("models", "given", "refusal"),
    [
        (None, {"method": "lookup", "beam_width": 9}, "--beam-width 9 is for --method drafter, and --method"),
        (None, {"method": "none", "tree_size": 9}, "--tree-size 9 is for --method drafter and --method lookup"),
        (None, {"tuned": "t.json", "copying": False}, "--tuned t.json sizes the trees: leave --no-copying out"),
        (None, OF_NINE | {"tree_size": 10}, "--tree-size 10: .* --beam-width 2 and --draft-length 4 have at most 9"),
        (None, OF_NINE | {"tree_size": 3}, "--draft-length 4 is deeper than trees of"),
        (None, {"tree_size": 1}, "--tree-size is 1 but must be an integer from 2 to 1024 .--method none decodes"),
        (None, {"method": "magic"}, "--method is 'magic'"),
        ("drafter", {"tree_size": 26}, "--tree-size 26: .* at most 25 nodes"),
        ("", {"beam_width": 4}, "--beam-width 4 is for --method drafter, and --method lookup does not read it"),
        ("", {"tuned": "t.json"}, "--tuned t.json sizes the trees of a drafter: give --drafter"),
    ],
)
def test_contradictions_are_refused_before_a_model_is_loaded_where_no_model_is_needed(
    models: str | None, given: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(ValueError, match=refusal):
        EngineConfig(**given) if models is None else on("cpu", models, **given)


def test_compilation_needs_plain_weights_on_cuda() -> None:
    spread: Any = SimpleNamespace(**{**vars(CUDA), "traits": Traits("bfloat16")})
    for target in (spread, shared_target()):
        with pytest.raises(ValueError, match=f"one CUDA device: leave it out for '{target.name}'"):
            resolve(EngineConfig(compile=True), target)
        assert not resolve(None, target).compile


def test_a_command_refuses_a_method_without_its_model_before_it_loads_one() -> None:
    for more, refusal in (
        ({"method": "drafter"}, "--method drafter needs a drafter"),
        ({"method": "draft-model"}, "--method draft-model needs a draft model"),
        ({"drafter": "d", "draft_model": "m"}, "name one of them with --method"),
    ):
        with pytest.raises(ValueError, match=refusal):
            EngineOptions(target="no/such", **more)
    assert EngineOptions(target="smollm2-135m").drafter_used == "smollm2-135m"
    assert EngineOptions(target="smollm2-135m", drafter="none").drafter_used is None
    assert EngineOptions(target="smollm2-135m", method="lookup").drafter_used is None


def test_a_new_way_to_draft_is_one_file_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    section = page[page.index("**A proposer**") : page.index("One line of `METHODS`")]
    code = "".join(example.source for example in DocTestParser().get_examples(section))
    (tmp_path / "copy_text.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(METHODS, "copy", Way("copy_text:CopyDrafting", reads=("tree_size",)))
    engine = Engine(shared_target(), config=EngineConfig(method="copy", tree_size=4))
    assert engine.plan.reason == "copy, N 4"
    assert engine.proposer.num_nodes == 4
    with pytest.raises(ValueError, match="--copying.* is for --method drafter, and --method copy does not read it"):
        EngineConfig(method="copy", copying=True)
