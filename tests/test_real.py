"""SmolLM2-135M in float32 with the drafter that comes with the package: in the engine, in transformers, and served."""

import re
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.loading import load_drafter, shipped_drafter
from drafter.engine.settings import EngineConfig
from drafter.integrations.transformers import generate
from drafter.models.drafter import RecurrentDrafter
from drafter.runtimes.loading import load_target
from drafter.targets.catalog import fetch, place_of
from drafter.targets.target import Target
from tests.engine.oracle import ids
from tests.engine.test_engine import hugging_face_answer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NAME = "smollm2-135m"
NUM_TOKENS = 32
PROMPTS = [
    "Why does bread rise? Answer in three sentences.",
    "Write a Python function that counts the vowels of a word.",
    "List five rivers of Europe, one on each line.",
    "Translate to French: the cat sleeps on the warm stone.",
    "What is 17 + 26? Show each step.",
]
GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS)


@cache
def target() -> Target:
    return load_target(str(fetch(NAME)), dtype="float32", device="cpu")


@cache
def hugging_face_answers() -> list[list[int]]:
    """What transformers says, one prompt at a time."""
    prompts = [target().encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    plain = load_target(target().name, device="cpu", runtime="torch", is_trainable=True)
    return [hugging_face_answer(plain, prompt, NUM_TOKENS, target().eos_token_ids) for prompt in prompts]


@cache
def drafter() -> RecurrentDrafter:
    return load_drafter(NAME, target())


def plain_engine(rows: int = 8) -> Engine:
    return Engine(target(), config=EngineConfig(method="none", max_num_seqs=rows))


@pytest.mark.parametrize(("rows", "width", "length", "size"), [(1, 8, 4, 24), (8, 3, 6, 10), (8, 4, 3, None)])
def test_answers_are_transformers_own(rows: int, width: int, length: int, size: int | None) -> None:
    config = EngineConfig(max_num_seqs=rows, beam_width=width, draft_length=length, tree_size=size)
    completions = Engine(target(), drafter(), config).generate(PROMPTS, GREEDY)
    assert ids(plain_engine(rows).generate(PROMPTS, GREEDY)) == ids(completions) == hugging_face_answers()
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    assert num_tokens / sum(completion.num_target_forwards for completion in completions) > 1.3
    for completion in completions:
        ended = completion.token_ids[-1] in target().eos_token_ids
        assert completion.finish_reason == ("stop" if ended else "length")


def test_generate_of_transformers_takes_the_drafter() -> None:
    """A chat as a user of transformers has it."""
    model: Any = AutoModelForCausalLM.from_pretrained(place_of(NAME), dtype=torch.float32)
    question = [{"role": "user", "content": "Why is the sea salty?"}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    inputs = target().tokenizer.apply_chat_template(question, **options)
    wanted = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    settings = {"custom_generate": str(shipped_drafter(NAME)), "trust_remote_code": True}
    assert torch.equal(model.generate(**inputs, max_new_tokens=32, do_sample=False, **settings), wanted)
    assert torch.equal(generate(model, inputs, drafter=NAME, max_new_tokens=32), wanted)


def test_a_client_of_the_server_streams_the_targets_own_answer(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Why is the sea salty? Answer in two sentences."}]
    wanted = plain_engine().generate([messages], SamplingParams(max_new_tokens=64))[0].text
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
