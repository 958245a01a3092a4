"""Recorded ranks of the hybrid against real decodes of its sizes, and what the recording leaves alone."""

from functools import cache

import pytest
import torch

from drafter.bench.hybrid_ranks import HybridAcceptance, Recorder, Recording, ranks_along, record_hybrids
from drafter.bench.ranks import UNREACHED
from drafter.bench.steptime import Budget
from drafter.decoding.params import SamplingParams
from drafter.decoding.tree import NodeList
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.proposers.hybrid import HybridProposer
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.engine.oracle import assert_lossless, requests

PROMPTS = prompts_for(12, seed=11)
NUM_TOKENS = 40
SHAPES = [(2, 2), (4, 3)]


@cache
def recorded() -> HybridAcceptance:
    recording = Recording(SHAPES, largest=16, num_verified=12, max_new_tokens=NUM_TOKENS, num_rows=6)
    return record_hybrids(shared_target(), trained_drafter(), PROMPTS, recording, Budget(60), lambda: None)


@pytest.mark.parametrize(("width", "length", "size"), [(2, 2, 4), (2, 2, 8), (4, 3, 4), (4, 3, 8), (4, 3, 16)])
def test_real_decodes_are_foretold(width: int, length: int, size: int) -> None:
    config = EngineConfig(method="hybrid", max_rows=6, beam_width=width, draft_length=length, tree_size=size)
    params = SamplingParams(max_new_tokens=NUM_TOKENS)
    engine = Engine(shared_target(), trained_drafter(), config)
    completions = [done for part in (PROMPTS[:6], PROMPTS[6:]) for done in engine.generate(part, params)]
    real = sum(len(done.token_ids) for done in completions) / sum(done.num_target_forwards for done in completions)
    assert recorded().tokens_per_step(width, length, size) == pytest.approx(real, rel=0.05)


def test_larger_trees_keep_more_and_none_keeps_nothing() -> None:
    acceptance = recorded()
    kept = [acceptance.tokens_per_step(4, 3, size) for size in (1, 2, 4, 8, 16, 200)]
    assert kept == sorted(kept) and kept[0] == 1.0 and kept[1] < kept[-2]
    assert acceptance.num_positions == 12 * NUM_TOKENS


def test_a_spent_budget_leaves_one_batch() -> None:
    answered: list[int] = []
    recording = Recording(SHAPES[:1], largest=4, num_verified=4, max_new_tokens=3, num_rows=4)
    found = record_hybrids(
        shared_target(), trained_drafter(), PROMPTS, recording, Budget(0.0), lambda: answered.append(1)
    )
    assert len(answered) == 4 and found.num_positions == 12


def test_recording_goes_on_by_one_token_and_changes_none() -> None:
    engine = Engine(shared_target(), trained_drafter(), EngineConfig(method="hybrid", max_rows=3, tree_size=8))
    assert isinstance(engine.proposer, HybridProposer)
    engine.proposer = recorder = Recorder({(8, 4): engine.proposer}, 8)
    asked = requests(7, seed=4, temperatures=(0.0,))  # rows end at different times, so that others move
    assert assert_lossless(engine, asked) == 1.0
    assert [len(log) for log in recorder.logs] == [params.max_new_tokens for _, params in asked]


def test_the_documented_example() -> None:
    a, b, x = 10, 11, 12
    nodes = NodeList(
        token_BM=torch.tensor([[a, b, x, 0]] * 2),
        parent_BM=torch.tensor([[-1, -1, 1, 0]] * 2),
        score_BM=torch.tensor([[-1.0, -2.0, -3.0, -torch.inf]] * 2),
        level_sizes=(2, 2),
    )
    ranks = ranks_along(nodes, torch.tensor([[b, x], [a, x]]))
    assert ranks.tolist() == [[1, 2], [0, UNREACHED]]
    # A place without a node is never right, whatever stands in it.
    assert ranks_along(nodes, torch.tensor([[a, 0]] * 2))[0].tolist() == [0, UNREACHED]
    # Of equal scores the first of the list goes first.
    equal = nodes._replace(score_BM=torch.full((2, 4), -1.0))
    assert ranks_along(equal, torch.tensor([[b, x]] * 2))[0].tolist() == [1, 2]
