"""The kernels of noise, filters and pick equal the functions that define them: in Triton's interpreter, or on a GPU."""

import os

import pytest
import torch

from drafter.decoding import sampling
from drafter.decoding.params import SamplingParams
from drafter.decoding.sampling import Noise, gumbel_noise, make_warp, pick, pick_nodes, warp_logits
from drafter.kernels import picking
from tests.decoding.test_sampling import MIXED

PARAMS = [
    *MIXED,
    SamplingParams(temperature=0.8, top_k=3, min_p=0.3),
    SamplingParams(temperature=1.1, top_p=0.3),
    SamplingParams(temperature=1.5, top_k=8, top_p=0.6),
]
DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picking, "_TILE", 256)  # so that few tokens fill several tiles


def tied_logits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random logits with two best in each row, and in some rows many equal ones or many of -inf."""
    logits_BNV = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    logits_BNV[::3] = (logits_BNV[::3] * 2).round() / 2  # zeros of both signs are equal, too
    logits_BNV[::4, :, ::3] = -torch.inf
    logits_BNV[:, :, -1] = logits_BNV.amax(-1)
    return logits_BNV.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_rows", "num_nodes", "num_tokens"), [(13, 2, 9), (13, 1, 603), (1, 24, 50)])
def test_picks_and_filters_equal_their_definition(
    dtype: torch.dtype, num_rows: int, num_nodes: int, num_tokens: int
) -> None:
    """Every filter alone and mixed in one batch, ties, zeros of both signs, -inf; a node alone has the same pick."""
    logits_BNV = tied_logits((num_rows, num_nodes, num_tokens), dtype, num_tokens)
    warp = make_warp(PARAMS[-num_rows:])
    seed_B, length_B = torch.arange(num_rows) - 3, torch.arange(num_rows) * 2**33
    depth_BN = torch.arange(num_nodes).expand(num_rows, -1) // 2
    noise_BNV = gumbel_noise(seed_B, length_B[:, None] + depth_BN + 1, torch.arange(num_tokens))
    expected = pick(logits_BNV, noise_BNV, warp), warp_logits(logits_BNV, warp)
    logits_BNV, depth_BN = logits_BNV.to(DEVICE), depth_BN.to(DEVICE)
    in_kernel = make_warp(PARAMS[-num_rows:], DEVICE, with_kernels=True)
    assert not in_kernel.filters
    noise = Noise(seed_B.to(DEVICE), length_B.to(DEVICE))
    pick_BN = pick_nodes(logits_BNV, depth_BN, noise, in_kernel)
    assert torch.equal(pick_BN.cpu(), expected[0])
    last = pick_nodes(logits_BNV[:, -1:], depth_BN[:, -1:], noise, in_kernel)
    assert torch.equal(last, pick_BN[:, -1:])
    assert torch.equal(warp_logits(logits_BNV, in_kernel).cpu(), expected[1])
    logits_BNV[:, :, 1] = torch.nan
    assert warp_logits(logits_BNV[:, :1], in_kernel)[:, :, 1].isnan().all()


def test_a_filter_that_no_kernel_knows_follows_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_BNV = tied_logits((13, 2, 300), torch.float32, 1)
    warp = make_warp(PARAMS)
    seed_B, depth_BN = torch.arange(13), torch.zeros(13, 2, dtype=torch.int64)
    noise_BNV = gumbel_noise(seed_B, depth_BN + 1, torch.arange(300))
    expected = pick(logits_BNV, noise_BNV, warp), warp_logits(logits_BNV, warp)
    monkeypatch.setattr(sampling, "_KERNEL_FILTERS", ("top_k", "top_p"))
    in_kernel = make_warp(PARAMS, DEVICE, with_kernels=True)
    assert in_kernel.filters == ("min_p",)
    zero = in_kernel.min_p_B.new_zeros(13)
    partly = picking.warp_logits
    monkeypatch.setattr(picking, "warp_logits", lambda logits_BNV, **by_row: partly(logits_BNV, **by_row, min_p=zero))
    noise = Noise(seed_B.to(DEVICE), seed_B.to(DEVICE) * 0)
    assert torch.equal(warp_logits(logits_BNV.to(DEVICE), in_kernel).cpu(), expected[1])
    assert torch.equal(pick_nodes(logits_BNV.to(DEVICE), depth_BN.to(DEVICE), noise, in_kernel).cpu(), expected[0])


def test_noise_equals_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_B, position_BT = torch.tensor([-5, 2**62]), torch.tensor([[0, 7, 2**31], [1, 2, 3]])
    for ids in (torch.arange(1500), torch.tensor([[[3, 40000]], [[1, 0]]])):
        for stream in (0, 3):
            expected = gumbel_noise(seed_B, position_BT, ids, stream=stream)
            with monkeypatch.context() as patch:
                patch.setattr(sampling, "has_kernels", lambda device: True)
                on_device = [tensor.to(DEVICE) for tensor in (seed_B, position_BT, ids)]
                found = gumbel_noise(*on_device, stream=stream).cpu()
            assert (found != expected).float().mean() < 1e-3
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
