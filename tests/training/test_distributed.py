"""Two processes train what one trains with the same batches, and a run goes on with another number of processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.test_run import make_place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "torchrun_train.sh"
TOLERANCE = 1e-4
# Validated every three steps: the interval counts the batches of one process.
ONE = ["--trainer.devices", "1", "--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "6"]
TWO = ["--trainer.devices", "2", "--trainer.strategy", "ddp", "--trainer.val_check_interval", "3"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("distributed"), num_rows=90)


def settings(run: str, num_steps: int) -> list[str]:
    """Flags of ``drafter train``."""
    return [
        *("--target", "target", "--train", "data.jsonl", "--data.val", "0.1"),
        *("--data.max_length", "64", "--data.batch_tokens", "128"),
        *("--model.optim.lr", "0.01", "--model.optim.warmup_steps", "1", "--model.optim.decay_share", "0"),
        *("--trainer.accelerator", "cpu", "--trainer.max_steps", str(num_steps), "--out", run),
        *("--trainer.gradient_clip_val", "1.0", "--trainer.log_every_n_steps", "1", "--trainer.precision", "32-true"),
        *("--trainer.check_val_every_n_epoch", "null", "--trainer.num_sanity_val_steps", "0"),
        *("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"),
        *("--decode-prompts", "2", "--decode-tokens", "8"),
    ]


def launch(place: Path, command: list[str], **variables: str) -> subprocess.Popen[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "DRAFTER_HOME": str(place / "home")} | variables
    return subprocess.Popen(command, cwd=place, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(place: Path, run: str, *processes: subprocess.Popen[str]) -> dict[str, Any]:
    """The last checkpoint, when all have ended well."""
    try:
        for process in processes:
            error = process.communicate(timeout=280)[1]
            assert process.returncode == 0, error[-3000:]
    finally:
        for process in processes:
            process.kill()
    return torch.load(place / run / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=True)


def train(place: Path, run: str, num_steps: int, processes: list[str], *more: str) -> dict[str, Any]:
    """Run ``drafter train`` as a user does; the last checkpoint."""
    command = [sys.executable, "-m", "drafter", "train", *settings(run, num_steps), *processes, *more]
    return finish(place, run, launch(place, command))


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, Any]:
    """Six steps of one process, two batches each."""
    return train(place, "alone", 6, ONE)


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["global_step"] == wanted["global_step"] == 6
    for name, tensor in wanted["state_dict"].items():
        assert torch.allclose(found["state_dict"][name].float(), tensor.float(), atol=TOLERANCE, rtol=0), name
    for name in ("val/loss", "val/top1_d1", "val/tokens_per_step"):
        assert found["metrics"][name] == pytest.approx(wanted["metrics"][name], abs=TOLERANCE), name


def test_two_processes_equal_one(place: Path, alone: dict[str, Any]) -> None:
    together = train(place, "together", 6, TWO)
    assert_same(together, alone)
    start = train(place, "start", 1, ONE)
    moved = (alone["state_dict"]["drafter.head.weight"] - start["state_dict"]["drafter.head.weight"]).abs().max()
    assert moved > 0.01, "or the equality above says nothing"
    shares = together["num_positions"] / alone["num_positions"]
    assert 0.6 < shares < 1.6, "positions of both processes are counted"


def test_run_of_two_processes_goes_on_with_two_and_no_other_number(place: Path, alone: dict[str, Any]) -> None:
    train(place, "two", 3, TWO)
    command = [sys.executable, "-m", "drafter", "train", *settings("two", 6), *ONE, "--ckpt-path", "last"]
    refused = launch(place, command)
    error = refused.communicate(timeout=280)[1]
    assert refused.returncode == 2 and "written by 2 process(es) and this run has 1" in error
    assert_same(train(place, "two", 6, TWO, "--ckpt-path", "last"), alone)


def test_target_shared_by_two_processes_trains_the_same(place: Path, alone: dict[str, Any]) -> None:
    assert_same(train(place, "shared", 6, TWO, "--model.shard_target", "true"), alone)


def test_two_machines_by_torchrun_train_the_same(place: Path, alone: dict[str, Any]) -> None:
    """Both on this machine: each is one call of the script with its own rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = [*settings("torchrun", 6), "--trainer.val_check_interval", "3"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    machines = [
        launch(place, ["bash", str(SCRIPT), *words], NNODES="2", NODE_RANK=rank, GPUS="1", MASTER_PORT=port, PATH=path)
        for rank in ("0", "1")
    ]
    assert_same(finish(place, "torchrun", *machines), alone)
