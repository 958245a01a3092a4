"""NativeRuntime: the step of drafter/kernels/csrc over weights as a file stores them.

Every output is summed in one order that depends on its matrix alone, so that tree, batch, chunk and threads change no
bit of a token's logits.

Shapes: B rows · T tokens of a forward · L moved slots · S slots of a row · V vocabulary · D hidden size ·
C context size.
"""

import ctypes
import math
import re
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from drafter.kernels import native
from drafter.runtimes.base import Slots, TargetOutput, Traits, Unsuitable, process_threads
from drafter.runtimes.native.family import describe
from drafter.runtimes.native.weights import Stored, matrix

_LAYER = "model.layers.{}."
_MOST_QUERIES = 32  # query heads that share a key head
_CHUNK = 256  # tokens of a row whose activations are counted, as an engine's prefill has them
# Nodes that pay for one row, by instructions: more cost arithmetic (docs/performance.md).
_CHEAP_TOKENS = {"avx512-vnni": 4, "avx-vnni": 4}
_IGNORED = ("rotary_emb.inv_freq",)
# Tables that do not depend on the length of a text; of longrope those of texts up to the original length.
_ROTATIONS = ("default", "linear", "llama3", "yarn", "longrope")


def _padded(number: int) -> int:
    return -(-number // native.LANES) * native.LANES


class NativeCache:
    """Keys and values of some rows, in blocks of 16 slots (csrc/layout.h); see :class:`drafter.runtimes.base.RowCache`.

    Args:
        model: whose layers and heads the cache has.
        num_rows, num_slots: B, S.
        dtype: float32 or float16.
        rotations: tables for all positions.
    """

    def __init__(
        self, model: native.Model, num_rows: int, num_slots: int, dtype: torch.dtype, rotations: Sequence[Any]
    ) -> None:
        self.num_rows, self.num_slots, self.spare_slot = num_rows, num_slots, num_slots
        self._model, slots = model, _padded(num_slots + 1)
        lead, dim = (model.num_layers, num_rows, model.num_key_heads), model.head_dim
        self._keys = torch.zeros(*lead, slots // native.LANES, dim, native.LANES, dtype=dtype)
        self._values = torch.zeros(*lead, slots, _padded(dim), dtype=dtype)
        addresses = self._keys.data_ptr(), self._values.data_ptr()
        tables = (native.Rotary * len(rotations))(*rotations)
        is_half = dtype == torch.float16
        self.native = native.Cache(num_rows, slots, num_slots, *addresses, tables, is_half).keep(*rotations)

    def move_slots(self, source_BL: Tensor, destination_BL: Tensor) -> None:
        native.move_slots(self._model, self.native, source_BL, destination_BL)

    def copy_row(self, source: int, destination: int, num_slots: int) -> None:
        """Copy the first ``num_slots`` slots of a row, rounded up to a block of slots that nobody sees."""
        blocks = -(-num_slots // native.LANES)
        self._keys[:, destination, :, :blocks] = self._keys[:, source, :, :blocks]
        self._values[:, destination, :, :num_slots] = self._values[:, source, :, :num_slots]


class NativeRuntime:
    """Runs a described decoder as a :class:`drafter.runtimes.base.Runtime`, which documents what is not told here.

    Args:
        config: of the text model.
        tensors: the checkpoint's, by the names of transformers. Every one must have a place in the description.
        number_format: ``stored``: weights as they are; integers are multiplied by activations rounded to 8 bits.
            ``float32``: the same without that rounding. ``bfloat16``: float weights are rounded to bfloat16.
        adds_one: norms multiply by 1 + weight where the family's do; a GGUF file has the 1 in its weights already.

    Raises:
        Unsuitable: the model is not described, has weights that are not, or lacks some.
        ValueError: a weight has another shape than the configuration says, or numbers that are none.
    """

    name = "native"
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(
        self, config: Any, tensors: Mapping[str, Stored], *, number_format: str = "stored", adds_one: bool = True
    ) -> None:
        self._left = {name: each for name, each in tensors.items() if not name.endswith(_IGNORED)}
        number_of = Counter(name.split(".", 3)[3] for name in self._left if re.match(r"model\.layers\.\d+\.", name))
        if uneven := [name for name, number in number_of.items() if number != config.num_hidden_layers]:
            raise Unsuitable(f"not each of its {config.num_hidden_layers} layers has a weight {min(uneven)}")
        self.description = describe(config)
        self._config, self._adds_one = config, adds_one and self.description.adds_one
        for tensor, each in self._left.items():
            if each.kind not in native.FORMATS:
                raise Unsuitable(
                    f"its weight {tensor} is stored as {each.kind}, which has no kernels; torch takes 4 bytes a weight "
                    "and is several times slower, --quantization int8 rounds the weights and runs here"
                )
        self._is_rounded = number_format == "stored"
        self._target = "BF16" if number_format == "bfloat16" else None
        self._cache_dtype = torch.float32 if number_format == "float32" else torch.float16
        self.traits = Traits(
            number_format,
            has_plain_logits=self.description.logit_scale == 1 and not self.description.logit_cap,
            cheap_tokens=_CHEAP_TOKENS.get(native.instructions(), 2),
            num_threads=process_threads(),
        )
        self.vocab_size, self.hidden_size = int(config.vocab_size), int(config.hidden_size)
        # Each weight's matrix, first row there and outputs; norms and biases, as the module has them.
        self.places: dict[str, tuple[native.Matrix, int, int]] = {}
        self.vectors: dict[str, Tensor] = {}
        self._kept: list[Any] = []
        self.num_parameters = 0
        native.set_num_threads(process_threads())
        self._model = self._build()
        if self._left:
            raise Unsuitable(f"its weight {min(self._left)} is not described")

    # -- building ----------------------------------------------------------------------------------------------------

    def _build(self) -> native.Model:
        config, said = self._config, self.description
        heads, key_heads, dim = config.num_attention_heads, config.num_key_value_heads, said.head_dim
        num_layers, width = config.num_hidden_layers, config.intermediate_size
        if heads % key_heads or heads // key_heads > _MOST_QUERIES or dim % 2:
            raise Unsuitable(f"{heads} query heads over {key_heads} key heads of {dim} numbers are not supported")
        embedding = self._matrix([("model.embed_tokens", self.vocab_size)], self.hidden_size)
        is_tied = "lm_head.weight" not in self._left and getattr(config, "tie_word_embeddings", True)
        head = embedding if is_tied else self._matrix([("lm_head", self.vocab_size)], self.hidden_size)
        self.embedding_matrix, self.embedding_scale, self.head = embedding, said.embedding_scale, head
        layers = (native.Layer * num_layers)()
        query, key = heads * dim, key_heads * dim
        has_gate = any(name.endswith(("gate_proj.weight", "gate_up_proj.weight")) for name in self._left)
        for number in tqdm(range(num_layers), desc="weights", unit="layer", delay=1, leave=False):
            lead, layer = _LAYER.format(number), layers[number]
            attention = lead + "self_attn."
            for name, place in self._fused(
                [(attention + "q_proj", query), (attention + "k_proj", key), (attention + "v_proj", key)],
                (attention + "qkv_proj", query + 2 * key),
            ):
                layer.qkv[place] = name
            layer.output = self._matrix([(attention + "o_proj", self.hidden_size)], query)
            if has_gate:
                parts, whole = [(lead + "mlp.gate_proj", width), (lead + "mlp.up_proj", width)], "mlp.gate_up_proj"
                down = lead + "mlp.down_proj"
            else:
                parts, whole, down = [(lead + "mlp.c_fc", width)], "mlp.c_fc", lead + "mlp.c_proj"
            for name, place in self._fused(parts, (lead + whole, width * len(parts))):
                layer.up[place] = name
            layer.down = self._matrix([(down, self.hidden_size)], width)
            has_four = lead + "pre_feedforward_layernorm.weight" in self._left
            has_input = lead + "input_layernorm.weight" in self._left
            names = {"after_mlp": "post_feedforward_layernorm", "before_attention": "input_layernorm"}
            names["before_mlp"] = "pre_feedforward_layernorm" if has_four else "post_attention_layernorm"
            names["after_attention"] = "post_attention_layernorm"
            names["before_mlp" if not (has_four or has_input) else "none"] = "none"
            names["after_attention" if has_input and not has_four else "none"] = "none"
            for field in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
                setattr(layer, field, self._norm(lead + names[field], self.hidden_size))
            layer.query = self._norm(attention + "q_norm", dim, query)
            layer.key = self._norm(attention + "k_norm", dim, key)
            layer.rotary, layer.window = said.rotation_of[number], said.window_of[number]
        model = native.Model(
            num_layers=num_layers, hidden_size=self.hidden_size, num_heads=heads, num_key_heads=key_heads,
            head_dim=dim, mlp_size=width, vocab_size=self.vocab_size,
            activation=native.ACTIVATIONS.index(said.activation), has_gate=has_gate,
            input_scale=said.input_scale, attention_scale=said.attention_scale, attention_cap=said.attention_cap,
            residual_scale=said.residual_scale, layers=ctypes.cast(layers, ctypes.POINTER(native.Layer)),
            final_norm=self._norm("model.norm", self.hidden_size), head=head,
        )  # fmt: skip
        if not model.final_norm.kind:
            raise Unsuitable("it has no weight model.norm.weight")
        self._layers = layers
        self._rotations: list[native.Rotary] = []
        return model

    def _take(self, name: str, shape: tuple[int, ...]) -> Stored | None:
        """A tensor of the checkpoint, once; ValueError for another shape."""
        stored = self._left.pop(name, None)
        if stored is not None:
            if stored.shape != shape:
                raise ValueError(f"{name} has the shape {list(stored.shape)}, and config.json asks for {list(shape)}")
            self.num_parameters += math.prod(shape)
        return stored

    def _matrix(self, names: Sequence[tuple[str, int]], inputs: int) -> native.Matrix:
        """Weights of one kind, one below the other; names without their ending, each with its outputs."""
        parts, biases = [], []
        for name, outputs in names:
            stored = self._take(name + ".weight", (outputs, inputs))
            if stored is None:
                raise Unsuitable(f"it has no weight {name}.weight")
            parts.append(stored)
            is_in_layer = name.startswith("model.layers.")  # no described model has other biases
            biases.append(self._take(name + ".bias", (outputs,)) if is_in_layer else None)
        bias = None
        if any(each is not None for each in biases):
            given = zip(biases, names, strict=True)
            vectors = [torch.zeros(name[1]) if each is None else each.vector() for each, name in given]
            bias = torch.cat(vectors).contiguous()
            if not bool(bias.isfinite().all()):
                raise ValueError(f"a bias of {names[0][0]} is not finite: the checkpoint is damaged")
        made = matrix(parts, is_rounded=self._is_rounded, target=self._target, bias=bias)
        self._kept.append(made)
        start = 0
        for (name, outputs), own in zip(names, biases, strict=True):
            self.places[name + ".weight"] = made, start, outputs
            if bias is not None and own is not None:
                self.vectors[name + ".bias"] = bias[start : start + outputs]
            start += outputs
        return made

    def _fused(self, parts: list[tuple[str, int]], whole: tuple[str, int]) -> list[tuple[native.Matrix, int]]:
        """One matrix of all parts where the checkpoint has one or their kinds agree, else one of each; with places."""
        if whole[0] + ".weight" in self._left:
            made, first = [self._matrix([whole], self.hidden_size)], 1
        else:
            kinds = {self._left[name + ".weight"].kind for name, _ in parts if name + ".weight" in self._left}
            groups = [parts] if len(kinds) < 2 else [[part] for part in parts]
            made, first = [self._matrix(group, self.hidden_size) for group in groups], len(groups)
        most = 3 if len(parts) == 3 else 2
        return [*zip(made, range(first), strict=True), *((native.NO_MATRIX, place) for place in range(first, most))]

    def _norm(self, name: str, *sizes: int) -> native.Norm:
        """A norm over one of the numbers of values; none where the checkpoint has none."""
        found = self._left.get(name + ".weight")
        size = found.shape[0] if found is not None and found.shape in [(size,) for size in sizes] else sizes[0]
        stored = self._take(name + ".weight", (size,))
        if stored is None:
            return native.Norm()
        weight, bias = stored.vector() + float(self._adds_one), self._take(name + ".bias", (size,))
        self.vectors[name + ".weight"] = weight - float(self.description.adds_one)
        vector = None if bias is None else bias.vector()
        if vector is not None:
            self.vectors[name + ".bias"] = vector
        if not all(bool(each.isfinite().all()) for each in (weight, vector) if each is not None):
            raise ValueError(f"{name} has numbers that are not finite: the checkpoint is damaged")
        self._kept.append((weight, vector))
        kind = native.NORMS["rms" if bias is None else "layer"]
        address = None if vector is None else vector.data_ptr()
        return native.Norm(kind, len(weight), self.description.epsilon, weight.data_ptr(), address)

    def _reach(self, num_positions: int) -> list[native.Rotary]:
        """Rotations for this number of positions, which a cache keeps: other threads may need longer ones meanwhile."""
        found = self._rotations
        if not found or found[0].num_positions < num_positions:
            found = []
            for kind in self.description.rotations:
                tables = rotation_table(self._config, kind, self.description.head_dim, num_positions)
                addresses = [table.data_ptr() for table in tables]
                found.append(native.Rotary(2 * tables[0].shape[1], num_positions, *addresses).keep(*tables))
            self._rotations = found
        return found

    # -- the protocol ------------------------------------------------------------------------------------------------

    @cached_property
    def embedding_weight_VD(self) -> Tensor:
        return native.unpack_rows(self.embedding_matrix, torch.arange(self.vocab_size))

    @cached_property
    def output_weight_VD(self) -> Tensor:
        return native.unpack_rows(self.head, torch.arange(self.vocab_size))

    def output_rows(self, token_X: Tensor) -> Tensor:
        return native.unpack_rows(self.head, token_X)

    def embed(self, token: Tensor) -> Tensor:
        embedding_XD = native.unpack_rows(self.embedding_matrix, token.reshape(-1))
        if self.embedding_scale != 1:
            embedding_XD *= self.embedding_scale
        return embedding_XD.view(*token.shape, self.hidden_size)

    def prepare_decoding(self) -> None:
        """Leave the cores to the native step's threads: torch's own, which wait beside them, would take them away."""
        torch.set_num_threads(1)

    def new_cache(self, num_rows: int, num_slots: int, dtype: torch.dtype | None = None) -> NativeCache:
        made = self._cache(num_rows, num_slots, dtype)
        weakref.finalize(made, native.give_back).atexit = False  # what the cache's forwards needed
        return made

    def _cache(self, num_rows: int, num_slots: int, dtype: torch.dtype | None = None) -> NativeCache:
        return NativeCache(self._model, num_rows, num_slots, dtype or self._cache_dtype, self._reach(num_slots + 1))

    def cache_bytes(self, num_rows: int, num_slots: int) -> int:
        model, slots = self._model, _padded(num_slots + 1)
        numbers = num_rows * slots * (model.head_dim + _padded(model.head_dim))
        kept = self._cache_dtype.itemsize * model.num_layers * model.num_key_heads * numbers
        heads = (model.num_heads + model.num_key_heads) * model.head_dim
        activations = 3 * model.hidden_size + 2 * heads + 5 * max(model.mlp_size, heads, model.hidden_size)
        return kept + 6 * num_rows * min(num_slots, _CHUNK) * activations  # grown by half, float32

    def forward(
        self, token_BT: Tensor, slots: Slots | None, cache: NativeCache | None, context_layers: Sequence[int] = ()
    ) -> TargetOutput:
        if slots is None or cache is None:
            num_rows, num_tokens = token_BT.shape
            cache, position_T = self._cache(num_rows, num_tokens), torch.arange(num_tokens)
            slots = Slots(position_T.expand(num_rows, -1), position_T.expand(num_rows, -1), None)
        return self.run(self._model, self.embed(token_BT), slots, cache, context_layers)

    def run(
        self,
        model: native.Model,
        embedding_BTD: Tensor,
        slots: Slots,
        cache: NativeCache,
        context_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """The forward of this model, or of its first layers, over embeddings."""
        slot_BT, position_BT = slots.slot_BT.contiguous(), slots.position_BT.contiguous()
        ancestor_BTT = None if slots.ancestor_BTT is None else slots.ancestor_BTT.contiguous()
        assert embedding_BTD.shape[:2] == slot_BT.shape == position_BT.shape, "tokens and slots differ in number"
        tokens = native.Tokens(
            *slot_BT.shape, slots.first_row, slot_BT.data_ptr(), position_BT.data_ptr(),
            None if ancestor_BTT is None else ancestor_BTT.data_ptr(),
        )  # fmt: skip
        hidden_BTD, states = native.forward(model, cache.native, tokens, embedding_BTD, context_layers)
        return TargetOutput(hidden_BTD, torch.cat(states, dim=-1) if states else hidden_BTD)

    def logits(self, hidden: Tensor) -> Tensor:
        product = native.multiply(self.head, hidden)
        if self.description.logit_scale != 1:
            product *= self.description.logit_scale
        cap = self.description.logit_cap
        return torch.tanh(product / cap) * cap if cap else product

    def final_norm(self) -> torch.nn.Module:
        weight, bias = (self.vectors.get(f"model.norm.{part}") for part in ("weight", "bias"))
        assert weight is not None, "every described model has one"
        kind: Any = torch.nn.RMSNorm if bias is None else torch.nn.LayerNorm
        norm = kind(len(weight), eps=self.description.epsilon)
        values = {"weight": weight + float(self.description.adds_one), "bias": bias}
        norm.load_state_dict({name: value for name, value in values.items() if value is not None})
        return norm.requires_grad_(False)

    def first_layers(self, number: int) -> "native.Model":
        """The model of the first layers alone, whose products round no activation; for comparisons."""
        layers = (native.Layer * number)(*self._layers[:number])
        for layer in layers:
            for part in (*layer.qkv, *layer.up, layer.output, layer.down):
                part.is_rounded = 0
        model = native.Model.from_buffer_copy(self._model)
        model.num_layers, model.layers = number, ctypes.cast(layers, ctypes.POINTER(native.Layer))
        return model.keep(layers)


def rotation_table(config: Any, kind: str | None, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [num_positions, dim / 2], float32, as transformers computes them (Unsuitable: the rotation
    depends on the length of the text, or is not known).
    """
    parameters = config.rope_parameters[kind] if kind is not None else config.rope_parameters
    name, factor = parameters.get("rope_type", "default"), 1.0
    if name not in _ROTATIONS:
        raise Unsuitable(f"rotations of kind {name} are not described")
    if name == "default":
        share = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
        dim = int(head_dim * share)
        frequency = 1.0 / parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        given = {} if kind is None else {"layer_type": kind}
        try:
            frequency, factor = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), **given)
        except (ArithmeticError, ValueError) as error:
            raise Unsuitable(f"its rotation of kind {name} has no tables ({error})") from error
    angle = torch.arange(num_positions).float()[:, None] * frequency.float()
    if not math.isfinite(factor) or not 0 < 2 * len(frequency) <= head_dim:
        raise Unsuitable("its rotation has no finite scale, or turns more numbers than a head has")
    return (angle.cos() * factor).contiguous(), (angle.sin() * factor).contiguous()
