"""Described families against transformers, and the bits of a token in every company."""

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.kernels import native
from drafter.runtimes.base import Slots
from drafter.runtimes.loading import load_target, wrap_model
from drafter.runtimes.native import family
from drafter.targets.target import Target
from tests.runtimes.native.gguf_models import ARCHITECTURES, write_model
from tests.targets.zoo import TARGETS, VOCAB, build, generated, prompts_of

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step was not built")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    native.set_num_threads(1)


def saved(kind: str, folder: Path, **changes: Any) -> Any:
    """A random model of a family, whose vectors are random as well, in a folder."""
    model = build(TARGETS[kind](**changes))
    for weight in model.parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=float("weight" in kind), std=0.3)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    model.set_attn_implementation("eager")  # SDPA of transformers below 5.21 leaves out the soft cap of Gemma 2
    return model.eval()


def native_target(folder: Path, **options: Any) -> Target:
    target = load_target(str(folder), device="cpu", **options)
    assert target.runtime.name == "native"
    return target


def test_no_weights_stay_mapped(tmp_path: Path) -> None:
    saved("Llama", tmp_path)
    loaded = [load_target(str(tmp_path), device="cpu", runtime=runtime) for runtime in ("native", "torch")]
    assert len(loaded) == 2 and str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("kind", ARCHITECTURES)
@torch.no_grad()
def test_texts_and_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = saved(kind, tmp_path)
    target, prompts = native_target(tmp_path, dtype="float32"), prompts_of(5, 14)
    token_BT = torch.tensor([prompts[1], prompts[1][::-1]])
    output = target.forward(token_BT, context_layers=(0, 1, target.num_layers))
    wanted = model(token_BT, output_hidden_states=True)
    torch.testing.assert_close(target.logits(output.hidden_BTD), wanted.logits, rtol=1e-3, atol=1e-3)
    states = torch.cat([wanted.hidden_states[layer] for layer in (0, 1, target.num_layers)], dim=2)
    torch.testing.assert_close(output.context_BTC, states, rtol=1e-3, atol=1e-3)
    norms = [each.runtime.final_norm()(output.hidden_BTD) for each in (target, wrap_model(model))]
    torch.testing.assert_close(*norms, rtol=1e-3, atol=1e-3)
    for method in ("none", "lookup"):
        for max_num_seqs in (1, 2):
            engine = Engine(target, config=EngineConfig(method=method, max_num_seqs=max_num_seqs, prefill_chunk=4))
            answers = engine.generate(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))
            assert [answer.token_ids for answer in answers] == generated(model, prompts, 12), (method, max_num_seqs)


LONG: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 5.0, 9.0, 20.0], "original_max_position_embeddings": 64,
    "partial_rotary_factor": 1.0,
}  # fmt: skip
GLOBAL = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
GLOBAL["full_attention"] = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
SIX = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
FOUR = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "no_rope_layers": [1, 1, 1, 0]}
FROM_GGUF = [
    *(pytest.param(kind, {}, id=kind) for kind in ARCHITECTURES if kind not in ("Mistral", "SmolLM3", "Gemma3Text")),
    pytest.param("Mistral", {"sliding_window": None}, id="Mistral"),
    pytest.param("SmolLM3", FOUR, id="SmolLM3"),
    pytest.param("Gemma3Text", SIX, id="Gemma3Text"),
    pytest.param("Gemma3Text", SIX | {"rope_parameters": GLOBAL}, id="Gemma 3 with scaled global layers"),
    pytest.param("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}, id="Phi 3 with longrope"),
    pytest.param("Llama", {"tie_word_embeddings": True}, id="tied"),
]


@pytest.mark.parametrize(("kind", "changes"), FROM_GGUF)
@torch.no_grad()
def test_gguf_files_of_every_family_have_the_logits_of_transformers(
    kind: str, changes: dict[str, Any], tmp_path: Path, home: Path
) -> None:
    model = saved(kind, tmp_path, **changes)
    file = write_model(model, kind, tmp_path / "model.gguf")
    target = load_target(str(file), device="cpu", runtime="native", dtype="float32")
    token_BT = torch.tensor(prompts_of(20))
    found = target.logits(target.forward(token_BT).hidden_BTD)
    torch.testing.assert_close(found, model(token_BT).logits, rtol=1e-3, atol=1e-3)
    assert target.max_length == (64 if "original_max_position_embeddings" in changes else 128)


def step(target: Target, cache: Any, token_T: Tensor, start: int, ancestor: Tensor | None, row: int = 0) -> Tensor:
    """Logits of tokens behind ``start`` committed ones, float32 [T, V]."""
    slot_T = torch.arange(start, start + len(token_T))
    depth_T = torch.arange(len(token_T)) if ancestor is None else ancestor.sum(1) - 1
    ancestor_BTT = None if ancestor is None else ancestor[None]
    slots = Slots(slot_T[None], (start + depth_T)[None], ancestor_BTT, row, start + len(token_T))
    return target.logits(target.forward(token_T[None], slots, cache).hidden_BTD)[0]


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "Gemma3Text", "Olmo2"])
@pytest.mark.parametrize("dtype", ["stored", "float32"])
def test_a_token_has_the_same_bits_in_a_chunk_a_tree_a_batch_and_with_any_threads(
    dtype: str, kind: str, tmp_path: Path
) -> None:
    saved(kind, tmp_path)
    target = native_target(tmp_path, dtype=dtype)
    token_T = torch.tensor(prompts_of(41)[0])
    alone = target.runtime.new_cache(2, 64)
    wanted = torch.cat([step(target, alone, token_T[at : at + 1], at, None) for at in range(41)])
    for num_threads in (1, 2, 3):
        native.set_num_threads(num_threads)
        cache = target.runtime.new_cache(2, 64)
        parts = [step(target, cache, token_T[at : at + 17], at, None, row=1) for at in range(0, 41, 17)]
        assert torch.cat(parts).equal(wanted)
        # A tree behind 30 tokens: the true path 30, 31, 32, 33 and other children beside it.
        tree_T = torch.stack([token_T[30], token_T[31], token_T[5], token_T[32], token_T[6], token_T[33]])
        parents = [-1, 0, 0, 1, 2, 3]
        ancestor = torch.eye(6, dtype=torch.bool)
        for node, parent in enumerate(parents):
            if parent >= 0:
                ancestor[node] |= ancestor[parent]
        found = step(target, cache, tree_T, 30, ancestor, row=1)
        assert found[[0, 1, 3, 5]].equal(wanted[30:34])
        # The accepted path moves together, and the next token sees it there.
        path = torch.tensor([[30, 31, 32, 33], [30, 31, 33, 35]])
        cache.move_slots(path[[1, 1]], path[[0, 0]])
        assert step(target, cache, token_T[34:35], 34, None, row=1).equal(wanted[34:35])
        cache.copy_row(1, 0, 34)
        assert step(target, cache, token_T[34:35], 34, None, row=0).equal(wanted[34:35])
        # Both rows in one forward, the second as padding of the first.
        token_BT = torch.stack([token_T[34:36], token_T[34:36]])
        slot_BT = torch.tensor([[34, cache.spare_slot], [34, 35]])
        slots = Slots(slot_BT, torch.tensor([[34, 35]] * 2), torch.ones(2, 2, 2, dtype=torch.bool).tril(), 0, 36)
        logits = target.logits(target.forward(token_BT, slots, cache).hidden_BTD)
        assert logits[0, 0].equal(wanted[34]) and logits[1].equal(wanted[34:36])
        for start, row in ((63, 0), (-1, 0), (0, 2)):  # slots and rows that the cache has not
            with pytest.raises(AssertionError):
                step(target, cache, token_T[:3], start, None, row)
        with pytest.raises(AssertionError):
            target.forward(token_T[None, :1], Slots(torch.tensor([[3]]), torch.tensor([[-1]]), None), cache)
        with pytest.raises(AssertionError):
            cache.move_slots(path, path + 64)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantization_rounds_the_numbers_that_torch_rounds(scheme: str, tmp_path: Path) -> None:
    saved("Llama", tmp_path, hidden_size=32, intermediate_size=64, num_attention_heads=4, head_dim=8)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "quantization": scheme}
    found = [load_target(str(tmp_path), runtime=runtime, **options) for runtime in ("native", "torch")]
    assert found[0].fingerprint == found[1].fingerprint and found[0].quantization == scheme
    token_BT = torch.tensor(prompts_of(9))
    logits, wanted = (target.logits(target.forward(token_BT).hidden_BTD) for target in found)
    torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)
    assert native_target(tmp_path, quantization=scheme).traits.number_format == "stored"


def test_a_description_that_is_not_the_models_runs_in_torch(tmp_path: Path, home: Path, monkeypatch) -> None:
    saved("Qwen3", tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setitem(family.FAMILIES, "qwen3", lambda config: {"attention_scale": 0.7})
        assert load_target(str(tmp_path / "model"), device="cpu").runtime.name == "torch"
        with pytest.raises(ValueError, match="runtime native cannot run target .*other states than transformers'"):
            load_target(str(tmp_path / "model"), device="cpu", runtime="native")
    assert native_target(tmp_path / "model").runtime.name == "native"
    saved("Mixtral", tmp_path / "mixture")
    assert load_target(str(tmp_path / "mixture"), device="cpu").runtime.name == "torch"
    assert native_target(tmp_path / "model").vocab_size == VOCAB


@pytest.mark.parametrize(
    ("kind", "lost", "added"),
    [("Qwen2", "q_proj.bias", ""), ("Qwen3", "q_norm.weight", ""), ("Llama", "", "o_proj"), ("Llama", "", "lm_head")],
)
def test_weights_that_transformers_has_not_or_asks_for_are_not_passed_over(
    kind: str, lost: str, added: str, tmp_path: Path, home: Path
) -> None:
    folder, file = tmp_path / "model", tmp_path / "model" / "model.safetensors"
    saved(kind, folder)
    native_target(folder)  # a checkpoint of the same configuration was found right before
    weights = {name: weight for name, weight in load_file(file).items() if not (lost and name.endswith(lost))}
    for name in [name for name in weights if added and name.endswith(f"{added}.weight")]:
        weights[name.removesuffix("weight") + "bias"] = torch.ones(len(weights[name]))
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"runtime native cannot run .*{lost or added + '.bias'}"):
        load_target(str(folder), device="cpu", runtime="native")


@torch.no_grad()
def test_keys_are_rounded_once_and_those_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    model = build(TARGETS["Llama"]())
    for weight in (model.model.layers[1].self_attn.k_proj.weight, model.model.layers[0].self_attn.v_proj.weight):
        weight *= 1e7
    model.save_pretrained(tmp_path)
    token_BT = torch.tensor(prompts_of(9))
    for dtype, size in (("stored", 2), ("bfloat16", 2), ("float32", 4)):
        runtime: Any = native_target(tmp_path, dtype=dtype).runtime
        cache = runtime.new_cache(2, 40)
        assert cache._keys.itemsize == cache._values.itemsize == size
        assert 0 <= runtime.cache_bytes(2, 40) - cache._keys.nbytes - cache._values.nbytes < 1 << 20
        if size == 2:
            with pytest.raises(ValueError, match="which float16 does not hold: give --dtype float32"):
                runtime.forward(token_BT, None, None)
        else:
            assert runtime.forward(token_BT, None, None).hidden_BTD.isfinite().all()
    place = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="numbers that are not finite"):
        runtime.run(runtime._model, torch.full((1, 1, 32), torch.nan), Slots(place, place, None), cache)


def test_threads_with_caches_of_their_own_and_any_number_of_layers(tmp_path: Path, monkeypatch) -> None:
    """One thread makes longer tables of rotations while another reads; 1,700 layers have more parts than a model."""
    saved("Llama", tmp_path)
    runtime: Any = native_target(tmp_path).runtime
    native.set_num_threads(2)
    token_BT = torch.tensor(prompts_of(9, 9))
    wanted = runtime.forward(token_BT, None, None).hidden_BTD

    def work(first: int) -> bool:
        place_BT = torch.arange(9).expand(2, -1)
        caches = [runtime.new_cache(2, first + 100 * number) for number in range(10)]
        slots = Slots(place_BT, place_BT, None)
        return all(runtime.forward(token_BT, slots, cache).hidden_BTD.equal(wanted) for cache in caches)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(work, (16, 50))) == [True, True]
    given_back: list[bool] = []
    monkeypatch.setattr(native, "give_back", lambda: given_back.append(True))
    model = native.Model.from_buffer_copy(runtime._model)
    layers = (native.Layer * 1700)(*[runtime._layers[0]] * 1700)
    model.num_layers, model.layers = 1700, ctypes.cast(layers, ctypes.POINTER(native.Layer))
    monkeypatch.setattr(runtime, "_model", model)
    cache, place = runtime.new_cache(1, 16), torch.zeros(1, 1, dtype=torch.int64)
    assert runtime.forward(place, Slots(place, place, None), cache).hidden_BTD.isfinite().all()
    del cache
    assert given_back


def test_a_home_that_cannot_be_written_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRAFTER_HOME", str(tmp_path / "file"))
    saved("Llama", tmp_path / "model")
    assert native_target(tmp_path / "model").vocab_size == VOCAB
