"""Recorded ranks against real decodes: the same text with other trees takes as many forwards as foretold."""

from functools import cache

import pytest
import torch

from drafter.bench.ranks import Acceptance, Drafts, count_steps, draft_everywhere, num_kept, ranks_of
from drafter.decoding.params import SamplingParams
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.proposers.beam import BeamProposer
from tests.engine.drafters import prompts_for, shared_target, trained_drafter

PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True)
WIDEST, LONGEST = 16, 4


@cache
def answers() -> tuple[list[list[int]], list[list[int]]]:
    prompts = prompts_for(6, seed=11)
    engine = Engine(shared_target(), config=EngineConfig(method="autoregressive", max_rows=6))
    return prompts, [completion.token_ids for completion in engine.generate(prompts, PARAMS)]


def recorded(**settings: str) -> Acceptance:
    target, drafter = shared_target(), trained_drafter(**settings)
    search = BeamProposer(drafter, target, WIDEST, LONGEST)
    return Acceptance([draft_everywhere(target, search, *pair) for pair in zip(*answers(), strict=True)])


@pytest.mark.parametrize("settings", [{}, {"cell": "gru", "context": "fused"}, {"head": "tied", "context": "history"}])
def test_the_widest_search_foretells_real_decodes_exactly(settings: dict[str, str]) -> None:
    prompts, _ = answers()
    acceptance = recorded(**settings)
    seen = set()
    for length, size in ((4, 2), (4, 5), (1, 9), (3, 17), (4, 65)):
        config = EngineConfig(max_rows=6, beam_width=WIDEST, draft_length=length, tree_size=min(size, 1 + 16 * length))
        completions = Engine(shared_target(), trained_drafter(**settings), config).generate(prompts, PARAMS)
        forwards = sum(completion.num_target_forwards for completion in completions)
        foretold = acceptance.tokens_per_step(WIDEST, length, config.num_nodes)
        assert foretold == pytest.approx(6 * 40 / forwards), (length, size)
        seen.add(round(foretold, 3))
    assert len(seen) > 3 and max(seen) > 1.2, seen


def test_narrower_searches_are_foretold_closely_and_mostly_exactly() -> None:
    prompts, _ = answers()
    acceptance = recorded()
    ratios = []
    for width, length, size in ((1, 4, 5), (2, 4, 9), (3, 3, 8), (4, 4, 17), (8, 4, 24)):
        config = EngineConfig(max_rows=6, beam_width=width, draft_length=length, tree_size=size)
        completions = Engine(shared_target(), trained_drafter(), config).generate(prompts, PARAMS)
        real = 6 * 40 / sum(completion.num_target_forwards for completion in completions)
        foretold = acceptance.tokens_per_step(width, length, size)
        ratios.append(foretold / real)
    assert max(abs(ratio - 1) for ratio in ratios) < 0.03, ratios
    assert sum(abs(ratio - 1) < 1e-9 for ratio in ratios) >= 3, ratios


def test_the_documented_example() -> None:
    a, b, x, y = 10, 11, 12, 13
    drafts = Drafts(
        token_SLW=torch.tensor([[[a, b], [x, y]]]),
        parent_SLW=torch.tensor([[[0, 0], [1, 0]]]),
        score_SLW=torch.tensor([[[-1.0, -2.0], [-3.0, -4.0]]]),
        true_SL=torch.tensor([[b, x]]),
    )
    rank = ranks_of(drafts, 2)
    assert rank[0, 0].tolist() == [1, 1] and rank[0, 1, 1] == 2
    assert [int(num_kept(rank, 2, size)) for size in (1, 2, 3, 4, 5)] == [0, 0, 1, 2, 2]
    # A beam of one follows `a` and loses the text at once.
    assert [int(num_kept(ranks_of(drafts, 1), 2, size)) for size in (3, 5)] == [0, 0]
    left = drafts._replace(true_SL=torch.tensor([[a, y]]))
    assert int(num_kept(ranks_of(left, 1), 2, 3)) == 2  # `y` is the first under `a`


def test_steps_are_counted_as_a_decode_makes_them() -> None:
    assert count_steps([2, 0, 0, 1]) == 2
    assert count_steps([0, 0, 0]) == 3 and count_steps([9]) == 1 and count_steps([]) == 0


def test_plain_decoding_gives_one_token_per_step() -> None:
    assert recorded().tokens_per_step(4, 2, 1) == 1.0
