"""A target that runs from OpenVINO's programs on disk: torch holds no copy of its weights.

The first start reads the target, asks it what it can do, and writes a folder (:mod:`drafter.targets.programs_writing`):
the programs of decoder and output matrix with their weights, embeddings and output matrix once more for look-ups, and
what the probes found out. Later starts read this folder alone, and map it into memory. They import no code of models:
that import takes as long as everything else.

The weights of the programs are numbers as they were read, or integers in groups: those of a GGUF file, or of
``--quantization``.
"""

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig

from drafter.kernels.pages import dropping, trim
from drafter.targets.cache import CacheShape
from drafter.targets.capabilities import Capabilities, LayerWindows, LogitMap, Probe
from drafter.targets.masks import Window
from drafter.targets.openvino_files import ENDS, FACTS, keep, programs_folder
from drafter.targets.openvino_runtime import OpenVINORuntime, check_dtype
from drafter.targets.stored import Grouped, StoredMatrix

_ROUNDED_TOGETHER = 32  # activations that share a scale of 8 bits, as many as weights do


class ProgramsModel(nn.Module):
    """What torch holds of a model whose layers run from programs: embeddings and output matrix, mapped into memory.

    Args:
        config: the sizes that a target reads.
        tensors: of the folder.
        dtype: of the rows that a matrix in groups gives.
    """

    generation_config = None

    def __init__(self, config: PreTrainedConfig, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        embedding, output = (_end(name, tensors, dtype) for name in ("embedding", "output"))
        assert embedding is not None
        if isinstance(embedding, Tensor):
            self.embedding: nn.Module = nn.Embedding.from_pretrained(embedding)
        else:
            self.embedding = embedding
        output = embedding if output is None else output
        bias = tensors.get("bias")
        if isinstance(output, Tensor):
            num_tokens, size = output.shape
            self.output: Any = nn.Linear(size, num_tokens, bias=bias is not None, device="meta")
            self.output.weight = nn.Parameter(output, requires_grad=False)
            if bias is not None:
                self.output.bias = nn.Parameter(bias, requires_grad=False)
        else:
            self.output = output
            self.output.bias = bias

    def get_input_embeddings(self) -> nn.Module:
        """Int64 [..., T] to embeddings [..., T, D], as transformers names them."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """The output matrix, as transformers names it."""
        return self.output


def _end(name: str, tensors: dict[str, Tensor], dtype: torch.dtype) -> Tensor | StoredMatrix | None:
    """Embeddings or output matrix of a folder; None for an output matrix that is the embeddings'."""
    packed = tensors.get(f"{name}.packed")
    if packed is None:
        return tensors.get(name)
    offset = tensors.get(f"{name}.offset_OG")
    matrix = Grouped(
        packed.numpy(),
        4 if packed.dtype == torch.uint8 else 8,
        tensors[f"{name}.scale_OG"].numpy(),
        None if offset is None else offset.numpy(),
    )
    return StoredMatrix(matrix, dtype)


class Programs(NamedTuple):
    """What a target is made of.

    Attributes:
        model: embeddings and output matrix.
        capabilities: of the model.
        runtime: that runs the programs.
        dtype: of embeddings, keys, values and states.
        fingerprint: of the weights before ``--quantization``.
        scheme: how the weights were quantised, ``none`` for plain ones and those of a GGUF file.
        num_parameters: of the model.
        tokenizer_kind: class of transformers that reads the tokenizer.
    """

    model: ProgramsModel
    capabilities: Capabilities
    runtime: OpenVINORuntime
    dtype: torch.dtype
    fingerprint: str
    scheme: str
    num_parameters: int
    tokenizer_kind: str


def open_checkpoint(
    place: Path | str,
    files: Sequence[Path],
    read: Any,
    dtype: torch.dtype,
    quantization: str,
    probe: Probe,
    **shared: Any,
) -> Programs:
    """The target of a folder or hub id.

    Args:
        place: folder or hub id.
        files: that decide what the model computes.
        read: cached function that reads the model in ``dtype``.
        dtype: bfloat16 or float32.
        quantization: ``none``, or how the weights of the linear layers are rounded.
        probe: asks the model what it can do.
        **shared: revision and trust_remote_code.

    Raises:
        Unsuitable: OpenVINO cannot run the model; says why.
        ValueError: of ``read`` and ``probe``.
    """
    check_dtype(dtype)

    def write(scratch: Path) -> None:
        from drafter.targets.programs_writing import write_checkpoint

        with dropping(files):  # its memory is a part of the files where the numbers are stored in this format
            write_checkpoint(scratch, place, read, dtype, quantization, probe, **shared)

    folder = programs_folder(files, {"dtype": str(dtype), "quantization": quantization})
    keep(folder, write)
    read.cache_clear()
    return _opened(folder, dtype)


def open_gguf(file: Path, place: Path, dtype: torch.dtype, probe: Probe) -> Programs:
    """The target of a GGUF file, by its own integers.

    Args:
        file: with matrices of the types of :mod:`drafter.targets.stored`.
        place: folder with the model's configuration and tokenizer.
        dtype: of embeddings, keys, values and states; activations are rounded to 8 bits in bfloat16 only.
        probe: asks a model of a few layers what it can do.

    Raises:
        ValueError: the file has matrices of another type, or OpenVINO cannot run the model; says why.
    """
    check_dtype(dtype)

    def write(scratch: Path) -> None:
        from drafter.targets.programs_writing import write_gguf

        with dropping([file]):
            write_gguf(scratch, file, place, dtype, probe)

    files = [file, *sorted(place.glob("*config.json"))]
    folder = programs_folder(files, {"dtype": str(dtype)})
    keep(folder, write)
    return _opened(folder, dtype)


def _opened(folder: Path, dtype: torch.dtype) -> Programs:
    """What a folder holds."""
    gc.collect()
    trim()
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    with safe_open(folder / ENDS, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    model: Any = ProgramsModel(PreTrainedConfig(**facts["config"]), tensors, dtype)
    windows = {kind: None if window is None else Window(*window) for kind, window in facts["windows"].items()}
    capabilities = Capabilities(
        model,
        LayerWindows(windows, is_mapped=facts["is_mapped"]),
        CacheShape(*facts["cache_shape"]),
        LogitMap(*facts["logit_map"]),
    )
    is_grouped = facts["is_grouped"]
    runtime = OpenVINORuntime(
        folder, model.embedding, capabilities,
        dtype=dtype,
        # OpenVINO rounds activations to 8 bits in float32 kernels; in bfloat16 it unpacks the weights instead.
        precision="f32" if is_grouped else "",
        rounded_together=_ROUNDED_TOGETHER if is_grouped and dtype == torch.bfloat16 else 0,
    )  # fmt: skip
    kept = (facts[name] for name in ("fingerprint", "scheme", "num_parameters", "tokenizer_kind"))
    return Programs(model, capabilities, runtime, dtype, *kept)
