"""A decoder described by data: what the native step has to know of a model, read from its configuration.

A new family of models is one entry of :data:`FAMILIES`. What no entry describes runs in torch.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from drafter.runtimes.base import Unsuitable

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu",
    "relu": "relu", "relu2": "relu_squared",
}  # fmt: skip


class Description(NamedTuple):
    """What the configuration says; names of weights and their biases say the rest.

    Attributes:
        head_dim: numbers of a head.
        adds_one: norms multiply by 1 + weight.
        embedding_scale: of embeddings, as the first layer gets them.
        input_scale: of embeddings, within the forward.
        attention_scale, attention_cap: of scores; 0: no cap.
        residual_scale: of what attention and MLP add.
        logit_scale, logit_cap: of logits; 0: no cap.
        activation: one of :data:`drafter.kernels.native.ACTIVATIONS`.
        epsilon: of norms.
        rotations: kinds of rotations (of ``rope_parameters``; None: the one kind of the model).
        rotation_of: of each layer, an index into ``rotations``; -1: the layer rotates nothing.
        window_of: of each layer; 0: it sees everything.
    """

    head_dim: int
    adds_one: bool = False
    embedding_scale: float = 1.0
    input_scale: float = 1.0
    attention_scale: float = 1.0
    attention_cap: float = 0.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    activation: str = "silu"
    epsilon: float = 1e-6
    rotations: tuple[str | None, ...] = (None,)
    rotation_of: tuple[int, ...] = ()
    window_of: tuple[int, ...] = ()


def _gemma(config: Any) -> dict[str, Any]:
    return {"adds_one": True, "embedding_scale": float(torch.tensor(config.hidden_size**0.5))}


def _gemma2(config: Any) -> dict[str, Any]:
    return _gemma(config) | {
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "attention_cap": config.attn_logit_softcapping or 0.0,
        "logit_cap": config.final_logit_softcapping or 0.0,
    }


def _gemma3(config: Any) -> dict[str, Any]:
    kinds = tuple(dict.fromkeys(config.layer_types))
    return _gemma2(config) | {
        "rotations": kinds,
        "rotation_of": tuple(kinds.index(kind) for kind in config.layer_types),
    }


def _granite(config: Any) -> dict[str, Any]:
    return {
        "input_scale": config.embedding_multiplier,
        "attention_scale": config.attention_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": 1 / config.logits_scaling,
    }


def _smollm3(config: Any) -> dict[str, Any]:
    return {"rotation_of": tuple(0 if rotates else -1 for rotates in config.no_rope_layers)}


def _plain(config: Any) -> dict[str, Any]:
    return {}


FAMILIES: dict[str, Callable[[Any], Mapping[str, Any]]] = {
    "llama": _plain,
    "mistral": _plain,
    "qwen2": _plain,
    "qwen3": _plain,
    "olmo2": _plain,
    "phi3": _plain,
    "starcoder2": _plain,
    "smollm3": _smollm3,
    "granite": _granite,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
_SLIDING = ("mistral", "phi3", "starcoder2")  # without kinds of layers, every layer has the window of the configuration


def describe(config: Any) -> Description:
    """The description of a text model's configuration (Unsuitable: no entry describes the model; says why)."""
    kind = config.model_type
    if kind not in FAMILIES:
        raise Unsuitable(f"models of type {kind} are not described")
    num_layers = config.num_hidden_layers
    given = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if given not in _ACTIVATIONS:
        raise Unsuitable(f"the activation {given!r} is not described")
    epsilons = (getattr(config, name, None) for name in ("rms_norm_eps", "norm_epsilon", "layer_norm_eps"))
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or 0
    if types is None:
        slides = kind in _SLIDING and getattr(config, "use_sliding_window", True) is not False
        windows = (window if slides else 0,) * num_layers
    elif set(types) <= {"full_attention", "sliding_attention"}:
        windows = tuple(window if each == "sliding_attention" else 0 for each in types)
    else:
        raise Unsuitable(f"attention of kinds {', '.join(sorted(set(types)))} is not described")
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    fields = {
        "head_dim": head_dim,
        "attention_scale": head_dim**-0.5,
        "activation": _ACTIVATIONS[given],
        "epsilon": next(value for value in epsilons if value is not None),
        "rotation_of": (0,) * num_layers,
        "window_of": windows,
        **FAMILIES[kind](config),
    }
    return Description(**fields)
