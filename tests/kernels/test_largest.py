"""argmax and topk, the native argmax of each instruction set included, against PyTorch's own."""

from collections.abc import Iterator

import pytest
import torch

from drafter.kernels import native
from drafter.kernels.largest import argmax, topk

CHUNKED, PRIME, SHORT = 64 * 96, 6151, 61


@pytest.fixture(autouse=True, params=["torch", "avx512-vnni", "avx-vnni", "avx2", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "torch":
        monkeypatch.setattr(native, "takes", lambda tensor: False)
        yield
        return
    best = native.library() and native.instructions()
    if not (best and native.use_instructions(request.param)):
        pytest.skip("not built, or this processor has no such instructions")
    yield
    native.use_instructions(best)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [CHUNKED, PRIME, SHORT])
def test_argmax_is_the_lowest_index_among_equals(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    # Few different values, so that every row holds its largest one many times.
    values = torch.randint(5, (3, 7, size), generator=generator).to(dtype)
    assert torch.equal(argmax(values), (values == 4).int().argmax(-1))
    values = torch.randn(3, 7, size, generator=generator).to(dtype)
    assert torch.equal(argmax(values), values.argmax(-1))


def test_argmax_of_rows_without_a_largest_number() -> None:
    values = torch.full((2, CHUNKED), -torch.inf)
    assert argmax(values).tolist() == [0, 0]
    values[1, 700] = torch.nan
    assert argmax(values).tolist() == [0, 700]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [CHUNKED, PRIME, SHORT])
@pytest.mark.parametrize("k", [1, 32])
def test_topk_finds_the_largest_and_where_they_are(dtype: torch.dtype, size: int, k: int) -> None:
    values = torch.randn(3, 7, size, generator=torch.Generator().manual_seed(k)).to(dtype)
    values[0, :, size // 2 :] = -torch.inf  # as filters leave them
    best, index = topk(values, k)
    assert torch.equal(best, values.topk(k).values)
    assert torch.equal(values.gather(-1, index), best)
    assert all(len(set(row)) == k for row in index.flatten(0, 1).tolist())
