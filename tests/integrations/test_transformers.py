"""For users of transformers: generate with a drafter in one line, the Auto classes, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.loading import shipped_drafter
from drafter.engine.settings import EngineConfig
from drafter.integrations.hub import write_custom_generate
from drafter.integrations.transformers import DrafterDecoder, generate, sampling_params
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.catalog import fetch
from drafter.targets.target import Target
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.engine.oracle import VOCAB

PAD = 0
KNOWN = prompts_for(4, seed=100)


@pytest.fixture
def model() -> PreTrainedModel:
    """The model the drafter was trained for, as a user of transformers has it: with gradients, in training mode."""
    own = shared_target().model
    copy = LlamaForCausalLM(LlamaConfig.from_dict(own.config.to_dict()))
    copy.load_state_dict(own.state_dict())
    copy.generation_config.eos_token_id = None
    return copy.eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An exported drafter."""
    trained_drafter().save_pretrained(tmp_path / "my.drafter-1")
    write_custom_generate(tmp_path / "my.drafter-1")
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
    assert torch.equal(generate(model, inputs, drafter=trained_drafter(), **settings), wanted)
    assert torch.equal(generate(model, BatchEncoding(inputs), drafter=trained_drafter(), **settings), wanted)
    decoder = DrafterDecoder(model, trained_drafter(), engine_config=EngineConfig(max_num_seqs=2, beam_width=4))
    assert torch.equal(decoder.generate(**inputs, **settings), wanted)


def test_rows_that_end_early_are_padded_like_the_models_own(model: PreTrainedModel) -> None:
    inputs = left_padded(KNOWN)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=24, pad_token_id=PAD)
    eos = [int(plain[0, -20]), int(plain[2, -9])]
    for settings in (
        {"eos_token_id": eos, "pad_token_id": PAD},
        {"eos_token_id": eos[0], "pad_token_id": PAD},
        {"eos_token_id": eos},
    ):
        wanted = model.generate(**inputs, do_sample=False, max_new_tokens=24, **settings)
        assert torch.equal(generate(model, inputs, drafter=trained_drafter(), max_new_tokens=24, **settings), wanted)
    config = GenerationConfig(max_new_tokens=24, eos_token_id=eos, pad_token_id=PAD)
    wanted = model.generate(**inputs, generation_config=config)
    assert torch.equal(generate(model, inputs, drafter=trained_drafter(), generation_config=config), wanted)
    assert wanted.shape[1] < plain.shape[1] or not torch.equal(wanted, plain)


def test_padding_without_a_mask_is_found_like_the_models_own(model: PreTrainedModel) -> None:
    ids = left_padded(KNOWN)["input_ids"]
    wanted = model.generate(ids, do_sample=False, max_new_tokens=9, pad_token_id=PAD)
    assert torch.equal(generate(model, ids, drafter=trained_drafter(), max_new_tokens=9, pad_token_id=PAD), wanted)


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
    with pytest.raises(ValueError, match="repetition_penalty=1.5 cannot be honoured"):
        model.generate(**inputs, custom_generate=str(moved), repetition_penalty=1.5, **settings)


def test_sampling_is_decided_by_the_seed(model: PreTrainedModel, folder: Path) -> None:
    inputs = left_padded([KNOWN[0]] * 3)
    settings: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_p": 0.95, "max_new_tokens": 12}
    first = generate(model, inputs, drafter=folder, seed=5, **settings)
    assert torch.equal(first, generate(model, inputs, drafter=str(folder), seed=5, **settings))
    assert len({tuple(row) for row in first.tolist()}) == 3, "rows have seeds of their own"
    second_row = generate(model, left_padded([KNOWN[0]]), drafter=folder, seed=6, **settings)
    assert torch.equal(first[1:2], second_row)
    torch.manual_seed(1)
    unseeded = generate(model, inputs, drafter=folder, **settings)
    torch.manual_seed(1)
    assert torch.equal(unseeded, generate(model, inputs, drafter=folder, **settings))
    assert not torch.equal(unseeded, generate(model, inputs, drafter=folder, **settings))


def test_sampling_follows_the_models_distribution(model: PreTrainedModel) -> None:
    """One token after a short prompt, 400 times: frequencies against the softmax that transformers would draw from."""
    num_rows, top_k = 400, 5
    ids = torch.tensor([KNOWN[1]] * num_rows)
    drawn = generate(
        model, ids, drafter=trained_drafter(), do_sample=True, top_k=top_k, temperature=0.8, max_new_tokens=2, seed=1
    )[:, ids.shape[1]]
    with torch.no_grad():
        logits = model(ids[:1]).logits[0, -1] / 0.8
    best = logits.topk(top_k)
    wanted = torch.zeros(VOCAB).index_add(0, best.indices, best.values.softmax(0))
    found = torch.bincount(drawn, minlength=VOCAB) / num_rows
    assert (found - wanted).abs().max() < 0.1
    assert set(drawn.tolist()) <= set(best.indices.tolist())


def test_generation_configs_become_sampling_parameters() -> None:
    greedy = sampling_params(GenerationConfig(temperature=0.7, top_p=0.9), 5)
    assert (greedy.temperature, greedy.top_k, greedy.max_new_tokens, greedy.stop_token_ids) == (0.0, 0, 20, ())
    sampled = sampling_params(GenerationConfig(do_sample=True, max_length=25, eos_token_id=7), 5)
    assert (sampled.temperature, sampled.top_k, sampled.top_p, sampled.min_p) == (1.0, 50, 1.0, 0.0)
    assert (sampled.max_new_tokens, sampled.stop_token_ids, sampled.ignore_eos) == (20, (7,), True)
    config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=0, top_p=0.9, min_p=0.05, max_new_tokens=9, eos_token_id=[7, 8]
    )
    full = sampling_params(config, 5)
    assert (full.temperature, full.top_k, full.top_p, full.min_p, full.max_new_tokens) == (0.6, 0, 0.9, 0.05, 9)
    assert full.stop_token_ids == (7, 8)
    harmless = GenerationConfig(num_beams=1, repetition_penalty=1.0, use_cache=False, length_penalty=2.0, top_k=3)
    assert sampling_params(harmless, 5).max_new_tokens == 20


@pytest.mark.parametrize(
    "setting",
    [
        {"num_beams": 4},
        {"repetition_penalty": 1.1},
        {"no_repeat_ngram_size": 2},
        {"num_return_sequences": 2},
        {"min_new_tokens": 3},
        {"bad_words_ids": [[5]]},
        {"stop_strings": ["x"]},
        {"guidance_scale": 2.0},
        {"typical_p": 0.5},
        {"max_time": 1.0},
        {"return_dict_in_generate": True},
        {"output_scores": True},
        {"prompt_lookup_num_tokens": 3},
        {"logits_processor": [lambda ids, scores: scores]},
        {"assistant_model": "another"},
        {"inputs_embeds": torch.zeros(1, 1, 32)},
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(model: PreTrainedModel, setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(setting))}.* cannot be honoured"):
        generate(model, left_padded(KNOWN), drafter=trained_drafter(), **setting)


def test_bad_inputs_are_refused(model: PreTrainedModel) -> None:
    def run(inputs: Any, **settings: Any) -> None:
        generate(model, inputs, drafter=trained_drafter(), **settings)

    with pytest.raises(ValueError, match="token ids of shape"):
        run(None)
    with pytest.raises(ValueError, match="token ids of shape"):
        run(torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="inputs holds 'pixel_values'"):
        run({"input_ids": torch.tensor([[5]]), "pixel_values": torch.zeros(1)})
    with pytest.raises(ValueError, match="a prompt is empty"):
        run(torch.tensor([[5, 6]]), attention_mask=torch.tensor([[0, 0]]))
    with pytest.raises(ValueError, match="attention_mask has shape"):
        run(torch.tensor([[5, 6]]), attention_mask=torch.tensor([[1]]))
    with pytest.raises(ValueError, match="max_length=2 leaves no room"):
        run(torch.tensor([[5, 6]]), max_length=2)
    with pytest.raises(ValueError, match="a streamer takes one row"):
        run(torch.tensor([[5], [6]]), streamer=object())


def test_streamer_gets_the_prompt_and_every_token(model: PreTrainedModel) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.is_ended = False

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.is_ended = True

    recorder = Recorder()
    ids = torch.tensor([KNOWN[0]])
    output = generate(model, ids, drafter=trained_drafter(), max_new_tokens=15, streamer=recorder)
    assert recorder.is_ended and recorder.tokens == output[0].tolist()


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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_model_with_the_drafter_of_the_package() -> None:
    """A chat with SmolLM2-135M as a user of transformers has it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(fetch("smollm2-135m"))
    model: Any = AutoModelForCausalLM.from_pretrained(fetch("smollm2-135m"), dtype=torch.float32)
    folder = shipped_drafter("smollm2-135m")
    question = [{"role": "user", "content": "Why is the sea salty?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    wanted = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    settings = {"custom_generate": str(folder), "trust_remote_code": True}
    assert torch.equal(model.generate(**inputs, max_new_tokens=32, do_sample=False, **settings), wanted)
    config = GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9, max_new_tokens=24)
    drawn = generate(model, inputs, drafter="smollm2-135m", generation_config=config, seed=3)
    # transformers' own top_k of 50 goes with it, and the seed decides as in any other way of decoding here.
    params = SamplingParams(max_new_tokens=24, temperature=0.7, top_p=0.9, top_k=50, seed=3)
    plain = Engine(Target.from_model(model, tokenizer), config=EngineConfig(method="none"))
    prompt = inputs["input_ids"][0].tolist()
    assert drawn[0].tolist() == prompt + plain.generate([prompt], params)[0].token_ids
