"""The package on an accelerator that refuses (:mod:`tests.accelerator.device`): one process runs all cases."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from torch.utils import backend_registration

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch registers no devices from Python",
)


# Kernels of a step outside the target's forward at most, by the nodes of its tree: the table of docs/performance.md.
KERNELS = {1: 62, 8: 459, 24: 601, 64: 638}


RUNS = {
    "steps": ("tests.accelerator.cases", "step-"),
    "others": ("tests.accelerator.cases", "reads-", "train-", "refused-", "counted-"),
    "count": ("tests.accelerator.count", "--quick"),
}


@cache
def output() -> dict[str, list[str]]:
    """Lines of each run; the processes run side by side."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(words: tuple[str, ...]) -> list[str]:
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()

    with ThreadPoolExecutor() as pool:
        return dict(zip(RUNS, pool.map(run, RUNS.values()), strict=True))


@cache
def results() -> dict[str, Any]:
    """The line of every case."""
    lines = [json.loads(line) for name in ("steps", "others") for line in output()[name] if line.startswith('{"name"')]
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
    """Prefill, shared prefixes, and the server's thread beyond its steps."""
    assert {name: line.get("found", line) for name, line in results_of("reads-").items()} == dict.fromkeys(
        results_of("reads-"), 0
    )


def test_a_training_step_reads_the_norm_of_its_gradient() -> None:
    """Every loss, and a step whose details are logged. A validation reads nothing."""
    expected = {name: {"read": 1} for name in results_of("train-")} | {"train-validation": {}}
    assert {name: line.get("found", line) for name, line in results_of("train-").items()} == expected


def test_the_device_refuses_hidden_reads_shapes_from_numbers_and_two_devices() -> None:
    assert {name: line.get("error") for name, line in results_of("refused-").items()} == {
        "refused-item": "HiddenReadError",
        "refused-bool": "DataDependentOutputException",
        "refused-tolist": "HiddenReadError",
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


def test_kernels_of_a_step_outside_the_targets_forward() -> None:
    """The tree of 64 nodes is drafted in 5 steps; the target has one layer here."""
    lines = [line.split("|")[1:4] for line in output()["count"] if line.startswith("| ")]
    found = {int(nodes): (int(own), int(others)) for nodes, own, others in lines}
    assert all(others <= KERNELS[nodes] for nodes, (_, others) in found.items()), found
    assert found.keys() == KERNELS.keys() and all(30 < own < 80 for own, _ in found.values()), found
