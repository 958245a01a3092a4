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
import logging
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from drafter.kernels.pages import dropping, trim
from drafter.targets.cache import CacheShape
from drafter.targets.capabilities import Capabilities, LayerWindows, LogitMap, Probe
from drafter.targets.home import keep, key_of
from drafter.targets.masks import Window
from drafter.targets.openvino_compile import ENDS, FACTS, FORMAT, programs_home
from drafter.targets.openvino_runtime import OpenVINORuntime, check_dtype
from drafter.targets.stored import Grouped, StoredMatrix

_log = logging.getLogger(__name__)


class ProgramsModel(nn.Module):
    """What torch holds of a model whose layers run from programs: embeddings and output matrix, mapped into memory.

    Args:
        config: the sizes that a target reads.
        tensors: of the folder, by ``embedding.`` and ``output.`` with the name of a part: a weight, or the parts of
            :class:`Grouped`. Where the output matrix is the embeddings', it has at most a bias of its own.
        dtype: of the rows that a matrix in groups gives.
    """

    generation_config = None

    def __init__(self, config: PreTrainedConfig, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        embedding, output = (
            {key.removeprefix(name): tensor for key, tensor in tensors.items() if key.startswith(name)}
            for name in ("embedding.", "output.")
        )
        if output.keys() <= {"bias"}:
            output |= embedding
        self.embedding = _end(embedding, dtype, is_output=False)
        self.output = _end(output, dtype, is_output=True)

    def get_input_embeddings(self) -> nn.Module:
        """Int64 [..., T] to embeddings [..., T, D], as transformers names them."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """The output matrix, as transformers names it."""
        return self.output


def _end(parts: dict[str, Tensor], dtype: torch.dtype, *, is_output: bool) -> nn.Module:
    """Embeddings or output matrix over the memory of their parts."""
    if "weight" not in parts:
        arrays = {name: part.numpy() for name, part in parts.items() if name != "bias"}
        return StoredMatrix(Grouped(**arrays), dtype, parts.get("bias"))
    if not is_output:
        return nn.Embedding.from_pretrained(parts["weight"])
    num_tokens, size = parts["weight"].shape
    output = nn.Linear(size, num_tokens, bias="bias" in parts, device="meta")
    output.load_state_dict(parts, assign=True)
    return output.requires_grad_(False)


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


def open_programs(
    place: Path | str,
    files: Sequence[Path],
    dtype: torch.dtype,
    probe: Probe,
    *,
    read: Any = None,
    quantization: str = "none",
    **shared: Any,
) -> Programs:
    """The target of a folder, a hub id or the integers of a GGUF file; the first start writes its programs.

    Args:
        place: folder or hub id; of a GGUF file, a folder with the model's configuration and tokenizer.
        files: that decide what the model computes.
        dtype: bfloat16 or float32, of embeddings, keys, values and states. Where the programs multiply by integers,
            activations are rounded to 8 bits in bfloat16.
        probe: asks the model what it can do; of a GGUF file, a model of a few layers.
        read: cached function that reads the model in ``dtype``; None: the first file is a GGUF file with matrices of
            the types of :mod:`drafter.targets.stored`, whose integers run.
        quantization: ``none``, or how the weights of the linear layers are rounded.
        **shared: revision and trust_remote_code.

    Raises:
        Unsuitable: OpenVINO cannot run the model; says why.
        ValueError: of ``read`` and ``probe``; a GGUF file has matrices of another type.
    """
    check_dtype(dtype)

    def write(scratch: Path) -> None:
        from drafter.targets import programs_writing as writing

        if folder.exists():
            _log.warning("%s is damaged or a copy, and is made again", folder)

        with dropping(files):  # its memory is a part of the files where the numbers are stored in this format
            if read is None:
                writing.write_gguf(scratch, files[0], place, dtype, probe)
            else:
                writing.write_checkpoint(scratch, place, read, dtype, quantization, probe, **shared)
        for other in folder.parents[1].iterdir():
            if other.name != FORMAT:  # of earlier releases
                shutil.rmtree(other, ignore_errors=True)

    versions = [version(name) for name in ("torch", "transformers", "openvino")]
    folder = programs_home() / key_of(files, [str(dtype), quantization, versions])
    keep(folder, write, is_exact=True)
    if read is not None:
        read.cache_clear()
    gc.collect()
    trim()
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    model: Any = ProgramsModel(PreTrainedConfig(**facts["config"]), load_file(folder / ENDS), dtype)
    windows = {kind: None if window is None else Window(*window) for kind, window in facts["windows"].items()}
    capabilities = Capabilities(
        model,
        LayerWindows(windows, is_mapped=facts["is_mapped"]),
        CacheShape(*facts["cache_shape"]),
        LogitMap(*facts["logit_map"]),
    )
    runtime = OpenVINORuntime(folder, model.embedding, capabilities, dtype, is_grouped=facts["is_grouped"])
    kept = (facts[name] for name in ("fingerprint", "scheme", "num_parameters", "tokenizer_kind"))
    return Programs(model, capabilities, runtime, dtype, *kept)
