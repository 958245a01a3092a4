"""The other engines: their weights are the target's, their texts are plain decoding's, what they report can be."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from drafter.bench.backends import (
    EngineBackend,
    PeerProcess,
    TransformersBackend,
    peak_memory,
    start_peer,
    weights_file,
)
from drafter.bench.settings import parse_method
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.runtimes.loading import load_target
from drafter.targets.target import Target
from tests.serving.tiny import tiny_target
from tests.targets.tiny_gguf import write_gguf

PROMPTS = [[1, 40, 41, 42, 40, 41], [1, 90], [1, 17, 18, 19, 20, 21, 22, 23, 24, 25]]
PARAMS = SamplingParams(max_new_tokens=12)
SPEC = parse_method("llama-cpp:F32")


def plain_texts(target: Target) -> list[list[int]]:
    backend = EngineBackend(Engine(target, config=EngineConfig(method="none", max_num_seqs=3)), 64)
    return [answer.token_ids for answer in backend.answer(PROMPTS, PARAMS)]


# -- transformers --------------------------------------------------------------------------------------------------


def texts_of_transformers(batch_size: int, params: SamplingParams = PARAMS) -> list[list[int]]:
    return [answer.token_ids for answer in TransformersBackend(tiny_target(), batch_size).answer(PROMPTS, params)]


def test_transformers_answers_by_our_settings_and_sets_aside_those_that_came_with_the_model(monkeypatch) -> None:
    model, plain = tiny_target().model, plain_texts(tiny_target())
    own = GenerationConfig(repetition_penalty=9.0, max_new_tokens=2, do_sample=True)
    monkeypatch.setattr(model, "generation_config", own)
    assert texts_of_transformers(1) == plain and model.generation_config is own
    sampled = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3)
    assert texts_of_transformers(2, sampled) == texts_of_transformers(2, sampled) != plain
    monkeypatch.setattr(tiny_target(), "eos_token_ids", (stop := plain[0][3],))
    texts = texts_of_transformers(3)
    assert texts[0][-1] == stop and len(texts[0]) <= 4 and texts == plain_texts(tiny_target())


# -- engines in processes of their own -----------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, home: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def target(file: Path) -> Target:
    return load_target(str(file), dtype="float32", device="cpu")


@pytest.fixture
def pythons() -> dict[str, str]:
    """This Python, or the one that DRAFTER_TEST_PEER_PYTHON names."""
    python = os.environ.get("DRAFTER_TEST_PEER_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode:
        pytest.skip(f"{python} lacks llama-cpp-python")
    return {"llama-cpp-python": python}


@pytest.fixture
def llama_cpp(target: Target, pythons: dict[str, str]) -> Iterator[PeerProcess]:
    with closing(start_peer(target, SPEC, 64, pythons)) as backend:
        yield backend


def test_a_file_of_the_wanted_format_is_taken_as_it_is(file: Path) -> None:
    assert weights_file(file, "F32") == file  # most of its matrices are float32
    assert weights_file(file, "BF16").parent == file.parent / "home" / "gguf"
    with pytest.raises(ValueError, match="comes from no GGUF file"):
        start_peer(tiny_target(), SPEC, 64, {})


def test_weights_are_the_targets_own_in_another_precision(file: Path, target: Target, pythons: dict[str, str]) -> None:
    start_peer(target, parse_method("llama-cpp:BF16"), 64, pythons).close()
    new = gguf.GGUFReader(weights_file(file, "BF16"))
    tensors = {tensor.name: tensor for tensor in new.tensors}
    for tensor in gguf.GGUFReader(file).tensors:
        exact, found = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)), tensors[tensor.name]
        rounded = exact.bfloat16().float() if exact.ndim > 1 else exact
        assert np.array_equal(gguf.dequantize(found.data, found.tensor_type), rounded.numpy())


def test_llama_cpp_answers_as_plain_decoding_does(target: Target, llama_cpp: PeerProcess) -> None:
    finished: list[int] = []
    with peak_memory(target.device, llama_cpp.process_id) as memory:
        answers = llama_cpp.answer(PROMPTS, PARAMS, lambda: finished.append(1))
    assert [answer.token_ids for answer in answers] == plain_texts(target)
    for answer in answers:
        assert 0 <= answer.first_token_seconds <= answer.seconds and answer.num_forwards == len(answer.token_ids)
    assert len(finished) == 3
    assert memory["of"].endswith("own process") and memory["bytes"] > 2**20
    assert "SSE3" in llama_cpp.build and len(llama_cpp.versions) == 1


@pytest.mark.parametrize("speculation", ["lookup", "draft"])
def test_llama_cpps_own_speculation_changes_no_text(speculation: str, target: Target, pythons: dict[str, str]) -> None:
    spec = parse_method(f"llama-cpp:F32:{speculation}")
    with closing(start_peer(target, spec, 64, pythons, target.name)) as peer:
        answers = peer.answer(PROMPTS, PARAMS)
    assert [answer.token_ids for answer in answers] == plain_texts(target)
    assert all(1 <= answer.num_forwards <= len(answer.token_ids) for answer in answers)


def test_an_engine_that_dies_is_one_line(llama_cpp: PeerProcess) -> None:
    assert llama_cpp.process_id is not None
    os.kill(llama_cpp.process_id, signal.SIGKILL)
    with pytest.raises(ValueError, match=r"--methods llama-cpp:F32: the engine failed: .+$"):
        llama_cpp.answer(PROMPTS, PARAMS)


def test_a_python_without_the_engine_is_one_line(target: Target) -> None:
    with pytest.raises(ValueError, match="--peer-python llama-cpp-python=/no/python cannot be run: No such file"):
        start_peer(target, SPEC, 64, {"llama-cpp-python": "/no/python"})
    if subprocess.run([sys.executable, "-c", "import llama_cpp"], capture_output=True).returncode:
        with pytest.raises(ValueError, match="the engine failed: ModuleNotFoundError: No module named 'llama_cpp'"):
            start_peer(target, SPEC, 64, {})
