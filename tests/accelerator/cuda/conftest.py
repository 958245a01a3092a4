"""Only scripts/pretend_cuda.sh runs these tests: they need torch's CUDA build and the device of pretend.c."""

import os
from typing import Any

import pytest

if "DRAFTER_PRETEND_CUDA" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def one_token_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps hand out one token, 5, because what the device computes is garbage."""
    import torch

    from drafter.engine import runner
    from drafter.proposers.beam import BeamProposer

    unpack = runner._unpack

    def unpacked(words_X: Any, like: Any) -> list[Any]:
        results = unpack(torch.zeros_like(words_X), like)
        results[0][:, 0], results[0][:, 1], results[0][:, 2:] = 0, 1, 5  # not failed, one token, which is 5
        if len(results) > 5:
            results[-3].fill_(1)  # all places of the trees are nodes
        return results

    monkeypatch.setattr(runner, "_unpack", unpacked)
    monkeypatch.setattr(BeamProposer, "check", lambda *given: None)  # garbage is not finite
