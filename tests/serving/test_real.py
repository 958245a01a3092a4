"""SmolLM2-135M with the drafter that comes with the package, served by the command, asked by the openai client."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
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
NUM_ROWS = 16
ASK: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Why is the sea salty? Answer in two sentences."}],
}


@cache
def plain() -> Engine:
    target = Target.load(str(fetch(NAME)), dtype="float32", device="cpu")
    return Engine(target, config=EngineConfig(method="none"))


def offline(params: SamplingParams) -> str:
    """What plain decoding says."""
    return plain().generate([ASK["messages"]], params)[0].text


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """Small trees: sixteen rows of them are one forward, on a processor."""
    fetch(NAME)
    tree = ["--beam-width", "4", "--draft-length", "3", "--tree-size", "6"]
    flags = ["--max-num-seqs", str(NUM_ROWS), "--max-model-len", "256", "--dtype", "float32", *tree]
    with server_process("--target", NAME, *flags, CUDA_VISIBLE_DEVICES="") as server:
        assert "drafting: drafter" in server.said, "the drafter needs no flag"
        yield openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=600)


def test_client_streams_the_targets_own_answer(client: openai.OpenAI) -> None:
    options = {"stream_options": {"include_usage": True}, "extra_body": {"details": True}}
    text, details, usage = "", [], None
    for chunk in client.chat.completions.create(**ASK, temperature=0, max_tokens=64, stream=True, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.model_extra and "details" in choice.model_extra:
                details.append(choice.model_extra["details"])
    assert text == offline(SamplingParams(max_new_tokens=64)) and len(text) > 60
    assert usage is not None and usage.completion_tokens == details[-1]["num_tokens"]
    assert details[-1]["num_tokens"] / details[-1]["num_target_forwards"] > 1.2, "drafts are accepted"


def test_seed_holds_alone_and_among_fifteen_neighbours(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        fields = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
        return client.chat.completions.create(**ASK, **fields, seed=seed).choices[0].message.content

    alone = ask(7)
    with ThreadPoolExecutor(NUM_ROWS) as pool:
        texts = list(pool.map(ask, range(NUM_ROWS)))
    params = SamplingParams(max_new_tokens=20, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True)
    assert texts[7] == alone == offline(params)
    assert len(set(texts)) > NUM_ROWS // 2
