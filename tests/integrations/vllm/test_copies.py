"""Copies in vLLM's chain without vLLM: the text in the cache's slots, and drafts equal to those of our own chain."""

import random

import pytest
import torch

from drafter.integrations.vllm.copies import CopyMixer, Place, Text, decode_place, encode_place
from drafter.proposers.copying import SHARES, Copies, mix

VOCAB = 200_000
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.mark.parametrize("layout", ["heads first", "slots first"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_hold_token_ids_in_every_number_format(dtype: torch.dtype, layout: str) -> None:
    """Five blocks of four slots; texts of 6 and 9 tokens in blocks (3, 1) and (4, 0...)."""
    cache_PHNC = torch.zeros(5, 2, 4, 16).to(dtype)
    if layout == "slots first":
        cache_PHNC = torch.zeros(5, 4, 2, 16).to(dtype).transpose(1, 2)
    block_BM = torch.tensor([[3, 1, 0], [4, 2, 1]], dtype=torch.int32)
    text = Text(cache_PHNC)
    text.write(torch.arange(12, 16), torch.tensor([7, 151_935, 9, 10], dtype=torch.int32))
    text.write(torch.tensor([4, 5, 16, 17, 18, 19, 8, -1]), torch.tensor([11, 12, 1, 2, 3, 4, VOCAB - 1, 99]))
    assert text.read(block_BM, 6)[0].tolist() == [7, 151_935, 9, 10, 11, 12]
    assert text.read(block_BM, 5)[1].tolist() == [1, 2, 3, 4, VOCAB - 1]
    assert Text(cache_PHNC).read(block_BM, 6)[0].tolist() == [7, 151_935, 9, 10, 11, 12], "the cache alone remembers"
    text.write(torch.tensor([5]), torch.tensor([13]))
    assert text.read(block_BM, 6)[0].tolist()[-2:] == [11, 13], "a rejected draft is overwritten"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_place_travels_from_token_to_token(dtype: torch.dtype) -> None:
    roots = [0, 1, 255, 256, 65_535, 131_071, 1_048_576]
    number_TX = torch.zeros(len(roots), 4, dtype=dtype)
    for num_drafted in range(4):
        number_TX = encode_place(number_TX, torch.tensor(roots) + num_drafted)
        assert number_TX.dtype == dtype
        place = decode_place(number_TX)
        assert place.root_B.tolist() == roots and place.num_drafted_B.tolist() == [num_drafted] * len(roots)


@pytest.mark.parametrize("seed", range(20))
def test_chain_mixes_what_our_beam_search_mixes(seed: int) -> None:
    """Matches are found anew for every draft here, and followed from draft to draft there."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    vocab_size, num_rows = 12, 3
    token_R = torch.randperm(vocab_size)[: rng.choice([7, 12])].sort().values
    mixer = CopyMixer(token_R, vocab_size)
    odds_X = torch.tensor((0.0, *SHARES)).logit()
    index_V = torch.full((vocab_size,), -1)
    index_V[token_R] = torch.arange(len(token_R))
    token_BS = torch.tensor([rng.choices(range(rng.randint(2, 4)), k=40) for _ in range(num_rows)])
    root_B = torch.tensor([rng.choice([0, 1, 2, 20, 30]) for _ in range(num_rows)])
    copies = Copies.of(token_BS.clone(), root_B, odds_X)
    num_copied = 0
    for depth in range(4):
        logits_BR = 2 * torch.randn(num_rows, len(token_R))
        named_B1, odds_B1 = copies.best()
        mixture = mix(logits_BR[:, None].clone(), index_V[named_B1], odds_B1)
        wanted_BV = torch.zeros(num_rows, vocab_size)
        wanted_BV[:, token_R] = (mixture.logits_BWR - mixture.total_BW1)[:, 0].exp()
        wanted_BV.scatter_add_(1, named_B1, (mixture.copied_BW1 - mixture.total_BW1)[:, 0].exp())
        place = Place(root_B, torch.full((num_rows,), depth))
        found_BV = mixer.mix_copies(logits_BR, token_BS, place)
        assert torch.allclose(found_BV.softmax(1), wanted_BV, atol=1e-6)
        drafted_B = found_BV.argmax(1)
        num_copied += int((odds_B1 > -torch.inf).sum())
        copies = copies.follow(torch.zeros(num_rows, 1, dtype=torch.int64), drafted_B[:, None])
        token_BS[torch.arange(num_rows), root_B + depth + 1] = drafted_B
    assert num_copied or int(root_B.max()) < 2


def test_slots_of_freed_blocks_copy_nothing() -> None:
    """A slot may hold any bits: they name no token outside the vocabulary."""
    token_1S = torch.tensor([[5, -7, 5, 2**31 - 1, 5]])
    logits_1R = torch.randn(1, 9)
    found_1V = CopyMixer(torch.arange(9), 9).mix_copies(
        logits_1R.clone(), token_1S, Place(torch.tensor([4]), torch.tensor([0]))
    )
    assert torch.equal(found_1V, logits_1R)
