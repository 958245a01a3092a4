"""The machine check: parts of a step add up, bytes are counted, the script runs bare, and on CUDA."""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafter.bench.step_times import FixedTree, StepClock, copy_bandwidth, weight_bytes
from drafter.decoding.params import SamplingParams
from drafter.decoding.proposer import RootOnly
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.targets.target import Target
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.engine.oracle import rows_of

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


def small_llama(is_tied: bool) -> Target:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=is_tied,
    )  # fmt: skip
    return Target.from_model(LlamaForCausalLM(config), name="small")


def test_weights_that_a_step_reads() -> None:
    # Attention 16 x (16 + 8 + 8 + 16), mlp 3 x 16 x 32, three norms of 16, an output matrix of 50 x 16.
    read = 16 * 48 + 3 * 16 * 32 + 3 * 16 + 50 * 16
    assert weight_bytes(small_llama(is_tied=True)) == weight_bytes(small_llama(is_tied=False)) == 4 * read


def test_a_copy_has_a_bandwidth() -> None:
    assert 1e7 < copy_bandwidth(torch.device("cpu"), 2**22) < 1e13


def clock_of(target: Target, num_rows: int = 2, context_length: int = 16, num_rounds: int = 3) -> StepClock:
    config = EngineConfig(max_num_seqs=num_rows, beam_width=4, draft_length=2, tree_size=8, compile=False)
    return StepClock(
        target, trained_drafter(), config, (4, 8), context_length=context_length, num_rounds=num_rounds
    )  # fmt: skip


def test_steps_and_their_parts_are_timed() -> None:
    clock = clock_of(shared_target())
    steps, parts = clock.steps(time.perf_counter() + 60), clock.parts()
    assert set(steps) == {1, 4, 8} and min(steps.values()) > 0
    assert {"propose", "forward", "accept"} <= set(parts) and min(parts.values()) > 0


@pytest.mark.parametrize("num_nodes", [2, 3, 7, 8, 25, 64])
def test_fixed_trees_are_trees(num_nodes: int) -> None:
    proposer = FixedTree(num_nodes, 61, torch.device("cpu"))
    candidates = proposer.propose(rows_of([[1, 2, 3], [4, 5]]), None)
    parent, depth = candidates.parent_BN[0].tolist(), candidates.depth_BN[0].tolist()
    assert candidates.token_BN.shape == (2, num_nodes) and candidates.token_BN[:, 0].tolist() == [3, 5]
    assert parent[0] == depth[0] == 0 and max(depth) == proposer.max_depth <= 6
    for node in range(1, num_nodes):
        assert parent[node] < node and depth[node] == depth[parent[node]] + 1
    children = list(zip(parent[1:], candidates.token_BN[0, 1:].tolist(), strict=True))
    assert len(set(children)) == len(children)


def test_steps_with_a_proposer_of_the_caller_change_no_token() -> None:
    engine = Engine(shared_target(), config=EngineConfig(method="lookup", max_num_seqs=4, tree_size=16))
    plain = Engine(shared_target(), config=EngineConfig(method="none", max_num_seqs=4))
    engine.reserve(64)
    proposer = FixedTree(16, 61, torch.device("cpu"))
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    prompts = prompts_for(4, seed=8)
    own = [engine.add(prompt, params, want_text=False) for prompt in prompts]
    while engine.has_work:
        engine.step(proposer)
    assert [request.token_ids for request in own] == [item.token_ids for item in plain.generate(prompts, params)]


def test_sizes_take_turns_and_medians_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_of(shared_target())
    order: list[int] = []
    durations = iter([9.0, 9.0, 9.0, 1.0, 5.0, 7.0, 3.0, 6.0, 8.0, 2.0, 4.0, 9.0])

    def step(proposer: RootOnly) -> float:
        order.append(proposer.num_nodes)
        return next(durations)

    monkeypatch.setattr(clock, "_step", step)
    monkeypatch.setattr(clock, "_restart", lambda: None)
    assert clock.steps(time.perf_counter() + 60) == {1: 2.0, 4: 5.0, 8: 8.0} and order == [1, 4, 8] * 4


def test_a_context_too_short_to_measure_in_is_said() -> None:
    with pytest.raises(ValueError, match="too short for so many steps"):
        clock_of(shared_target(), context_length=240).steps(time.perf_counter() + 60)


def test_the_script_needs_neither_network_nor_the_packages_of_other_rooms(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    words = ["--device", "cpu", "--dtype", "float32", "--shapes", "tiny", "--batch-sizes", "1", "--tree-sizes", "4"]
    code = (
        "import runpy, socket, sys\n"
        "for name in ('datasets', 'wandb', 'fastapi', 'lightning', 'matplotlib'): sys.modules[name] = None\n"
        "def refuse(*words): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        f"sys.argv = ['gpu_check.py', '--no-compile', '--out', {str(out)!r}, *{words!r}]\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    assert content["records"][0]["target"] == "llama-tiny-random" and content["machine"]
    assert "| llama-tiny-random float32 |" in done.stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["--shapes", "9b", "--device", "cpu"], "unknown shape '9b'"), ([], "there is no CUDA device")],
)
def test_the_script_says_what_is_wrong(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not words and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    main = runpy.run_path(str(SCRIPT), run_name="gpu_check")["main"]
    assert main(["--out", str(tmp_path / "x.json"), *words]) == 2
    assert reason in capsys.readouterr().err


def test_the_shell_script_reads() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT.with_suffix(".sh"))], check=True)


@pytest.mark.gpu
def test_the_check_runs_on_cuda() -> None:
    from drafter.models.config import DrafterConfig
    from drafter.models.drafter import RecurrentDrafter

    target = small_llama(is_tied=False)
    target.model.to("cuda", torch.bfloat16)
    target = Target.from_model(target.model, name="small")
    drafter = RecurrentDrafter(DrafterConfig(vocab_size=50, hidden_size=16)).to("cuda", torch.bfloat16)  # type: ignore[arg-type]
    config = EngineConfig(max_num_seqs=2, beam_width=4, draft_length=2, tree_size=8)
    clock = StepClock(target, drafter.eval().bind(target), config, (4, 8), context_length=16, num_rounds=2)
    assert min(clock.steps(time.perf_counter() + 60).values()) > 0
