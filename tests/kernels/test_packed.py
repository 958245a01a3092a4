"""Packed linear layers: the same products, and only where they belong."""

import copy
import shutil

import pytest
import torch

from drafter.kernels import native
from drafter.kernels.packed import PackedMatrix, can_pack, can_round, pack_linears
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from tests.engine.oracle import tiny_target

CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="no packed kernels on this machine")


@needs_kernels
def test_a_wrong_product_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedMatrix, "linear", lambda self, x, bias=None: x.new_zeros(*x.shape[:-1], 48))
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(torch.device("cuda"), torch.float32) and not can_pack(CPU, torch.float64)


@needs_kernels
def test_a_packed_model_computes_and_counts_the_same() -> None:
    plain = tiny_target()
    model = copy.deepcopy(plain.model)
    output = model.get_output_embeddings()
    assert pack_linears(model, keep=(output,)) > 4
    assert torch.equal(model.get_output_embeddings().weight, plain.output_weight_VD)
    token_BT = torch.randint(0, plain.vocab_size, (2, 9))
    with torch.no_grad():
        assert torch.allclose(model(token_BT).logits, plain.model(token_BT).logits, atol=1e-5)
    assert plain.runtime.num_parameters == sum(p.numel() for p in plain.model.parameters())


@needs_kernels
@pytest.mark.parametrize("head", ["tied", "full"])
def test_a_packed_drafter_drafts_the_same(head: str) -> None:
    target = tiny_target()
    config = DrafterConfig(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size, head=head, draft_vocab_size=target.vocab_size // 2
    )
    torch.manual_seed(0)
    plain = RecurrentDrafter(config).eval().bind(target)
    packed = copy.deepcopy(plain).pack().bind(target)
    context = torch.randn(3, 1, target.hidden_size)
    state = torch.randn(3, 4, target.hidden_size)
    with torch.no_grad():
        found, expected = packed.logits(context, state), plain.logits(context, state)
    # Drafts change no token, so their weights may be rounded to 8 bits.
    tolerance = 0.05 if can_round(CPU) else 1e-5
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
    assert packed.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_the_native_step_is_built_where_a_compiler_is() -> None:
    """Its own tests are skipped without the library, so that a build that fails would show nowhere else."""
    assert native.library() is not None
