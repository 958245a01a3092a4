"""Copies in vLLM's chain without vLLM: the text in the cache's slots, and drafts equal to those of our own chain."""

import pytest
import torch

from drafter.integrations.vllm.copies import CopyMixer, Text, decode_place, encode_place

VOCAB = 200_000
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.mark.parametrize("layout", ["heads first", "slots first"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_hold_token_ids_in_every_number_format(dtype: torch.dtype, layout: str) -> None:
    """Five blocks of four slots; texts of 6 and 9 tokens in blocks (3, 1) and (4, 0...)."""
    cache_PHJX = torch.zeros(5, 2, 4, 16).to(dtype)
    if layout == "slots first":
        cache_PHJX = torch.zeros(5, 4, 2, 16).to(dtype).transpose(1, 2)
    block_BM = torch.tensor([[3, 1, 0], [4, 2, 1]], dtype=torch.int32)
    text = Text(cache_PHJX, block_BM, 6)
    text.write(torch.arange(12, 16), torch.tensor([7, 151_935, 9, 10], dtype=torch.int32))
    text.write(torch.tensor([4, 5, 16, 17, 18, 19, 8, -1]), torch.tensor([11, 12, 1, 2, 3, 4, VOCAB - 1, 99]))
    assert text.read()[0].tolist() == [7, 151_935, 9, 10, 11, 12]
    assert Text(cache_PHJX, block_BM, 5).read()[1].tolist() == [1, 2, 3, 4, VOCAB - 1]
    assert Text(cache_PHJX, block_BM, 6).read()[0].tolist() == [7, 151_935, 9, 10, 11, 12], "the cache alone remembers"
    text.write(torch.tensor([5]), torch.tensor([13]))
    assert text.read()[0].tolist()[-2:] == [11, 13], "a rejected draft is overwritten"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_place_travels_from_token_to_token(dtype: torch.dtype) -> None:
    roots = [0, 1, 255, 256, 65_535, 131_071, 1_048_576]
    number_TX = torch.zeros(len(roots), 4, dtype=dtype)
    for num_drafted in range(4):
        number_TX = encode_place(number_TX, torch.tensor(roots) + num_drafted)
        assert number_TX.dtype == dtype
        root_T, num_drafted_T = decode_place(number_TX)
        assert root_T.tolist() == roots and num_drafted_T.tolist() == [num_drafted] * len(roots)


def test_slots_of_freed_blocks_copy_nothing() -> None:
    """A slot may hold any bits: they name no token outside the vocabulary."""
    token_1S = torch.tensor([[5, -7, 5, 2**31 - 1, 5]])
    logits_1R = torch.randn(1, 9)
    place_1X = encode_place(torch.zeros(1, 4), torch.tensor([4]))
    found_1V = CopyMixer(torch.arange(9), 9).mix_copies(logits_1R.clone(), token_1S, place_1X)
    assert torch.equal(found_1V, logits_1R)
