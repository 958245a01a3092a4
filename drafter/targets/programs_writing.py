"""Writes the folder that a target runs from (:mod:`drafter.targets.programs`)."""

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from drafter.kernels.pages import trim
from drafter.targets.cache import CacheShape
from drafter.targets.capabilities import Capabilities, Probe, decoder_of
from drafter.targets.export import check_exportable, export_logits, forward_to_openvino, to_openvino
from drafter.targets.fingerprint import ends_in_model, fingerprint_of
from drafter.targets.gguf_file import ends_in_gguf
from drafter.targets.loading import Checkpoint, describe, read_tokenizer
from drafter.targets.openvino_compile import ENDS, FACTS, FORWARD, HEAD, Unsuitable, import_openvino
from drafter.targets.openvino_graph import (
    join_products,
    round_once,
    split_heads,
    split_stores,
    with_type,
    write_out_attention,
)
from drafter.targets.openvino_runtime import PRECISIONS, mask_kinds
from drafter.targets.quantized import has_plain_weights
from drafter.targets.sharding import layers_of
from drafter.targets.stored import BITS, Grouped, StoredMatrix, read_tensors, round_matrix
from drafter.utils.io import first_line


class _Source(NamedTuple):
    """What programs are made of.

    Attributes:
        model: whose code is recorded; its decoder is float32 if there are matrices.
        capabilities: of the model.
        matrices: in place of parameters of the decoder, by name; each goes when a program has its numbers.
        ends: embeddings and output matrix.
        fingerprint, scheme: as of :class:`drafter.targets.programs.Programs`.
    """

    model: PreTrainedModel
    capabilities: Capabilities
    matrices: dict[str, Grouped]
    ends: tuple[Tensor | Grouped, Tensor | Grouped]
    fingerprint: str
    scheme: str


def write_checkpoint(
    folder: Path, place: Path | str, read: Any, dtype: torch.dtype, quantization: str, probe: Probe, **shared: Any
) -> None:
    """Write the programs of a checkpoint; arguments and errors as of :func:`drafter.targets.programs.open_programs`."""
    check_exportable(_described(place, dtype, **shared))
    checkpoint: Checkpoint = read()
    model = checkpoint.model
    if not has_plain_weights(model):
        raise Unsuitable("its weights have the storage of a library of quantisation")
    found = probe(model)
    if not isinstance(found.cache_shape, CacheShape):
        raise Unsuitable("its layers have keys of different shapes")
    output: Any = model.get_output_embeddings()
    if type(output) is not nn.Linear:
        raise Unsuitable("its output matrix is no linear layer")
    fingerprint = fingerprint_of(output.weight, ends_in_model(decoder_of(model)))
    ends: tuple[Any, Any] = _embedding_rows(model), output.weight.detach()
    matrices = {}
    if quantization != "none":
        read.cache_clear()  # the model loses its weights
        ends = ends[0], round_matrix(ends[1], BITS[quantization])
        matrices = _rounded(model, found.decoder, quantization)
    source = _Source(model, found, matrices, ends, fingerprint, checkpoint.scheme or quantization)
    _write(folder, source, dtype, checkpoint.tokenizer)


def write_gguf(folder: Path, file: Path, place: Path | str, dtype: torch.dtype, probe: Probe) -> None:
    """Write the programs of a GGUF file's integers; arguments and errors as of
    :func:`drafter.targets.programs.open_programs`.
    """
    model = _described(place, torch.float32)  # OpenVINO multiplies by integers in float32 programs only
    check_exportable(model)
    found, fingerprint = _probe_few_layers(file, place, model, probe)
    parameters = dict(model.named_parameters())
    tensors = read_tensors(file, model, parameters)
    by_parameter = {id(parameter): tensors[name] for name, parameter in parameters.items()}
    modules: Any = model.get_input_embeddings(), model.get_output_embeddings()
    embedding, output = (by_parameter[id(module.weight)] for module in modules)
    if not (isinstance(embedding, Grouped) and isinstance(output, Grouped)):
        raise ValueError("its embeddings or its output matrix are not quantised")
    matrices = {}
    for name, parameter in found.decoder.named_parameters():
        tensor = by_parameter[id(parameter)]
        if isinstance(tensor, Tensor):
            parameter.data.copy_(tensor)
        elif parameter is not modules[0].weight:
            matrices[name] = tensor
    source = _Source(model, found, matrices, (embedding, output), fingerprint, "none")
    _write(folder, source, dtype, read_tokenizer(place))


def _described(place: Path | str, dtype: torch.dtype, **shared: Any) -> PreTrainedModel:
    """:func:`drafter.targets.loading.describe`; Unsuitable for an odd configuration, whatever transformers raises."""
    try:
        return describe(place, dtype, **shared)
    except Exception as error:
        raise Unsuitable(f"its configuration has no model ({first_line(error)})") from error


@torch.no_grad()
def _embedding_rows(model: PreTrainedModel) -> Tensor:
    """Embeddings [V, D] as the first layer gets them: Gemma scales the rows of its matrix."""
    embedding: Any = model.get_input_embeddings()
    if type(embedding) is nn.Embedding:
        return embedding.weight.detach()
    rows: Tensor = embedding(torch.arange(len(embedding.weight)))
    return rows


def _save_ends(source: _Source, file: Path) -> None:
    """Save embeddings and output matrix by the names that :class:`drafter.targets.programs.ProgramsModel` reads."""
    embedding, output = (
        {"weight": end}
        if isinstance(end, Tensor)
        else {name: torch.from_numpy(array) for name, array in end._asdict().items() if array is not None}
        for end in source.ends
    )
    places = [{name: part.data_ptr() for name, part in end.items()} for end in (embedding, output)]
    if places[0] == places[1]:
        output = {}
    bias = getattr(source.model.get_output_embeddings(), "bias", None)
    if bias is not None:
        output["bias"] = bias.detach()
    ends = {"embedding": embedding, "output": output}
    save_file({f"{end}.{name}": part.contiguous() for end, parts in ends.items() for name, part in parts.items()}, file)


def _write(folder: Path, source: _Source, dtype: torch.dtype, tokenizer: Any) -> None:
    """Fill a folder with programs, ends and facts."""
    found = source.capabilities
    shape = found.cache_shape
    assert isinstance(shape, CacheShape)
    _save_ends(source, folder / ENDS)
    kind = type(tokenizer).__name__
    facts = {
        "windows": {kind: window and list(window) for kind, window in found.windows.by_kind.items()},
        "is_mapped": found.windows.is_mapped,
        "cache_shape": list(shape),
        "logit_map": list(found.logit_map),
        "fingerprint": source.fingerprint,
        "scheme": source.scheme,
        "is_grouped": bool(source.matrices),
        "config": _config_of(source.model),
        "tokenizer_kind": kind if getattr(transformers, kind, None) is type(tokenizer) else "AutoTokenizer",
        "num_parameters": source.model.num_parameters(),
    }
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    write_programs(folder, source, dtype)


def _config_of(model: PreTrainedModel) -> dict[str, Any]:
    """What a target reads of a configuration."""
    text = model.config.get_text_config(decoder=True)
    names = ("hidden_size", "num_hidden_layers", "max_position_embeddings")
    stops = (
        getattr(owner, "eos_token_id", None) for owner in (getattr(model, "generation_config", None), model.config)
    )
    return {
        **{name: getattr(text, name) for name in names if hasattr(text, name)},
        "eos_token_id": next((stop for stop in stops if stop is not None), None),
    }


def write_programs(folder: Path, source: _Source, dtype: torch.dtype) -> None:
    """Write the programs of decoder and output matrix; ``dtype``: of embeddings, keys, values and states.

    Raises:
        Unsuitable: the model's code cannot be recorded or converted, or a file cannot be written.
    """
    ov = import_openvino()
    found, output_matrix = source.capabilities, source.ends[1]
    decoder, shape = found.decoder, found.cache_shape
    assert isinstance(shape, CacheShape)
    output: Any = source.model.get_output_embeddings()
    with tqdm(total=3, desc="Exporting the target to OpenVINO, once", disable=None) as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            given = [name for name, _ in decoder.named_parameters() if name in source.matrices]
            recorded, names = forward_to_openvino(ov, source.model, found, given, stored=dtype)
            bar.update()
            forward = join_products(ov, recorded, [source.matrices.pop(name) for name in names])
            num_leading = 2 + (len(mask_kinds(found)) or 1)
            forward = split_stores(ov, forward, num_leading, output.weight.shape[1], shape)
            split_heads(ov, forward)
            write_out_attention(ov, forward)
            round_once(ov, forward)
            in_groups = [output_matrix] if isinstance(output_matrix, Grouped) else []
            head = to_openvino(ov, export_logits(output, found.logit_map, is_given=bool(in_groups)))
            head = join_products(ov, head, in_groups)
            if dtype != decoder.dtype:
                forward = with_type(ov, forward, PRECISIONS[dtype], has_outputs=True)
                head = with_type(ov, head, PRECISIONS[dtype], has_outputs=False)  # logits stay finer
            bar.update()
        except Exception as error:
            # Code that cannot be recorded or converted raises errors of all kinds, of torch and of OpenVINO.
            raise Unsuitable(f"its code cannot be exported ({first_line(error)})") from error
        for program, name in ((forward, FORWARD), (head, HEAD)):
            try:
                ov.save_model(program, folder / name, compress_to_fp16=False)
            except RuntimeError as error:  # OpenVINO's form of a full disk
                what = f"{folder / name} cannot be written, perhaps for want of space: {first_line(error)}"
                raise Unsuitable(what) from error
        bar.update()


@torch.no_grad()
def _rounded(model: PreTrainedModel, decoder: PreTrainedModel, quantization: str) -> dict[str, Grouped]:
    """The rounded weights of a decoder's linear layers, by name.

    The model loses these weights, embeddings and output matrix. Its other weights become float32, which OpenVINO's
    products with integers need.
    """
    ends: Any = model.get_input_embeddings(), model.get_output_embeddings()
    linears = {id(layer.weight) for layer in model.modules() if type(layer) is nn.Linear}
    matrices = {}
    for name, parameter in decoder.named_parameters():
        if parameter is not ends[0].weight and id(parameter) in linears:
            matrices[name] = round_matrix(parameter, BITS[quantization])
            parameter.data = torch.empty_like(parameter, dtype=torch.float32)  # takes no memory before it is written
        elif parameter is not ends[0].weight:
            parameter.data = parameter.float()
    if not matrices:
        raise Unsuitable(f"--quantization {quantization} rounds linear layers")
    for end in ends:
        end.weight.data = torch.empty_like(end.weight, dtype=torch.float32)
    if ends[1].bias is not None:
        ends[1].bias.data = ends[1].bias.float()
    trim()
    return matrices


def _probe_few_layers(file: Path, place: Path | str, model: PreTrainedModel, probe: Probe) -> tuple[Capabilities, str]:
    """What ``model`` can do, and its fingerprint, by its first layers: one of each kind and two at least, unpacked."""
    few = describe(place, torch.float32)
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    count = max(2, *(kinds.index(kind) + 1 for kind in set(kinds)))
    layers = layers_of(few, str(place))
    del layers[count:]
    parameters = dict(few.named_parameters())
    for name, tensor in read_tensors(file, model, parameters).items():
        dense = tensor if isinstance(tensor, Tensor) else StoredMatrix(tensor, torch.float32).weight
        parameters[name].data.copy_(dense)
    found = probe(few)
    assert isinstance(found.cache_shape, CacheShape)
    cache_shape = found.cache_shape._replace(num_layers=config.num_hidden_layers)
    output: Any = few.get_output_embeddings()
    return found._replace(decoder=decoder_of(model), cache_shape=cache_shape), fingerprint_of(
        output.weight, ends_in_gguf(file)
    )
