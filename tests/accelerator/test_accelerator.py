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


RUNS = (("step-",), ("reads-", "train-", "refused-", "counted-"), ("kernels-",))  # starts of cases


@cache
def results() -> dict[str, Any]:
    """What every case found, or its error; three processes run side by side."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.accelerator.cases"]
    running = [
        subprocess.Popen([*command, *starts], env=environment, stdout=subprocess.PIPE, text=True) for starts in RUNS
    ]
    texts = "".join(process.communicate(timeout=1500)[0] for process in running)
    assert not any(process.returncode for process in running), texts[-2000:]
    lines = [json.loads(line) for line in texts.splitlines() if line.startswith('{"name"')]
    return {line["name"]: line.get("found", line) for line in lines}


def results_of(kind: str) -> dict[str, Any]:
    """The results of cases whose names begin so; there are some."""
    found = {name: result for name, result in results().items() if name.startswith(kind)}
    assert found, kind
    return found


def test_a_step_reads_once_and_sends_nothing() -> None:
    """Targets of several kinds, trees and plain steps, all methods, greedy and sampled, log-probabilities and trees."""
    found = results_of("step-")
    assert found == dict.fromkeys(found, {"read": 1}) and len(found) >= 20


def test_nothing_else_reads() -> None:
    """Prefill, shared prefixes, and the server's thread beyond its steps."""
    found = results_of("reads-")
    assert found == dict.fromkeys(found, 0)


def test_a_training_step_reads_the_norm_of_its_gradient() -> None:
    """Every loss, and a step whose details are logged. A validation reads nothing."""
    found = results_of("train-")
    assert found == {name: {"read": 1} for name in found} | {"train-validation": {}}


def test_the_device_refuses_hidden_reads_shapes_from_numbers_and_two_devices() -> None:
    assert {name.removeprefix("refused-"): line.get("error") for name, line in results_of("refused-").items()} == {
        **dict.fromkeys(("item", "tolist", "numpy"), "HiddenReadError"),
        "bool": "DataDependentOutputException",
        **dict.fromkeys(("nonzero", "mask", "unique", "repeat"), "DynamicOutputShapeException"),
        "two-devices": "FakeTensorDeviceMismatchError",
        "index-of-the-host": "TwoDevicesError",
    }


def test_copies_are_counted() -> None:
    assert results_of("counted-") == {"counted-read": {"read": 3}, "counted-sent": {"sent": 2}}


def test_kernels_of_a_step() -> None:
    """At most those of the table of docs/performance.md, in bfloat16; the tree of 64 nodes is drafted in 5 steps."""
    most = {"kernels-1": 62, "kernels-8": 459, "kernels-24": 601, "kernels-64": 638}
    found = results_of("kernels-")
    assert found.keys() == most.keys() and all(found[name]["rest"] <= most[name] for name in most), found
    assert all(1200 < line["target"] < 1600 for line in found.values()), found
