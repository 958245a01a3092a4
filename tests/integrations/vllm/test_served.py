"""Our drafter in a real vLLM (scripts/vllm_test.sh): the same text as vLLM alone, the same steps as our chain.

DRAFTER_VLLM_PYTHON names the Python of an environment with vLLM and this package; DRAFTER_VLLM_PROMPTS a file of
prompts instead of those of scripts/quickstart.sh.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.data.formats import read_rows
from drafter.decoding.params import SamplingParams
from drafter.engine.config import EngineConfig
from drafter.engine.defaults import shipped_drafter
from drafter.engine.engine import Engine
from drafter.integrations.vllm.export import export_vllm
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.catalog import fetch
from drafter.targets.target import Target
from tests.engine.drafters import answers_of, prompts_for, train_on_texts
from tests.engine.oracle import tiny_target

PYTHON = os.environ.get("DRAFTER_VLLM_PYTHON", "")
ROOT = Path(__file__).parents[3]
PROMPTS = os.environ.get("DRAFTER_VLLM_PROMPTS") or str(ROOT / "scripts" / "quickstart-prompts.jsonl")
NUM_TOKENS = 96
GREEDY = {"max_tokens": NUM_TOKENS, "temperature": 0.0}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON, reason="DRAFTER_VLLM_PYTHON names no environment with vLLM"),
]


class Served:
    """Models in a process of vLLM's environment."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, prompts: Sequence[list[int]], *, batch: int, model: int = 0, **params: Any) -> dict[str, Any]:
        request = {"model": model, "prompts": list(prompts), "params": GREEDY | params, "batch": batch}
        return self._talk(json.dumps(request) + "\n")

    def _talk(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        assert reply, f"vLLM ended with status {self._process.wait()}; its output is above"
        return dict(json.loads(reply))

    @classmethod
    @contextmanager
    def start(cls, *models: dict[str, Any], **environment: str) -> Iterator["Served"]:
        """Models by the arguments of vllm.LLM, each loaded for its first request."""
        words = [json.dumps({"max_model_len": 1024, "dtype": "float32"} | model) for model in models]
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
        with subprocess.Popen(
            [PYTHON, str(Path(__file__).parent / "worker.py"), *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own | settings | environment,
        ) as process:  # fmt: skip
            try:
                yield cls(process)
            finally:
                process.terminate()


def speculative(folder: Path) -> dict[str, Any]:
    return {"speculative_config": {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}}


@cache
def real_target() -> Target:
    return Target.load("smollm2-135m", dtype="float32", device="cpu", pack=False)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    fetch("smollm2-135m")
    return [real_target().encode_chat([{"role": "user", "content": str(row.text or row.prompt[0]["content"])}])
            for row in read_rows(PROMPTS)][:8]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drafter that comes with the package, for vLLM."""
    place = shipped_drafter("smollm2-135m")
    assert place is not None
    drafter = RecurrentDrafter.from_pretrained(place, dtype=torch.float32)
    return export_vllm(drafter, tmp_path_factory.mktemp("vllm") / "drafter", target=real_target(), dtype="float32")


@pytest.fixture(scope="module")
def model(prompts: list[list[int]]) -> dict[str, Any]:
    return {"model": str(fetch("smollm2-135m"))}


@pytest.fixture(scope="module")
def plain(model: dict[str, Any], prompts: list[list[int]]) -> list[list[int]]:
    """The texts of vLLM alone, one prompt at a time."""
    with Served.start(model | {"enforce_eager": True}) as served:
        return list(served.ask(prompts, batch=1)["token_ids"])


def test_texts_are_those_of_vllm_alone_and_steps_those_of_our_chain(
    model: dict[str, Any], folder: Path, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    with Served.start(model | speculative(folder) | {"enforce_eager": True}) as served:
        single, batched = served.ask(prompts, batch=1), served.ask(prompts, batch=8)
    assert single["token_ids"] == plain and batched["token_ids"] == plain
    place = shipped_drafter("smollm2-135m")
    assert place is not None
    drafter = RecurrentDrafter.from_pretrained(place, dtype=torch.float32).bind(real_target())
    engine = Engine(real_target(), drafter, EngineConfig(method="redrafter", beam_width=1, draft_length=3))
    ours = engine.generate(prompts, SamplingParams(max_new_tokens=NUM_TOKENS))
    assert [completion.token_ids for completion in ours] == plain
    steps = [count for completion in ours for count in completion.num_accepted]
    accepted = [sum(count > place for count in steps) for place in range(3)]
    print(f"drafting steps: vLLM {single['num_drafts']}, ours {len(steps)}; accepted by position: "
          f"{single['num_accepted']}, {accepted}")  # fmt: skip
    assert single["num_drafts"] == pytest.approx(len(steps), rel=0.02)
    assert single["num_accepted"] == pytest.approx(accepted, rel=0.05, abs=3)


def test_compiled_with_prefix_cache_and_chunked_prefill(
    model: dict[str, Any], folder: Path, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    options = model | speculative(folder) | {"max_num_batched_tokens": 64, "max_num_seqs": 8}
    with Served.start(options | {"enable_prefix_caching": True, "enable_chunked_prefill": True}) as served:
        runs = [served.ask(prompts, batch=batch)["token_ids"] for batch in (8, 8, 1)]
    assert runs == [plain] * 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, str]:
    """A random target whose heads two processes can share, with keys of a size that vLLM's CPU kernels have."""
    target = tiny_target(vocab_size=64, hidden_size=128)
    place = tmp_path_factory.mktemp("tiny")
    target.model.save_pretrained(place)
    return target, str(place)


def tiny_folder(target: Target, place: Path, **settings: Any) -> Path:
    """A drafter that has learnt the tiny target's answers a little, for vLLM."""
    torch.manual_seed(0)
    config = DrafterConfig(vocab_size=64, hidden_size=128, num_res_blocks=1, **settings)
    drafter = RecurrentDrafter(config)
    if config.draft_vocab_size is not None:
        drafter.set_draft_token_ids(torch.arange(64 - config.draft_vocab_size, 64))
    asked = prompts_for(16, seed=100)
    texts = [(prompt + answer)[:49] for prompt, answer in zip(asked, answers_of(target, asked), strict=True)]
    train_on_texts(drafter.bind(target), target, torch.tensor(texts), 60)
    return export_vllm(drafter, place, target=target, dtype="float32")


FORMS: dict[str, dict[str, Any]] = {
    "full, low rank": {"head": "full", "block_rank": 16},
    "tied, fused": {"head": "tied", "context": "fused", "context_layers": (0, 1, 2)},
    "tied, reduced": {"head": "tied", "draft_vocab_size": 50},
    "full, reduced, fused": {"head": "full", "draft_vocab_size": 50, "context": "fused", "context_layers": (1, 2)},
}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_form_on_one_rank_and_on_two(num_ranks: int, tiny: tuple[Target, str], tmp_path: Path) -> None:
    target, place = tiny
    options = {"model": place, "max_model_len": 128, "enforce_eager": True, "skip_tokenizer_init": True}
    asked = prompts_for(8, seed=7)
    answers = answers_of(target, asked, SamplingParams(max_new_tokens=48, ignore_eos=True))
    forms = list(FORMS)[2 * (num_ranks - 1) :]
    models = [
        options | {"tensor_parallel_size": num_ranks} | speculative(tiny_folder(target, tmp_path / name, **FORMS[name]))
        for name in forms
    ]
    # In one process where that is possible: vLLM takes half a minute to be imported.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if num_ranks == 2 else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with Served.start(*models, **environment) as served:
        for index, name in enumerate(forms):
            found = served.ask(asked, batch=8, model=index, max_tokens=48, ignore_eos=True)
            print(f"{num_ranks} rank(s), {name}: drafts {found['num_drafts']}, accepted {found['num_accepted']}")
            assert found["token_ids"] == answers
            assert found["num_accepted"][0] > 0.3 * found["num_drafts"], "the drafter has learnt these answers"
