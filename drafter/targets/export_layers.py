"""A program that was recorded of a few layers becomes the program of all layers.

Recording takes a second of processor time for a layer, and most layers run the same code with other weights. So only
the first layers are recorded, two of each kind at least. Where the operators of the two differ in nothing but weights,
keys, values and the hidden states that come in, copies of the operators serve the other layers of this kind.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from drafter.targets.sharding import layers_of

_SELECT = torch.ops.aten.select.int
_PLAIN = (bool, int, float, str, type(None))


class LayerStack:
    """The decoder layers of a model, and how many of them have to be recorded.

    Args:
        model: with its decoder.
        decoder: the model without its output matrix.

    Attributes:
        layers: the list.
        path: its name in the decoder.
        num_recorded: how many are recorded, from the first on: after the first, two of every kind that comes later; or
            all of them.
    """

    def __init__(self, model: PreTrainedModel, decoder: PreTrainedModel) -> None:
        self._decoder = decoder
        self.layers = layers_of(model, type(model).__name__)
        self.path = next(name for name, module in decoder.named_modules() if module is self.layers)
        types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or [""] * len(self.layers)
        self._kinds = [_kind_of(layer, kind) for layer, kind in zip(self.layers, types, strict=True)]
        numbers = range(3, len(self.layers))
        self.num_recorded = next(filter(self._is_enough, numbers), len(self.layers))

    def _is_enough(self, num: int) -> bool:
        return all(self._kinds[1:num].count(kind) >= 2 for kind in set(self._kinds[num:]))

    def recorded_like(self, layer: int) -> list[int]:
        """The last two recorded layers of a layer's kind, the last one first."""
        alike = [other for other in range(1, self.num_recorded) if self._kinds[other] == self._kinds[layer]]
        return alike[:-3:-1]

    def is_recorded(self, name: str) -> bool:
        """Whether a parameter of the decoder is in a recorded layer, or in none."""
        found = re.match(rf"{re.escape(self.path)}\.(\d+)\.", name)
        return found is None or int(found[1]) < self.num_recorded

    @contextmanager
    def cut(self) -> Iterator[nn.ModuleList]:
        """The decoder has its recorded layers alone within the block, which gets their list."""
        parent, _, name = self.path.rpartition(".")
        owner = self._decoder.get_submodule(parent)
        few = self.layers[: self.num_recorded]
        setattr(owner, name, few)
        try:
            yield few
        finally:
            setattr(owner, name, self.layers)


def _kind_of(layer: nn.Module, layer_type: str) -> str:
    """What tells layers of different code apart: modules, their settings, the shapes of their weights."""
    parts = []
    for name, module in layer.named_modules():
        settings = {
            key: value for key, value in vars(module).items() if isinstance(value, _PLAIN) and key != "layer_idx"
        }
        shapes = [(key, tuple(weight.shape)) for key, weight in module.named_parameters(recurse=False)]
        parts.append((name, type(module).__qualname__, sorted(settings.items()), shapes))
    return repr((layer_type, parts))


def repeat_layers(recorded: GraphModule, stack: LayerStack, given: Sequence[str]) -> list[str] | None:
    """Add the layers that were not recorded.

    Args:
        recorded: of :class:`drafter.targets.export.ForwardProgram`, with the first layers of the stack; changed.
        stack: the layers.
        given: names of the weights that are inputs, in the order of the inputs.

    Returns:
        The names of the weights that are inputs now; None, and nothing is changed, where two layers of one kind differ.
    """
    layers = _RecordedLayers(recorded, stack, given)
    missing = range(stack.num_recorded, len(stack.layers))
    if not all(layers.are_alike(*stack.recorded_like(layer)) for layer in missing):
        return None
    layers.repeat(missing)
    recorded.graph.eliminate_dead_code()
    recorded.graph.lint()
    return layers.given


class _RecordedLayers:
    """The operators of each recorded layer, and the role of every value that an operator reads.

    Args: as of :func:`repeat_layers`.
    """

    def __init__(self, recorded: GraphModule, stack: LayerStack, given: Sequence[str]) -> None:
        self._recorded, self._stack, self.given = recorded, stack, list(given)
        self._own: dict[int, list[Node]] = defaultdict(list)
        self._place: dict[Node, tuple[int, int]] = {}
        self._weights: dict[Node, tuple[int, str]] = {}  # layer and name of its tensor
        self._stores: dict[Node, tuple[int, Node]] = {}  # layer, and keys or values of all layers
        inside = re.compile(rf"_decoder\.{re.escape(stack.path)}\.(\d+)(?:\.|$)")
        of_weight = re.compile(rf"{re.escape(stack.path)}\.(\d+)\.(.+)")
        inputs = [node for node in recorded.graph.nodes if node.op == "placeholder"]
        self._last_input = inputs[-1]
        names = dict(zip(inputs[len(inputs) - len(given) :], given, strict=True))
        for node in recorded.graph.nodes:
            name = names.get(node, str(node.target).removeprefix("_decoder.") if node.op == "get_attr" else "")
            found = of_weight.fullmatch(name)
            if found:
                self._weights[node] = int(found[1]), found[2]
            elif node.target is _SELECT and node.args[0].op == "placeholder":
                self._stores[node] = node.args[2], node.args[0]
            elif node.op == "call_function":
                paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
                layer = next((int(match[1]) for match in map(inside.match, paths) if match), None)
                if layer is not None:
                    self._place[node] = layer, len(self._own[layer])
                    self._own[layer].append(node)
        self._output = next(node for node in recorded.graph.nodes if node.op == "output")
        self._final, self._keys, self._values, *self._hidden = self._output.args[0]

    def are_alike(self, one: int, other: int) -> bool:
        """Whether two layers run the same operators on values of the same roles."""
        return self._described(one) == self._described(other)

    def _described(self, layer: int) -> list[Any]:
        described: list[Any] = [
            (node.target, *tree_map_only(Node, lambda value: self._role(value, layer), [node.args, node.kwargs]))
            for node in self._own[layer]
        ]
        return [*described, *(self._place[part.args[0][layer]][1] for part in (self._keys, self._values))]

    def _role(self, value: Node, layer: int) -> Any:
        if value is self._hidden[layer]:
            return ("hidden",)
        for found in (self._place.get(value), self._weights.get(value), self._stores.get(value)):
            if found is not None and found[0] == layer:
                return ("own", found[1])
        return value

    def _out(self, layer: int) -> Node:
        """The hidden states that a recorded layer hands on."""
        if layer + 1 < len(self._hidden):
            return self._hidden[layer + 1]
        like = self._stack.recorded_like(layer)[1]
        return self._own[layer][self._place[self._hidden[like + 1]][1]]

    def repeat(self, layers: range) -> None:
        """Add copies of the recorded layers behind the last of them."""
        graph, last = self._recorded.graph, layers.start - 1
        before = hidden = self._out(last)
        readers = list(hidden.users)
        keys, values = (list(part.args[0]) for part in (self._keys, self._values))
        with graph.inserting_before(self._own[last][-1].next):
            for layer in layers:
                like = self._stack.recorded_like(layer)[0]
                copies = self._inputs(layer, like) | {self._hidden[like]: hidden}
                for node in self._own[like]:
                    copies[node] = graph.node_copy(node, partial(_copy_of, copies))
                self._hidden.append(hidden)
                hidden = copies[self._out(like)]
                keys.append(copies[keys[like]])
                values.append(copies[values[like]])
        for reader in readers:
            reader.replace_input_with(before, hidden)
        self._keys.args, self._values.args = (keys, *self._keys.args[1:]), (values, *self._values.args[1:])
        self._output.args = ((self._final, self._keys, self._values, *self._hidden),)

    def _inputs(self, layer: int, like: int) -> dict[Node, Node]:
        """Weights, keys and values of a layer in place of those of a recorded one."""
        graph = self._recorded.graph
        found: dict[Node, Node] = {}
        for node, (place, store) in self._stores.items():
            if place == like:
                found[node] = graph.call_function(_SELECT, (store, 0, layer))
        for node, (place, rest) in self._weights.items():
            if place != like:
                continue
            name = f"{self._stack.path}.{layer}.{rest}"
            if node.op == "placeholder":
                with graph.inserting_after(self._last_input):
                    found[node] = self._last_input = graph.placeholder(name.replace(".", "_"))
                self.given.append(name)
            else:
                attribute = name.replace(".", "_")
                setattr(self._recorded, attribute, attrgetter(rest)(self._stack.layers[layer]))
                found[node] = graph.get_attr(attribute)
        for node, copy in found.items():
            copy.meta = dict(node.meta)
        return found


def _copy_of(copies: dict[Node, Node], value: Node) -> Node:
    return copies.get(value, value)
