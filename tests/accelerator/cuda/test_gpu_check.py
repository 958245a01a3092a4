"""All stages of scripts/gpu_check.py on a device whose numbers are garbage: no stage fails, no training step waits."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import drafter.training.build as build_module
from drafter.runtimes.torch import runtime as torch_runtime
from scripts.gpu_check import STAGES, main

torch.backends.cuda.enable_cudnn_sdp(False)


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing asks for numbers: a model on the device is what its twin on a CPU is."""
    probe = torch_runtime.probe

    def of_twin(model: Any, name: str) -> Any:
        config = copy.deepcopy(model.config)
        config.dtype = torch.float32
        return probe(type(model)(config), name)

    monkeypatch.setattr(torch_runtime, "probe", of_twin)
    monkeypatch.setattr(
        torch_runtime, "_check_tree_forward", lambda runtime, name: torch_runtime._run_small_tree(runtime)
    )
    monkeypatch.setattr(build_module, "measure_scales", lambda *given: (1.0, 1.0))


@pytest.mark.usefixtures("garbage")
def test_every_stage_writes_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "check.jsonl"
    for stage in STAGES:
        assert main([stage, "--small", "--shapes", "tiny", "--no-real", "--out", str(out)]) == 0
    rows = [row for row in map(json.loads, out.read_text().splitlines()) if "run" not in row]
    assert {row["stage"] for row in rows} == set(STAGES)
    assert [row["waits_per_step"] for row in rows if row["stage"] == "train"] == [0.0, 0.0]
