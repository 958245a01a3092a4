"""A target that runs from OpenVINO's programs on disk: torch holds no copy of its weights.

The first start reads the target, asks it what it can do, and writes a folder: the programs of decoder and output matrix
with their weights, embeddings and output matrix once more for look-ups, and what the probes found out. Later starts
read this folder alone, and map it into memory. The model's modules remain as a description without weights.

The weights of the programs are numbers as they were read, or integers in groups: those of a GGUF file, or of
``--quantization``.
"""

import gc
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from drafter.kernels.packed import count_parameters
from drafter.kernels.pages import dropping, trim
from drafter.targets.cache import CacheShape
from drafter.targets.capabilities import Capabilities, LayerWindows, LogitMap, decoder_of, fingerprint_of
from drafter.targets.export import check_exportable, export_logits, forward_to_openvino, to_openvino
from drafter.targets.loading import Checkpoint, describe
from drafter.targets.masks import Window
from drafter.targets.openvino_compile import Unsuitable, import_openvino
from drafter.targets.openvino_files import FORWARD, HEAD, keep, programs_folder
from drafter.targets.openvino_graph import join_products, split_stores, use_matrices, with_type
from drafter.targets.openvino_runtime import PRECISIONS, OpenVINORuntime, check_dtype, mask_kinds
from drafter.targets.quantized import has_plain_weights
from drafter.targets.sharding import layers_of
from drafter.targets.stored import Grouped, StoredMatrix, read_tensors, round_matrix
from drafter.utils.io import first_line

_FACTS, _ENDS = "facts.json", "ends.safetensors"
_ROUNDED_TOGETHER = 32  # activations that share a scale of 8 bits, as many as weights do
BITS = {"int8": 8, "int4": 4}

# Asks a model what it can do, and compares a small tree with its paths.
Probe = Callable[[PreTrainedModel], Capabilities]


class Programs(NamedTuple):
    """What a target is made of.

    Attributes:
        model: modules without weights, but for embeddings and output matrix.
        capabilities: of the model.
        runtime: that runs the programs.
        dtype: of embeddings, keys, values and states.
        fingerprint: of the weights before ``--quantization``.
        scheme: how the weights were quantised, ``none`` for plain ones and those of a GGUF file.
        num_parameters: of the model.
    """

    model: PreTrainedModel
    capabilities: Capabilities
    runtime: OpenVINORuntime
    dtype: torch.dtype
    fingerprint: str
    scheme: str
    num_parameters: int


class _Source(NamedTuple):
    """What programs are made of.

    Attributes:
        capabilities: of a model whose code is recorded; float32 if there are matrices.
        model: this model.
        matrices: in place of parameters of the decoder, by name; each goes when a program has its numbers.
        ends: embeddings and output matrix.
        fingerprint, scheme: as of :class:`Programs`.
    """

    model: PreTrainedModel
    capabilities: Capabilities
    matrices: dict[str, Grouped]
    ends: tuple[Tensor | Grouped, Tensor | Grouped]
    fingerprint: str
    scheme: str


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
    model = _described(place, dtype, **shared)
    check_exportable(model)
    folder = programs_folder(files, {"dtype": str(dtype), "quantization": quantization})

    def write(scratch: Path) -> None:
        # Its memory is a part of the files where the numbers are stored in this format.
        with dropping(files):
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
                ends = _embedding(plain).weight.detach(), output.weight.detach()
                source = _Source(plain, found, {}, ends, fingerprint_of(ends[1]), scheme)
            else:
                source = _rounded(plain, found, describe(place, torch.float32, **shared), quantization)
            _write(scratch, source, dtype)

    keep(folder, write)
    read.cache_clear()
    gc.collect()
    trim()
    return _open(folder, model, dtype)


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
    model = _described(place, dtype)
    folder = programs_folder([file, place / "config.json"], {"dtype": str(dtype)})

    def write(scratch: Path) -> None:
        with dropping([file]):
            _write(scratch, _of_gguf(file, place, probe), dtype)

    keep(folder, write)
    gc.collect()
    trim()
    return _open(folder, model, dtype)


def _described(place: Path | str, dtype: torch.dtype, **shared: Any) -> PreTrainedModel:
    """:func:`drafter.targets.loading.describe`; Unsuitable for an odd configuration, whatever transformers raises."""
    try:
        return describe(place, dtype, **shared)
    except Exception as error:
        raise Unsuitable(f"its configuration has no model ({first_line(error)})") from error


def _open(folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> Programs:
    """What a folder holds; ``model``: a description, which loses its weights."""
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    num_parameters = count_parameters(model)
    windows = {kind: None if window is None else Window(*window) for kind, window in facts["windows"].items()}
    capabilities = Capabilities(
        decoder_of(model),
        LayerWindows(windows, is_mapped=facts["is_mapped"]),
        CacheShape(*facts["cache_shape"]),
        LogitMap(*facts["logit_map"]),
    )
    for module in model.modules():  # a description has no weights that somebody could take for numbers
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().to("meta"), requires_grad=False))
    _set_ends(model, folder / _ENDS, dtype)
    is_grouped = facts["is_grouped"]
    runtime = OpenVINORuntime(
        folder, _embedding(model), capabilities,
        dtype=dtype,
        # OpenVINO rounds activations to 8 bits in float32 kernels; in bfloat16 it unpacks the weights instead.
        precision="f32" if is_grouped else "",
        rounded_together=_ROUNDED_TOGETHER if is_grouped and dtype == torch.bfloat16 else 0,
    )  # fmt: skip
    return Programs(model, capabilities, runtime, dtype, facts["fingerprint"], facts["scheme"], num_parameters)


def _embedding(model: PreTrainedModel) -> Any:
    return model.get_input_embeddings()


def _set_ends(model: PreTrainedModel, file: Path, dtype: torch.dtype) -> None:
    """Give a description its embeddings and its output matrix, mapped into memory."""
    with safe_open(file, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    ends: dict[str, StoredMatrix | nn.Parameter] = {}
    for name in ("embedding", "output"):
        packed = tensors.get(f"{name}.packed")
        if packed is not None:
            offset = tensors.get(f"{name}.offset_OG")
            matrix = Grouped(
                packed.numpy(),
                4 if packed.dtype == torch.uint8 else 8,
                tensors[f"{name}.scale_OG"].numpy(),
                None if offset is None else offset.numpy(),
            )
            ends[name] = StoredMatrix(matrix, dtype)
        elif name in tensors:
            ends[name] = nn.Parameter(tensors[name], requires_grad=False)
    if isinstance(ends["embedding"], StoredMatrix):
        model.set_input_embeddings(ends["embedding"])
    else:
        _embedding(model).weight = ends["embedding"]
    found = ends.get("output", ends["embedding"])
    if isinstance(found, StoredMatrix):
        found.bias = tensors.get("bias")
        model.set_output_embeddings(found)
    else:
        output: Any = model.get_output_embeddings()
        output.weight = found
        if "bias" in tensors:
            output.bias = nn.Parameter(tensors["bias"], requires_grad=False)


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


def _write(folder: Path, source: _Source, dtype: torch.dtype) -> None:
    """Fill a folder with programs, ends and facts."""
    check_exportable(source.model)
    found = source.capabilities
    shape = found.cache_shape
    assert isinstance(shape, CacheShape)
    _save_ends(source, folder / _ENDS)
    facts = {
        "windows": {kind: window and list(window) for kind, window in found.windows.by_kind.items()},
        "is_mapped": found.windows.is_mapped,
        "cache_shape": list(shape),
        "logit_map": list(found.logit_map),
        "fingerprint": source.fingerprint,
        "scheme": source.scheme,
        "is_grouped": bool(source.matrices),
    }
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
    write_programs(folder, source, dtype)


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
    embedding: Any = _embedding(plain).weight
    matrices = {}
    by_name = dict(decoder.named_parameters())
    for name, parameter in found.decoder.named_parameters():
        if parameter is embedding:
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
    ends = embedding.detach(), round_matrix(output.weight, bits)
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
