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

from drafter.targets.cache import CacheShape
from drafter.targets.capabilities import Capabilities, Probe, decoder_of, fingerprint_of
from drafter.targets.export import check_exportable, export_logits, forward_to_openvino, to_openvino
from drafter.targets.loading import Checkpoint, describe, read_tokenizer
from drafter.targets.openvino_compile import Unsuitable, import_openvino
from drafter.targets.openvino_files import ENDS, FACTS, FORWARD, HEAD
from drafter.targets.openvino_graph import join_products, split_stores, use_matrices, with_type
from drafter.targets.openvino_runtime import PRECISIONS, mask_kinds
from drafter.targets.quantized import has_plain_weights
from drafter.targets.sharding import layers_of
from drafter.targets.stored import BITS, Grouped, StoredMatrix, read_tensors, round_matrix
from drafter.utils.io import first_line


class _Source(NamedTuple):
    """What programs are made of.

    Attributes:
        model: whose code is recorded; float32 if there are matrices.
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
    """Write the programs of a checkpoint; arguments and errors as of
    :func:`drafter.targets.programs.open_checkpoint`.
    """
    check_exportable(_described(place, dtype, **shared))
    checkpoint: Checkpoint = read()
    plain = checkpoint.model
    if not has_plain_weights(plain):
        raise Unsuitable("its weights have the storage of a library of quantisation")
    found = probe(plain.eval().requires_grad_(False))
    if not isinstance(found.cache_shape, CacheShape):
        raise Unsuitable("its layers have keys of different shapes")
    scheme = checkpoint.scheme or "none"
    if quantization == "none":
        output: Any = plain.get_output_embeddings()
        if type(output) is not nn.Linear:
            raise Unsuitable("its output matrix is no linear layer")
        ends = _embedding_rows(plain), output.weight.detach()
        source = _Source(plain, found, {}, ends, fingerprint_of(ends[1]), scheme)
    else:
        source = _rounded(plain, found, describe(place, torch.float32, **shared), quantization)
    _write(folder, source, dtype, checkpoint.tokenizer)


def write_gguf(folder: Path, file: Path, place: Path, dtype: torch.dtype, probe: Probe) -> None:
    """Write the programs of a GGUF file's integers; arguments and errors as of
    :func:`drafter.targets.programs.open_gguf`.
    """
    check_exportable(_described(place, dtype))
    _write(folder, _of_gguf(file, place, probe), dtype, read_tokenizer(place))


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
    tensors: dict[str, Tensor] = {}
    embedding, output = source.ends
    for name, end in {"embedding": embedding, "output": output}.items():
        if name == "output" and _is_same(end, embedding):
            continue
        if isinstance(end, Grouped):
            parts = {"packed": end.packed, "scale_OG": end.scale_OG, "offset_OG": end.offset_OG}
            tensors |= {f"{name}.{part}": torch.from_numpy(a) for part, a in parts.items() if a is not None}
        else:
            tensors[name] = end
    bias = getattr(source.model.get_output_embeddings(), "bias", None)
    if bias is not None:
        tensors["bias"] = bias.detach()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def _is_same(one: Tensor | Grouped, other: Tensor | Grouped) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.data_ptr() == other.data_ptr()
    return one is other


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
    model, found, output_matrix = source.model, source.capabilities, source.ends[1]
    decoder, shape, kinds = found.decoder, found.cache_shape, mask_kinds(found)
    assert isinstance(shape, CacheShape)
    output: Any = model.get_output_embeddings()
    hidden_size = output.weight.shape[1]
    with tqdm(total=3, desc="Exporting the target to OpenVINO, once", disable=None) as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            given = [name for name, _ in decoder.named_parameters() if name in source.matrices]
            recorded, names = forward_to_openvino(ov, model, decoder, shape, hidden_size, kinds, given, stored=dtype)
            bar.update()
            forward = use_matrices(ov, recorded, [source.matrices.pop(name) for name in names])
            forward = split_stores(ov, forward, 2 + (len(kinds) or 1), shape.num_layers)
            is_given = isinstance(output_matrix, Grouped)
            head = to_openvino(ov, export_logits(output, found.logit_map, hidden_size, is_given=is_given))
            if isinstance(output_matrix, Grouped):
                head = use_matrices(ov, head, [output_matrix])
            join_products(ov, forward)
            if dtype != model.dtype:
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


def _rounded(plain: PreTrainedModel, found: Capabilities, recorded: PreTrainedModel, quantization: str) -> _Source:
    """Programs with the rounded weights of all linear layers of a plain model.

    Args:
        plain: the model.
        found: what it can do.
        recorded: its description in float32, which OpenVINO's products with integers need.
        quantization: the scheme.
    """
    bits = BITS[quantization]
    linears = {id(layer.weight) for layer in plain.modules() if type(layer) is nn.Linear}
    decoder = decoder_of(recorded)
    embedding: Any = plain.get_input_embeddings()
    matrices = {}
    by_name = dict(decoder.named_parameters())
    for name, parameter in found.decoder.named_parameters():
        if parameter is embedding.weight:
            continue
        if id(parameter) in linears:
            matrices[name] = round_matrix(parameter, bits)
        else:
            by_name[name].data.copy_(parameter)
    output: Any = plain.get_output_embeddings()
    if not matrices or type(output) is not nn.Linear:
        raise Unsuitable(f"--quantization {quantization} rounds linear layers")
    if output.bias is not None:
        head: Any = recorded.get_output_embeddings()
        head.bias.data.copy_(output.bias)
    ends = _embedding_rows(plain), round_matrix(output.weight, bits)
    capabilities = found._replace(decoder=decoder)
    return _Source(recorded, capabilities, matrices, ends, fingerprint_of(output.weight), quantization)


def _of_gguf(file: Path, place: Path, probe: Probe) -> _Source:
    """Programs with the integers of a GGUF file; only a few layers are unpacked, for the probes."""
    model = describe(place, torch.float32)  # OpenVINO multiplies by integers in float32 programs only
    capabilities, fingerprint = _probe_few_layers(file, place, model, probe)
    parameters = dict(model.named_parameters())
    tensors = read_tensors(file, model, parameters)
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
    return _Source(model, capabilities, matrices, (embedding, output), fingerprint, "none")


def _probe_few_layers(file: Path, place: Path, model: PreTrainedModel, probe: Probe) -> tuple[Capabilities, str]:
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
    return found._replace(decoder=decoder_of(model), cache_shape=cache_shape), fingerprint_of(output.weight)
