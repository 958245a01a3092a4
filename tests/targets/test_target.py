"""Target over many architectures: a packed tree gives what each of its paths gives, wherever the row stands; texts of
several windows are, token for token, what transformers generates; the committed table of architectures holds.

Shapes: B rows · N tree nodes · T tokens · S slots · D hidden size · V vocabulary.
"""

import itertools
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from drafter.decoding.tree import ancestors
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.runtimes.loading import load_target, resolve_device, training_dtype, wrap_model
from drafter.runtimes.torch.attention import FOLDED_ATTENTION
from drafter.runtimes.torch.cache import SlotCache
from drafter.runtimes.torch.capabilities import layer_windows
from drafter.targets.fingerprint import fingerprint_of
from drafter.targets.slots import Slots
from drafter.targets.target import Target
from drafter.utils.fingerprint import same_fingerprint
from tests.conftest import size
from tests.engine.oracle import answer, oracle, requests
from tests.runtimes.torch.test_masks import path_to, random_parents
from tests.serving.tiny import tiny_target as tiny_chat_target
from tests.targets.zoo import OTHERS, TARGETS, VOCAB, build, drafted, generated, panel, prompts_of

NUM_NODES, NUM_SLOTS = 7, 40


def tiny(name: str = "Llama", **changes: Any) -> Target:
    return wrap_model(build(TARGETS[name](**changes)), name=name)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def prefill(target: Target, cache: SlotCache, prefixes: list[list[int]]) -> None:
    """Two chunks: up to three tokens of every row, then the rest; padding goes to the spare slot."""
    for start, stop in ((0, 3), (3, max(map(len, prefixes)))):
        parts = [prefix[start:stop] for prefix in prefixes]
        width = max(map(len, parts))
        token_BT = torch.tensor([part + [0] * (width - len(part)) for part in parts])
        slot_BT = torch.tensor(
            [[start + i if i < len(part) else cache.spare_slot for i in range(width)] for part in parts]
        )
        position_BT = (start + torch.arange(width)).expand(len(parts), -1)
        target.forward(token_BT, Slots(slot_BT, position_BT, None, num_visible=NUM_SLOTS), cache)


@torch.no_grad()
def check_trees_over_ragged_rows(target: Target, plain: Target) -> None:
    """Trees of ``target`` give what paths give in ``plain``, before and after compaction."""
    generator = torch.Generator().manual_seed(1)
    texts = [tokens(size, seed=size).tolist() for size in (1, 4, 9)]
    cache = target.runtime.new_cache(3, NUM_SLOTS)
    prefill(target, cache, texts)
    for seed in (2, 3):
        length_B = torch.tensor([len(text) for text in texts])
        parents = [random_parents(NUM_NODES, generator) for _ in texts]
        token_BN, ancestor_BNN = tokens(3, NUM_NODES, seed=seed), ancestors(torch.tensor(parents), NUM_NODES)
        depth_BN = ancestor_BNN.sum(-1) - 1
        num_visible = int(length_B.max()) + NUM_NODES
        slot_BN, position_BN = length_B[:, None] + torch.arange(NUM_NODES), length_B[:, None] + depth_BN
        slots = Slots(slot_BN, position_BN, ancestor_BNN, num_visible=num_visible)
        hidden_BND = target.forward(token_BN, slots, cache).hidden_BTD
        for row, node in itertools.product(range(3), range(NUM_NODES)):
            path = texts[row] + token_BN[row, path_to(parents[row], node)].tolist()
            wanted_D = plain.forward(torch.tensor([path])).hidden_BTD[0, -1]
            assert torch.allclose(hidden_BND[row, node], wanted_D, atol=1e-5, rtol=1e-5), (row, node)
        # Each row keeps the path to its deepest node: those slots move together, and the next tree stands behind them.
        paths = [path_to(line, int(depth_N.argmax())) for line, depth_N in zip(parents, depth_BN, strict=True)]
        longest = max(map(len, paths))
        source_BL = length_B[:, None] + torch.tensor([path + [path[-1]] * (longest - len(path)) for path in paths])
        cache.move_slots(source_BL, length_B[:, None] + torch.arange(longest))
        texts = [text + token_BN[row, path].tolist() for row, (text, path) in enumerate(zip(texts, paths, strict=True))]
    assert torch.allclose(target.logits(hidden_BND), plain.logits(hidden_BND), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["own", "folded"])
@pytest.mark.parametrize("name", TARGETS)
def test_trees_over_ragged_rows_equal_their_paths_before_and_after_compaction(name: str, form: str) -> None:
    target = tiny(name)
    if form != "own":
        target.runtime.prepare_decoding()
        if target.model.config._attn_implementation != FOLDED_ATTENTION:
            pytest.skip("its attention is not SDPA")
    check_trees_over_ragged_rows(target, target if form == "own" else tiny(name))


@pytest.mark.parametrize("name", TARGETS)
@torch.no_grad()
def test_logits_are_the_models_own(name: str) -> None:
    target = tiny(name)
    token_BT = tokens(2, 6)
    wanted_BTV = target.model(token_BT).logits
    got_BTV = target.logits(target.forward(token_BT).hidden_BTD)
    assert torch.allclose(got_BTV, wanted_BTV, atol=1e-5, rtol=1e-5)
    assert target.vocab_size == VOCAB and target.hidden_size == 32 and target.num_layers == 2
    assert target.runtime.embed(token_BT).shape == (2, 6, 32)
    # Where the target says so, they are the output matrix times the hidden state.
    assert target.traits.has_plain_logits == (name not in ("Gemma2", "Cohere", "Cohere2", "Granite", "GPTJ"))
    if target.traits.has_plain_logits:
        product_BTV = target.forward(token_BT).hidden_BTD @ target.runtime.output_weight_VD.T
        assert torch.allclose(product_BTV, wanted_BTV, atol=1e-5, rtol=1e-5)
    # Right padding changes nothing before it.
    padded_BT = torch.cat([token_BT, torch.zeros(2, 3, dtype=torch.int64)], dim=1)
    assert torch.allclose(target.forward(padded_BT).hidden_BTD[:, :6], target.forward(token_BT).hidden_BTD, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_cannot_be_targets_are_refused_with_the_reason(name: str) -> None:
    config, why = OTHERS[name]
    model = build(config())
    with pytest.raises(ValueError, match=why) as caught:
        wrap_model(model, name=f"my-{name}")
    assert f"'my-{name}'" in str(caught.value) and "\n" not in str(caught.value)


def test_models_without_output_matrix_or_masks_are_refused() -> None:
    with pytest.raises(ValueError, match="no output matrix"):
        wrap_model(transformers.LlamaModel(TARGETS["Llama"]()))
    model = build(TARGETS["Llama"]())
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        wrap_model(model)


@pytest.mark.parametrize("fault", ["mask", "positions"])
def test_model_that_ignores_what_it_is_given_is_refused(fault: str) -> None:
    """An architecture nobody here knows, which takes the arguments and does not use them."""
    model = build(TARGETS["Llama"]())
    decoder_forward = model.model.forward

    def careless(**given: Any) -> Any:
        if given.get("attention_mask") is not None and fault == "positions":
            given["position_ids"] = given["position_ids"][:, :1] + torch.arange(given["attention_mask"].shape[2])
        elif given.get("attention_mask") is not None:
            given["attention_mask"] = torch.ones_like(given["attention_mask"])
        return decoder_forward(**given)

    model.model.forward = careless
    with pytest.raises(ValueError, match="other hidden states than the same tokens in a row"):
        wrap_model(model)


@torch.no_grad()
def test_context_layers_are_the_models_hidden_states() -> None:
    target = tiny()
    token_BT = tokens(2, 5)
    output = target.forward(token_BT, context_layers=(0, 1))
    hidden_states = target.model(token_BT, output_hidden_states=True).hidden_states
    assert torch.equal(output.context_BTC, torch.cat([hidden_states[0], hidden_states[1]], dim=-1))
    assert torch.equal(output.hidden_BTD, hidden_states[-1])
    plain = target.forward(token_BT)
    assert plain.context_BTC is plain.hidden_BTD
    assert not target.model.training and not any(weight.requires_grad for weight in target.model.parameters())


def test_soft_cap_is_found_even_where_logits_are_small() -> None:
    config = TARGETS["Gemma2"]()
    target = wrap_model(build(config, std=0.01), name="flat")
    assert target.logits(1e6 * torch.ones(1, 32)).abs().max() <= config.final_logit_softcapping


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_pass_the_checks_and_keep_their_fingerprint(dtype: torch.dtype) -> None:
    for name, other in (("Llama", "Gemma2"), ("Gemma2", "GPT2"), ("GPT2", "Llama")):
        target = wrap_model(build(TARGETS[name](), std=0.02).to(dtype), name=name)
        assert target.dtype == target.runtime.new_cache(1, 8).layer(0)[0].dtype == dtype
        plain, different = (build(TARGETS[kind](), std=0.02).get_output_embeddings() for kind in (name, other))
        assert same_fingerprint(target.fingerprint, fingerprint_of(plain.weight))
        assert not same_fingerprint(target.fingerprint, fingerprint_of(different.weight))


def test_layers_of_different_shapes_have_stores_of_their_own() -> None:
    model = build(TARGETS["Llama"]())
    layer = model.model.layers[1].self_attn
    layer.k_proj, layer.v_proj = layer.q_proj, layer.q_proj
    layer.num_key_value_groups = 1
    target, asked = wrap_model(model), requests(4, seed=6)
    assert not target.traits.is_uniform
    for max_num_seqs in (1, 4):
        engine = Engine(target, config=EngineConfig(method="lookup", max_num_seqs=max_num_seqs, tree_size=6))
        assert [list(completion.token_ids) for completion in answer(engine, asked)] == oracle(target, asked)


def test_stop_tokens_come_from_the_generation_config_first() -> None:
    model = build(TARGETS["Llama"]())
    model.generation_config.eos_token_id = [5, 7]
    assert wrap_model(model).eos_token_ids == (5, 7)
    model.generation_config.eos_token_id = None
    assert wrap_model(model).eos_token_ids == (2,)
    model.config.eos_token_id = None
    tokenizer: Any = SimpleNamespace(eos_token_id=9)
    assert wrap_model(model, tokenizer).eos_token_ids == (9,)
    assert wrap_model(model).eos_token_ids == ()


def test_without_a_tokenizer_text_is_refused() -> None:
    target = tiny()
    for use in (lambda: target.encode("a"), lambda: target.decode([1]), lambda: target.encode_chat([])):
        with pytest.raises(ValueError, match="no tokenizer"):
            use()


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@torch.no_grad()
def test_load_from_a_folder(name: str, tmp_path: Path) -> None:
    made = tiny(name)
    made.model.save_pretrained(tmp_path)
    target = load_target(str(tmp_path), device="cpu", runtime="torch")
    assert target.tokenizer is None and target.name == str(tmp_path)
    kernel = "sdpa" if made.model._supports_sdpa else "eager"  # older transformers runs Gemma 2 with sdpa
    assert target.model.config._attn_implementation == kernel
    assert target.fingerprint == made.fingerprint
    token_BT = tokens(1, 5)
    assert torch.equal(target.forward(token_BT).hidden_BTD, made.forward(token_BT).hidden_BTD)
    assert load_target(str(tmp_path), dtype="bfloat16", device="cpu", runtime="torch").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="shared by 2 processes but 1 run: start that many on every node"):
        load_target(str(tmp_path), device="cpu", num_shards=2)


def test_devices_are_the_ones_that_torch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    def finds(kind: str | None) -> None:
        found = None if kind is None else torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)

    finds(None)
    assert resolve_device("auto") == torch.device("cpu")
    for device in ("xpu", "gpu", "cpu:x"):
        with pytest.raises(ValueError, match=f"--device '{device}': torch finds cpu here; use one of these, or auto"):
            resolve_device(device)
    finds("xpu")
    assert resolve_device("auto") == torch.device("xpu") and resolve_device("xpu:1") == torch.device("xpu", 1)
    for device in ("xpu:2", "mps"):
        with pytest.raises(ValueError, match=f"--device '{device}': torch finds cpu, xpu, xpu:0, xpu:1 here"):
            resolve_device(device)
    finds("mps")  # Apple's GPUs have no float64, in which the noise of sampling is computed
    assert resolve_device("auto") == torch.device("cpu") and resolve_device("mps") == torch.device("mps")


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [("avx2", "float32"), ("avx512_f", "float32"), ("avx512_bf16", "bfloat16"), ("bf16", "bfloat16")],
)
def test_a_cpu_trains_in_bfloat16_where_it_has_the_instructions(capability: str, dtype: str, monkeypatch) -> None:
    """Without them torch multiplies matrices in bfloat16 seven times more slowly than in float32."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False, capability: True})
    assert training_dtype(torch.device("cpu")) == dtype and training_dtype(torch.device("cuda")) == "bfloat16"


@pytest.mark.parametrize("content", [[{"type": "text", "text": "hey"}], 7])
def test_messages_that_a_template_cannot_take_are_refused(content: object) -> None:
    with pytest.raises(ValueError, match="refuses these messages"):
        tiny_chat_target().encode_chat([{"role": "user", "content": content}])  # type: ignore[dict-item]


WINDOW = 8
# One of each kind; the slow tests of architectures have all.
WINDOWED = ("Mistral", "Qwen2", "Gemma2", "GptOss", "Llama4Text")
PROMPTS = prompts_of(3, 5, 13, 30)
NUM_NEW = 24
# Method, rows, and whether a step looks at all slots of a row, as steps for CUDA graphs do.
WAYS = (("none", 1, False), ("none", 4, False), ("lookup", 1, False), ("lookup", 4, True))


def windowed(name: str) -> Target:
    kinds = ["full_attention", "sliding_attention"]
    mixed = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": kinds}
    return wrap_model(build(TARGETS[name](**(mixed if name == "Qwen2" else {}))), name=name)


@pytest.mark.parametrize("name", WINDOWED)
def test_texts_of_several_windows_are_those_of_generate(name: str) -> None:
    target = windowed(name)
    wanted = generated(target.model, PROMPTS, NUM_NEW)
    for method, rows, sees_all in WAYS:
        found = drafted(target, method, PROMPTS, NUM_NEW, max_num_seqs=rows, prefill_chunk=7, compile=sees_all)
        assert found == wanted, (method, rows)
    if name in ("Mistral", "Gemma2", "Llama4Text"):  # without its window the model writes another text
        target.runtime.capabilities = target.runtime.capabilities._replace(windows={})
        assert drafted(target, "none", PROMPTS, NUM_NEW) != wanted


@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3"])
def test_multimodal_checkpoints_answer_text_prompts(model_type: str, tmp_path: Path) -> None:
    model = panel.small_model(model_type)
    for weight in model.parameters():  # norms of ones would let a tied matrix repeat the last token
        if weight.ndim == 1:
            weight.data.uniform_(0, 1)
    model.save_pretrained(tmp_path)
    target = load_target(str(tmp_path), dtype="float32", device="cpu")
    wanted = generated(model, PROMPTS, NUM_NEW)
    assert any(len(set(ids)) > 2 for ids in wanted)
    assert drafted(target, "none", PROMPTS, NUM_NEW) == drafted(target, "lookup", PROMPTS, NUM_NEW) == wanted


def test_a_window_that_is_switched_off_is_none_and_one_that_attention_ignores_is_refused() -> None:
    for name, settings in (("Mistral", {"sliding_window": None}), ("Qwen2", {"use_sliding_window": False})):
        assert layer_windows(build(TARGETS[name](**settings)), name) == {}
    with pytest.raises(ValueError, match="a sliding window of 8 tokens in its configuration"):
        wrap_model(build(TARGETS["Llama"](sliding_window=WINDOW)), name="odd")


@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "GPTNeoX", "OPT", "Cohere2"])
def test_the_final_norm_is_found(name: str) -> None:
    target, seen = tiny(name), []
    norm = target.runtime.final_norm()
    last = [module for module in target.model.modules() if type(module) is type(norm)][-1]
    hook = last.register_forward_hook(lambda module, given, output: seen.append((given[0], output)))
    target.forward(torch.tensor([[5, 6, 7, 8]]))
    hook.remove()
    torch.testing.assert_close(norm(seen[-1][0]), seen[-1][1])


ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "results" / "architectures.jsonl"
FEW = slice(None, None, 5)  # every fifth type; the fast tests have those that users meet most


def verdicts() -> dict[str, str]:
    rows = map(json.loads, TABLE.read_text().splitlines())
    return {row["model_type"]: row["verdict"] for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(verdicts())[size(FEW, slice(None))])
def test_the_table_holds(model_type: str) -> None:
    assert panel.judge(model_type).verdict == verdicts()[model_type]


def test_the_page_counts_what_the_table_holds() -> None:
    page = (ROOT / "docs" / "interop.md").read_text()
    counts = Counter(verdicts().values())
    assert set(counts) == {"identical", "refused", "not built"}
    counted = f"{counts['identical']} types are identical, {counts['refused']} refused, none broken"
    assert f"{counted}, {counts['not built']} not built" in " ".join(page.split())
