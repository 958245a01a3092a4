"""Prompt lookup: matches, continuations, shares of the votes, and answers equal to autoregressive decoding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.decoding.params import SamplingParams
from drafter.decoding.tree import depths_of
from drafter.engine.engine import Engine
from drafter.engine.request import RequestOptions
from drafter.engine.settings import Plan
from drafter.proposers import lookup
from drafter.proposers.lookup import LookupDrafting, LookupProposer, find_matches, follow_matches
from tests.engine.drafters import shared_target, trained_drafter
from tests.engine.oracle import assert_lossless, requests, rows_of, tiny_target
from tests.reference.lookup_loop import find_matches_loop, follow_loop, share_loop
from tests.reference.nodes import nodes_of, paths_of

TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=4)


def proposer_of(num_matches: int, length: int, num_nodes: int = 1024) -> LookupProposer:
    drafting = LookupDrafting(num_matches=num_matches, lookup_length=length, tree_size=num_nodes)
    return LookupProposer(drafting, torch.device("cpu"))


def test_worked_examples() -> None:
    history_BS = torch.tensor([[1, 2, 3, 1, 2, 4, 1, 2, 1, 2]])
    match_BW, size_BW = find_matches(history_BS, torch.tensor([7]), 4, 3)
    assert match_BW[0, :2].tolist() == [4, 1] and size_BW.tolist() == [[2, 2, 0]]

    history_BS = torch.tensor([[1, 2, 3, 1, 2, 3, 9, 9]])
    assert follow_matches(history_BS, torch.tensor([5]), torch.tensor([[2]]), 6).tolist() == [[[1, 2, 3, 1, 2, 3]]]


@settings(max_examples=150, deadline=None)
@given(texts=TEXTS, max_ngram=st.integers(1, 5), length=st.integers(1, 5))
def test_matches_and_continuations_equal_the_loop(texts: list[list[int]], max_ngram: int, length: int) -> None:
    rows = rows_of(texts, num_slots=26)
    match_BW, size_BW = find_matches(rows.history_BS, rows.length_B, max_ngram, 26)
    follow_BWL = follow_matches(rows.history_BS, rows.length_B, match_BW, length)
    for row, text in enumerate(texts):
        expected = find_matches_loop(text, max_ngram)
        found = [(int(n), int(i)) for n, i in zip(size_BW[row], match_BW[row], strict=True) if n > 0]
        assert found == expected
        for index, (_, end) in enumerate(expected):
            assert follow_BWL[row, index].tolist() == follow_loop(text, end, length)


@settings(max_examples=100, deadline=None)
@given(texts=TEXTS, num_matches=st.integers(1, 6), length=st.integers(1, 4))
def test_scores_equal_the_loop(texts: list[list[int]], num_matches: int, length: int) -> None:
    rows = rows_of(texts)
    proposer = proposer_of(num_matches, length)
    if (nodes := proposer.draft(rows, None)) is None:
        assert not any(find_matches_loop(text, 8) for text in texts)
        return
    depth_M = depths_of(proposer.level_sizes, torch.device("cpu"))
    for row, text in enumerate(texts):
        longest = {end: size for size, end in find_matches_loop(text, 32)}
        best = [(longest[end], end) for _, end in find_matches_loop(text, 8)[:num_matches]]
        proposals = [follow_loop(text, end, length) for _, end in best]
        lengths = [size for size, _ in best]
        columns = nodes.token_BM[row], nodes.parent_BM[row], depth_M, nodes.score_BM[row]
        scores = paths_of(nodes_of(text[-1], *columns))
        assert scores.keys() == {tuple(p[: d + 1]) for p in proposals for d in range(length)}
        for path, score in scores.items():
            share = share_loop(proposals, lengths, path, lookup._ODDS, lookup._WEIGHT_PER_TOKEN)
            assert score == pytest.approx(math.log(share), abs=1e-4)
            assert score <= lookup._most([size for size, _ in find_matches_loop(text, 8)][:num_matches]) + 1e-4


@pytest.mark.parametrize("numbers", [(4, 24, 8, 10), (3, 6, 1, 5), (8, 2, 4, 10), (4, 64, 8, 3)])
def test_oracle(numbers: tuple[int, ...]) -> None:
    names = ("max_num_seqs", "tree_size", "num_matches", "lookup_length")
    sizes: dict = dict(zip(names, numbers, strict=True))
    engine = Engine(tiny_target(), config=Plan.of("lookup", prefill_chunk=7, **sizes))
    assert assert_lossless(engine, requests()) >= 1.0


@pytest.mark.parametrize("method", ["lookup", "drafter"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 3}])
def test_a_prediction_saves_steps_and_changes_no_token(method: str, params: dict) -> None:
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True, **params)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    plain = Engine(shared_target(), config=Plan.of("none")).generate(prompts, sampling)
    changed = list(plain[0].token_ids)
    changed[20] += 1  # one change, in the middle
    engine = Engine(shared_target(), trained_drafter() if method == "drafter" else None, Plan.of(method, tree_size=24))
    alone = engine.generate(prompts, sampling)
    told = engine.generate(prompts, sampling, options=RequestOptions(prediction_ids=tuple(changed)))
    for one, other, third in zip(plain, alone, told, strict=True):
        assert one.token_ids == other.token_ids == third.token_ids
    assert told[0].num_target_forwards < alone[0].num_target_forwards
    drafted = sum(told[0].num_accepted)
    assert 0 < told[0].num_predicted <= min(drafted, 39) and alone[0].num_predicted == 0


def test_nodes_that_cost_more_than_they_bring_are_left_out() -> None:
    """A match of two tokens is followed while a node costs little; a match of one token is worth less."""
    proposer = proposer_of(num_matches=1, length=3, num_nodes=4)
    sizes, alone = {}, (rows_of([[1, 2, 3, 1, 2]]), rows_of([[1, 2, 3, 4, 2]]))
    for cost in (0.0, 0.3, 0.5, 1.0):
        proposer.expect_cost(cost)
        sizes[cost] = [proposer.propose(rows, None).token_BN.shape[1] for rows in alone]
    assert sizes == {0.0: [4, 4], 0.3: [3, 2], 0.5: [2, 1], 1.0: [1, 1]}
    copying, other = [1, 2, 3, 1, 2], [1, 2, 3, 4, 5]
    proposer.expect_cost(0.3)  # all four rows pay for a node
    for texts, num_nodes in (([copying, other, other, other], 1), ([copying, copying, other, other], 3)):
        assert proposer.propose(rows_of(texts), None).token_BN.shape[1] == num_nodes
