"""Engines that cannot fit."""

import pytest
import torch

from drafter.engine import memory
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.proposers.options import Method
from tests.engine.oracle import VOCAB, tiny_target


@pytest.mark.parametrize("method", ["none", "draft-model"])
def test_an_engine_that_cannot_fit_says_so_with_the_numbers(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft_model = tiny_target(), tiny_target(1) if method == "draft-model" else None
    engine = Engine(target, config=EngineConfig(method=method, max_num_seqs=3), draft_model=draft_model)
    models = [target] if draft_model is None else [target, draft_model]
    need = sum(memory.cache_bytes(model, 3, 128) for model in models) + 3 * engine.proposer.num_nodes * VOCAB * 4
    monkeypatch.setattr(memory, "available_bytes", lambda device: need - 1)
    with pytest.raises(ValueError, match=r"3 rows of 128 slots need .* GiB .* lower --max-num-seqs"):
        engine.reserve(100)
    monkeypatch.setattr(memory, "available_bytes", lambda device: need)
    engine.reserve(100)


def test_the_memory_of_this_machine_is_known() -> None:
    available = memory.available_bytes(torch.device("cpu"))
    assert available is None or available > 2**20
