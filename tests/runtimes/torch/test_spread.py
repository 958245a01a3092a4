"""Layers in main memory, on disk and on several devices: the same tokens, and which layer goes where."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.runtimes.loading import load_target
from drafter.runtimes.torch.spread import spread_out
from drafter.targets.target import Target
from tests.engine.drafters import shared_target, trained_drafter
from tests.engine.oracle import answer, oracle, requests

_ASKED = requests(5, seed=4)
_CONFIG = EngineConfig(
    method="drafter", beam_width=4, draft_length=3, tree_size=8, max_num_seqs=2, enable_prefix_caching=True
)
_REST = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]  # of the modules, beside the layers
_MAP = "".join(f"{name}: cpu\n" for name in [*_REST, "model.layers.0"]) + "model.layers.1: disk\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared target as a folder."""
    place = tmp_path_factory.mktemp("map") / "target"
    shared_target().model.save_pretrained(place)
    return place


def written(folder: Path, text: str) -> str:
    (folder / "map.yaml").write_text(text)
    return str(folder / "map.yaml")


def tokens_of(target: Target, config: EngineConfig = _CONFIG) -> list[Sequence[int]]:
    drafter = trained_drafter()
    return [completion.token_ids for completion in answer(Engine(target, drafter.bind(target), config), _ASKED)]


def test_layers_on_disk_give_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    target = load_target(str(folder), device="cpu", device_map=written(tmp_path, _MAP))
    layers: Any = target.model.model.layers
    assert {weight.device.type for weight in layers[1].parameters()} == {"meta"}, "read for each forward"
    assert {weight.device.type for weight in layers[0].parameters()} == {"cpu"}
    assert target.traits.is_trainable and not target.traits.is_uniform
    auto = load_target(str(folder), device="cpu", device_map="auto")
    assert tokens_of(target) == tokens_of(auto) == oracle(shared_target(), _ASKED)


def test_keys_and_values_of_several_devices(folder: Path) -> None:
    """One processor under two names stands for two devices."""
    target = load_target(str(folder), device="cpu", is_trainable=True)
    target.runtime._layer_devices = (torch.device("cpu"), torch.device("cpu", 0))
    assert len(target.runtime.new_cache(1, 8)._stores) == 2
    assert tokens_of(target) == oracle(shared_target(), _ASKED)
    for max_num_seqs in (1, 4):
        config = EngineConfig(method="none", max_num_seqs=max_num_seqs)
        assert tokens_of(target, config) == oracle(shared_target(), _ASKED)


def test_layers_fill_the_devices_in_order() -> None:
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **sizes)).float()
    layer = 2 * sum(weight.numel() for weight in model.model.layers[0].parameters())
    rest = 2 * (sum(weight.numel() for weight in model.parameters()) - 6 * layer // 2)
    free = {0: int((rest + 1.5 * layer) / 0.8), 1: int(2.5 * layer / 0.8), "cpu": int(1.2 * layer / 0.8)}
    found = spread_out(model, torch.bfloat16, torch.device("cuda", 0), free)
    assert [found.pop(f"model.layers.{index}") for index in range(6)] == [0, 1, 1, "cpu", "disk", "disk"]
    assert found == dict.fromkeys(_REST, 0)
    on_cpu = spread_out(model, torch.bfloat16, torch.device("cpu"), {"cpu": free[0]})
    assert [on_cpu[f"model.layers.{index}"] for index in range(3)] == ["cpu", "disk", "disk"]


def test_maps_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--device-map gone.yaml: there is no such file; give auto"):
        load_target(str(folder), device="cpu", device_map="gone.yaml")
    on_disk = _MAP.replace("embed_tokens: cpu", "embed_tokens: disk")
    for text, message in (
        (on_disk, "embeddings and output matrix must lie on one device"),
        (_MAP.replace("lm_head: cpu\n", ""), "lm_head"),
        ("- cpu\n", "a map has a device for every module"),
        *((f"'': {device}", f"--target '{folder}' cannot be loaded") for device in ("cuda:0", "meta", "evil")),
    ):
        with pytest.raises(ValueError, match=message):
            load_target(str(folder), device="cpu", device_map=written(tmp_path, text))
