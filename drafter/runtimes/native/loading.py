"""Loads a target for the native runtime, from the integers of a GGUF file or the weights of safetensors files."""

import contextlib
import copy
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from drafter.kernels import native
from drafter.runtimes.base import BITS, Slots, Spec, Unsuitable, check_rotation
from drafter.runtimes.native.family import FAMILIES
from drafter.runtimes.native.runtime import NativeRuntime
from drafter.runtimes.native.weights import (
    ARCHITECTURES,
    Stored,
    entries,
    open_gguf,
    open_safetensors,
    rounded,
    tensors_of_gguf,
)
from drafter.targets.catalog import (
    checkpoint_files,
    home_folder,
    key_of,
    place_of,
    read_config,
    read_tokenizer,
    stored_file,
)
from drafter.targets.fingerprint import Ends, ends_in_files, fingerprint_of_sample, sample_index
from drafter.targets.target import Target
from drafter.utils.parse import read_json_object

_log = logging.getLogger(__name__)
_CHECKED_LAYERS = 2  # at least; as many as it takes to see every kind of layer once
_MOST_CHECKED = 8
_TOLERANCE = 2e-3


def load_native(spec: Spec) -> Target:
    """A target that the native step runs.

    Raises:
        Unsuitable: the library was not built, or does not run this target; says why.
        ValueError: a file is damaged, or does not fit its configuration.
    """
    if spec.device.type != "cpu" or not spec.is_whole or spec.is_trainable:
        raise Unsuitable("it decodes whole targets on a CPU", is_expected=True)
    if spec.trust_remote_code or spec.dtype == "float16":
        raise Unsuitable("it runs described models as their files store them, in float32 or in bfloat16")
    if native.library() is None:
        raise Unsuitable(
            "the native step was not built, so torch computes in float32, several times slower: install a C++ compiler "
            "(or ziglang, and set CXX='python -m ziglang c++ -mcpu=baseline'), then the package again"
        )
    number_format = "stored" if spec.dtype == "auto" else spec.dtype
    is_plain = number_format == "bfloat16" or spec.quantization != "none"  # of the file's numbers, not its integers
    stored = None if is_plain else stored_file(spec.name, spec.revision)
    place: Path | str = stored[1] if stored else place_of(spec.name, spec.revision)
    files = checkpoint_files(place, spec.revision)
    folder = place if isinstance(place, Path) else files[0].parent
    config = _read_config(folder)
    with ThreadPoolExecutor(1) as beside:  # blocks are packed without Python's lock
        tokenizer = beside.submit(read_tokenizer, place, revision=spec.revision)
        try:
            tensors, ends = _open(files, stored and stored[0], config)
            output = tensors.get("lm_head.weight") or tensors["model.embed_tokens.weight"]
            if spec.quantization != "none":
                tensors = rounded(tensors, BITS[spec.quantization])
            runtime = NativeRuntime(config, tensors, number_format=number_format, adds_one=not stored)
        except KeyError as error:
            raise Unsuitable(f"it has no weight {error}") from error
        except ValueError as error:
            raise ValueError(f"--target {spec.name!r} cannot be loaded: {error}") from error
    _check(runtime, config, folder)
    config = _limited(config, spec.name)
    index = sample_index(runtime.vocab_size * runtime.hidden_size)
    generation = folder / "generation_config.json"
    return Target(
        runtime, tokenizer.result(), config, name=spec.name, revision=spec.revision,
        fingerprint=fingerprint_of_sample(entries(output, index), ends), quantization=spec.quantization,
        generation_config=SimpleNamespace(**read_json_object(generation)) if generation.is_file() else None,
    )  # fmt: skip


def _limited(config: Any, name: str) -> Any:
    """The configuration with the context for which one table of rotations holds."""
    rope = config.rope_parameters or {}
    if rope.get("rope_type") != "longrope" or config.max_position_embeddings <= (
        most := rope["original_max_position_embeddings"]
    ):
        return config
    _log.warning("target %r takes texts of at most %d tokens here; --runtime torch takes longer ones", name, most)
    limited = copy.deepcopy(config)
    limited.max_position_embeddings = most
    return limited


def _open(files: Sequence[Path], gguf: Path | None, config: Any) -> tuple[dict[str, Stored], Ends]:
    """The tensors by the names of transformers, and what the fingerprint reads of them (ValueError: damaged files)."""
    if gguf is None:
        weights = [file for file in files if file.suffix == ".safetensors"]
        return open_safetensors(weights), ends_in_files(weights)
    header = open_gguf(gguf)
    if (kind := header.scalars.get("general.architecture")) not in ARCHITECTURES:
        raise Unsuitable(f"GGUF files of architecture {kind} are not described")
    return tensors_of_gguf(header, config.num_attention_heads, config.num_key_value_heads), _ends(header.tensors)


def _read_config(folder: Path) -> Any:
    """The configuration of a folder, of a described type (Unsuitable for others, before transformers reads it)."""
    said = read_json_object(folder / "config.json")
    if said.get("model_type") not in FAMILIES:
        raise Unsuitable(f"models of type {said.get('model_type')} are not described")
    if said.get("quantization_config"):
        raise Unsuitable("its weights come quantised")
    try:
        check_rotation(said)
        return read_config(folder)
    except Exception as error:  # transformers checks values with errors of many types; torch's loader names them
        raise Unsuitable(f"its configuration cannot be read ({type(error).__name__})") from error


def _ends(tensors: Mapping[str, Stored]) -> Iterator[tuple[str, float, float]]:
    """First and last entry of the matrices of a GGUF file's layers."""
    from gguf import GGMLQuantizationType, quants

    for name, each in tensors.items():
        if name.startswith("blk.") and len(each.shape) > 1:
            kind = GGMLQuantizationType[each.kind]
            first, last = (quants.dequantize(each.data[row : row + 1], kind) for row in (0, len(each.data) - 1))
            yield name, float(first.flat[0]), float(last.flat[-1])


def _check(runtime: NativeRuntime, config: Any, folder: Path) -> None:
    """Compare a short forward through the first layers with transformers' own module, once for a configuration and its
    weights' names (Unsuitable: the description is not the model's).
    """
    names = sorted({*runtime.places, *runtime.vectors})
    facts = [config.to_dict(), version("transformers"), native.instructions(), runtime.traits.number_format, names]
    mark = home_folder() / "checked" / key_of([], json.loads(json.dumps(facts, default=str)))
    if os.path.exists(mark):
        return
    from transformers import AutoConfig

    distance = _distance(runtime, AutoConfig.from_pretrained(folder))
    if not distance <= _TOLERANCE:
        raise Unsuitable(f"its first layers give other states than transformers' (off by {distance:.2g})")
    with contextlib.suppress(OSError):  # a home that cannot be written: every start checks
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


@torch.no_grad()
def _distance(runtime: NativeRuntime, config: Any) -> float:
    """How far the states of a prefix and a small tree are from the module's, as a share of their size."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    said = runtime.description
    kinds = list(zip(said.rotation_of, said.window_of, strict=True))
    number = next(n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds) or n == _MOST_CHECKED)
    number = min(max(number, _CHECKED_LAYERS), len(kinds))
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size = number, 8
    small.bos_token_id = small.eos_token_id = small.pad_token_id = None
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:number]
    with no_init_weights():
        module = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation="eager").model
    own = {name.removeprefix("model."): weight for name, weight in _numbers(runtime, number)}
    if differing := (module.state_dict().keys() - {"embed_tokens.weight"}) ^ own.keys():
        raise Unsuitable(f"the weight {min(differing)} is only in the checkpoint, or only in transformers' module")
    module.load_state_dict(own, strict=False, assign=True)
    embedding = runtime.embed(torch.arange(2, 10)[None] % runtime.vocab_size)
    wanted = module.eval()(inputs_embeds=embedding, use_cache=False, return_dict=True).last_hidden_state
    model = runtime.first_layers(number)
    cache = runtime.new_cache(1, 16, torch.float32)
    place = torch.arange(8)[None]
    found = []
    for part, ancestor in ((slice(0, 5), None), (slice(5, 8), torch.ones(1, 3, 3, dtype=torch.bool).tril())):
        slots = Slots(place[:, part], place[:, part], ancestor)
        found.append(runtime.run(model, embedding[:, part].contiguous(), slots, cache).hidden_BTD)
    return float((torch.cat(found, dim=1) - wanted).norm() / wanted.norm())


def _numbers(runtime: NativeRuntime, num_layers: int) -> Iterator[tuple[str, Tensor]]:
    """The numbers of the first layers' weights by the names of transformers."""
    kept = re.compile(r"model\.(norm|layers\.(\d+))\.")
    for name in (*runtime.vectors, *runtime.places):
        if (found := kept.match(name)) is None or int(found[2] or 0) >= num_layers:
            continue
        if name in runtime.vectors:
            yield name, runtime.vectors[name]
        else:
            matrix, start, outputs = runtime.places[name]
            yield name, native.unpack_rows(matrix, torch.arange(start, start + outputs))
