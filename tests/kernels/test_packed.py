"""Packed linear layers: the same products, and only where they belong."""

import copy
import shutil
from pathlib import Path

import pytest
import torch

from drafter.kernels import native
from drafter.kernels.packed import PackedLinear, can_pack, pack_linears
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from tests.engine.oracle import tiny_target

CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="no packed kernels on this machine")


@needs_kernels
def test_a_wrong_product_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: x.new_zeros(*x.shape[:-1], 48))
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(torch.device("cuda"), torch.float32) and not can_pack(CPU, torch.float64)


@needs_kernels
def test_a_packed_model_computes_and_counts_the_same() -> None:
    plain = tiny_target()
    model = copy.deepcopy(plain.model)
    assert pack_linears(model, keep=(model.get_output_embeddings(),)) > 4
    assert torch.equal(model.get_output_embeddings().weight, plain.runtime.output_weight_VD)
    token_BT = torch.randint(0, plain.vocab_size, (2, 9))
    with torch.no_grad():
        assert torch.allclose(model(token_BT).logits, plain.model(token_BT).logits, atol=1e-5)
    assert plain.runtime.num_parameters == sum(p.numel() for p in plain.model.parameters())


@pytest.mark.skipif(native.library() is None, reason="needs the native library")
def test_all_searches_share_one_rounded_copy_until_another_target_comes() -> None:
    target = tiny_target()
    config = DrafterConfig(vocab_size=target.vocab_size, hidden_size=target.hidden_size, head="tied")
    drafter = RecurrentDrafter(config).eval().bind(target).pack()
    first = drafter.rounded()
    assert drafter.bind(target).rounded() is first and drafter.bind(tiny_target(1)).rounded() is not first
    x = torch.randn(3, target.hidden_size)
    feature, output = drafter.features(x, x), drafter.rounded().output
    expected = feature @ native.unpack_rows(output, torch.arange(output.outputs)).T
    assert (expected - drafter.logits(x, x)).abs().max() < 0.2 * expected.abs().max()
    assert (native.multiply(output, feature) - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_the_native_step_is_built_where_a_compiler_is_from_the_sources_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own tests are skipped without the library, so that a build that fails would show nowhere else."""
    assert native.library.__wrapped__() is not None
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"changed")
    with pytest.raises(ValueError, match="built from other sources than drafter has now: run pip install again"):
        native.library.__wrapped__()
