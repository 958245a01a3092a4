"""SmolLM2-135M with the drafter that comes with the package, served by the command, asked by the openai client."""

from typing import Any

import openai
import pytest

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.targets.catalog import fetch
from drafter.targets.target import Target
from tests.serving.live import server_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NAME = "smollm2-135m"
ASK: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Why is the sea salty? Answer in two sentences."}],
}


def test_client_streams_the_targets_own_answer() -> None:
    folder = str(fetch(NAME))
    engine = Engine(Target.load(folder, dtype="float32", device="cpu"), config=EngineConfig(method="none"))
    wanted = engine.generate([ASK["messages"]], SamplingParams(max_new_tokens=64))[0].text
    options = {"stream_options": {"include_usage": True}, "extra_body": {"details": True}}
    text, details, usage = "", [], None
    tree = ["--beam-width", "4", "--draft-length", "3", "--tree-size", "6"]
    flags = ["--max-num-seqs", "2", "--max-model-len", "256", "--dtype", "float32", *tree]
    with server_process("--target", NAME, *flags, CUDA_VISIBLE_DEVICES="") as (url, said):
        assert "drafting: drafter" in said, "the drafter needs no flag"
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", timeout=600)
        for chunk in client.chat.completions.create(**ASK, temperature=0, max_tokens=64, stream=True, **options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                if choice.model_extra and "details" in choice.model_extra:
                    details.append(choice.model_extra["details"])
    assert text == wanted and len(text) > 60
    assert usage is not None and usage.completion_tokens == details[-1]["num_tokens"]
    assert details[-1]["num_tokens"] / details[-1]["num_target_forwards"] > 1.2, "drafts are accepted"
