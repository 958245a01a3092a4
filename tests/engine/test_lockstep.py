"""A target of several processes (gloo, float32) answers as one process does, and no process outlives another."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.loading import LoadedModels
from drafter.engine.runner import Runner
from drafter.engine.settings import EngineConfig
from drafter.targets.target import Target
from tests.engine.drafters import shared_target, trained_drafter
from tests.engine.oracle import oracle, requests
from tests.engine.ranks import in_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="processes of a machine with GPUs would use them")

_TREE = {"beam_width": 4, "draft_length": 3, "tree_size": 8}
_CONFIGS = {
    "none": EngineConfig(method="none", max_num_seqs=4),
    "one row": EngineConfig(method="drafter", max_num_seqs=1, **_TREE),
    "drafter": EngineConfig(method="drafter", max_num_seqs=4, **_TREE),
    "chunks": EngineConfig(method="drafter", max_num_seqs=3, prefill_chunk=4, **_TREE),
    "prefixes": EngineConfig(method="drafter", max_num_seqs=2, enable_prefix_caching=True, max_model_len=128, **_TREE),
}
_ASKED = requests(6, seed=3)
_SHARED = tuple((tuple(range(3, 40)) + (end,), SamplingParams(max_new_tokens=12, ignore_eos=True)) for end in (5, 6, 7))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared target, with 4 attention heads over 2 key/value heads, as a folder; its drafter is trained."""
    trained_drafter()
    place = tmp_path_factory.mktemp("ranks") / "target"
    shared_target().model.save_pretrained(place)
    return place


def with_drafter(target: Target) -> LoadedModels:
    return LoadedModels(target, trained_drafter().bind(target), None)


def answers(models: LoadedModels) -> dict[str, Any]:
    """The tokens of every method, and the prompt tokens that were shared."""
    found: dict[str, Any] = {}
    for name, config in _CONFIGS.items():
        asked = _SHARED if name == "prefixes" else _ASKED
        engine = Engine(models.target, models.drafter, config)
        done = engine.generate([ids for ids, _ in asked], [params for _, params in asked])
        found[name] = [completion.token_ids for completion in done]
        found[f"{name} steps"] = sum(completion.num_target_forwards for completion in done)
    engine = Engine(models.target, models.drafter, _CONFIGS["drafter"])
    for refused in ([], [10**6]):
        with pytest.raises(ValueError):
            engine.generate([refused])
    dropped = engine.add([1, 2, 3], SamplingParams(max_new_tokens=30))
    kept = engine.add([1, 2, 3], replace(_SHARED[0][1], max_new_tokens=5))
    engine.step()
    engine.abort(dropped.request_id)
    engine.limit_rows(1)
    while engine.has_work:
        engine.step()
    found["kept"] = kept.token_ids
    return found


def test_two_processes_answer_as_one(folder: Path) -> None:
    ended = in_ranks(folder, answers, load=with_drafter)
    assert ended.exit_codes == [0, 0], ended.result
    wanted = oracle(shared_target(), _ASKED)
    for name in ("none", "one row", "drafter", "chunks"):
        assert ended.result[name] == wanted, name
    assert ended.result["prefixes"] == oracle(shared_target(), _SHARED)
    assert ended.result["drafter steps"] < ended.result["none steps"], "drafts are accepted"
    assert ended.result["kept"] == oracle(shared_target(), (((1, 2, 3), replace(_SHARED[0][1], max_new_tokens=5)),))[0]


def test_processes_that_disagree_stop(folder: Path) -> None:
    def load(target: Target) -> LoadedModels:
        assert target.ranks is not None
        if not target.ranks.is_leader:
            target.output_weight_VD.copy_(target.output_weight_VD.roll(1, 0))
        return LoadedModels(target, None, None)

    ended = in_ranks(folder, lambda models: answers(with_drafter(models.target)), load=load)
    assert "disagree about the tokens" in ended.result
    assert ended.exit_codes == [1, 1]


@pytest.mark.parametrize("victim", [0, 1])
def test_no_process_outlives_another(folder: Path, victim: int) -> None:
    """One process dies between two steps, when the others have begun the next one."""

    def load(target: Target) -> LoadedModels:
        assert target.ranks is not None
        if target.ranks.rank == victim:
            step = Runner.step

            def dying(runner: Runner, *args: Any) -> Any:
                if int(runner._length_B.max()) > 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                return step(runner, *args)

            Runner.step = dying  # type: ignore[method-assign]
        return LoadedModels(target, None, None)

    def work(models: LoadedModels) -> Any:
        engine = Engine(models.target, config=_CONFIGS["none"])
        return engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=40, ignore_eos=True))[0].token_ids

    ended = in_ranks(folder, work, load=load)
    assert ended.exit_codes[victim] == -signal.SIGKILL and ended.exit_codes[1 - victim] == 1
    assert ended.seconds < 30
    if victim == 1:
        assert "process 0 of 2 stops" in ended.result


def test_more_processes_than_heads_are_refused(folder: Path) -> None:
    ended = in_ranks(folder, answers, num_ranks=4)
    assert "--tensor-parallel 4 cannot split 2 key/value heads evenly" in ended.result
    assert ended.exit_codes == [1] * 4


def test_processes_that_nobody_started_are_missed(folder: Path) -> None:
    with pytest.raises(ValueError, match="--tensor-parallel 2 needs 2 processes but 1 run: torchrun --nproc-per-node"):
        Target.load(str(folder), num_ranks=2)


def test_an_engine_of_ones_own_parts_is_refused(folder: Path) -> None:
    def work(models: LoadedModels) -> Any:
        engine = Engine(models.target, config=_CONFIGS["none"])
        return Engine(models.target, config=_CONFIGS["none"], proposer=engine.proposer)

    ended = in_ranks(folder, work)
    assert "takes its proposer and tree from its settings only" in ended.result
