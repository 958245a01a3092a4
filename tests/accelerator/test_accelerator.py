"""The package on an accelerator that refuses (:mod:`tests.accelerator.device`): one process runs all cases."""

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from torch.utils import backend_registration

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch registers no devices from Python",
)


@cache
def results() -> dict[str, Any]:
    """The line of every case."""
    command = [sys.executable, "-m", "tests.accelerator.cases"]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"name"')]
    assert run.returncode == 0, run.stderr[-2000:]
    return {line["name"]: line for line in lines}


def results_of(kind: str) -> dict[str, Any]:
    """The lines of cases whose names begin so; there are some."""
    found = {name: line for name, line in results().items() if name.startswith(kind)}
    assert found, kind
    return found


def test_a_step_reads_once_and_sends_nothing() -> None:
    """Targets of several kinds, trees and plain steps, all methods, greedy and sampled, log-probabilities and trees."""
    assert {name: line.get("found", line) for name, line in results_of("step-").items()} == dict.fromkeys(
        results_of("step-"), {"read": 1}
    )
    assert len(results_of("step-")) >= 20


def test_nothing_else_reads() -> None:
    """Prefill, shared prefixes."""
    assert {name: line.get("found", line) for name, line in results_of("reads-").items()} == dict.fromkeys(
        results_of("reads-"), 0
    )


def test_the_device_refuses_hidden_reads_shapes_from_numbers_and_two_devices() -> None:
    assert {name: line.get("error") for name, line in results_of("refused-").items()} == {
        "refused-item": "DataDependentOutputException",
        "refused-bool": "DataDependentOutputException",
        "refused-tolist": "DataDependentOutputException",
        "refused-numpy": "HiddenReadError",
        "refused-nonzero": "DynamicOutputShapeException",
        "refused-mask": "DynamicOutputShapeException",
        "refused-unique": "DynamicOutputShapeException",
        "refused-repeat": "DynamicOutputShapeException",
        "refused-two-devices": "FakeTensorDeviceMismatchError",
        "refused-index-of-the-host": "TwoDevicesError",
    }


def test_copies_are_counted() -> None:
    found = {name: line.get("found", line) for name, line in results_of("counted-").items()}
    assert found == {"counted-read": {"read": 3}, "counted-sent": {"sent": 2}}
