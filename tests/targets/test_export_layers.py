"""A program recorded of a few layers gives the numbers of all layers."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from drafter.targets.export import ForwardProgram, _attention_by_rows, _readable, export_forward
from drafter.targets.export_layers import LayerStack, repeat_layers
from tests.targets.test_target import tiny

ROWS, TOKENS, SLOTS = 2, 3, 4


def record(target: Any, given: list[str]) -> tuple[Any, LayerStack, list[str] | None]:
    found = target.capabilities
    stack = LayerStack(target.model, found.decoder)
    few = list(filter(stack.is_recorded, given))
    with stack.cut() as layers:
        recorded = _readable(export_forward(target.model, found, few, stored=torch.float32, layers=layers))
    assert recorded is not None
    return recorded, stack, repeat_layers(recorded, stack, few)


def test_copies_of_the_recorded_layers_have_weights_keys_and_values_of_their_own() -> None:
    """Worked example: of six layers three are recorded, the third is copied three times."""
    target = tiny("Llama", num_hidden_layers=6)
    given = [f"layers.{layer}.mlp.up_proj.weight" for layer in range(6)]
    recorded, stack, names = record(target, given)
    assert (stack.num_recorded, names) == (3, given)
    shape = target.cache_shape
    lead = (6, ROWS, shape.num_heads, SLOTS)
    stores = [torch.randn(*lead, shape.key_dim), torch.randn(*lead, shape.value_dim)]
    mask = torch.zeros(ROWS, 1, TOKENS, SLOTS + TOKENS)
    inputs = [torch.randn(1, ROWS * TOKENS, target.hidden_size), torch.arange(ROWS * TOKENS)[None]]
    weights = [torch.randn_like(target.capabilities.decoder.get_parameter(name)) for name in given]
    for node in recorded.graph.nodes:  # OpenVINO reads any strides as a view, torch does not
        node.target = torch.ops.aten.reshape.default if node.target is torch.ops.aten.view.default else node.target
    found = torch.fx.Interpreter(recorded).run(*inputs, mask, *stores, *weights, enable_io_processing=False)
    whole = ForwardProgram(target.capabilities, given, torch.float32, stack.layers)
    with _attention_by_rows(target.model), torch.no_grad():
        wanted: tuple[Tensor, ...] = whole(*inputs, [mask], *stores, weights)
    assert len(found) == len(wanted) == 3 + 6
    assert all(torch.equal(mine, other) for mine, other in zip(found, wanted, strict=True))


def test_layers_that_count_themselves_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("Llama", num_hidden_layers=4)
    places = {layer.mlp: place for place, layer in enumerate(target.model.model.layers)}
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda mlp, x: forward(mlp, x) * (1 + places[mlp]))
    _, stack, names = record(target, [])
    assert (stack.num_recorded, names) == (3, None)


def test_kinds_of_layers_are_recorded_twice_each() -> None:
    target = tiny("Llama", num_hidden_layers=9)
    for place in (3, 7):
        target.model.model.layers[place].self_attn.scaling = 0.5
    assert LayerStack(target.model, target.capabilities.decoder).num_recorded == 8
