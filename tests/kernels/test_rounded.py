"""Rounded layers: integers and scales that are exact in every number format, and one product of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drafter.kernels.packed import PackedLinear, can_pack, count_parameters, pack_linears
from drafter.kernels.rounded import RoundedLinear, round_linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_integers_times_an_exact_scale(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 160).to(dtype)
    rounded = RoundedLinear(linear)
    assert rounded.rounded_OI.dtype == torch.int8 and int(rounded.rounded_OI.abs().max()) == 127
    assert torch.equal(rounded.scale_O.bfloat16().to(dtype), rounded.scale_O)
    exact_OI = rounded.rounded_OI.double() * rounded.scale_O.double()[:, None]
    error_OI = (exact_OI - linear.weight.detach().double()).abs()
    assert bool((error_OI <= 0.75 * rounded.scale_O.double()[:, None]).all())
    x = torch.randn(3, 4, 96).to(dtype)
    expected = F.linear(x.double(), exact_OI, linear.bias.detach().double())
    with torch.no_grad():
        assert torch.allclose(rounded(x).double(), expected, atol=1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_a_rounded_layer_changes_no_product(dtype: torch.dtype) -> None:
    if not can_pack(torch.device("cpu"), dtype):
        pytest.skip(f"no packed kernels for {dtype} on this machine")
    torch.manual_seed(0)
    rounded = RoundedLinear(nn.Linear(96, 160).to(dtype))
    packed = PackedLinear(rounded, keep_weight=True)
    x = torch.randn(5, 96).to(dtype)
    with torch.no_grad():
        assert torch.allclose(packed(x), rounded(x), atol=1e-5 if dtype == torch.float32 else 1e-2)
    assert torch.equal(packed.weight, rounded.weight)


def test_an_output_of_zeros_stays_zero() -> None:
    linear = nn.Linear(8, 2, bias=False)
    linear.weight.data[1] = 0
    assert not RoundedLinear(linear).weight[1].any()


def test_rounded_models_count_their_weights() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 4, bias=False)), nn.LayerNorm(4))
    before = count_parameters(model)
    assert round_linears(model) == 2 and round_linears(model) == 0
    assert count_parameters(model) == before
    if can_pack(torch.device("cpu"), torch.float32):
        assert pack_linears(model) == 2
        assert count_parameters(model) == before
