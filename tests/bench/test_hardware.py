"""The machine check: parts of a step add up, bytes are counted, the script runs bare, and on CUDA."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafter.bench.hardware import CheckSettings, check_table, check_target, copy_bandwidth, weight_bytes
from drafter.bench.steptime import Budget
from drafter.targets.checks import decoder_of
from drafter.targets.target import Target
from tests.engine.drafters import shared_target, trained_drafter

SETTINGS = CheckSettings(
    (1, 2), (4, 8), beam_width=4, draft_length=2, context_length=16, num_rounds=2, copy_bytes=2**20
)
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


def check(target: Target, **options: Any) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    drafter = trained_drafter() if target is shared_target() else options.pop("drafter")
    check_target(target, drafter, SETTINGS, Budget(60), compile=False, on_record=records.append, **options)
    return records


def test_parts_of_a_step_are_told_apart() -> None:
    records = check(shared_target())
    assert [record["batch_size"] for record in records] == [1, 2]
    for record in records:
        assert set(record["step_ms"]) == {"4", "8"} and set(record["forward_ms"]) == {"1", "4", "8"}
        assert record["rest_ms"] > 0 and record["draft_ms"] > 0
        assert record["forward_ms"]["8"] > 0 and record["floor_ms"] > 0 and record["peak_bytes"] > 0
    assert not decoder_of(shared_target().model)._forward_hooks  # the clock is off again
    assert check_table(records).count("\n") == 4


def test_no_measurement_begins_when_the_time_is_over() -> None:
    records: list[dict[str, Any]] = []
    check_target(
        shared_target(), trained_drafter(), SETTINGS, Budget(0.0), compile=False, on_record=records.append
    )  # fmt: skip
    assert records == []


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
    records = check(target, drafter=drafter.eval())
    assert len(records) == 2 and all(record["peak_bytes"] > 0 for record in records)
