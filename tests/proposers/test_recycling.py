"""Token recycling: the template, the table, the tree, and answers equal to autoregressive decoding."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.decoding import host
from drafter.decoding.params import SamplingParams
from drafter.decoding.sampling import make_warp
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.proposers.parts import FollowerTable
from drafter.proposers.recycling import (
    _STORED_WEIGHT,
    RANK_RATES,
    RecyclingProposer,
    best_template,
)
from tests.decoding.test_merge import assert_tree
from tests.engine.oracle import answer, assert_lossless, requests, rows_of, tiny_target
from tests.reference.merge_loop import paths_of
from tests.reference.recycling_loop import Followers, best_expectation, draft_loop, observe_loop

CPU = torch.device("cpu")


def table_of(followers: dict[int, list[int]], vocab_size: int = 8, num_followers: int = 3) -> FollowerTable:
    """A table that was shown, for each token, followers with logits 3, 2, 1."""
    table = FollowerTable(vocab_size, num_followers, CPU)
    tokens = torch.tensor([list(followers)])
    logits = torch.full((1, len(followers), vocab_size), -9.0)
    for index, ranked in enumerate(followers.values()):
        logits[0, index, ranked] = torch.arange(len(ranked), 0, -1).float()
    yes = torch.ones_like(tokens, dtype=torch.bool)
    table.update(tokens, logits, yes, yes)
    return table


def test_template_example() -> None:
    template = best_template(4, 6, (0.6, 0.3))
    assert template.ranks == ((0, 1), (0,), (0,))
    assert template.parents == ((0, 0), (0,), (0,))


@given(
    num_nodes=st.integers(1, 12),
    max_depth=st.integers(1, 4),
    rates=st.lists(st.floats(0.05, 0.9), min_size=1, max_size=3, unique=True),
)
@settings(max_examples=100, deadline=None)
def test_template_is_the_best_tree(num_nodes: int, max_depth: int, rates: list[float]) -> None:
    rates = sorted(rates, reverse=True)
    template = best_template(num_nodes, max_depth, rates)
    above = [1.0]
    total, num_made = 0.0, 0
    for parents, ranks in zip(template.parents, template.ranks, strict=True):
        assert len(set(zip(parents, ranks, strict=True))) == len(ranks)
        above = [above[parent] * rates[rank] for parent, rank in zip(parents, ranks, strict=True)]
        total += sum(above)
        num_made += len(above)
    assert num_made == min(num_nodes, sum(len(rates) ** (depth + 1) for depth in range(max_depth)))
    assert total == pytest.approx(best_expectation(num_nodes, max_depth, rates))


@given(seed=st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_table_and_tree_equal_the_loop(seed: int) -> None:
    """Several updates full of duplicates, padding and vain drafts; then the drafts of every token."""
    generator = random.Random(seed)
    torch_generator = torch.Generator().manual_seed(seed)
    vocab_size, num_followers, shape = 7, 3, (2, 4)
    table = FollowerTable(vocab_size, num_followers, CPU)
    twin: dict[int, Followers] = {}
    for _ in range(generator.randint(1, 3)):
        token_BN = torch.randint(5, shape, generator=torch_generator)
        logits_BNV = torch.randn(*shape, vocab_size, generator=torch_generator)
        known_BN, certain_BN = (torch.rand(shape, generator=torch_generator) < 0.6 for _ in range(2))
        table.update(token_BN, logits_BNV, known_BN, certain_BN)
        observe_loop(
            twin,
            token_BN.flatten().tolist(),
            logits_BNV.flatten(0, 1).tolist(),
            known_BN.flatten().tolist(),
            certain_BN.flatten().tolist(),
            num_followers,
        )
    proposer = RecyclingProposer(table, 9, 3, 6)
    template = best_template(9, 3, RANK_RATES[:num_followers])
    rows = rows_of([[token] for token in range(vocab_size)])
    nodes = proposer.draft(rows, None)
    tree = proposer.propose(rows, None)
    assert_tree(tree)
    for row in range(vocab_size):
        expected = draft_loop(twin, row, template.parents, template.ranks, RANK_RATES, _STORED_WEIGHT)
        found = paths_of(nodes.token_BM[row].tolist(), nodes.parent_BM[row].tolist(), nodes.score_BM[row].tolist())
        assert {node.path: pytest.approx(node.score, abs=1e-4) for node in found} == expected
        assert int(tree.is_node_BN[row].sum()) == 1 + min(5, len(expected))


def test_tokens_never_seen_are_padding() -> None:
    proposer = RecyclingProposer(table_of({1: [2, 3, 4]}), 8, 3, 5)
    tree = proposer.propose(rows_of([[5], [1]]), None)
    assert tree.is_node_BN.tolist() == [[True, False, False, False, False], [True, True, True, True, False]]
    assert tree.token_BN[1, 1:4].tolist() == [2, 3, 4]


def test_followers_are_ranked_with_the_noise() -> None:
    """At temperature 1 noise of +2 lifts the third follower (logit 1) over the first (logit 3 - 1)."""
    proposer = RecyclingProposer(table_of({1: [2, 3, 4]}), 3, 1)
    rows = rows_of([[1], [1]])
    rows = rows._replace(warp=make_warp([SamplingParams(temperature=1.0), SamplingParams()]))
    noise_BLV = torch.zeros(2, 2, 8)
    noise_BLV[:, 0, 2], noise_BLV[:, 0, 4] = -1.0, 2.0
    nodes = proposer.draft(rows, noise_BLV)
    assert nodes.token_BM.tolist() == [[4, 2, 3], [2, 3, 4]]  # the greedy row does not look at noise
    uncoupled = RecyclingProposer(proposer.table, 3, 1, coupled=False).draft(rows, noise_BLV)
    assert uncoupled.token_BM.tolist() == [[2, 3, 4], [2, 3, 4]]


def test_filtered_followers_come_last() -> None:
    proposer = RecyclingProposer(table_of({1: [2, 3, 4]}), 3, 1)
    rows = rows_of([[1]])._replace(warp=make_warp([SamplingParams(temperature=1.0, top_k=1)]))
    noise_BLV = torch.zeros(1, 2, 8)
    noise_BLV[:, 0, 4] = 9.0
    nodes = proposer.draft(rows, noise_BLV)
    assert nodes.token_BM[0, 0] == 2 and nodes.score_BM[0, 1:].max() < -5


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize(("max_rows", "tree_size"), [(1, 24), (3, 7), (8, 64), (4, 2)])
def test_oracle(max_rows: int, tree_size: int, coupled: bool) -> None:
    config = EngineConfig(method="recycling", max_rows=max_rows, tree_size=tree_size, coupled=coupled, prefill_chunk=7)
    engine = Engine(tiny_target(), config=config)
    assert assert_lossless(engine, requests()) >= 1.0


def test_a_warm_table_drafts_better_and_changes_nothing() -> None:
    target = tiny_target()
    asked = requests()
    engine = Engine(target, config=EngineConfig(method="recycling", max_rows=4))
    cold = assert_lossless(engine, asked)
    warm = assert_lossless(engine, asked)
    assert warm > cold > 1.0


def test_idle_rows_teach_nothing() -> None:
    """A row still in prefill, and padding of the batch, must not write: what the target says there is garbage."""
    target = tiny_target()
    engine = Engine(target, config=EngineConfig(method="recycling", max_rows=4, prefill_chunk=2))
    asked = [((1,), SamplingParams(max_new_tokens=6)), (tuple(range(20)), SamplingParams(max_new_tokens=1))]
    answer(engine, asked[:1])
    alone = engine.proposer.table.token_VK.clone()  # type: ignore[attr-defined]
    other = Engine(target, config=engine.config)
    sequences = [other.add(list(prompt), params) for prompt, params in asked]
    while not sequences[0].is_finished:
        other.step()
    assert not sequences[1].is_prefilled
    written = other.proposer.table.token_VK  # type: ignore[attr-defined]
    assert torch.equal(written[:-1], alone[:-1])


@pytest.mark.parametrize("few", [8, 0])
def test_plain_steps_of_many_rows_teach_some_rows_in_turn(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "FEW_ROWS", few)
    config = EngineConfig(method="recycling", max_rows=6, max_drafted_rows=1, tree_size=8)
    engine = Engine(tiny_target(), config=config)
    asked = [(prompt, SamplingParams(max_new_tokens=4, ignore_eos=True)) for prompt in ([3 + i] for i in range(6))]
    taught: list[list[int]] = []
    table = engine.proposer.table  # type: ignore[attr-defined]
    update = table.update_few if few else table.update

    def note(tokens: Any, *rest: Any) -> None:
        taught.append([int(row[0]) for row in tokens])
        update(tokens, *rest)

    monkeypatch.setattr(table, "update_few" if few else "update", note)
    assert assert_lossless(engine, asked) == 1.0
    assert taught[0] == [3, 4, 5, 6]
    assert [len(tokens) for tokens in taught] == [4, 2, 4, 4]
