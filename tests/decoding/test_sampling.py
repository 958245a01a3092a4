"""Warpers and the pick against loop twins and transformers; keyed noise, whose quality has fixed thresholds."""

import itertools
import math
from functools import partial

import pytest
import torch
from scipy import stats
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from drafter.decoding import sampling
from drafter.decoding.params import SamplingParams
from drafter.decoding.sampling import Noise, gumbel_noise, make_warp, mix64, pick, pick_nodes, random_bits, warp_logits
from drafter.kernels import native
from tests.reference import hashing, warpers

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


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45, 5e-324])
def test_temperatures_whose_logits_would_overflow_are_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1)
    warp, logits_BNV = make_warp([params]), torch.tensor([[[1.0, 900.0, 899.0]]])
    noise_BNV = gumbel_noise(torch.tensor([1]), torch.tensor([[1]]), torch.arange(3)) if warp.has_noise else None
    assert pick(logits_BNV, noise_BNV, warp).item() == 1 and params.temperature == 0.0


GAMMA = hashing.GAMMA - hashing.WORD
ALPHA = 1e-6


def uniforms_BTM(seeds, positions, num_tokens, stream=0):
    bits = random_bits(torch.tensor(seeds), torch.tensor(positions), torch.arange(num_tokens), stream=stream)
    return sampling._uniform(bits)


def test_mix64_is_the_published_generator():
    # First outputs of SplitMix64 from state 1234567, as its authors' reference implementation prints them.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [hashing.mix64((1234567 + i * hashing.GAMMA) % hashing.WORD) for i in range(1, 5)] == published
    state = 1234567 + torch.arange(1, 5) * torch.tensor(GAMMA)
    assert [word % hashing.WORD for word in mix64(state).tolist()] == published


def test_bits_and_noise_equal_the_python_twin():
    seeds = [0, 1, -1, 2**63 - 1, -(2**63)]
    positions = [0, 1, 131071]
    tokens = [0, 1, 5, 49151, 262143]
    for stream in range(4):
        args = torch.tensor(seeds), torch.tensor([positions] * len(seeds)), torch.tensor(tokens)
        words = random_bits(*args, stream=stream).flatten().tolist()
        noise = gumbel_noise(*args, stream=stream).flatten().tolist()
        for key, word, number in zip(itertools.product(seeds, positions, tokens), words, noise, strict=True):
            assert word % hashing.WORD == hashing.random_word(*key, stream)
            assert number == pytest.approx(hashing.gumbel(*key, stream), rel=1e-6, abs=1e-6)


def test_extreme_words_give_finite_noise():
    uniform = sampling._uniform(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert uniform.tolist() == [2.0**-53, 1 - 2.0**-53, 0.5 - 2.0**-53, 0.5 + 2.0**-53]
    noise = -(-uniform.log()).log()
    assert noise.isfinite().all() and noise.min() > -3.7 and noise.max() < 36.8


PAIRS = {
    "neighbouring tokens": ((0, 0, 0), (0, 0, 1)),
    "neighbouring positions": ((0, 0, 0), (0, 1, 0)),
    "neighbouring seeds": ((0, 0, 0), (1, 0, 0)),
    "next token of the position before": ((0, 1, 0), (0, 0, 1)),
    "next seed, position before": ((0, 1, 0), (1, 0, 0)),
    "far tokens": ((0, 0, 0), (0, 0, 32)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_independent(name):
    """Chi-square of pairs in a 16 x 16 table, over 2^17 keys; each pair of keys differs in what the name says."""
    grid = uniforms_BTM(list(range(33)), [list(range(65))] * 33, 33 + 62)
    (seed_0, position_0, token_0), (seed_1, position_1, token_1) = PAIRS[name]
    first = grid[seed_0 : seed_0 + 32, position_0 : position_0 + 64, token_0 : token_0 + 62]
    second = grid[seed_1 : seed_1 + 32, position_1 : position_1 + 64, token_1 : token_1 + 62]
    cell = ((first * 16).long() * 16 + (second * 16).long()).flatten()
    assert stats.chisquare(torch.bincount(cell, minlength=256).numpy()).pvalue > ALPHA
    correlation = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(cell.numel())


FILTERED = [
    SamplingParams(temperature=1.0, top_p=0.95),
    SamplingParams(temperature=0.05, top_k=7, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=9.0, top_p=0.999, min_p=1e-6),
]


@pytest.mark.skipif(native.library() is None, reason="needs the native library")
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_native_loops_equal_their_twins(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    """Noise of all and of listed tokens, and picks with and without filters, ties, -inf and greedy rows."""
    seed_B, position_BN = torch.tensor([5, -6, 2**62]), torch.tensor([[10, 11], [0, 2**31], [3, 3]])
    params = [SamplingParams(temperature=t, **more) for t, more in ((0.7, {}), (0.0, {}), (1.5, {"top_k": 50}))]
    for num_tokens in (3, 257, 8193, 49152):
        logits_BNV = torch.randn(3, 2, num_tokens, generator=torch.Generator().manual_seed(num_tokens)).mul(8).round()
        logits_BNV[:, :, 1] = -torch.inf
        lists = torch.arange(num_tokens), torch.randint(num_tokens, (3, 1, 7))
        warps = [make_warp(each) for each in ([params[0], params[1], params[0]], FILTERED, params)]
        noise = Noise(seed_B, torch.tensor([4, 0, 2**31]))
        depth_BN = torch.tensor([[0, 1], [0, 2], [1, 1]])

        def results() -> list[torch.Tensor]:
            return [
                *(gumbel_noise(seed_B, position_BN, ids) for ids in lists),  # noqa: B023
                *(pick_nodes(logits_BNV, depth_BN, noise, warp) for warp in warps),  # noqa: B023
            ]

        native.set_num_threads(num_threads)
        try:
            found = results()
        finally:
            native.set_num_threads(1)
        with monkeypatch.context() as patch:
            patch.setattr(sampling.native, "takes", lambda *_: False)
            expected = results()
        for mine, theirs in zip(found[:2], expected[:2], strict=True):
            assert (mine != theirs).float().mean() < 1e-4
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        assert all(map(torch.equal, found[2:], expected[2:]))
        last = Noise(seed_B[2:], noise.length_B[2:])
        alone = pick_nodes(logits_BNV[2:, 1:], depth_BN[2:, 1:], last, make_warp(params[2:]))
        assert torch.equal(alone, found[-1][2:, 1:]), "a node alone has the pick that the node has among others"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_has_the_same_bits():
    args = torch.tensor([5, -6]), torch.tensor([[10, 11], [0, 2**31]]), torch.arange(49152)
    on_gpu = [a.cuda() for a in args]
    assert torch.equal(random_bits(*on_gpu).cpu(), random_bits(*args))
    assert torch.equal(sampling._uniform(random_bits(*on_gpu)).cpu(), sampling._uniform(random_bits(*args)))
    difference = (gumbel_noise(*on_gpu).cpu() - gumbel_noise(*args)).abs()
    assert (difference > 0).float().mean() < 1e-6 and difference.max() < 1e-5
