"""A target that runs from the integers of its GGUF file: no copy of its weights in torch, no unpacking to 16 bits.

The first start writes OpenVINO's programs with the file's own integers and what probes found out; later starts read
these. Only two layers are unpacked, for the probes. The model's modules remain as a description without weights.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from drafter.kernels.packed import count_parameters
from drafter.targets.cache import CacheShape
from drafter.targets.capabilities import Capabilities, LayerWindows, LogitMap, decoder_of, fingerprint_of, layer_windows
from drafter.targets.openvino_files import head_digest, keep, programs_folder
from drafter.targets.openvino_runtime import OpenVINORuntime, write_programs
from drafter.targets.sharding import layers_of
from drafter.targets.stored import Grouped, StoredMatrix, load_matrix, read_tensors, save_matrix

_FACTS = "facts.json"
_ROUNDED_TOGETHER = 32  # activations that share a scale, as many as weights do

# Asks a model what it can do, and compares a small tree with its paths.
Probe = Callable[[PreTrainedModel], Capabilities]


class StoredTarget(NamedTuple):
    """What a target is made of.

    Attributes:
        model: modules without weights, but for embeddings and output matrix (:class:`StoredMatrix`).
        capabilities: of the model.
        runtime: that runs the programs.
        fingerprint: of the unpacked weights.
        num_parameters: of the model.
        output: the output matrix.
    """

    model: PreTrainedModel
    capabilities: Capabilities
    runtime: OpenVINORuntime
    fingerprint: str
    num_parameters: int
    output: StoredMatrix


def load_stored(
    file: Path, place: Path, digest: str, dtype: torch.dtype, probe: Probe, *, is_exact: bool = False
) -> StoredTarget:
    """The target of a GGUF file.

    Args:
        file: with matrices of the types of :mod:`drafter.targets.stored`.
        place: folder with the model's configuration and tokenizer.
        digest: SHA-256 of the file.
        dtype: of embeddings, keys, values and states.
        probe: asks a model of a few layers what it can do.
        is_exact: activations are not rounded to 8 bits.

    Raises:
        ValueError: the file has matrices of another type, or OpenVINO cannot run the model; says why.
    """
    model = _describe(place, dtype)
    num_parameters = count_parameters(model)
    key = head_digest({"gguf": digest, "config": model.config.to_dict(), "dtype": str(dtype)}).hexdigest()[:24]
    folder = programs_folder(key)
    keep(folder, lambda scratch: _write(scratch, file, place, dtype, probe))
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    capabilities = Capabilities(
        decoder_of(model),
        LayerWindows(layer_windows(model, file.name).by_kind, is_mapped=facts["is_mapped"]) if facts["is_mapped"]
        else LayerWindows({}, is_mapped=False),
        CacheShape(*facts["cache_shape"]),
        LogitMap(*facts["logit_map"]),
    )  # fmt: skip
    embedding = load_matrix(folder, "embedding")
    assert embedding is not None
    output = StoredMatrix(load_matrix(folder, "output") or embedding, dtype)
    for module in model.modules():  # a description has no weights that somebody could take for numbers
        for parameter_name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, parameter_name, nn.Parameter(parameter.detach().to("meta"), requires_grad=False))
    embed = StoredMatrix(embedding, dtype)
    model.set_input_embeddings(embed)
    model.set_output_embeddings(output)
    rounded = 0 if is_exact else _ROUNDED_TOGETHER
    # OpenVINO rounds activations to 8 bits in float32 kernels; in bfloat16 it unpacks the weights instead.
    runtime = OpenVINORuntime(folder, embed, capabilities, dtype=dtype, precision="f32", rounded_together=rounded)
    return StoredTarget(model, capabilities, runtime, facts["fingerprint"], num_parameters, output)


def _describe(place: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a folder with weights that nobody has written: their memory is not in use yet."""
    config = AutoConfig.from_pretrained(place)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.tie_weights()
    if (place / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(place)
    return model.eval().requires_grad_(False)


def _write(folder: Path, file: Path, place: Path, dtype: torch.dtype, probe: Probe) -> None:
    """Fill a folder with programs, embeddings and facts."""
    model = _describe(place, torch.float32)  # OpenVINO multiplies by integers in float32 programs only
    tensors = dict(read_tensors(file, model))
    parameters = dict(model.named_parameters())
    missing = parameters.keys() - tensors.keys()
    if missing:
        raise ValueError(f"the GGUF file has no tensor for {min(missing)}")
    found = probe(_few_layers(place, tensors))
    assert isinstance(found.cache_shape, CacheShape)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    capabilities = found._replace(
        decoder=decoder_of(model), cache_shape=found.cache_shape._replace(num_layers=num_layers)
    )
    by_parameter = {id(parameter): tensors[name] for name, parameter in parameters.items()}
    ends: Any = model.get_input_embeddings(), model.get_output_embeddings()
    embedding, output = (by_parameter[id(module.weight)] for module in ends)
    if not (isinstance(embedding, Grouped) and isinstance(output, Grouped)):
        raise ValueError("its embeddings or its output matrix are not quantised")
    matrices = {}
    for name, parameter in capabilities.decoder.named_parameters():
        tensor = by_parameter[id(parameter)]
        if isinstance(tensor, Tensor):
            parameter.data.copy_(tensor)
        elif parameter is not ends[0].weight:
            matrices[name] = tensor
    write_programs(folder, model, capabilities, matrices, output, dtype)
    save_matrix(embedding, folder, "embedding")
    if output is not embedding:
        save_matrix(output, folder, "output")
    facts = {
        "is_mapped": capabilities.windows.is_mapped,
        "cache_shape": list(capabilities.cache_shape),
        "logit_map": list(capabilities.logit_map),
        "fingerprint": fingerprint_of(StoredMatrix(output, torch.float32).weight),
    }
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _few_layers(place: Path, tensors: Mapping[str, Grouped | Tensor]) -> PreTrainedModel:
    """The model with its first layers, one of each kind and two at least, and their unpacked weights."""
    model = _describe(place, torch.float32)
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    count = max(2, *(kinds.index(kind) + 1 for kind in set(kinds)))
    layers = layers_of(model, str(place))
    del layers[count:]
    for name, parameter in model.named_parameters():
        tensor = tensors[name]
        parameter.data.copy_(tensor if isinstance(tensor, Tensor) else StoredMatrix(tensor, torch.float32).weight)
    return model
