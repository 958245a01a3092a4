"""The target's forward as one program: embeddings, masks, keys and values in, recorded from transformers' own modules.

`torch.export` records the model's own code. The cache of the recording returns the concatenation of visible and new
keys and values, and keeps the new ones.

Shapes: B rows · T tokens of a row · M hidden states · S visible cache slots · H heads · G key/value heads ·
K head dimension · D hidden size · V vocabulary.
"""

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.func import functional_call
from torch.fx import GraphModule
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer

from drafter.targets.cache import FOLDED_ATTENTION, CacheShape, cache_keyword, use_folded_attention
from drafter.targets.capabilities import Capabilities, LogitMap
from drafter.targets.export_layers import LayerStack, repeat_layers
from drafter.targets.openvino_compile import Unsuitable, as_recorded, decomposed
from drafter.targets.openvino_runtime import mask_kinds

_ATEN = torch.ops.aten
# In recorded programs: operators that change at most the dtype, and operators that OpenVINO reads as they are.
_CONVERSIONS = {_ATEN.contiguous.default, _ATEN.to.device, _ATEN.to.dtype}
_READABLE = {
    operator.floordiv, operator.mul,
    _ATEN.add.Tensor, _ATEN.cat.default, _ATEN.cos.default, _ATEN.linear.default, _ATEN.mean.dim, _ATEN.mul.Tensor,
    _ATEN.neg.default, _ATEN.pow.Tensor_Scalar, _ATEN.repeat.default, _ATEN.rsqrt.default,
    _ATEN.scaled_dot_product_attention.default, _ATEN.select.int, _ATEN.silu.default, _ATEN.sin.default,
    _ATEN.slice.Tensor, _ATEN.sym_size.int, _ATEN.transpose.int, _ATEN.unsqueeze.default, _ATEN.view.default,
}  # fmt: skip


class ConcatCache(Cache):
    """Keys and values of visible slots; each layer's update returns them with the new ones behind.

    Attributes:
        new_keys, new_values: of each layer, [B, G, T, K].

    Args:
        keys, values: of each layer, [B, G, S, K].
        dtype: of the store. Later forwards read new keys and values in this format, so that this one does, too.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], dtype: torch.dtype) -> None:
        num_slots = keys[0].shape[2]
        super().__init__(layers=[StaticLayer(num_slots) for _ in keys])
        self._keys, self._values, self._dtype = keys, values, dtype
        self.new_keys: list[Tensor] = list(keys)
        self.new_values: list[Tensor] = list(values)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """All keys and values that the layer's attention reads, [B, G, S + T, K]; slots first."""
        key_states, value_states = (new.to(self._dtype).to(new.dtype) for new in (key_states, value_states))
        self.new_keys[layer_idx], self.new_values[layer_idx] = key_states, value_states
        keys = torch.cat([self._keys[layer_idx], key_states], dim=2)
        return keys, torch.cat([self._values[layer_idx], value_states], dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused by models that get positions and a 4-D mask."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Visible slots and new tokens, and offset."""
        return self._keys[layer_idx].shape[2] + query_length, 0


class ForwardProgram(nn.Module):
    """What is recorded: hidden states, every layer's new keys and values, and the input of every layer.

    Args:
        found: about the model, with the decoder and its kinds of masks.
        given: names of the decoder's parameters that are inputs of the program.
        dtype: of the store of keys and values.
        layers: of the decoder; the inputs may hold keys and values of further layers.
    """

    def __init__(self, found: Capabilities, given: Sequence[str], dtype: torch.dtype, layers: nn.ModuleList) -> None:
        super().__init__()
        self._decoder, self._mask_kinds = found.decoder, mask_kinds(found)
        self._given, self._dtype = tuple(given), dtype
        self._layers = list(layers)  # no second name for the modules

    def forward(
        self,
        embedding_BTD: Tensor,
        position_BT: Tensor,
        masks: list[Tensor],
        keys: Tensor,
        values: Tensor,
        weights: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """Run the decoder.

        Args:
            embedding_BTD: of the tokens.
            position_BT: int64.
            masks: added to the scores, [B, 1, T, S + T]; one, or one for each kind of layer.
            keys, values: of all layers, [layers, B, G, S, K].
            weights: the parameters that are inputs.

        Returns:
            Final hidden states [B, T, D], new keys [layers * B, G, T, K], new values, and the hidden states [B, T, D]
            before each layer.
        """
        layers = range(len(self._layers))
        cache = ConcatCache([keys[layer] for layer in layers], [values[layer] for layer in layers], self._dtype)
        inputs = {
            "inputs_embeds": embedding_BTD,
            "attention_mask": dict(zip(self._mask_kinds, masks, strict=True)) if self._mask_kinds else masks[0],
            "position_ids": position_BT,
            cache_keyword(self._decoder): cache,
        }
        given = dict(zip(self._given, weights, strict=True))
        states: list[Tensor] = []
        # Not `output_hidden_states`, for which transformers would leave hooks on these layers.
        hooks = [
            layer.register_forward_pre_hook(partial(_note_input, states), with_kwargs=True) for layer in self._layers
        ]
        try:
            settings = {"use_cache": True, "return_dict": True}
            output = functional_call(self._decoder, given, (), {**inputs, **settings})
        finally:
            for hook in hooks:
                hook.remove()
        return output.last_hidden_state, torch.cat(cache.new_keys), torch.cat(cache.new_values), *states


def _note_input(states: list[Tensor], layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
    states.append(args[0] if args else kwargs["hidden_states"])


class LogitsProgram(nn.Module):
    """What is recorded of the output matrix: hidden states [M, D] to logits [M, V].

    Args:
        output: the output matrix.
        logit_map: what the model does to its products.
    """

    def __init__(self, output: nn.Module, logit_map: LogitMap) -> None:
        super().__init__()
        self._output = output
        self._logit_map = logit_map

    def forward(self, hidden_MD: Tensor, weights: list[Tensor]) -> Tensor:
        """Logits of final hidden states; ``weights``: the matrix, where it is an input."""
        return self._logit_map(
            functional_call(self._output, dict(zip(("weight",), weights, strict=False)), (hidden_MD,))
        )


def check_exportable(model: PreTrainedModel) -> None:
    """Unsuitable for a model whose attention is not SDPA: its formula cannot be told the rows of a batch."""
    kernel = model.config._attn_implementation
    if kernel not in ("sdpa", FOLDED_ATTENTION):
        raise Unsuitable(f"its attention is {kernel!r}, not 'sdpa'")


@torch.no_grad()
def export_forward(
    model: PreTrainedModel, found: Capabilities, given: Sequence[str], *, stored: torch.dtype, layers: nn.ModuleList
) -> ExportedProgram:
    """The decoder's forward as a program with any number of rows, tokens and slots (:class:`ForwardProgram`).

    Args:
        model: a model that :func:`check_exportable` accepts.
        found: about the model.
        given: names of the decoder's parameters that are inputs of the program, behind the others.
        stored: number format that keys and values are stored in.
        layers: of the decoder, perhaps fewer than its cache has.

    Raises:
        Exception: of any kind that `torch.export` raises for code that it cannot record.
    """
    rows, tokens, slots = 2, 5, 24
    shape, dtype = found.cache_shape, found.decoder.dtype
    assert isinstance(shape, CacheShape)
    # One input for all layers: symbolic shapes of an input for each layer would take most of the time.
    lead = (shape.num_layers, rows, shape.num_heads, slots)
    stores = [torch.zeros(*lead, size, dtype=dtype) for size in (shape.key_dim, shape.value_dim)]
    num_masks = len(mask_kinds(found)) or 1
    masks = [torch.zeros(rows, 1, tokens, slots + tokens, dtype=dtype) for _ in range(num_masks)]
    hidden_size = model.get_output_embeddings().weight.shape[1]
    embedding_BTD = torch.zeros(rows, tokens, hidden_size, dtype=dtype)
    any_size = torch.export.Dim.AUTO
    by_token, by_store = {0: any_size, 1: any_size}, {1: any_size, 3: any_size}
    by_mask = [{0: any_size, 2: any_size, 3: any_size}] * num_masks
    weights = [found.decoder.get_parameter(name) for name in given]
    use_folded_attention(model)
    position_BT = torch.arange(tokens).expand(rows, -1)
    return torch.export.export(
        ForwardProgram(found, given, stored, layers).eval(),
        (embedding_BTD, position_BT, masks, *stores, weights),
        dynamic_shapes=(by_token, by_token, by_mask, by_store, by_store, [None] * len(weights)),
        strict=False,
    )


@torch.no_grad()
def export_logits(output: nn.Module, logit_map: LogitMap, *, is_given: bool = False) -> ExportedProgram:
    """The output matrix as a program for any number of hidden states (:class:`LogitsProgram`); errors as above.

    ``is_given``: the matrix is an input.
    """
    weight: Any = output.weight
    weights = [weight] if is_given else []
    inputs = torch.zeros(3, weight.shape[1], dtype=weight.dtype), weights
    sizes = ({0: torch.export.Dim.AUTO}, [None] * len(weights))
    return torch.export.export(LogitsProgram(output, logit_map), inputs, dynamic_shapes=sizes, strict=False)


def forward_to_openvino(
    ov: Any, model: PreTrainedModel, found: Capabilities, given: Sequence[str], *, stored: torch.dtype
) -> tuple[Any, list[str]]:
    """The decoder's forward as a model of OpenVINO, recorded of as few layers as possible.

    Args: ``ov``: the module ``openvino``; the others as of :func:`export_forward`.

    Returns:
        The model; the names of the parameters that are inputs, in the order of the inputs.

    Raises:
        Exception: of any kind that torch or OpenVINO raises for code that it cannot record or convert.
    """
    stack = LayerStack(model, found.decoder)
    if stack.num_recorded < len(stack.layers):
        few = list(filter(stack.is_recorded, given))
        with stack.cut() as layers:
            program = export_forward(model, found, few, stored=stored, layers=layers)
        recorded = _readable(program) or decomposed(program)
        names = repeat_layers(recorded, stack, few)
        if names is not None:
            return ov.convert_model(as_recorded(recorded)), names
    return to_openvino(ov, export_forward(model, found, given, stored=stored, layers=stack.layers)), list(given)


def to_openvino(ov: Any, program: ExportedProgram) -> Any:
    """The program as a model of OpenVINO.

    OpenVINO's converter first has torch decompose the operators, a second recording as long as the first. This function
    hands over the first where OpenVINO reads all operators, as in Llama and its kin.

    Args:
        ov: the module ``openvino``.
        program: of :func:`export_forward` or :func:`export_logits`.

    Raises:
        Exception: of any kind that OpenVINO raises for what it cannot convert.
    """
    recorded = _readable(program)
    return ov.convert_model(program if recorded is None else as_recorded(recorded))


def _readable(program: ExportedProgram) -> GraphModule | None:
    """The recorded operators as OpenVINO reads them; None where it does not read one of them."""
    recorded: Any = program.module(check_guards=False)
    for node in list(recorded.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is _ATEN._assert_tensor_metadata.default:
            recorded.graph.erase_node(node)
        elif node.target in _CONVERSIONS:
            source, dtype = node.args[0], node.meta["val"].dtype
            if source.meta["val"].dtype == dtype:
                node.replace_all_uses_with(source)
            else:
                node.target, node.args, node.kwargs = _ATEN._to_copy.default, (source,), {"dtype": dtype}
        elif node.target is _ATEN.reshape.default:
            node.target = _ATEN.view.default
        elif node.target not in _READABLE:
            return None
    recorded.graph.eliminate_dead_code()
    found: GraphModule = recorded
    return found
