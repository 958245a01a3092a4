"""Proposers and steps in two forms, lists for a few rows on a CPU and tensors: the same nodes, trees and tokens."""

import math
import random
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.decoding import host
from drafter.decoding.host import NodeLists, read_nodes
from drafter.decoding.params import SamplingParams
from drafter.decoding.proposer import StepOutcome
from drafter.decoding.sampling import make_warp
from drafter.decoding.tree import Candidates, ancestors, concatenate, merge_equal
from drafter.decoding.verify import accept_picks
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.runner import _walk
from drafter.proposers.hybrid import HybridProposer
from drafter.proposers.lookup import LookupProposer
from drafter.proposers.options import Method
from drafter.proposers.parts import FollowerTable, HitRates
from drafter.proposers.recycling import RecyclingProposer
from drafter.proposers.table import PROPOSERS
from tests.decoding.test_merge import random_list
from tests.engine.drafters import shared_target, trained_drafter
from tests.engine.oracle import assert_lossless, requests, rows_of

CPU = torch.device("cpu")
TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4)


def paths(nodes: NodeLists) -> dict[tuple[int, ...], float]:
    """Path and score of every node."""
    found: list[tuple[int, ...]] = []
    for token, parent, depth in zip(nodes.tokens, nodes.parents, nodes.depths, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
        assert len(found[-1]) == depth
    assert len(set(found)) == len(found)
    return dict(zip(found, nodes.scores, strict=True))


def assert_same(lists: list[NodeLists], others: list[NodeLists]) -> None:
    for one, other in zip(lists, others, strict=True):
        assert paths(one) == pytest.approx(paths(other), abs=1e-4)


def kept_scores(tree: Candidates, row: int, scores: dict[tuple[int, ...], float]) -> list[float]:
    """Scores of the nodes of a packed tree, best first."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_BN[row, 1:].tolist(), tree.parent_BN[row, 1:].tolist(), strict=True):
        found.append(() if parent == len(found) else (*found[parent], token))  # padding is its own parent
    return sorted((scores[path] for path in found if path), reverse=True)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), num_lists=st.integers(1, 3), num_nodes=st.integers(1, 9))
def test_merged_and_packed_lists_equal_the_tensors(seed: int, num_lists: int, num_nodes: int) -> None:
    generator = random.Random(seed)
    lists = [merge_equal(random_list(generator, 2)) for _ in range(num_lists)]
    merged = merge_equal(concatenate(lists))
    rows = [host.merge(row) for row in zip(*map(read_nodes, lists), strict=True)]
    assert_same(rows, read_nodes(merged))
    tree = host.pack([5, 6], rows, num_nodes)
    expected = merged.pack(torch.tensor([5, 6]), min(num_nodes, 1 + merged.token_BM.shape[1]))
    for row, nodes in enumerate(rows):
        # Of equal scores either form may keep any.
        assert kept_scores(tree, row, paths(nodes)) == pytest.approx(kept_scores(expected, row, paths(nodes)), abs=1e-4)
    max_depth = len(merged.level_sizes)
    assert torch.equal(host.ancestors(tree.parent_BN.tolist()), ancestors(tree.parent_BN, max_depth))
    pick_BN = torch.randint(3, tree.token_BN.shape, generator=torch.Generator().manual_seed(seed))
    walked = _walk(tree, pick_BN, max_depth)
    accepted = accept_picks(tree, pick_BN, tree.ancestors(max_depth), max_depth)
    assert all(torch.equal(one, other) for one, other in zip(walked, accepted, strict=True))


@settings(max_examples=200, deadline=None)
@given(texts=TEXTS, num_matches=st.integers(1, 5), length=st.integers(1, 6), max_ngram=st.integers(1, 8))
def test_lookup(texts: list[list[int]], num_matches: int, length: int, max_ngram: int) -> None:
    proposer = LookupProposer(num_matches, length, max_ngram, CPU)
    rows = rows_of(texts)
    assert_same(proposer.draft_lists(rows, None), read_nodes(proposer.draft(rows, None)))


def outcome_of(tree: Candidates, max_depth: int, generator: torch.Generator) -> StepOutcome:
    """A verified step with random logits."""
    logits_BNV = torch.randn(*tree.token_BN.shape, 7, generator=generator)
    pick_BN = logits_BNV.argmax(2)
    return StepOutcome(tree, logits_BNV, pick_BN, *accept_picks(tree, pick_BN, tree.ancestors(max_depth), max_depth))


@pytest.mark.parametrize("seed", range(20))
def test_recycling_and_hybrid_draft_and_learn_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two memories go through the same steps, one in each form, and stay equal."""
    rows_generator = random.Random(seed)
    hybrids = []
    for _ in range(2):
        table = FollowerTable(7, 3, CPU)
        parts = [LookupProposer(2, 3, 4, CPU), RecyclingProposer(table, 9, 3)]
        hybrids.append(HybridProposer(parts, 8, CPU, HitRates(32, CPU)))
        hybrids[-1].reserve(3, 64)
    for step in range(6):
        rows = rows_of([[rows_generator.randrange(7) for _ in range(rows_generator.randint(1, 30))] for _ in range(3)])
        rows = rows._replace(is_active_B=torch.tensor([True, rows_generator.random() < 0.7, True]))
        trees = []
        for few, hybrid in zip((8, 0), hybrids, strict=True):
            monkeypatch.setattr(host, "FEW_ROWS", few)
            trees.append(hybrid.propose(rows, None))
        # Both observe the same tree, because equal scores may come in either order.
        outcome = outcome_of(trees[0], hybrids[0].max_depth, torch.Generator().manual_seed(step))
        for few, hybrid in zip((8, 0), hybrids, strict=True):
            monkeypatch.setattr(host, "FEW_ROWS", few)
            hybrid.observe(rows, outcome)
        assert torch.equal(*(hybrid.parts[1].table.token_VK[:-1] for hybrid in hybrids))  # type: ignore[attr-defined]
        rates, other = (hybrid._rates for hybrid in hybrids)
        assert torch.allclose(rates.hits_BC, other.hits_BC) and torch.allclose(rates.expected_BC, other.expected_BC)
        assert torch.allclose(rates.factor(3), other.factor(3))
        for hybrid in hybrids:
            lists = hybrid.draft_lists(rows, None), read_nodes(hybrid.draft(rows, None))
            assert_same(*lists)
            assert all(score > -math.inf for row in lists[0] for score in row.scores)
        assert torch.equal(trees[0].is_node_BN.sum(1), trees[1].is_node_BN.sum(1))


def test_the_table_has_a_line_for_every_method() -> None:
    assert set(PROPOSERS) == set(get_args(Method))


def test_sampled_rows_take_the_tensor_form_of_recycling() -> None:
    table = FollowerTable(7, 3, CPU)
    yes = torch.ones(1, 1, dtype=torch.bool)
    table.update(torch.tensor([[1]]), torch.tensor([[[0.0, 0.0, 3.0, 2.0, 1.0, -9.0, -9.0]]]), yes, yes)
    proposer = RecyclingProposer(table, 3, 1)
    rows = rows_of([[1]])._replace(warp=make_warp([SamplingParams(temperature=1.0)]))
    noise_BLV = torch.zeros(1, 2, 7)
    noise_BLV[:, 0, 4] = 5.0
    assert proposer.draft_lists(rows, noise_BLV)[0].tokens[0] == 4
    assert proposer.draft_lists(rows_of([[1]]), None)[0].tokens[0] == 2


@pytest.mark.parametrize("few", [8, 2, 0])
@pytest.mark.parametrize("method", ["autoregressive", "redrafter", "lookup", "recycling", "hybrid"])
def test_oracle(method: Method, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled rows: lists, tensors, and steps that change between the two."""
    monkeypatch.setattr(host, "FEW_ROWS", few)
    config = EngineConfig(method=method, max_rows=4, beam_width=3, draft_length=3, prefill_chunk=7)
    drafter = trained_drafter() if method in ("redrafter", "hybrid") else None
    rate = assert_lossless(Engine(shared_target(), drafter, config), requests(7))
    assert rate == 1.0 if method == "autoregressive" else rate > 1.0
