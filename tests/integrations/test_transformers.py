"""For users of transformers: generate with a drafter in one line, the Auto classes, and what is refused."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, BatchEncoding, GenerationConfig, LlamaForCausalLM, PreTrainedModel

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.integrations.export import CUSTOM_GENERATE
from drafter.integrations.transformers import DrafterDecoder, generate
from drafter.models.drafter import RecurrentDrafter
from drafter.runtimes.loading import wrap_model
from tests.engine.drafters import prompts_for, shared_target, trained_drafter

PAD = 0
KNOWN = prompts_for(4, seed=100)


@pytest.fixture
def model() -> PreTrainedModel:
    """The model the drafter was trained for, as a user of transformers has it: with gradients, in training mode."""
    own = shared_target().model
    copy = LlamaForCausalLM(transformers.LlamaConfig.from_dict(own.config.to_dict()))
    copy.load_state_dict(own.state_dict())
    copy.generation_config.eos_token_id = None
    return copy.eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An exported drafter."""
    trained_drafter().save_pretrained(tmp_path / "my.drafter-1")
    shutil.copytree(CUSTOM_GENERATE, tmp_path / "my.drafter-1" / "custom_generate")
    return tmp_path / "my.drafter-1"


def left_padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = [[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("settings", [{"max_new_tokens": 24}, {"max_length": 30}, {}])
def test_greedy_is_the_models_own_generate(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    inputs = left_padded(KNOWN)
    model.generation_config.pad_token_id = PAD
    wanted = model.generate(**inputs, do_sample=False, **settings)
    assert torch.equal(generate(model, BatchEncoding(inputs), drafter=trained_drafter(), **settings), wanted)
    decoder = DrafterDecoder(model, trained_drafter(), engine_config=EngineConfig(max_num_seqs=2, beam_width=4))
    assert torch.equal(decoder.generate(**inputs, **settings), wanted)


def test_rows_that_end_early_are_padded_like_the_models_own(model: PreTrainedModel) -> None:
    inputs = left_padded(KNOWN)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=24, pad_token_id=PAD)
    eos = [int(plain[0, -20]), int(plain[2, -9])]
    config = GenerationConfig(max_new_tokens=24, eos_token_id=eos, pad_token_id=PAD)
    for settings in ({"max_new_tokens": 24, "eos_token_id": eos}, {"generation_config": config}):
        wanted = model.generate(**inputs, do_sample=False, **settings)
        assert torch.equal(generate(model, inputs, drafter=trained_drafter(), **settings), wanted)
        assert not torch.equal(wanted, plain)


def test_one_line_with_transformers_alone_in_front(model: PreTrainedModel, folder: Path) -> None:
    inputs = left_padded(KNOWN)
    wanted = model.generate(**inputs, do_sample=False, max_new_tokens=16, pad_token_id=PAD)
    settings = {"max_new_tokens": 16, "pad_token_id": PAD, "trust_remote_code": True}
    assert torch.equal(model.generate(**inputs, custom_generate=str(folder), **settings), wanted)
    # The folder may move, and the drafter may lie elsewhere.
    moved = folder.rename(folder.with_name("moved"))
    assert torch.equal(model.generate(**inputs, custom_generate=str(moved), **settings), wanted)
    assert torch.equal(model.generate(**inputs, custom_generate=str(moved), drafter=str(moved), **settings), wanted)
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(**inputs, custom_generate=str(moved), max_new_tokens=4, trust_remote_code=False)
    with pytest.raises(ValueError, match="RepetitionPenaltyLogitsProcessor cannot be honoured"):
        model.generate(**inputs, custom_generate=str(moved), repetition_penalty=1.5, **settings)


def test_sampling_is_decided_by_the_seed(model: PreTrainedModel, folder: Path) -> None:
    inputs = left_padded([KNOWN[0]] * 3)
    settings: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_p": 0.95, "max_new_tokens": 12}
    first = generate(model, inputs, drafter=folder, seed=5, **settings)
    assert len({tuple(row) for row in first.tolist()}) == 3, "rows have seeds of their own"
    assert torch.equal(first[1:2], generate(model, left_padded([KNOWN[0]]), drafter=folder, seed=6, **settings))
    torch.manual_seed(1)
    unseeded = [generate(model, inputs, drafter=folder, **settings) for _ in range(2)]
    torch.manual_seed(1)
    assert torch.equal(unseeded[0], generate(model, inputs, drafter=folder, **settings))
    assert not torch.equal(*unseeded)


def test_settings_of_every_origin_are_read_as_by_transformers(model: PreTrainedModel) -> None:
    """Sampling parameters of a config, of the model's own config, and transformers' default of 50 likeliest tokens."""
    prompt, engine = KNOWN[0], Engine(wrap_model(model), config=EngineConfig(method="none"))
    inputs = torch.tensor([prompt])
    model.generation_config.min_p = 0.05
    config = GenerationConfig(do_sample=True, temperature=1.4, top_p=0.95, max_length=len(prompt) + 20)
    for given, top_k in ((config, 50), (GenerationConfig(**config.to_diff_dict() | {"top_k": 7}), 7)):
        params = SamplingParams(max_new_tokens=20, temperature=1.4, top_p=0.95, top_k=top_k, min_p=0.05, seed=3)
        wanted = engine.generate([prompt], params)[0].token_ids
        found = generate(model, inputs, drafter=trained_drafter(), generation_config=given, seed=3)
        assert found[0].tolist() == prompt + wanted
    harmless = {"repetition_penalty": 1.0, "use_cache": False, "num_return_sequences": 2}
    drawn = generate(model, inputs, drafter=trained_drafter(), seed=3, do_sample=True, max_new_tokens=9, **harmless)
    assert drawn.shape == (2, len(prompt) + 9) and not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"num_beams": 4}, "num_beams"),
        ({"repetition_penalty": 1.1}, "RepetitionPenalty"),
        ({"max_time": 1.0}, "MaxTimeCriteria"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"logits_processor": [lambda ids, scores: scores]}, "function"),
        ({"inputs_embeds": torch.zeros(4, 7, 32)}, "inputs_embeds"),
        ({"past_key_values": transformers.DynamicCache()}, "past_key_values"),
        ({"position_ids": torch.zeros(4, 7, dtype=torch.int64)}, "position_ids"),
        ({"attention_mask": torch.zeros(4, 1)}, "attention_mask has shape"),
        ({"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[0, 0]])}, "a prompt is empty"),
        ({"streamer": transformers.TextStreamer(None)}, "batch size 1"),
    ],
)
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_what_cannot_be_honoured_is_refused_by_name(model: PreTrainedModel, setting: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        generate(model, **(left_padded(KNOWN) | setting), drafter=trained_drafter())


def test_streamer_gets_the_prompt_and_every_token(model: PreTrainedModel) -> None:
    found: list[Any] = []
    recorder = SimpleNamespace(put=found.append, end=lambda: found.append(torch.tensor([-1])))
    ids = torch.tensor([KNOWN[0]])
    output = generate(model, ids, drafter=trained_drafter(), max_new_tokens=15, streamer=recorder)
    assert torch.cat([value.flatten() for value in found]).tolist() == [*output[0].tolist(), -1]


def test_model_is_left_as_it_was(model: PreTrainedModel) -> None:
    model.train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    grads = [parameter.requires_grad for parameter in model.parameters()]
    generate(model, torch.tensor([KNOWN[0]]), drafter=trained_drafter(), max_new_tokens=3)
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == grads
    model(torch.tensor([KNOWN[0]])).logits.sum().backward()


def test_auto_classes_know_the_drafter(folder: Path) -> None:
    assert AutoConfig.from_pretrained(folder).model_type == "recurrent_drafter"
    loaded = AutoModel.from_pretrained(folder)
    assert isinstance(loaded, RecurrentDrafter)
    assert torch.equal(loaded.head.weight, trained_drafter().head.weight)
