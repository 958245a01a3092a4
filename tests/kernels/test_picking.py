"""The kernels of noise, filters and pick: a process of its own runs the cases of picking_cases.py."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("is_interpreted", [True, pytest.param(False, marks=on_gpu)])
def test_cases(is_interpreted: bool) -> None:
    command = [sys.executable, "-m", "pytest", str(Path(__file__).with_name("picking_cases.py"))]
    # Triton reads the variable when it is imported.
    variables = os.environ | {"TRITON_INTERPRET": str(int(is_interpreted))}
    result = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
