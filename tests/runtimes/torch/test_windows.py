"""Layers with windows: texts of several windows are, token for token, what transformers generates."""

from pathlib import Path

import pytest

from drafter.runtimes.loading import load_target, wrap_model
from drafter.runtimes.torch.capabilities import layer_windows
from drafter.targets.target import Target
from tests.targets.zoo import TARGETS, build, drafted, generated, panel, prompts_of

WINDOW = 8
# One of each kind; the slow tests of architectures have all.
MODELS = ("Mistral", "Qwen2", "Gemma2", "GptOss", "Llama4Text")
PROMPTS = prompts_of(3, 5, 13, 30)
NUM_NEW = 24
# Method, rows, and whether a step looks at all slots of a row, as steps for CUDA graphs do.
WAYS = (("none", 1, False), ("none", 4, False), ("lookup", 1, False), ("lookup", 4, True))


def windowed(name: str) -> Target:
    kinds = ["full_attention", "sliding_attention"]
    mixed = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": kinds}
    return wrap_model(build(TARGETS[name](**(mixed if name == "Qwen2" else {}))), name=name)


@pytest.mark.parametrize("name", MODELS)
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
