"""Readers of safetensors and GGUF: the numbers of the usual readers, and a named ValueError for whatever is damaged."""

import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from drafter.kernels import native
from drafter.runtimes.base import Unsuitable
from drafter.runtimes.loading import load_target
from drafter.runtimes.native.runtime import rotation_table
from drafter.runtimes.native.weights import GGUF, Stored, matrix, open_gguf, open_safetensors, tensors_of_gguf
from tests.kernels.test_native import FLOATS, SCALES, stored_rows
from tests.targets.tiny_gguf import finish
from tests.targets.tiny_gguf import write_gguf as tiny_gguf
from tests.targets.zoo import TARGETS, build

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step was not built")

_CHECKS = [HealthCheck.function_scoped_fixture]
MANY = settings(max_examples=200, deadline=None, suppress_health_check=_CHECKS, database=None)


def numbers(*parts: Stored, bias: torch.Tensor | None = None) -> torch.Tensor:
    made = matrix(parts, is_rounded=False, target=None, bias=bias)
    return native.unpack_rows(made, torch.arange(made.outputs))


def write_gguf(file: Path, tensors: Mapping[str, tuple[str, np.ndarray]], kind: str = "llama") -> Path:
    """A file of tensors as the gguf package writes it, with lists that a reader has to pass over."""
    writer = gguf.GGUFWriter(file, kind)
    writer.add_token_list(["a", "bc", ""] * 9)
    writer.add_token_scores([0.5, -1.0])
    writer.add_add_bos_token(True)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, (each, rows) in tensors.items():
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[each])
    return finish(writer, file)


@pytest.mark.parametrize("kind", native.FORMATS)
def test_a_gguf_file_has_the_numbers_of_the_gguf_package_and_transformers_order_of_rows(kind: str, tmp_path) -> None:
    heads, key_heads = 6, 2
    drawn = {part: stored_rows(kind, outputs, 512, outputs) for part, outputs in (("q", 48), ("k", 16), ("v", 17))}
    bias = np.random.default_rng(0).standard_normal(48).astype(np.float32)
    parts = {f"blk.7.attn_{part}.weight": (kind, rows) for part, (rows, _) in drawn.items()}
    file = write_gguf(tmp_path / "a.gguf", {**parts, "blk.7.attn_q.bias": ("F32", bias), "other": ("F32", bias)})
    read = open_gguf(file)
    assert read.scalars["general.architecture"] == "llama"
    assert read.scalars["tokenizer.ggml.add_bos_token"] is True
    found = tensors_of_gguf(read, heads, key_heads)
    lead = "model.layers.7.self_attn."
    assert set(found) == {*(f"{lead}{part}_proj.weight" for part in "qkv"), f"{lead}q_proj.bias", "other"}
    processor = LlamaTensorProcessor({"num_attention_heads": heads, "num_key_value_heads": key_heads})
    plain_rows = {part: weight.numpy() for part, (_, weight) in drawn.items()}
    wanted = [torch.tensor(processor.process(plain_rows[part], f"blk.7.attn_{part}.weight").weights) for part in "qkv"]
    stored = [found[f"{lead}{part}_proj.weight"] for part in "qkv"]
    assert numbers(*stored).equal(torch.cat(wanted))  # one matrix of all three
    turned = processor.process(bias, "blk.7.attn_q.bias").weights
    assert found[f"{lead}q_proj.bias"].vector().equal(torch.tensor(turned))
    plain = tensors_of_gguf(GGUF({"general.architecture": "qwen2"}, read.tensors), heads, key_heads)
    assert numbers(plain[lead + "q_proj.weight"]).equal(drawn["q"][1])


def test_norms_of_gemma_have_their_own_names(tmp_path: Path) -> None:
    parts = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    weights = {f"blk.0.{part}.weight": ("F32", np.full(8, i, np.float32)) for i, part in enumerate(parts)}
    read = open_gguf(write_gguf(tmp_path / "a.gguf", weights, "gemma3"))
    found = {name: float(each.vector()[0]) for name, each in tensors_of_gguf(read, 1, 1).items()}
    names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    assert found == {f"model.layers.0.{name}_layernorm.weight": float(i) for i, name in enumerate(names)}


def test_safetensors_have_the_numbers_of_their_own_reader(tmp_path: Path) -> None:
    torch.manual_seed(0)
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    save_file({name: torch.randn(19, 37).to(dtype) for name, dtype in FLOATS.items()}, files[0], {"format": "pt"})
    save_file({f"{name}.bias": torch.randn(19).to(dtype) for name, dtype in FLOATS.items()}, files[1])
    found = open_safetensors(files)
    for name, weight in load_file(files[0]).items():
        assert numbers(found[name], found[name]).equal(torch.cat([weight, weight]).float())
        made = matrix([found[name]], is_rounded=False, target="BF16", bias=None)
        assert native.unpack_rows(made, torch.arange(19)).equal(weight.bfloat16().float())
    for name, bias in load_file(files[1]).items():
        assert found[name].vector().equal(bias.float())


def test_types_without_kernels_are_kept_by_name_and_two_files_with_one_name_go_elsewhere(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3)}, tmp_path / "a.safetensors")
    (stored,) = open_safetensors([tmp_path / "a.safetensors"]).values()
    assert stored.kind == "I64"
    with pytest.raises(Unsuitable, match="more than one of its files has the tensor a"):
        open_safetensors([tmp_path / "a.safetensors"] * 2)
    rows = np.zeros((2, 292), np.uint8)
    read = open_gguf(write_gguf(tmp_path / "a.gguf", {"output.weight": ("Q8_K", rows)}))
    assert tensors_of_gguf(read, 1, 1)["lm_head.weight"].kind == "Q8_K"


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(("kind", "places"), SCALES.items())
def test_a_scale_that_is_no_finite_number_is_refused(kind: str, places: list[int], value: float) -> None:
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    for place in places:
        rows = stored_rows(kind, 3, 512)[0].copy()
        rows[1, size + place : size + place + 2] = np.array([value], np.float16).view(np.uint8)
        with pytest.raises(ValueError, match=f"a scale of a {kind} matrix is no finite number"):
            matrix([Stored(kind, (3, 512), rows)], is_rounded=True, target=None, bias=None)


@pytest.mark.parametrize("kind", FLOATS)
def test_weights_that_are_not_finite_and_a_file_that_is_shortened_meanwhile_are_refused(kind: str, tmp_path) -> None:
    rows = stored_rows(kind, 3000, 64)[0]
    file = write_gguf(tmp_path / "a.gguf", {"a": (kind, rows)})
    stored = open_gguf(file).tensors["a"]
    assert numbers(stored).shape == (3000, 64)
    for value in (torch.nan, -torch.inf):
        weight = torch.ones(40, 64, dtype=FLOATS[kind])
        weight[39, 63] = value
        raw = weight.view(torch.uint8).numpy().reshape(40, -1)
        with pytest.raises(ValueError, match=f"a number of a {kind} matrix is not finite"):
            numbers(Stored(kind, (40, 64), raw))
    os.truncate(file, file.stat().st_size - 100_000)
    with pytest.raises(ValueError, match="the file was shortened while it was read"):
        numbers(stored)


def test_a_vector_of_integers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a vector of shape \[32\] is stored as Q8_0"):
        Stored("Q8_0", (32,), np.zeros((1, 34), np.uint8)).vector()


# -- damaged headers ---------------------------------------------------------------------------------------------------

Info = tuple[str, Sequence[int], int, int]  # name, sizes (inputs first), type, offset
TWO: list[Info] = [("a", [32, 2], 0, 0), ("b", [32, 2], 8, 256)]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf_bytes(infos: Sequence[Info] = TWO, keys: Sequence[bytes] = (), **counts: int) -> bytes:
    """A GGUF file of 324 bytes of data, with wrong counts where asked."""
    version, tensors, num_keys = (counts.get(k, v) for k, v in (("version", 3), ("tensors", 2), ("keys", len(keys))))
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, num_keys) + b"".join(keys)
    for name, sizes, kind, offset in infos:
        head += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return head + bytes(-len(head) % 32) + bytes(256 + 68)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def of_list(kind: int, number: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, number) + values


FAULTY_GGUF = {
    "no magic": (b"GGML" + gguf_bytes()[4:], "version 3"),
    "version": (gguf_bytes(version=1), "version 1"),
    "big endian": (gguf_bytes(version=3 << 24), "version"),
    "short": (b"GGUF", "buffer"),
    "counts": (gguf_bytes(tensors=1 << 60), "tensors"),
    "one tensor too many": (gguf_bytes(tensors=3), ""),
    "long text": (gguf_bytes(keys=[struct.pack("<Q", 1 << 62)]), "a text of"),
    "kind of value": (gguf_bytes(keys=[key("k", 99, b"")]), "99"),
    "long list": (gguf_bytes(keys=[key("k", 9, of_list(4, 1 << 61))]), "a list of"),
    "list behind the file": (gguf_bytes(keys=[key("k", 9, of_list(12, 1 << 20))]), "a list ends behind"),
    "text in a list": (gguf_bytes(keys=[key("k", 9, of_list(8, 2, struct.pack("<Q", (1 << 64) - 9)))]), ""),
    "list of lists": (gguf_bytes(keys=[key("k", 9, of_list(9, 1 << 20))]), "a list of lists"),
    "key twice": (gguf_bytes(keys=[key("k", 0, b"1")] * 2), "'k' twice"),
    "alignment": (gguf_bytes(keys=[key("general.alignment", 4, bytes(4))]), "an alignment of 0"),
    "name twice": (gguf_bytes([TWO[0]] * 2), "'a' twice"),
    "no sizes": (gguf_bytes([("a", [], 0, 0), TWO[1]]), "'a' has 0 dimensions"),
    "many sizes": (gguf_bytes([("a", [1] * 5, 0, 0), TWO[1]]), "'a' has 5 dimensions"),
    "empty": (gguf_bytes([("a", [32, 0], 0, 0), TWO[1]]), "'a', "),
    "huge": (gguf_bytes([("a", [1 << 63, 1 << 63], 0, 0), TWO[1]]), "'a', "),
    "half a block": (gguf_bytes([("b", [33, 2], 8, 0), TWO[0]]), "'b', Q8_0 .2, 33., does not fit"),
    "crooked": (gguf_bytes([TWO[0], ("b", [32, 1], 8, 260)]), "'b', "),
    "behind the file": (gguf_bytes([TWO[0], ("b", [32, 2], 8, 288)]), "'b', "),
    "overlap": (gguf_bytes([TWO[0], ("b", [32, 2], 8, 224)]), "'b' overlaps another tensor"),
    "text is none": (gguf_bytes(keys=[struct.pack("<Q", 1) + b"\xff"]), "codec"),
}  # fmt: skip


A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}


def safetensors_bytes(header: Any) -> bytes:
    """A safetensors file of 32 bytes of data."""
    said = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(said)) + said + bytes(32)


FAULTY_SAFETENSORS = {
    "short": (b"1234567", "header of"),
    "longer than the file": (struct.pack("<Q", 1 << 63) + b"{}", "header of"),
    "no header": (bytes(8), "header of 0"),
    "no json": (safetensors_bytes(b"{"), "Expecting"),
    "no text": (safetensors_bytes(b'{"\xff": 1}'), "codec"),
    "deep": (safetensors_bytes(b"[" * 200000), "recursion"),
    "a list": (safetensors_bytes([]), "items"),
    "a number": (safetensors_bytes({"a": 1}), "subscriptable"),
    "a digit": (safetensors_bytes(b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}"), "digit"),
    "no offsets": (safetensors_bytes({"a": {"dtype": "F32", "shape": [2]}}), "data_offsets"),
    "type": (safetensors_bytes({"a": A | {"dtype": ["F32"]}}), "a type or a shape is none"),
    "negative": (safetensors_bytes({"a": A | {"shape": [-2, -3]}}), "a size is no number"),
    "fraction": (safetensors_bytes({"a": A | {"shape": [2.0, 3]}}), "a size is no number"),
    "no sizes": (safetensors_bytes({"a": A | {"shape": [1] * 10**6}}), "a type or a shape is none"),
    "other size": (safetensors_bytes({"a": A | {"shape": [2, 4]}}), "24 bytes for the shape .2, 4. of F32"),
    "empty": (safetensors_bytes({"a": A | {"shape": [0], "data_offsets": [0, 0]}}), "0 bytes"),
    "behind the file": (safetensors_bytes({"a": A | {"data_offsets": [16, 40]}}), "ends behind the file"),
    "backwards": (safetensors_bytes({"a": {"dtype": "I8", "shape": [], "data_offsets": [9, 8]}}), "ends behind"),
    "overlap": (safetensors_bytes({"a": A, "b": B | {"data_offsets": [20, 28]}}), "'b' overlaps another"),
    "name twice": (safetensors_bytes(b'{"a": 1, "a": 2}'), "a name stands twice"),
}


FAULTY = [
    *(pytest.param("a.gguf", *case, id=f"gguf: {fault}") for fault, case in FAULTY_GGUF.items()),
    *(pytest.param("a.safetensors", *case, id=f"safetensors: {fault}") for fault, case in FAULTY_SAFETENSORS.items()),
]


def read(file: Path) -> dict[str, Stored]:
    return tensors_of_gguf(open_gguf(file), 2, 1) if file.suffix == ".gguf" else open_safetensors([file])


@pytest.mark.parametrize(("name", "content", "said"), FAULTY)
def test_a_faulty_file_is_named_with_its_fault(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    begin = "its header is no GGUF " if name == "a.gguf" else ""
    for written, fault in ((content, f"damaged: {begin}.*{said}"), (b"", "empty")):
        (tmp_path / name).write_bytes(written)
        with pytest.raises(ValueError, match=f"{name} is {fault}"):
            read(tmp_path / name)


def read_all(file: Path) -> None:
    """Read everything in a file that may be damaged: a ValueError of one line with the file's name, or numbers."""
    try:
        tensors = read(file)
    except ValueError as error:
        assert str(error).startswith(f"{file} is ") and "\n" not in str(error) and len(str(error)) < 500
        return
    assert sum(each.data.nbytes for each in tensors.values()) <= file.stat().st_size
    for each in tensors.values():
        if each.kind in native.FORMATS:
            try:
                if len(each.shape) == 2:
                    assert numbers(each).shape == each.shape
                else:
                    assert each.vector().shape == each.shape
            except ValueError as error:
                assert any(word in str(error) for word in ("scale", "vector", "not finite"))


VALID_GGUF = gguf_bytes(
    [("blk.0.attn_q.weight", [32, 2], 0, 0), ("output.weight", [32, 2], 8, 256)],
    [
        key("general.architecture", 8, text("llama")),
        key("general.alignment", 4, struct.pack("<I", 32)),
        key("list", 9, of_list(8, 2, text("a") + text("bc"))),
        key("floats", 9, of_list(6, 2, bytes(8))),
        key("flag", 7, b"\x01"),
    ],
)
VALID = {"a.gguf": VALID_GGUF, "a.safetensors": safetensors_bytes({"a": A, "b": B, "__metadata__": {"format": "pt"}})}
EDGES = st.sampled_from([0, 1, 2, 31, 33, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
CHANGE = st.tuples(
    st.integers(0, max(map(len, VALID.values()))),
    st.binary(min_size=1, max_size=9) | EDGES.map(lambda number: struct.pack("<Q", number)),
)


@pytest.mark.parametrize("name", VALID)
@MANY
@given(changes=st.lists(CHANGE, max_size=4), length=st.none() | st.integers(0, 900))
def test_no_damage_of_a_file_raises_anything_else(
    name: str, changes: list[tuple[int, bytes]], length: int | None, tmp_path: Path
) -> None:
    content = bytearray(VALID[name])
    for place, new in changes:
        content[place : place + len(new)] = new
    (tmp_path / name).write_bytes(content[:length])
    read_all(tmp_path / name)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | EDGES
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=4), v, max_size=3))
ENTRIES = st.fixed_dictionaries({}, optional={
    "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "F8_E4M3"]) | VALUES,
    "shape": st.lists(st.integers(0, 4) | EDGES, max_size=3) | VALUES,
    "data_offsets": st.lists(st.integers(0, 40) | EDGES, min_size=2, max_size=2) | VALUES,
})  # fmt: skip
SIZES = st.lists(st.sampled_from([1, 2, 4, 32, 256]) | EDGES, max_size=5)
INFOS = st.tuples(
    st.sampled_from(["blk.0.attn_q.weight", "blk.0.attn_k.bias", "blk.", "blk.0.x", "output.weight", "", "."]),
    SIZES, st.integers(0, 40), st.sampled_from([0, 32, 64, 256]) | EDGES,
)  # fmt: skip


@MANY
@given(header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRIES | VALUES))
def test_no_description_of_safetensors_raises_anything_else(header: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes(header))
    read_all(tmp_path / "a.safetensors")


@MANY
@given(infos=st.lists(INFOS, max_size=3))
@example(infos=[("blk.0.attn_q.weight", [1, 1 << 40], 15, 0)])  # no type with a reader: nothing checks its size
def test_no_description_of_tensors_in_gguf_raises_anything_else(infos: list[Info], tmp_path: Path) -> None:
    keys = [key("general.architecture", 8, text("llama"))]
    (tmp_path / "a.gguf").write_bytes(gguf_bytes(infos, keys, tensors=len(infos)))
    read_all(tmp_path / "a.gguf")


# -- what becomes of odd checkpoints -----------------------------------------------------------------------------------


def test_what_the_native_step_cannot_read_runs_in_torch(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "a.gguf", matrices="MXFP4")
    assert load_target(str(file), device="cpu").runtime.name == "torch"
    assert load_target(str(file), device="cpu", quantization="int8").runtime.name == "native"
    with pytest.raises(ValueError, match=r"is stored as MXFP4, which has no kernels; .* --quantization int8 rounds"):
        load_target(str(file), device="cpu", runtime="native")
    # Names without the module's first part.
    build(TARGETS["Llama"](tie_word_embeddings=True)).model.save_pretrained(tmp_path / "bare")
    assert load_target(str(tmp_path / "bare"), device="cpu").runtime.name == "torch"
    config = TARGETS["Llama"]()
    config.rope_parameters["partial_rotary_factor"] = 2.0
    with pytest.raises(Unsuitable, match="turns more numbers than a head has"):
        rotation_table(config, None, 16, 8)


LAYER = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (LAYER, lambda norm: torch.ones(7), "the shape .7., and config.json asks for .32."),
        (LAYER, lambda norm: norm * float("nan"), "are not finite"),
        (LAYER, lambda norm: None, "not each of its 2 layers has a weight input_layernorm.weight"),
        ("lm_head.weight", lambda weight: None, "no weight lm_head.weight"),
        ("model.norm.weight", lambda norm: None, "no weight model.norm.weight"),
        ("model.layers.0.self_attn.k_proj.weight", lambda weight: weight[:-1], "k_proj.weight has the shape"),
        ("model.layers.1.mlp.down_proj.bias", lambda bias: bias / 0, "a bias of model.layers.1.mlp.down_proj is not"),
    ],
)
def test_a_damaged_weight_is_named(name: str, damage: Any, said: str, tmp_path: Path) -> None:
    build(TARGETS["Llama"](mlp_bias=name.endswith("bias"))).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    changed = {each: damage(weight) if each == name else weight for each, weight in weights.items()}
    save_file({each: w.contiguous() for each, w in changed.items() if w is not None}, file, {"format": "pt"})
    for runtime in ("native", "auto"):
        with pytest.raises(ValueError, match=said if runtime == "native" else "cannot be loaded"):
            load_target(str(tmp_path), device="cpu", runtime=runtime)
