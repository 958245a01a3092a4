"""OpenVINO runs the target's forward on a CPU: one exported program for any number of rows, tokens and slots.

The program reads keys and values where the slot cache keeps them. One program means one packed copy of the weights.

Shapes: B rows · T tokens of a row · S visible cache slots · G key/value heads · K head dimension · D hidden size ·
C context size · V vocabulary · M hidden states.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from tqdm import tqdm

from drafter.targets.cache import CacheShape, SlotCache
from drafter.targets.capabilities import Capabilities
from drafter.targets.openvino_compile import (
    FORWARD,
    HEAD,
    Program,
    Unsuitable,
    current_start,
    import_openvino,
    openvino_core,
)

PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
_FEW_ROWS = 4  # whose keys and values are copied row by row


class OpenVINORuntime:
    """Runs the decoder and the output matrix of a target with OpenVINO.

    Args:
        folder: of the programs, as :func:`drafter.targets.programs_writing.write_programs` leaves it.
        embed: int64 [B, T] to embeddings [B, T, D].
        capabilities: of the model, whose layers all have keys of one shape.
        dtype: of embeddings, keys, values and states; one that :func:`check_dtype` accepts.
        is_grouped: the weights are integers in groups.
    """

    def __init__(
        self, folder: Path, embed: nn.Module, capabilities: Capabilities, dtype: torch.dtype, *, is_grouped: bool
    ) -> None:
        assert isinstance(capabilities.cache_shape, CacheShape)
        self._ov = import_openvino()
        self._start = current_start.get()
        self._folder, self._embed, self._dtype = folder, embed, dtype
        shape = capabilities.cache_shape
        self._num_layers = shape.num_layers
        hidden_size = embed(torch.zeros(1, dtype=torch.int64)).shape[1]
        stores = ((1, shape.num_heads, 1, size) for size in (shape.key_dim, shape.value_dim))
        # One row, slot and token.
        self._shapes = (
            (1, 1, hidden_size),
            (1, 1),
            *[(1, 1, 1, 2)] * (len(mask_kinds(capabilities)) or 1),
            *(store for store in stores for _ in range(shape.num_layers)),
        )
        self._settings = {
            "PERFORMANCE_HINT": "LATENCY",
            # OpenVINO rounds activations to 8 bits in float32 kernels; in bfloat16 it unpacks the weights instead.
            "INFERENCE_PRECISION_HINT": "f32" if is_grouped else PRECISIONS[dtype],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            # Pinned threads of OpenVINO and threads of torch that share their cores wait for each other.
            "ENABLE_CPU_PINNING": False,
            # Activations that share a scale of 8 bits, as many as weights do; 0: activations are not rounded.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 32 if is_grouped and dtype == torch.bfloat16 else 0,
        }
        self._head = self._compile(Program(folder / HEAD, self._settings, ((1, hidden_size),)), "output matrix")
        self._requests: dict[tuple[int, ...], Any] = {}  # by the layers whose input is an output
        self._bound: dict[tuple[int, ...], tuple[Any, list[Tensor]]] = {}  # keys and values, and memory of inputs
        self._stores: WeakKeyDictionary[SlotCache, dict[tuple[int, ...], list[Any]]] = WeakKeyDictionary()

    def forward(
        self,
        token_BT: Tensor,
        position_BT: Tensor,
        masks: Sequence[Tensor],
        cache: SlotCache,
        context_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """Run the decoder over the tokens and write their keys and values to the planned slots of the cache.

        Args:
            token_BT, position_BT: int64 [B, T].
            masks: bool [B, 1, T, S] over the slots, the tokens' own included; one, or one for each kind of layer.
            cache: planned.
            context_layers: indices into the hidden states that make the context; none: the final hidden states.

        Returns:
            Hidden states [B, T, D] after the last norm, and the context [B, T, C].
        """
        num_slots = masks[0].shape[-1]
        inner_layers = tuple(sorted(layer for layer in {*context_layers} if layer < self._num_layers))
        if inner_layers not in self._requests:
            wanted = Program(self._folder / FORWARD, self._settings, self._shapes, inner_layers)
            self._requests[inner_layers] = self._compile(wanted, "layers")
        request = self._requests[inner_layers]
        slot_BT = cache.planned_slots
        embedding_BTD = self._embed(token_BT).to(self._dtype)
        added = (self._added_mask(mask, slot_BT) for mask in masks)
        tensors = [tensor.contiguous() for tensor in (embedding_BTD, position_BT, *added)]
        inputs, stores = [self._share(tensor) for tensor in tensors], self._stores_of(cache, num_slots)
        if inner_layers not in self._bound or self._bound[inner_layers][0] is not stores:  # the same in most steps
            inputs += stores
        for index, tensor in enumerate(inputs):
            request.set_input_tensor(index, tensor)
        self._bound[inner_layers] = stores, tensors  # OpenVINO does not keep the memory of its inputs
        request.infer()
        outputs = range(3 + len(inner_layers))
        hidden, keys, values, *inner = (self._read(request.get_output_tensor(index)) for index in outputs)
        self._write(cache, slot_BT, keys, values)
        hidden_BTD = hidden.clone()
        if not context_layers:
            return hidden_BTD, hidden_BTD
        # The states after the last layer are the final ones.
        states = dict(zip(inner_layers, inner, strict=True)) | {self._num_layers: hidden}
        return hidden_BTD, torch.cat([states[layer] for layer in context_layers], dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output logits [..., V] of final hidden states [..., D]."""
        flat_MD = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        self._head.set_input_tensor(0, self._share(flat_MD))
        self._head.infer()
        logits_MV = self._read(self._head.get_output_tensor(0)).clone()
        return logits_MV.view(*hidden.shape[:-1], -1)

    def _compile(self, program: Program, what: str) -> Any:
        with tqdm(total=1, desc=f"Packing the target ({what})", disable=None, leave=False) as bar:
            request = program.compile() if self._start is None else self._start.request(program)
            bar.update()
        return request

    def _added_mask(self, mask: Tensor, slot_BT: Tensor) -> Tensor:
        """The mask as the program adds it to the scores, [B, 1, T, S + T]: first the slots, then the tokens themselves.

        The slots that the tokens will be written to still hold old values: what the mask says of these slots holds for
        the tokens, and the slots are hidden. Worked example: token 0 goes to slot 1 of 3, mask [[1, 1, 0]] becomes
        [[1, 0, 0], [1]].
        """
        num_slots = mask.shape[-1]
        num_tokens = slot_BT.shape[1]
        place_B1TT = slot_BT.clamp_max(num_slots - 1)[:, None, None, :].expand(-1, -1, num_tokens, -1)
        is_padding_B11T = (slot_BT >= num_slots)[:, None, None, :]
        among_tokens = mask.gather(3, place_B1TT) & ~is_padding_B11T
        # Every token sees itself: a softmax over nothing would be undefined for padding.
        among_tokens |= torch.eye(num_tokens, dtype=torch.bool)
        seen = torch.cat([mask.scatter(3, place_B1TT, False), among_tokens], dim=3)
        return torch.zeros(seen.shape, dtype=self._dtype).masked_fill_(~seen, torch.finfo(self._dtype).min)

    def _write(self, cache: SlotCache, slot_BT: Tensor, keys: Tensor, values: Tensor) -> None:
        """Scatter all layers' new keys and values [layers * B, G, T, K] to the planned slots."""
        num_rows, num_tokens = slot_BT.shape
        starts = _neighbours(slot_BT)
        row_B1 = torch.arange(num_rows)[:, None] + cache.rows.start
        for store, new in ((cache.keys, keys), (cache.values, values)):
            # A slot that may not be seen weighs 0, and 0 * NaN is NaN: overflow at a draft token must not spread.
            by_layer = new.unflatten(0, (-1, num_rows)).nan_to_num(0.0, 0.0, 0.0)
            if starts is None:
                store[:, row_B1, :, slot_BT] = by_layer.permute(1, 3, 0, 2, 4)
                continue
            for row, start in enumerate(starts):
                store[:, cache.rows.start + row, :, start : start + num_tokens] = by_layer[:, row]

    def _stores_of(self, cache: SlotCache, num_slots: int) -> list[Any]:
        """What the planned rows see of keys and values: OpenVINO's tensors over the cache, keys of all layers first."""
        known = self._stores.setdefault(cache, {})
        rows = cache.rows
        key = rows.start, rows.stop, num_slots
        if key not in known:
            known[key] = [
                self._ov.Tensor(
                    self._share(layer),
                    self._ov.Coordinate([rows.start, 0, 0, 0]),
                    self._ov.Coordinate([rows.stop, layer.shape[1], num_slots, layer.shape[3]]),
                )
                for store in (cache.keys, cache.values)
                for layer in store
            ]
        return known[key]

    def _share(self, tensor: Tensor) -> Any:
        """The memory of a contiguous tensor as OpenVINO's."""
        if tensor.dtype != torch.bfloat16:
            return self._ov.Tensor(tensor.numpy(), shared_memory=True)
        array = tensor.view(torch.int16).numpy()
        return self._ov.Tensor(array, self._ov.Shape(array.shape), self._ov.Type.bf16)

    def _read(self, tensor: Any) -> Tensor:
        """OpenVINO's memory as a tensor, valid until the next run."""
        found = torch.from_numpy(tensor.data)
        return found if found.dtype == torch.float32 else found.view(self._dtype)


def _neighbours(slot_BT: Tensor) -> list[int] | None:
    """The first slot of every row, where all rows are few and their slots follow each other; a copy is faster there."""
    if len(slot_BT) > _FEW_ROWS:
        return None
    rows = slot_BT.tolist()
    is_run = all(row == list(range(row[0], row[0] + len(row))) for row in rows)
    return [row[0] for row in rows] if is_run else None


def check_dtype(dtype: torch.dtype) -> None:
    """Unsuitable for a number format that OpenVINO does not compute in on this CPU."""
    if dtype not in PRECISIONS:
        raise Unsuitable(f"it runs in float32 and bfloat16, not in {str(dtype).removeprefix('torch.')}")
    capabilities = openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if dtype == torch.bfloat16 and "BF16" not in capabilities:
        raise Unsuitable("this CPU has no bfloat16 arithmetic")


def mask_kinds(capabilities: Capabilities) -> tuple[str, ...]:
    """Kinds of layers with masks of their own; empty where all layers share one."""
    return tuple(capabilities.windows.by_kind) if capabilities.windows.is_mapped else ()
