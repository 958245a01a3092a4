"""Targets that run from the integers of their GGUF file: the text of the unpacked weights, in every type of matrix."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from drafter.targets import loading
from drafter.targets.catalog import stored_file
from drafter.targets.openvino_compile import import_openvino
from drafter.targets.programs import open_programs
from drafter.targets.slots import Slots
from drafter.targets.stored import read_matrix, round_linears, round_matrix
from drafter.targets.target import Target
from tests.targets.test_target import tiny
from tests.targets.tiny_gguf import write_gguf
from tests.targets.zoo import drafted, generated, prompts_of

TYPES = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
PROMPTS = prompts_of(3, 9, 17)
needs_bfloat16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="this CPU has no bfloat16 arithmetic"
)


def drawn_blocks(kind: str, num_rows: int = 6, num_blocks: int = 2) -> np.ndarray:
    """Random blocks of a type, with scales of usual sizes."""
    random = np.random.default_rng(0)
    quantisation = gguf.GGMLQuantizationType[kind]
    if not kind.endswith("_K"):
        return gguf.quants.quantize(random.standard_normal((num_rows, 32 * num_blocks), np.float32), quantisation)
    size = gguf.GGML_QUANT_SIZES[quantisation][1]
    blocks = random.integers(0, 256, size=(num_rows, num_blocks, size), dtype=np.uint8)
    units = (np.abs(random.standard_normal((num_rows, num_blocks, 2))) * 0.01).astype(np.float16)
    if kind == "Q4_K":
        blocks[:, :, :4] = units.view(np.uint8)
    else:
        blocks[:, :, -2:] = units[:, :, :1].copy().view(np.uint8)
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("kind", TYPES)
def test_matrices_in_groups_are_the_unpacked_ones(kind: str) -> None:
    blocks = drawn_blocks(kind)
    wanted = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
    matrix = read_matrix(blocks, kind)
    assert matrix.shape == tuple(wanted.shape)
    # Integers that are centred around 0 cost offsets of 24 bits their last bit.
    torch.testing.assert_close(matrix.dense(), wanted, rtol=0, atol=1e-5 if kind == "Q4_K" else 0)
    assert torch.equal(matrix.rows(np.array([4, 1])).dense(), matrix.dense()[[4, 1]])


@pytest.mark.parametrize(("bits", "kind"), [(8, "Q8_0"), (4, "Q4_1")])
def test_rounded_matrices_are_those_of_gguf(bits: int, kind: str) -> None:
    weight_OI = torch.randn(5000, 64, generator=torch.Generator().manual_seed(0))
    weight_OI[7] = 0
    quantisation = gguf.GGMLQuantizationType[kind]
    wanted_OI = gguf.quants.dequantize(gguf.quants.quantize(weight_OI.numpy(), quantisation), quantisation)
    found_OI = round_matrix(weight_OI, bits).dense()
    assert np.abs(found_OI.numpy() - wanted_OI).max() < 1e-6 and (found_OI - weight_OI).abs().mean() < 0.1


def test_rounding_leaves_shared_embeddings_and_odd_sizes_make_one_group() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(6, 33), torch.nn.Linear(33, 6))
    model[1].weight = model[0].weight
    before = model[0].weight.clone()
    assert round_linears(model, 4) == 1
    assert torch.equal(model[0].weight, before) and not torch.equal(model[1].weight, before)
    assert round_matrix(before, 4).bits == 8 and round_matrix(before, 4).scale_OG.shape == (6, 1)


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="matrices of type Q2_K have no form"):
        read_matrix(drawn_blocks("Q8_0"), "Q2_K")


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTER_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
@pytest.mark.usefixtures("home")
def test_text_with_float32_activations_is_that_of_generate(kind: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", matrices=kind)
    unpacked = Target.load(str(file), dtype="float32", device="cpu", pack=False)
    wanted = generated(unpacked.model, PROMPTS, 24)
    found = stored_file(str(file))
    assert found is not None
    made = open_programs(found[1], [file], torch.float32, lambda model: Target.from_model(model).capabilities)
    target = Target._of_programs(made, None, name="stored")
    assert drafted(target, "none", PROMPTS, 24) == drafted(target, "lookup", PROMPTS, 24) == wanted
    assert target.fingerprint == unpacked.fingerprint and target.num_parameters == unpacked.num_parameters
    assert target.is_stored and not unpacked.is_stored
    assert torch.equal(target.embedding_weight_VD, unpacked.embedding_weight_VD)
    assert set(dict(target.model.named_children())) <= {"embedding", "output"}, "torch has no layers"
    token_BT = torch.tensor(PROMPTS[1])[None]
    contexts = [each.forward(token_BT, context_layers=(0, 1)).context_BTC for each in (target, unpacked)]
    assert torch.allclose(*contexts, atol=1e-4, rtol=1e-4)


@needs_bfloat16
@pytest.mark.usefixtures("home")
def test_stored_is_a_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(write_gguf(tmp_path / "tiny.gguf", matrices="Q4_1"))
    target = Target.load(file, device="cpu", runtime="auto", dtype="stored")
    assert target.runtime is not None and target.dtype == torch.bfloat16 and target.tokenizer is not None
    assert target.eos_token_ids == (2,) and not target.is_plain
    assert list((tmp_path / "home").rglob("model.safetensors")) == []
    with pytest.raises(ValueError, match="--exact-attention computes with weights in torch: give --runtime torch"):
        target.new_cache(1, 8, exact_attention=True)
    assert [len(text) for text in drafted(target, "lookup", PROMPTS, 24)] == [24] * 3
    assert_tokens_of_one_forward_see_each_other_as_later_tokens_will(target)
    # A later start probes and exports nothing.
    monkeypatch.setattr("drafter.targets.programs_writing.write_programs", lambda *_: 1 / 0)
    again = Target.load(file, device="cpu", runtime="openvino", dtype="stored")
    assert drafted(again, "none", PROMPTS, 24) == drafted(target, "none", PROMPTS, 24)


def assert_tokens_of_one_forward_see_each_other_as_later_tokens_will(target: Target) -> None:
    """Keys and values are stored in bfloat16: those of the same forward are rounded, too."""
    token_BT = torch.tensor(PROMPTS[1])[None]

    def states(sizes: list[int]) -> torch.Tensor:
        cache, start, found = target.new_cache(1, 16), 0, []
        for size in sizes:
            position_BT = torch.arange(start, start + size)[None]
            slots = Slots(position_BT, position_BT, None, num_visible=16)
            found.append(target.forward(token_BT[:, start : start + size], slots, cache).hidden_BTD)
            start += size
        return torch.cat(found, 1).float()

    share = (states([9]) == states([1] * 9)).float().mean()
    assert share > 0.9, share


@needs_bfloat16
@pytest.mark.usefixtures("home")
def test_auto_runs_the_integers_of_a_gguf_file_on_a_fast_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_LEAST_OPENVINO_BYTES", 1)
    monkeypatch.setattr(loading, "_LEAST_STORED_BYTES", 1)

    def loaded(name: str, **options: Any) -> Target:
        kind = options.pop("kind", "Q4_1")
        return Target.load(
            str(write_gguf(tmp_path / name, matrices=kind)), **{"device": "cpu", "runtime": "auto"} | options
        )

    target = loaded("a.gguf")
    assert target.is_stored and target.dtype == torch.bfloat16
    assert list((tmp_path / "home").rglob("model.safetensors")) == [], "nothing is unpacked"
    plain = [loaded("a.gguf", dtype="bfloat16"), loaded("b.gguf", kind="BF16"), loaded("b.gguf", quantization="int8")]
    assert [(each.is_stored, each.dtype, each.runtime_name) for each in plain] == [
        (False, torch.bfloat16, "openvino")
    ] * 3
    monkeypatch.setattr(loading, "_LEAST_STORED_BYTES", 10**9)
    assert not loaded("a.gguf").is_stored, "a small file is unpacked"
    torch_alone = [loaded("a.gguf", runtime="torch"), loaded("a.gguf", pack=False)]
    assert [(each.is_stored, each.dtype) for each in torch_alone] == [(False, torch.float32)] * 2


@pytest.mark.parametrize(
    ("runtime", "bits"), [("torch", 8), ("torch", 4), ("openvino", 8), ("openvino", 4), ("openvino", 0)]
)
@pytest.mark.usefixtures("home")
def test_drafted_text_is_the_text_of_generate_with_rounded_weights(runtime: str, bits: int, tmp_path: Path) -> None:
    """In float32 the activations are not rounded."""
    scheme = f"int{bits}" if bits else "none"
    tiny("Llama").model.save_pretrained(tmp_path / "model")
    target = Target.load(str(tmp_path / "model"), device="cpu", dtype="float32", runtime=runtime, quantization=scheme)
    assert (target.runtime_name, target.quantization) == (runtime, scheme)
    plain = tiny("Llama")
    assert target.fingerprint == (f"{plain.fingerprint}-{scheme}" if bits else plain.fingerprint)
    model: Any = plain.model
    wanted = generated(model, PROMPTS, 24)
    if bits:
        text = wanted
        assert round_linears(model, bits) == 15  # seven of each layer, and the output matrix
        wanted = generated(model, PROMPTS, 24)
        assert wanted != text
    assert drafted(target, "none", PROMPTS, 24) == drafted(target, "lookup", PROMPTS, 24) == wanted
    if runtime == "openvino":  # query, key and value are one matrix, gate and up another: four of each layer
        (file,) = (tmp_path / "home").rglob("forward.xml")
        operators = import_openvino().Core().read_model(file).get_ops()
        kinds = [str(node.get_output_element_type(0)) for node in operators if node.get_type_name() == "Constant"]
        assert kinds.count("<Type: 'int8_t'>") == {8: 8, 4: 2, 0: 0}[bits]  # 48 inputs make no groups of 32


@pytest.mark.usefixtures("home")
def test_what_has_no_integers_is_refused_in_one_line(tmp_path: Path) -> None:
    floats = str(write_gguf(tmp_path / "floats.gguf"))
    with pytest.raises(ValueError, match="--dtype stored runs with OpenVINO on a CPU"):
        Target.load(floats, device="cpu", dtype="stored", runtime="torch")
    with pytest.raises(ValueError, match="--quantization is 'int3' but must be one of none, int8, int4"):
        Target.load(floats, quantization="int3")
    with pytest.raises(ValueError, match="--quantization int8 runs in one process"):
        Target.load(floats, quantization="int8", num_shards=2)
    with pytest.raises(ValueError, match="--quantization int8 rounds plain weights"):
        Target.load(floats, device="cpu", dtype="stored", runtime="auto", quantization="int8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="runs GGUF files, and target .* has none here"):
        Target.load(str(tmp_path / "folder"), device="cpu", dtype="stored", runtime="auto")
