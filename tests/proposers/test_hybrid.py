"""The hybrid: lossless, learning from its hits, and no worse than its parts; beam search with copies for a drafter."""

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.decoding.tree import NodeList, conditional, cumulative
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers.beam import BeamProposer
from drafter.proposers.options import Method
from drafter.proposers.parts import HitRates
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.engine.oracle import assert_lossless, requests

NO_EOS = SamplingParams(max_new_tokens=30, ignore_eos=True)


def new_engine(method: Method = "hybrid", drafter: RecurrentDrafter | None = None, **settings: int) -> Engine:
    fields: dict[str, int] = {"beam_width": 4, "draft_length": 4, "tree_size": 10, "max_rows": 3}
    config = EngineConfig(method=method, **(fields | settings))  # type: ignore[arg-type]
    return Engine(shared_target(), drafter, config)


@pytest.mark.parametrize(("rows", "size"), [(1, 10), (3, 10), (4, 24), (3, 2)])
def test_any_tree_gives_the_oracles_tokens(rows: int, size: int) -> None:
    engine = new_engine(max_rows=rows, tree_size=size)
    known = [(prompt, NO_EOS) for prompt in prompts_for(3, seed=100)]
    assert_lossless(engine, [*known, *requests(8, seed=rows)])


def test_no_fewer_tokens_per_step_than_the_best_of_its_parts() -> None:
    asked = [(prompt, NO_EOS) for prompt in prompts_for(12, seed=100)]
    methods: tuple[Method, ...] = ("lookup", "recycling")
    best = max(assert_lossless(new_engine(method), asked) for method in methods)
    assert assert_lossless(new_engine(), asked) >= 0.98 * best


def test_with_a_drafter_a_hybrid_is_beam_search_with_copies() -> None:
    engine = new_engine(drafter=trained_drafter())
    assert isinstance(engine.proposer, BeamProposer)
    asked = [(prompt, NO_EOS) for prompt in prompts_for(12, seed=100)]
    others = [new_engine("lookup"), new_engine("redrafter", trained_drafter(), copying=False)]
    assert assert_lossless(engine, asked) >= 0.95 * max(assert_lossless(other, asked) for other in others)


def test_rows_that_are_too_many_decode_plainly_and_are_learnt_from() -> None:
    engine = new_engine(max_drafted_rows=1)
    asked = [(prompt, NO_EOS) for prompt in prompts_for(3, seed=100, sizes=(5,))]  # equally long: never alone
    assert assert_lossless(engine, asked) == 1.0
    table = engine.proposer.parts[-1].table  # type: ignore[attr-defined]
    assert (table.logit_VK[:-1, 0] > -torch.inf).sum() > 3
    assert assert_lossless(engine, asked[:1]) > 1.0


@pytest.mark.parametrize("method", ["hybrid", "recycling"])
def test_an_engine_forgets_what_it_learned(method: Method) -> None:
    engine = new_engine(method)
    prompts = prompts_for(4, seed=100)

    def num_steps() -> list[int]:
        return [item.num_target_forwards for item in engine.generate(prompts, NO_EOS)]

    first = num_steps()
    assert num_steps() != first  # of the same texts
    engine.forget()
    assert num_steps() == first


def test_factors_follow_hits() -> None:
    """Class 0 is right twice as often as expected, class 1 never; a row without a record takes over from all rows."""
    rates = HitRates(2, torch.device("cpu"))
    rates.reserve(2)
    class_BM = torch.tensor([[0, 1]])
    expected_BM = torch.tensor([[0.5, 0.5]])
    for _ in range(100):
        rates.observe(class_BM, expected_BM, torch.tensor([[True, False]]), torch.ones(1, 2, dtype=torch.bool))
    own_C, other_C = rates.factor(2)
    assert own_C[0] > 1.6 and own_C[1] < 0.3
    assert 1.0 < other_C[0] < 2.0 and other_C[1] < 0.2
    rates.move(0, 1)
    assert torch.equal(rates.factor(2)[1], own_C)


def test_conditional_and_cumulative_undo_each_other() -> None:
    """Two children of the root, then a child of the second and an empty place."""
    score_BM = torch.tensor([[-0.5, -1.0, -1.75, -torch.inf]])
    nodes = NodeList(torch.tensor([[5, 6, 7, 0]]), torch.tensor([[-1, -1, 1, 0]]), score_BM, (2, 2))
    probability_BM = conditional(nodes)
    assert torch.allclose(probability_BM, torch.tensor([[-0.5, -1.0, -0.75, -torch.inf]]).exp())
    assert torch.allclose(cumulative(nodes, probability_BM.log()), score_BM)
