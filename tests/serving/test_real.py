"""SmolLM2-135M with the drafter that comes with the package, served by the command, asked by the openai client."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import httpx
import openai
import pytest

from drafter.decoding.params import SamplingParams
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.targets.catalog import fetch
from drafter.targets.target import Target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NAME = "smollm2-135m"
NUM_ROWS = 16
MESSAGES = [{"role": "user", "content": "Why is the sea salty? Answer in two sentences."}]


@cache
def target() -> Target:
    return Target.load(str(fetch(NAME, progress=False)), dtype="float32", device="cpu")


def offline(params: SamplingParams) -> str:
    """What plain decoding says."""
    return Engine(target(), config=EngineConfig(method="none")).generate([MESSAGES], params)[0].text


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """Small trees: sixteen rows of them are one forward, on a processor."""
    flags = [
        "--target",
        NAME,
        "--port",
        "0",
        "--max-num-seqs",
        str(NUM_ROWS),
        "--max-model-len",
        "256",
        "--dtype",
        "float32",
    ]
    tree = ["--beam-width", "4", "--draft-length", "3", "--tree-size", "6"]
    command = [sys.executable, "-m", "drafter.cli.main", "serve", *flags, *tree]
    fetch(NAME, progress=False)
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ) as server:
        try:
            assert server.stderr is not None
            said = ""
            for line in server.stderr:
                said += line
                if found := re.search(r"http://127.0.0.1:\d+", line):
                    break
            assert found, said
            assert "drafter" in said, "the drafter needs no flag"
            deadline = time.monotonic() + 300
            while httpx.get(found[0] + "/ready").status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield openai.OpenAI(base_url=found[0] + "/v1", api_key="none", max_retries=0, timeout=600)
        finally:
            server.terminate()
            server.wait(60)
    assert server.returncode == 0


def test_client_streams_the_targets_own_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"details": True},
    )
    text, details, usage = "", [], None
    for chunk in stream:
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
        answer = client.chat.completions.create(
            model=NAME,
            messages=MESSAGES,  # type: ignore[arg-type]
            temperature=0.9,
            top_p=0.95,
            max_tokens=20,
            seed=seed,
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].message.content

    alone = ask(7)
    with ThreadPoolExecutor(NUM_ROWS) as pool:
        texts = list(pool.map(ask, range(NUM_ROWS)))
    params = SamplingParams(max_new_tokens=20, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True)
    assert texts[7] == alone == offline(params)
    assert len(set(texts)) > NUM_ROWS // 2
