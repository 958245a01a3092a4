"""What GGUF files say beside their weights; files that say odd things get one line that names the fault, or run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.runtimes.loading import load_target
from drafter.targets import chat
from drafter.targets.gguf_file import convert_gguf
from tests.data.tiny import change_json, save_target, tiny_target
from tests.runtimes.native.gguf_models import write_model
from tests.targets.tiny_gguf import TEMPLATE, write_gguf
from tests.targets.zoo import TARGETS, VOCAB, build

LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def converted(folder: Path, more: Callable[[gguf.GGUFWriter], None] = lambda writer: None) -> Path:
    folder.mkdir()
    convert_gguf(write_gguf(folder.with_suffix(".gguf"), more=more), folder)
    return folder


def add_divisors(writer: gguf.GGUFWriter, scale: float = 1.0) -> None:
    """As llama.cpp's converter writes the rotation of Llama 3.1: one divisor for each frequency."""
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=32, num_attention_heads=2, rope_parameters={"rope_theta": 10000.0, **LLAMA3})
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0].numpy()
    plain = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    writer.add_tensor("rope_freqs.weight", (plain / scaled * scale).astype(np.float32))


def add_scaling(writer: gguf.GGUFWriter, kind: str, **more: float) -> None:
    writer.add_string("llama.rope.scaling.type", kind)
    for name, value in more.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"llama.rope.scaling.{name}", value)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (lambda writer: add_scaling(writer, "linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        (lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
        (lambda writer: add_scaling(writer, "yarn", factor=4.0, original_context_length=32), YARN),
        (add_divisors, LLAMA3),
        (lambda writer: (writer.add_rope_dimension_count(16), add_divisors(writer)), LLAMA3),
    ],
)
def test_the_rotation_of_a_file_is_that_of_a_folder_with_the_same_weights(
    tmp_path: Path, more: Callable[[Any], None], wanted: dict[str, Any]
) -> None:
    plain = converted(tmp_path / "plain")
    rope = {"rope_theta": 10000.0, **wanted}
    by_hand = AutoModelForCausalLM.from_pretrained(plain, rope_parameters=rope, dtype=torch.float32)
    folders = converted(tmp_path / "scaled", more), plain
    models = by_hand, *(load_target(str(folder), device="cpu", runtime="torch").model for folder in folders)
    wanted_BTV, found_BTV, plain_BTV = (model(torch.arange(3, 103)[None]).logits for model in models)
    assert torch.equal(wanted_BTV, found_BTV) and not torch.allclose(wanted_BTV, plain_BTV, rtol=0.01)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (lambda writer: add_scaling(writer, "longrope", factor=4.0), "rope.scaling.type longrope"),
        (lambda writer: add_scaling(writer, "linear", factor=4.0, attn_factor=2.0), "rope.scaling.type linear"),
        (lambda writer: add_divisors(writer, scale=2.0), "rope_freqs.weight"),
        (lambda writer: writer.add_rope_dimension_count(8), "rope.dimension_count 8 of heads of 16"),
        (lambda writer: writer.add_tensor("rope_factors_long.weight", np.ones(8, np.float32)), "rope_factors_long"),
    ],
)
def test_a_rotation_that_is_not_known_is_refused(tmp_path: Path, more: Callable[[Any], None], message: str) -> None:
    with pytest.raises(ValueError, match=f"turns positions in a way that is not known here .*{message}"):
        converted(tmp_path / "odd", more)


def naming(text: str, other: str = "<|x|>") -> Callable[[Any], None]:
    """Other texts for the control tokens 1 and 0."""
    tokens = [other, text, "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ"]
    return lambda writer: writer.add_token_list(tokens)


def run_to(file: Path, **load: Any) -> tuple[int, ...]:
    """The tokens that end an answer of a file; each was seen to end one."""
    target = load_target(str(file), device="cpu", **load)
    engine = Engine(target, config=EngineConfig(method="none"))
    for end in target.eos_token_ids:
        params = SamplingParams(max_new_tokens=4, logit_bias={end: 100.0})
        [ended] = engine.generate([[{"role": "user", "content": "hi"}]], params)
        assert (ended.token_ids, ended.finish_reason, ended.text) == ([end], "stop", "")
    return target.eos_token_ids


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        (lambda writer: None, (2, 0)),  # the header names the first, the text of the other is that of an end
        (lambda writer: writer.add_eot_token_id(1), (2, 1, 0)),
        (lambda writer: writer.add_token_types([1] * 260), (2,)),  # ordinary tokens
        *((naming(end), (2, 1)) for end in ("<|eot_id|>", "<|eom_id|>", "</s>", "<turn|>", "<|end|>")),
        (naming("<|return|>", "<|end|>"), (2, 1)),  # the other ends a message that another one follows
    ],
)
def test_an_answer_ends_where_the_header_or_a_control_token_says(
    tmp_path: Path, more: Callable[[Any], None], ends: tuple[int, ...]
) -> None:
    assert run_to(write_gguf(tmp_path / "a.gguf", more=more)) == ends


def test_an_answer_of_gemma_ends_with_its_turn(tmp_path: Path) -> None:
    """The header names the end of the text alone."""

    def more(writer: Any) -> None:
        special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
        tokens = [*special, "\u2581", *map(chr, range(ord("a"), ord("a") + VOCAB - 7))]
        del writer.kv_data[0]["tokenizer.ggml.merges"]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(number) for number in range(VOCAB)])
        writer.add_token_types([3] * 3 + [2] + [3] * 2 + [1] * (VOCAB - 6))
        for name, number in {"pad": 0, "eos": 1, "bos": 2, "unk": 3}.items():
            getattr(writer, f"add_{name}_token_id")(number)
        writer.add_chat_template(
            TEMPLATE.replace("<|im_start|>", "<start_of_turn>").replace("<|im_end|>", "<end_of_turn>")
        )

    model = build(TARGETS["Gemma3Text"](num_hidden_layers=2, layer_types=["full_attention"] * 2))
    file = write_model(model, "Gemma3Text", tmp_path / "gemma.gguf", more)
    assert run_to(file, runtime="native") == (1, 5)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.attn_sinks.weight", "more.weight"])
def test_a_tensor_that_the_model_does_not_read_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"holds tensors that its model does not read \({name}\)"):
        converted(tmp_path / "odd", lambda writer: writer.add_tensor(name, np.ones(32, np.float32)))


def test_padding_of_a_vocabulary_is_never_drawn_and_refused_in_prompts(tmp_path: Path) -> None:
    target = load_target(str(write_gguf(tmp_path / "a.gguf", num_padding=300)), device="cpu")
    assert (target.num_tokens, target.vocab_size) == (260, 560)
    engine = Engine(target, config=EngineConfig(method="none"))
    params = SamplingParams(max_new_tokens=100, temperature=1e6, ignore_eos=True)
    [drawn] = engine.generate([[3]], params)
    assert max(drawn.token_ids) < 260
    with pytest.raises(ValueError, match="token id 260 is not in the vocabulary of 260 tokens"):
        engine.generate([[3, 260]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(save_target(tiny_target(), tmp_path / "target"))


def engine_of(folder: Path) -> Engine:
    return Engine(load_target(str(folder), device="cpu"), config=EngineConfig(method="none"))


def answer(folder: Path) -> list[int]:
    return list(engine_of(folder).generate(["hi"], SamplingParams(max_new_tokens=8))[0].token_ids)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pad_token_id": 10**6}, "Padding_idx must be within num_embeddings"),
        ({"eos_token_id": [None]}, "Validation error for field 'eos_token_id': .*Invalid item"),
        ({"num_hidden_layers": 5}, r"config.json asks for 5 layers, and its files hold 2|its files lack \d+"),
        ({"attention_bias": True}, r"its files lack \d+ of the weights that config.json asks for"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"hidden_act": "evil"}, "'evil'"),
        ({"_attn_implementation": "somebody/kernel"}, "names the attention kernel 'somebody/kernel' of a hub"),
        ({"num_hidden_layers": 10**9}, "config.json asks for 1,000,000,000 layers, and its files hold 2"),
    ],
)
def test_an_odd_config_is_refused_in_one_line(folder: Path, fields: dict[str, Any], message: str) -> None:
    change_json(folder / "config.json", **fields)
    with pytest.raises(ValueError, match=message) as caught:
        load_target(str(folder), device="cpu", dtype="bfloat16", runtime="torch")
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "is_harmless"),
    [
        ("model.layers.0.self_attn.o_proj.bias", False),
        ("model.layers.1.self_attn.sinks", False),
        ("model.layers.1.extra_norm.weight", False),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("visual.layers.0.weight", True),
    ],
)
def test_a_weight_that_nothing_reads_is_refused_by_its_name(folder: Path, name: str, is_harmless: bool) -> None:
    whole, file = answer(folder), folder / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(32)}, file, {"format": "pt"})
    if is_harmless:
        assert answer(folder) == whole
    else:
        with pytest.raises(ValueError, match=f"weights that the model does not read, first {name}"):
            answer(folder)


def test_an_odd_config_that_changes_nothing_is_taken(folder: Path) -> None:
    whole = answer(folder)
    for fields in ({"return_dict": False}, {"max_position_embeddings": 2**64}, {"max_position_embeddings": -1}):
        change_json(folder / "config.json", **fields)
        assert answer(folder) == whole


def test_an_odd_gguf_header_is_refused_in_one_line(tmp_path: Path, home: Path) -> None:
    for field, number, message in (
        ("head_count", 0, "division"),
        ("block_count", 10**9, "its header names 1000000000 layers"),
        ("vocab_size", 10**9, "the model of its header has"),
        ("embedding_length", 10**6, "the model of its header has"),
        ("vocab_size", 0, "Padding_idx must be within num_embeddings"),
        ("block_count", 9, "its header names 9 layers, and it holds tensors of 1"),
    ):
        file = write_gguf(tmp_path / "odd.gguf", **{field: number})
        with pytest.raises(ValueError, match=message) as caught:
            load_target(str(file), device="cpu")
        assert str(caught.value).startswith(f"{file} cannot be read as a GGUF model")
        assert "\n" not in str(caught.value)


def test_a_tokenizer_that_explodes_reaches_the_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve rules that make eight letters of one: 10^10 times the text."""
    monkeypatch.setattr(chat, "MAX_BYTES", 256 << 20)
    whole = engine_of(folder)
    rule = {"type": "Replace", "pattern": {"String": "h"}, "content": "h" * 8}
    change_json(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [rule] * 12})
    engine = engine_of(folder)
    for raw in (False, True):
        with pytest.raises(ValueError, match="the tokenizer.* (ended its process|takes more than 256 MiB|took longer)"):
            engine.generate(["hi"], raw=raw)
    assert whole.target.encode("hi"), "the valid tokenizer is not limited so"
