"""The published checkpoint format, which Apple's ml-recurrent-drafter and TensorRT-LLM's converter read.

A folder with ``config.json`` (model_type ``recurrent_drafting_drafter``) and ``model.safetensors``::

    rnn_w.weight [D, D]                  rnn_u.weight [D, D], rnn_u.bias [D]
    lm_head.{i}.linear.weight [E, E]     lm_head.{i}.linear.bias [E]              residual blocks i < num_draft_layers
    lm_head.{num_draft_layers}.weight [V, E]

    s_0 = 0;  s_k = SiLU(rnn_w e + rnn_u s_{k-1});  x = [h; s_k];  x += SiLU(lm_head.i(x)) ...;  logits = lm_head.n(x)

Our constant scales of h and e fold into the weights that read them, and a tied head is multiplied out with the
target's output rows, over the whole vocabulary. A drafter of another shape cannot be written this way and is refused.

Shapes: V vocabulary · D hidden size · E = 2D (``exit_dim``).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafter.models.config import DrafterConfig, shape_of
from drafter.models.files import WEIGHTS

MODEL_TYPE = "recurrent_drafting_drafter"
# Fields of the shape that the format has, that fold into its weights, or that go with `context`.
_EXPRESSED = {"vocab_size", "hidden_size", "num_res_blocks", "head", "block_rank", "draft_vocab_size", "context_layers"}
_CHUNK_ROWS = 8192  # rows of the vocabulary multiplied out at once, in float32


def to_apple(
    config: DrafterConfig, tensors: Mapping[str, Tensor], output_weight_VD: Tensor | None = None
) -> dict[str, Tensor]:
    """A drafter's tensors under their published names; a tied head needs the target's output matrix (ValueError: a
    field that the format cannot express).
    """
    _check_expressible(config)
    head = tensors["head.weight"]
    scale_E = torch.ones(2 * config.hidden_size, device=head.device)
    scale_E[: config.hidden_size] = config.hidden_scale
    own = {**tensors, "cell.w.weight": (tensors["cell.w.weight"].float() * config.embedding_scale).to(head.dtype)}
    for block in range(config.num_res_blocks):
        name = f"blocks.{block}.linear.weight"
        weight, down = own[name], own.get(f"blocks.{block}.down.weight")
        if down is not None:  # a low-rank block: its two narrow matrices are multiplied out in float32
            weight = (weight.float() @ down.float()).to(weight.dtype)
        own[name] = (weight.float() * scale_E).to(head.dtype)
    scaled = head.float() * scale_E
    if config.head == "tied":
        if output_weight_VD is None:
            raise ValueError(
                "a drafter with head 'tied' is multiplied out with its target's output matrix: give --target"
            )
        # From the unrounded product of scale and weight, so that only the result is rounded.
        parts = output_weight_VD.split(_CHUNK_ROWS)
        scaled = torch.cat([(rows.float() @ scaled.to(rows.device)).to(head.dtype).cpu() for rows in parts])
    own["head.weight"] = scaled.to(head.dtype)
    names = _own_names(config.num_res_blocks)
    return {published: own[name].detach().cpu().contiguous() for published, name in names.items()}


def from_apple(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published tensors under our names (ValueError: a tensor is missing or unknown)."""
    names = _own_names(config.num_res_blocks)
    for name in sorted(names.keys() ^ tensors.keys()):
        raise ValueError(f"published checkpoint: tensor {name!r} is {'missing' if name in names else 'unknown'}")
    found = {own: tensors[name] for name, own in names.items()}
    return {**found, "draft_token_ids_R": torch.arange(config.vocab_size)}


def _own_names(num_blocks: int) -> dict[str, str]:
    names = {"rnn_w.weight": "cell.w.weight", "rnn_u.weight": "cell.u.weight", "rnn_u.bias": "cell.u.bias"}
    for block in range(num_blocks):
        for part in ("weight", "bias"):
            names[f"lm_head.{block}.linear.{part}"] = f"blocks.{block}.linear.{part}"
    return {**names, f"lm_head.{num_blocks}.weight": "head.weight"}


def config_to_apple(config: DrafterConfig) -> dict[str, Any]:
    _check_expressible(config)
    return {
        "model_type": MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "exit_dim": 2 * config.hidden_size,
        "num_draft_layers": config.num_res_blocks,
        "num_lookback_tokens": 1,  # no reader of the format uses it for drafters with an rnn
        "rnn": True,
    }


def config_from_apple(found: Mapping[str, Any]) -> DrafterConfig:
    """Our config of a published one; ValueError naming the field that has no counterpart."""
    where = "published drafter config"
    if found.get("model_type") != MODEL_TYPE or found.get("rnn") is not True:
        raise ValueError(
            f"{where}: model_type is {found.get('model_type')!r} and rnn {found.get('rnn')}; it must be {MODEL_TYPE!r} "
            "with rnn"
        )
    for name in ("vocab_size", "hidden_size", "exit_dim", "num_draft_layers"):
        if not isinstance(found.get(name), int):
            raise ValueError(f"{where}: {name} is {found.get(name)!r} but must be an integer")
    config = DrafterConfig(
        vocab_size=found["vocab_size"], hidden_size=found["hidden_size"], num_res_blocks=found["num_draft_layers"]
    )
    if found["exit_dim"] != 2 * config.hidden_size:
        raise ValueError(
            f"{where}: exit_dim is {found['exit_dim']}, not twice the hidden_size {config.hidden_size}: the input "
            "projection that this asks for has no counterpart here"
        )
    return config


def write_folder(
    folder: Path, config: DrafterConfig, tensors: Mapping[str, Tensor], output_weight_VD: Tensor | None = None
) -> None:
    """Write the two files of the format into a folder that exists. Arguments and errors as of :func:`to_apple`."""
    save_file(to_apple(config, tensors, output_weight_VD), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_to_apple(config), indent=2) + "\n", encoding="utf-8")


def _check_expressible(config: DrafterConfig) -> None:
    refusal = "this drafter cannot be written in the published format:"
    for name, value in shape_of(config.to_dict()).items():
        if name not in _EXPRESSED and value != (only := getattr(DrafterConfig, name)):
            raise ValueError(f"{refusal} {name} {value!r}: the format knows {only!r} only")
    if config.head != "tied" and config.num_outputs != config.vocab_size:
        raise ValueError(
            f"{refusal} draft_vocab_size {config.num_outputs} with head {config.head!r}: the format has a row for each "
            f"token of the vocabulary of {config.vocab_size}, and these were never trained"
        )
