"""Warpers and the pick: against loop twins, and against transformers' own warpers."""

import math
from functools import partial

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from drafter.decoding import sampling
from drafter.decoding.params import SamplingParams
from drafter.decoding.sampling import Noise, gumbel_noise, make_warp, pick, pick_nodes, warp_logits
from tests.reference import warpers

MINUS_INF = -math.inf
Params = partial(SamplingParams, temperature=1.0)

MIXED = [
    Params(temperature=0.0),
    Params(temperature=1.0),
    Params(temperature=0.7, top_k=5),
    Params(temperature=1.3, top_p=0.9),
    Params(temperature=1.0, min_p=0.1),
    Params(temperature=0.6, top_k=20, top_p=0.8, min_p=0.02),
    Params(temperature=2.0, top_k=1),
    Params(temperature=0.0, top_k=3, top_p=0.1, min_p=0.5),
    Params(temperature=1.0, top_k=10_000, top_p=1e-6),
    Params(temperature=0.01, top_p=0.999),
]


def random_logits(*shape, seed=0, scale=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def finite_logit_tokens(warped):
    return (warped > MINUS_INF).nonzero().flatten().tolist()


def test_worked_example():
    """Probabilities 0.5, 0.3, 0.15, 0.05 at temperature 1."""
    logits_BNV = torch.tensor([[[0.5, 0.15, 0.3, 0.05]]]).log()
    kept = {
        Params(): [0, 1, 2, 3],
        Params(top_k=2): [0, 2],
        Params(top_p=0.5): [0],
        Params(top_p=0.51): [0, 2],
        Params(top_p=0.81): [0, 1, 2],
        Params(min_p=0.2): [0, 1, 2],
        Params(top_k=3, top_p=0.85): [0, 1, 2],  # 0.8 of the 0.95 that top-k leaves falls short of 0.85
        Params(top_k=2, min_p=0.7): [0],
    }
    for params, tokens in kept.items():
        warped = warp_logits(logits_BNV, make_warp([params]))[0, 0]
        assert finite_logit_tokens(warped) == tokens, params
        assert torch.equal(warped[tokens], logits_BNV[0, 0, tokens])
    equal_BNV = torch.tensor([[[2.0, 1.0, 1.0, 1.0, 0.0]]])  # equal logits are kept or dropped together
    for params in [Params(top_k=2), Params(top_p=0.6), Params(min_p=0.3)]:
        assert finite_logit_tokens(warp_logits(equal_BNV, make_warp([params]))[0, 0]) == [0, 1, 2, 3]


def test_rows_with_a_filter_that_no_kernel_knows_are_picked_here(monkeypatch):
    logits_BNV, seed_B = random_logits(len(MIXED), 3, 601), torch.arange(len(MIXED))
    depth_BN, noise = torch.arange(3).expand(len(MIXED), -1), Noise(seed_B, seed_B * 7)
    expected_BN = pick_nodes(logits_BNV, depth_BN, noise, make_warp(MIXED))
    monkeypatch.setattr(sampling, "_KERNEL_FILTERS", ("top_k", "top_p"))
    monkeypatch.delattr(sampling.native, "pick")
    assert torch.equal(pick_nodes(logits_BNV, depth_BN, noise, make_warp(MIXED)), expected_BN)


@pytest.mark.parametrize("num_tokens", [2, 50, 601])
def test_warp_and_pick_equal_the_loop_twins(num_tokens):
    num_nodes = 4
    logits_BNV = random_logits(len(MIXED), num_nodes, num_tokens, seed=num_tokens)
    seed_B = torch.arange(len(MIXED))
    noise_BNV = gumbel_noise(seed_B, torch.arange(num_nodes).expand(len(MIXED), -1), torch.arange(num_tokens))
    warp = make_warp(MIXED)
    warped_BNV = warp_logits(logits_BNV, warp)
    pick_BN = pick(logits_BNV, noise_BNV, warp)
    for b, params in enumerate(MIXED):
        fields = (params.temperature, params.top_k, params.top_p, params.min_p)
        for n in range(num_nodes):
            logits = logits_BNV[b, n].tolist()
            expected = warpers.warp(logits, *fields)
            assert finite_logit_tokens(warped_BNV[b, n]) == finite_logit_tokens(torch.tensor(expected)), params
            torch.testing.assert_close(warped_BNV[b, n], torch.tensor(expected), rtol=1e-5, atol=1e-6)
            assert pick_BN[b, n].item() == warpers.pick(logits, noise_BNV[b, n].tolist(), *fields)


@pytest.mark.parametrize("params", MIXED[1:6])
def test_same_as_transformers(params):
    """The warpers that `generate` applies, in its order; no token lies within 1e-5 of the edge of the nucleus."""
    logits_BNV = random_logits(1, 16, 400, seed=2)
    expected = TemperatureLogitsWarper(params.temperature)(None, logits_BNV[0])
    if params.top_k:
        expected = TopKLogitsWarper(params.top_k)(None, expected)
    if params.top_p < 1:
        expected = TopPLogitsWarper(params.top_p)(None, expected)
    if params.min_p > 0:
        expected = MinPLogitsWarper(params.min_p)(None, expected)
    torch.testing.assert_close(warp_logits(logits_BNV, make_warp([params]))[0], expected)


def test_rows_do_not_depend_on_the_batch():
    """Alone, a row has its own flags (no filter of the neighbours runs); the result is the same, bit for bit."""
    logits_BNV = random_logits(len(MIXED), 5, 700, seed=3)
    noise_BNV = gumbel_noise(torch.arange(len(MIXED)), torch.arange(5).expand(len(MIXED), -1), torch.arange(700))
    warp = make_warp(MIXED)
    warped_BNV, pick_BN = warp_logits(logits_BNV, warp), pick(logits_BNV, noise_BNV, warp)
    for b, params in enumerate(MIXED):
        alone, row = make_warp([params]), slice(b, b + 1)
        assert torch.equal(warp_logits(logits_BNV[row], alone), warped_BNV[row])
        for node in (slice(None), *(slice(n, n + 1) for n in range(5))):
            noise = noise_BNV[row, node] if alone.has_noise else None
            assert torch.equal(pick(logits_BNV[row, node], noise, alone), pick_BN[row, node])


def test_greedy_takes_the_lowest_of_equal_logits():
    logits_BNV = torch.tensor([[[0.0, 5.0, 5.0]]])
    assert pick(logits_BNV, None, make_warp([Params(temperature=0.0)])).item() == 1
    noise_BNV = torch.tensor([[[0.0, -1.0, 9.0]]])
    both = pick(logits_BNV.expand(2, 1, 3), noise_BNV, make_warp([Params(temperature=0.0), Params(temperature=1.0)]))
    assert both.tolist() == [[1], [2]]


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45, 5e-324])
def test_temperatures_whose_logits_would_overflow_are_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1)
    warp, logits_BNV = make_warp([params]), torch.tensor([[[1.0, 900.0, 899.0]]])
    noise_BNV = gumbel_noise(torch.tensor([1]), torch.tensor([[1]]), torch.arange(3)) if warp.has_noise else None
    assert pick(logits_BNV, noise_BNV, warp).item() == 1 and params.temperature == 0.0
