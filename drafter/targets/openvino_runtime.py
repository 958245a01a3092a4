"""OpenVINO runs the target's forward on a CPU: the exported program, compiled for a few numbers of tokens.

A program is compiled for M, the tokens of all rows together; rows, tokens of a row and visible slots stay open. The
program reads keys and values where the slot cache keeps them. Each compiled M has its own packed copy of the weights.
One program for any M runs prompts, steps above the largest bucket, and steps beyond the limit of memory; each run takes
longer.

Shapes: B rows · T tokens of a row · M = B T tokens of a program · S visible cache slots · D hidden size · C context
size · V vocabulary.
"""

import hashlib
import json
import logging
import math
import shutil
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel

from drafter.kernels.huge_pages import use_huge_pages
from drafter.kernels.rounded import RoundedLinear
from drafter.targets.cache import CacheShape, SlotCache
from drafter.targets.capabilities import Capabilities
from drafter.targets.catalog import home_folder
from drafter.targets.export import check_exportable, export_forward, export_logits
from drafter.targets.openvino_graph import join_products, split_stores
from drafter.utils.io import first_line, replacing

_log = logging.getLogger(__name__)

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # tokens of all rows that have a program of their own
_MOST_PACKED_BYTES = 4 << 30  # of weights in programs of one M; further M run in the program for any M
_MOST_ROUNDED_TOGETHER = 128  # activations that share a scale: beyond a hundred, no time is saved
_PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
_FORMAT = "format-3"  # of the files on disk
_ANY = -1
_FEW_ROWS = 4  # whose keys and values are copied row by row


class OpenVINORuntime:
    """Runs the decoder and the output matrix of a target with OpenVINO.

    Args:
        model: a frozen model in float32 or bfloat16 on the CPU, its linear layers not packed.
        capabilities: of the model, whose layers all have keys of one shape.

    Raises:
        ValueError: OpenVINO is missing, or cannot run this model or number format; says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capabilities: Capabilities,
    ) -> None:
        decoder, windows, shape, logit_map = capabilities
        assert isinstance(shape, CacheShape)
        mask_kinds = tuple(windows.by_kind) if windows.is_mapped else ()
        try:
            import openvino
        except ImportError as error:
            raise ValueError(
                "openvino is not installed: in the repository, pip install -c constraints.txt -e '.[openvino]'"
            ) from error
        self._ov = openvino
        self._core: Any = openvino.Core()
        self._dtype: torch.dtype = model.dtype
        self._check_precision(model)
        check_exportable(model)
        self._shape = shape
        self._num_masks = len(mask_kinds) or 1
        self._num_bytes = sum(tensor.nbytes for tensor in decoder.state_dict().values())
        home = home_folder() / "openvino"
        folder = home / _FORMAT / _key_of(model, mask_kinds)
        if not (folder / "head.xml").is_file():
            with replacing(folder) as scratch:
                scratch.mkdir()
                self._convert(scratch, model, decoder, logit_map, mask_kinds)
            for other in home.iterdir():
                if other.name != _FORMAT:  # of earlier releases
                    shutil.rmtree(other, ignore_errors=True)
        self._settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": _PRECISIONS[self._dtype],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            # Pinned threads of OpenVINO and threads of torch that share their cores wait for each other.
            "ENABLE_CPU_PINNING": False,
            "CACHE_DIR": str(folder / "compiled"),
            "CACHE_MODE": "OPTIMIZE_SIZE",
            # Beside 8-bit weights, a bfloat16 target rounds activations to 8 bits as well; float32 stays exact.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": _rounded_together(model) if self._dtype == torch.bfloat16 else 0,
        }
        self._forward_model = self._core.read_model(folder / "forward.xml")
        self._head = self._compile(self._core.read_model(folder / "head.xml"), "output matrix")
        self._programs: dict[tuple[int, tuple[int, ...]], _Program] = {}
        self._stores: WeakKeyDictionary[SlotCache, _Stores] = WeakKeyDictionary()

    def forward(
        self,
        token_BT: Tensor,
        position_BT: Tensor,
        masks: Sequence[Tensor],
        cache: SlotCache,
        context_layers: Sequence[int] = (),
        *,
        is_repeated: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Run the decoder over the tokens and write their keys and values to the planned slots of the cache.

        Args:
            token_BT, position_BT: int64 [B, T].
            masks: bool [B, 1, T, S] over the slots, the tokens' own included; one, or one for each kind of layer.
            cache: planned.
            context_layers: indices into the hidden states that make the context; none: the final hidden states.
            is_repeated: many forwards over as many tokens will follow; they get a program of their own.

        Returns:
            Hidden states [B, T, D] after the last norm, and the context [B, T, C].
        """
        num_rows, num_tokens = token_BT.shape
        num_slots = masks[0].shape[-1]
        size = self._size(num_rows, num_tokens, is_repeated)
        padding = size // num_rows - num_tokens if size > 0 else 0
        inner_layers = tuple(sorted(layer for layer in {*context_layers} if layer < self._shape.num_layers))
        program = self._program(size, inner_layers)
        slot_BT = cache.planned_slots
        program.bind_stores(self._stores_of(cache), cache.rows, num_slots)
        program.set_tokens(F.pad(token_BT, (0, padding)), F.pad(position_BT, (0, padding)))
        program.set_masks([self._split_mask(mask, slot_BT, padding) for mask in masks])
        hidden, keys, values, *inner = program.run()
        self._write(cache, slot_BT, keys, values)
        lead = (num_rows, num_tokens + padding)
        hidden_BTD = hidden.view(*lead, -1)[:, :num_tokens].clone()
        if not context_layers:
            return hidden_BTD, hidden_BTD
        # The states after the last layer are the final ones.
        states = dict(zip(inner_layers, inner, strict=True)) | {self._shape.num_layers: hidden}
        chosen = [states[layer].view(*lead, -1)[:, :num_tokens] for layer in context_layers]
        return hidden_BTD, torch.cat(chosen, dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output logits [..., V] of final hidden states [..., D]."""
        flat_MD = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        self._head.set_input_tensor(0, self._share(flat_MD))
        self._head.infer()
        logits_MV = self._read(self._head.get_output_tensor(0)).clone()
        return logits_MV.view(*hidden.shape[:-1], -1)

    def _check_precision(self, model: PreTrainedModel) -> None:
        if model.device.type != "cpu":
            raise ValueError(f"it runs on a CPU, not on {model.device.type}")
        if self._dtype not in _PRECISIONS:
            raise ValueError(f"it runs in float32 and bfloat16, not in {str(self._dtype).removeprefix('torch.')}")
        if self._dtype == torch.bfloat16 and "BF16" not in self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise ValueError("this CPU has no bfloat16 arithmetic")

    def _convert(
        self,
        folder: Path,
        model: PreTrainedModel,
        decoder: PreTrainedModel,
        logit_map: Callable[[Tensor], Tensor],
        kinds: Sequence[str],
    ) -> None:
        """Write the programs of decoder and output matrix to a folder."""
        with tqdm(total=3, desc="Exporting the target to OpenVINO", disable=None) as bar, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                program = export_forward(model, decoder, self._shape, kinds)
                bar.update()
                recorded = self._ov.convert_model(program)
                forward = split_stores(self._ov, recorded, 2 + self._num_masks, self._shape.num_layers)
                join_products(self._ov, forward)
                bar.update()
                matrix: Any = model.get_output_embeddings()
                output = self._ov.convert_model(export_logits(matrix, logit_map, matrix.weight.shape[1]))
                self._ov.save_model(forward, folder / "forward.xml", compress_to_fp16=False)
                self._ov.save_model(output, folder / "head.xml", compress_to_fp16=False)
                bar.update()
            except Exception as error:
                # Code that cannot be recorded or converted raises errors of all kinds, of torch and of OpenVINO.
                raise ValueError(f"its code cannot be exported ({first_line(error)})") from error

    def _compile(self, model: Any, what: str) -> Any:
        with tqdm(total=1, desc=f"Compiling the target ({what})", disable=None, leave=False) as bar:
            request = self._core.compile_model(model, "CPU", self._settings).create_infer_request()
            use_huge_pages()
            bar.update()
        return request

    def _size(self, num_rows: int, num_tokens: int, is_repeated: bool) -> int:
        """M of the program that runs B rows of T tokens; -1: the program for any M."""
        least = num_rows * num_tokens
        compiled = {size for size, _ in self._programs if size != _ANY}
        may_compile = is_repeated and (len(compiled) + 1) * self._num_bytes <= _MOST_PACKED_BYTES
        for size in _BUCKETS:
            if least <= size <= 2 * least and size % num_rows == 0 and (size in compiled or may_compile):
                return size
        return _ANY

    def _program(self, size: int, layers: tuple[int, ...]) -> "_Program":
        """The compiled program of M tokens whose outputs include the hidden states of some layers."""
        if (size, layers) not in self._programs:
            source = self._forward_model
            chosen = [source.outputs[index] for index in (0, 1, 2, *(3 + layer for layer in layers))]
            model = self._ov.Model([output.get_node() for output in chosen], source.get_parameters(), "forward").clone()
            rows = 1 if size == 1 else _ANY
            shapes: dict[Any, list[int]] = {}
            for index, port in enumerate(model.inputs):
                if index < 2:
                    shapes[port] = [1, size]
                elif index < 2 + self._num_masks:
                    shapes[port] = [rows, 1, rows, _ANY]
                else:
                    is_key = index < 2 + self._num_masks + self._shape.num_layers
                    dim = self._shape.key_dim if is_key else self._shape.value_dim
                    shapes[port] = [rows, self._shape.num_heads, _ANY, dim]
            model.reshape(shapes)
            what = "any number of tokens" if size == _ANY else f"{size} tokens"
            self._programs[size, layers] = _Program(self, self._compile(model, what), self._num_masks)
        return self._programs[size, layers]

    def _split_mask(self, mask: Tensor, slot_BT: Tensor, padding: int) -> Tensor:
        """The mask as the program adds it to the scores: visible slots [B, 1, T, S], then the tokens themselves.

        The slots that the tokens will be written to hold old values and are masked.
        """
        num_slots = mask.shape[-1]
        is_visible_BT = slot_BT < num_slots
        place_B1TT = slot_BT.clamp_max(num_slots - 1)[:, None, None, :].expand(-1, -1, slot_BT.shape[1], -1)
        new_B1TT = mask.gather(3, place_B1TT) & is_visible_BT[:, None, None, :]
        # Every token sees itself: a softmax over nothing would be undefined for padding.
        new_B1TT = F.pad(new_B1TT, (0, padding, 0, padding)) | torch.eye(slot_BT.shape[1] + padding, dtype=torch.bool)
        old_B1TS = F.pad(mask.scatter(3, place_B1TT, False), (0, 0, 0, padding))
        seen = torch.cat([old_B1TS, new_B1TT], dim=3)
        return torch.zeros(seen.shape, dtype=self._dtype).masked_fill_(~seen, torch.finfo(self._dtype).min)

    def _write(self, cache: SlotCache, slot_BT: Tensor, keys_LGMK: Tensor, values_LGMK: Tensor) -> None:
        """Scatter all layers' new keys and values to the planned slots."""
        num_rows, num_tokens = slot_BT.shape
        starts = _neighbours(slot_BT)
        row_B1 = torch.arange(num_rows)[:, None] + cache.rows.start
        for store, new in ((cache.keys, keys_LGMK), (cache.values, values_LGMK)):
            layers, heads, _, size = new.shape
            # A slot that may not be seen weighs 0, and 0 * NaN is NaN: overflow at a draft token must not spread.
            by_row = new.view(layers, heads, num_rows, -1, size)[:, :, :, :num_tokens].nan_to_num(0.0, 0.0, 0.0)
            if starts is None:
                store[:, row_B1, :, slot_BT] = by_row.permute(2, 3, 0, 1, 4)
                continue
            for row, start in enumerate(starts):
                store[:, cache.rows.start + row, :, start : start + num_tokens] = by_row[:, :, row]

    def _stores_of(self, cache: SlotCache) -> "_Stores":
        if cache not in self._stores:
            self._stores[cache] = _Stores(
                [self._share(layer) for store in (cache.keys, cache.values) for layer in store]
            )
        return self._stores[cache]

    def _share(self, tensor: Tensor) -> Any:
        """The memory of a contiguous tensor as OpenVINO's."""
        if tensor.dtype != torch.bfloat16:
            return self._ov.Tensor(tensor.numpy(), shared_memory=True)
        array = tensor.view(torch.int16).numpy()
        return self._ov.Tensor(array, self._ov.Shape(array.shape), self._ov.Type.bf16)

    def _read(self, tensor: Any) -> Tensor:
        """OpenVINO's memory as a tensor, valid until the next run."""
        return torch.from_numpy(tensor.data).view(self._dtype)


class _Stores:
    """The stores of a slot cache as OpenVINO's tensors, keys of all layers first, and the parts that rows see."""

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers
        self._parts: dict[tuple[int, int, int], list[Any]] = {}

    def part(self, ov: Any, rows: slice, num_slots: int) -> list[Any]:
        """The visible slots of some rows, without a copy."""
        key = (rows.start, rows.stop, num_slots)
        if key not in self._parts:
            self._parts[key] = [
                ov.Tensor(
                    layer,
                    ov.Coordinate([rows.start, 0, 0, 0]),
                    ov.Coordinate([rows.stop, layer.shape[1], num_slots, layer.shape[3]]),
                )
                for layer in self._layers
            ]
        return self._parts[key]


class _Program:
    """A compiled program with its inputs; the memory of the last inputs is kept until the next."""

    def __init__(self, runtime: OpenVINORuntime, request: Any, num_masks: int) -> None:
        self._runtime = runtime
        self._request = request
        self._num_masks = num_masks
        self._bound: list[Any] = []
        self._inputs: dict[int, Tensor] = {}
        self._num_outputs = len(request.model_outputs)

    def bind_stores(self, stores: _Stores, rows: slice, num_slots: int) -> None:
        part = stores.part(self._runtime._ov, rows, num_slots)
        if part is not self._bound:
            for index, tensor in enumerate(part):
                self._request.set_input_tensor(2 + self._num_masks + index, tensor)
            self._bound = part

    def set_tokens(self, token_BT: Tensor, position_BT: Tensor) -> None:
        for index, tensor in enumerate((token_BT, position_BT)):
            self._set(index, tensor.reshape(1, -1).contiguous())

    def set_masks(self, masks: Sequence[Tensor]) -> None:
        for index, mask in enumerate(masks):
            self._set(2 + index, mask)

    def _set(self, index: int, tensor: Tensor) -> None:
        self._inputs[index] = tensor  # OpenVINO reads its memory and does not keep it
        self._request.set_input_tensor(index, self._runtime._share(tensor))

    def run(self) -> list[Tensor]:
        self._request.infer()
        return [self._runtime._read(self._request.get_output_tensor(index)) for index in range(self._num_outputs)]


def _neighbours(slot_BT: Tensor) -> list[int] | None:
    """The first slot of every row, where all rows are few and their slots follow each other; a copy is faster there."""
    if len(slot_BT) > _FEW_ROWS:
        return None
    rows = slot_BT.tolist()
    is_run = all(row == list(range(row[0], row[0] + len(row))) for row in rows)
    return [row[0] for row in rows] if is_run else None


def _rounded_together(model: PreTrainedModel) -> int:
    """Activations that share a scale: the largest number that divides the input sizes of all rounded layers."""
    sizes = [layer.in_features for layer in model.modules() if isinstance(layer, RoundedLinear)]
    shared = math.gcd(*sizes)
    return max((size for size in range(32, _MOST_ROUNDED_TOGETHER + 1, 32) if shared % size == 0), default=32)


def _key_of(model: PreTrainedModel, mask_kinds: Sequence[str]) -> str:
    """Hash of all that decides a program: weights, configuration, number format, versions."""
    digest = hashlib.sha256()
    versions = {name: version(name) for name in ("torch", "transformers", "openvino")}
    head = {"versions": versions, "config": model.config.to_dict(), "masks": list(mask_kinds)}
    digest.update(json.dumps(head, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:24]
