"""Multimodal checkpoints whose text side is a plain decoder: text prompts decode as with ``generate``."""

from pathlib import Path

import pytest

from drafter.data.formats import parse_row
from drafter.data.reading import RawRow
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.targets.target import Target
from tests.targets.zoo import generated, panel

NUM_NEW = 16


@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3"])
def test_text_prompts_decode_as_with_generate(model_type: str, tmp_path: Path) -> None:
    model = panel.small_model(model_type)
    for weight in model.parameters():  # norms of ones would let a tied matrix repeat the last token
        if weight.ndim == 1:
            weight.data.uniform_(0, 1)
    model.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), dtype="float32", device="cpu")
    prompts = [list(range(5, 10)), list(range(20, 33))]
    wanted = generated(model, prompts, NUM_NEW)
    assert any(len(set(ids)) > 2 for ids in wanted)
    for method in ("none", "lookup"):
        engine = Engine(target, None, EngineConfig(method=method))
        found = engine.generate(prompts, SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True))
        assert [completion.token_ids for completion in found] == wanted, method


def test_images_in_a_row_are_refused_by_name() -> None:
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    row = RawRow({"messages": [{"role": "user", "content": content}]}, "p.jsonl, line 1")
    with pytest.raises(ValueError, match="messages.0: a part of type 'image_url': only text can be used"):
        parse_row(row)
