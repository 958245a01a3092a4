"""Targets that trees cannot use: plain decoding with the model's own cache, and a refusal of everything that drafts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.engine.config import EngineConfig
from drafter.engine.defaults import choose
from drafter.engine.engine import Engine
from drafter.engine.loading import load_drafter
from drafter.engine.memory import cache_bytes
from drafter.proposers.draft_model import DraftModelProposer
from drafter.targets.target import Target
from tests.engine.drafters import shared_target
from tests.engine.oracle import answer, oracle, requests
from tests.targets.zoo import PLAIN, TARGETS, build
from tests.training.fakes import make_module, make_trainer

PROMPTS = [list(range(3, 3 + size)) for size in (9, 1, 4, 14, 2)]
NUM_NEW = 12


def plain(name: str = "Jamba") -> Target:
    return Target.from_model(build(PLAIN[name][0]()), name=f"my-{name}")


@pytest.mark.parametrize("name", PLAIN)
def test_text_is_the_text_of_generate(name: str) -> None:
    """Rows of different lengths, of which two run together."""
    target = plain(name)
    assert PLAIN[name][1] in target.no_trees and "my-" in target.no_trees
    model: Any = target.model
    engine = Engine(target, config=EngineConfig(method="autoregressive", max_rows=2, prefill_chunk=3))
    found = engine.generate(PROMPTS, SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True))
    for prompt, completion in zip(PROMPTS, found, strict=True):
        wanted = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, eos_token_id=None
        )
        assert list(completion.token_ids) == wanted[0, len(prompt) :].tolist(), prompt


def test_sampled_rows_join_and_leave() -> None:
    target, asked = plain(), requests(6, seed=5)
    for config in (EngineConfig(method="autoregressive", max_rows=3), choose(target, given={"max_rows": 4}).config):
        found = answer(Engine(target, config=config), asked)
        assert [list(completion.token_ids) for completion in found] == oracle(target, asked)


def test_a_step_that_failed_at_a_later_row_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    target = plain()
    engine = Engine(target, config=EngineConfig(method="autoregressive", max_rows=2))
    params = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
    wanted = [list(completion.token_ids) for completion in engine.generate(PROMPTS[:2], params)]
    rows = [engine.add(prompt, params) for prompt in PROMPTS[:2]]
    engine.step()
    forward, calls = type(target._decoder).forward, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(target._decoder), "forward", failing)
    with pytest.raises(RuntimeError):
        engine.step()
    while engine.has_work:
        engine.step()
    assert [row.token_ids for row in rows] == wanted


def test_what_drafts_is_refused_in_one_line(tmp_path: Path) -> None:
    target = plain()
    reason = "needs draft trees, and target 'my-Jamba' has layers of kind linear_attention"
    for given in ({"method": "recycling"}, {"tree_size": 4}, {"beam_width": 2}):
        with pytest.raises(ValueError, match=f"--(method|tree-size|beam-width).*{reason}"):
            choose(target, given=given)
    with pytest.raises(ValueError, match=f"--method lookup {reason}"):
        Engine(target, config=EngineConfig(method="lookup"))
    with pytest.raises(ValueError, match=f"--drafter d {reason}"):
        load_drafter("d", target)
    with pytest.raises(ValueError, match=f"--draft-model {reason}"):
        DraftModelProposer(target, shared_target(), 3)
    with pytest.raises(ValueError, match="--exact-attention needs a cache of slots"):
        target.new_cache(1, 8, exact_attention=True)
    with pytest.raises(ValueError, match=f"--runtime openvino {reason}"):
        target.use_openvino()
    with pytest.raises(ValueError, match=f"drafter train {reason}"):
        make_trainer(tmp_path).fit(make_module(target), [])


def test_prefixes_are_not_shared() -> None:
    target = plain()
    config = EngineConfig(method="autoregressive", max_rows=2, reuse_prefixes=True, max_length=64)
    engine = Engine(target, config=config)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    asked = []
    for _ in range(2):
        asked.append(engine.add(PROMPTS[0], params))
        while engine.has_work:
            engine.step()
    assert asked[0].token_ids == asked[1].token_ids and asked[1].num_shared == 0


def test_bytes_of_a_text() -> None:
    """Two heads of 8 numbers for keys and values of Jamba's attention layers; its states do not grow."""
    target = plain()
    one, two = (cache_bytes(target, 1, size) for size in (100, 200))
    attention = sum(kind == "full_attention" for kind in target.model.config.layer_types)
    assert two - one == 100 * attention * 2 * 2 * 8 * 4 and one > two - one
    assert cache_bytes(target, 3, 100) == 3 * one


def test_layers_of_different_shapes_have_stores_of_their_own() -> None:
    model = build(TARGETS["Llama"]())
    layer = model.model.layers[1].self_attn
    layer.k_proj, layer.v_proj = layer.q_proj, layer.q_proj
    layer.num_key_value_groups = 1
    target, asked = Target.from_model(model), requests(4, seed=6)
    assert not target.no_trees and not target.is_plain
    for max_rows in (1, 4):
        engine = Engine(target, config=EngineConfig(method="recycling", max_rows=max_rows, tree_size=6))
        assert [list(completion.token_ids) for completion in answer(engine, asked)] == oracle(target, asked)
