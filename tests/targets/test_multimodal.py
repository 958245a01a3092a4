"""Multimodal checkpoints whose text side is a plain decoder: text prompts decode as with ``generate``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from drafter.data.formats import parse_row
from drafter.data.reading import RawRow
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.targets.target import Target

WINDOW = 8  # shorter than the texts
NUM_NEW = 16
TEXT: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
VISION: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
)


def qwen3_vl() -> PreTrainedConfig:
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 10000.0}
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, deepstack_visual_indexes=[0],
        num_position_embeddings=16,
    )  # fmt: skip
    return transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )


def mistral3() -> PreTrainedConfig:
    vision = {"model_type": "pixtral", "head_dim": 8, **VISION}
    return transformers.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"}, vision_config=vision, image_token_index=90
    )


def gemma3() -> PreTrainedConfig:
    kinds = ["sliding_attention", "full_attention"]
    return transformers.Gemma3Config(
        text_config={**TEXT, "query_pre_attn_scalar": 8, "sliding_window": WINDOW, "layer_types": kinds},
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
    )


@pytest.mark.parametrize("config", [qwen3_vl, mistral3, gemma3], ids=lambda config: config.__name__)
def test_text_prompts_decode_as_with_generate(config: Callable[[], PreTrainedConfig], tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = AutoModelForImageTextToText.from_config(config()).float().eval()
        for weight in model.parameters():
            weight.data.normal_(0, 0.3) if weight.ndim > 1 else weight.data.uniform_(0, 1)
    model.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), dtype="float32", device="cpu")
    prompts = [list(range(5, 10)), list(range(20, 33))]
    wanted = [
        model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)).long(), max_new_tokens=NUM_NEW, do_sample=False
        )[0, len(ids) :].tolist()
        for ids in prompts
    ]
    assert any(len(set(ids)) > 2 for ids in wanted)
    for method in ("none", "lookup"):
        engine = Engine(target, None, EngineConfig(method=method))
        found = engine.generate(prompts, SamplingParams(max_new_tokens=NUM_NEW))
        assert [completion.token_ids for completion in found] == wanted, method


def test_images_in_a_row_are_refused_by_name() -> None:
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    row = RawRow({"messages": [{"role": "user", "content": content}]}, "p.jsonl, line 1")
    with pytest.raises(ValueError, match="messages.0: a part of type 'image_url': only text can be used"):
        parse_row(row)
