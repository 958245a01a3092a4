"""Targets whose files are whole and say odd things: one line that names the fault, or an answer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.runtimes.loading import load_target
from drafter.targets import chat
from tests.data.tiny import save_target, tiny_target
from tests.targets.tiny_gguf import write_gguf

Fields = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(save_target(tiny_target(), tmp_path / "target"))


def change(file: Path, fields: Fields) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


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
def test_an_odd_config_is_refused_in_one_line(folder: Path, fields: Fields, message: str) -> None:
    change(folder / "config.json", fields)
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
        change(folder / "config.json", fields)
        assert answer(folder) == whole


def test_an_odd_gguf_header_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTER_HOME", str(tmp_path / "home"))
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
    change(folder / "tokenizer.json", {"normalizer": {"type": "Sequence", "normalizers": [rule] * 12}})
    engine = engine_of(folder)
    for raw in (False, True):
        with pytest.raises(ValueError, match="the tokenizer.* (ended its process|takes more than 256 MiB|took longer)"):
            engine.generate(["hi"], raw=raw)
    assert whole.target.encode("hi"), "the valid tokenizer is not limited so"
