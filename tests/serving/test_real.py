"""SmolLM2-135M with the drafter that comes with the package, served by the command, asked by the openai client."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.runtimes.loading import load_target
from drafter.targets.catalog import fetch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NAME = "smollm2-135m"


def test_client_streams_the_targets_own_answer(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Why is the sea salty? Answer in two sentences."}]
    engine = Engine(load_target(str(fetch(NAME)), dtype="float32", device="cpu"), config=EngineConfig(method="none"))
    wanted = engine.generate([messages], SamplingParams(max_new_tokens=64))[0].text
    log = tmp_path / "log"
    flags = "--max-num-seqs 2 --max-model-len 256 --dtype float32 --beam-width 4 --draft-length 3 --tree-size 6"
    command = f"-m drafter serve --port 0 --target {NAME} --device cpu {flags}"
    with log.open("w") as stream, subprocess.Popen([sys.executable, *command.split()], stderr=stream) as server:
        try:
            while not (notice := re.search(r"http://\S+", log.read_text())):
                assert server.poll() is None, log.read_text()
                time.sleep(0.5)
            client = openai.OpenAI(base_url=notice[0] + "v1", api_key="none", timeout=600)
            body: dict[str, Any] = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 64}
            chunks = client.chat.completions.create(**body, stream=True, extra_body={"details": True})
            choices = [chunk.choices[0] for chunk in chunks]
        finally:
            server.terminate()
    assert server.returncode == 0, "the server ends as told"
    assert "drafting: drafter" in log.read_text(), "the drafter needs no flag"
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text == wanted and len(text) > 60
    details = choices[-1].details
    assert details["num_tokens"] / details["num_target_forwards"] > 1.2, "drafts are accepted"
