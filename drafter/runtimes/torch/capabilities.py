"""Which models can be a target, and what a target can do: small probes ask the model, no list of names decides.

Shapes: B rows · T tokens · V vocabulary · D hidden size.
"""

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from drafter.runtimes.torch.attention import FOLDED_ATTENTION, OPAQUE_ATTENTION
from drafter.runtimes.torch.cache import CacheShape, LayerShape, cache_keyword
from drafter.targets.slots import Window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
# Attention implementations that take any mask as a tensor.
_MASKABLE = ("sdpa", "eager", FOLDED_ATTENTION, OPAQUE_ATTENTION)


Windows = dict[str, Window | None]


class LogitMap(NamedTuple):
    """What a model does to its products: ``soft_cap * tanh(scale * product / soft_cap)``; a cap of 0 does nothing."""

    scale: float = 1.0
    soft_cap: float = 0.0

    def __call__(self, product: Tensor) -> Tensor:
        if self.scale != 1:
            product = product * self.scale
        return torch.tanh(product / self.soft_cap) * self.soft_cap if self.soft_cap else product


class Capabilities(NamedTuple):
    """What probes found out about a model: windows, what one token's keys and values take, and the map of logits."""

    windows: Windows
    cache_shape: CacheShape
    logit_map: LogitMap


def probe(model: "PreTrainedModel", name: str) -> Capabilities:
    """Ask a frozen model in eval mode what it can do (ValueError: the model cannot be a target; says why)."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"target {name!r} is an encoder-decoder model; a decoder-only causal LM is needed")
    if model.get_output_embeddings() is None or decoder_of(model) is model:
        raise ValueError(f"target {name!r} is no causal LM: it has no output matrix over the vocabulary")
    kernel = getattr(model.config, "_attn_implementation", None) or "eager"
    if kernel not in _MASKABLE:
        raise ValueError(
            f"target {name!r} runs with attention {kernel!r}, which takes no tree mask: "
            "load the model with attn_implementation='sdpa'"
        )
    logit_map = _probe_logit_map(model, name)
    text = model.config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ()) - _ATTENTION_KINDS
    if kinds or getattr(model, "_is_stateful", False):
        what = ", ".join(sorted(kinds)) or "recurrent state"
        raise refusal(name, f"has layers of kind {what}, whose state cannot branch into a tree or be rolled back")
    if "local" in (getattr(text, "attention_layers", None) or ()):
        raise refusal(name, "has local attention layers that count their window from the end of the cache")
    return Capabilities(layer_windows(model, name), _probe_cache_shape(model, name), logit_map)


def refusal(name: str, reason: str) -> ValueError:
    return ValueError(
        f"target {name!r} {reason}: draft trees need plain attention; use transformers' generate() for it"
    )


def decoder_of(model: "PreTrainedModel") -> "PreTrainedModel":
    """The model without its output matrix: token ids in, final hidden states (after the last norm) out."""
    # Llama 4 names a base that it does not have, and then says that it is its own decoder.
    found: tuple[Any, ...] = (model.base_model, model.get_decoder(), getattr(model, "model", model))
    return next((decoder for decoder in found if decoder is not model), model)


def layers_of(model: "PreTrainedModel", name: str) -> nn.ModuleList:
    """The decoder layers; ValueError where there is no list of them."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in decoder_of(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"target {name!r} has no list of {count} layers that could be shared")


@torch.no_grad()
def _final_hidden(model: Any, **given: Any) -> Tensor:
    """Final hidden states [1, 3, D] of three tokens; ``given``: further arguments of the decoder."""
    hidden_BTD: Tensor = decoder_of(model)(
        input_ids=_tokens_for(model), **{"use_cache": False} | given
    ).last_hidden_state
    return hidden_BTD


def _tokens_for(model: Any) -> Tensor:
    embedding_VD = model.get_input_embeddings().weight
    return torch.arange(1, 4, device=embedding_VD.device)[None] % len(embedding_VD)


def layer_windows(model: "PreTrainedModel", name: str) -> Windows:
    """The window of each kind of attention layer by its configuration, None for layers that see everything; empty where
    nothing is windowed (ValueError: the model's attention ignores the window of its configuration).
    """
    config = model.config.get_text_config(decoder=True)
    sizes: dict[str, Window | None] = {"full_attention": None}
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    if window and getattr(config, "use_sliding_window", True) is not False:
        sizes["sliding_attention"] = Window("sliding", int(window))
    if chunk:
        sizes["chunked_attention"] = Window("chunked", int(chunk))
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # every layer has the same window, if any
        if "sliding_attention" in sizes and not _slides(model):
            raise ValueError(
                f"target {name!r} has a sliding window of {window} tokens in its configuration, which transformers' "
                "cache applies and the model's attention does not: longer texts have no definite continuation"
            )
        kinds = ["sliding_attention" if "sliding_attention" in sizes else "full_attention"]
    windows = {kind: sizes.get(kind) for kind in dict.fromkeys(kinds)}
    return windows if any(windows.values()) else {}


def _slides(model: "PreTrainedModel") -> bool:
    """Whether ``sliding_window`` of the configuration means anything to the model: some carry it without a use."""
    config = model.config.get_text_config(decoder=True)
    wide_BTD, window = _final_hidden(model), config.sliding_window
    config.sliding_window = 1
    try:
        return not torch.equal(wide_BTD, _final_hidden(model))
    finally:
        config.sliding_window = window


def _probe_cache_shape(model: "PreTrainedModel", name: str) -> CacheShape:
    """What each layer stores in the library's own cache (ValueError: not one key and one value per head and token)."""
    from transformers import DynamicCache

    cache = DynamicCache()
    _final_hidden(model, **{cache_keyword(decoder_of(model)): cache}, use_cache=True)
    shapes = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.ndim != 4 or keys.shape[2] != 3 or values.shape[2] != 3:
            raise refusal(name, "keeps a state other than keys and values per token")
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3]))
    if not shapes:
        raise refusal(name, "keeps no keys and values in the library's cache")
    return CacheShape(tuple(shapes))


@torch.no_grad()
def _probe_logit_map(model: "PreTrainedModel", name: str) -> LogitMap:
    """What the model does to its products: the candidate of the configuration that reproduces the model's own logits
    (ValueError: none does, so that picks from our logits would not be the model's).
    """
    config = model.config.get_text_config(decoder=True)
    wanted_BTV = model(input_ids=_tokens_for(model), use_cache=False).logits.float()
    output_matrix: Any = model.get_output_embeddings()
    hidden_BTD = _final_hidden(model)
    if hidden_BTD.shape[-1] != output_matrix.weight.shape[1]:
        raise ValueError(
            f"target {name!r} changes its last hidden state before the output matrix: states of {hidden_BTD.shape[-1]} "
            f"values for a matrix of {output_matrix.weight.shape[1]} columns"
        )
    raw_BTV = output_matrix(hidden_BTD)
    scale = float(getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1))
    soft_cap = float(getattr(config, "final_logit_softcapping", None) or 0)
    tolerance = 1e-4 if raw_BTV.dtype == torch.float32 else 2e-2
    # What the configuration names comes first: on small logits a soft cap looks like nothing.
    for logit_map in (LogitMap(scale, soft_cap), LogitMap(scale), LogitMap(soft_cap=soft_cap), LogitMap()):
        if torch.allclose(logit_map(raw_BTV).float(), wanted_BTV, rtol=tolerance, atol=tolerance):
            return logit_map
    raise ValueError(f"target {name!r} computes its logits from the last hidden state in a way that is not known here")


def final_norm(model: "PreTrainedModel", name: str) -> nn.Module:
    """A copy, on the CPU, of the last module that makes final hidden states, [..., D] in and out (ValueError: none)."""
    made: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, given: Any, output: Any) -> None:
        if len(given) == 1 and isinstance(output, Tensor) and output.shape == given[0].shape:
            made.append((module, output))

    hooks = [part.register_forward_hook(note) for part in decoder_of(model).modules() if not list(part.children())]
    try:
        hidden_BTD = _final_hidden(model)
    finally:
        for hook in hooks:
            hook.remove()
    found = [module for module, output in made if torch.equal(output, hidden_BTD)]
    if not found:
        raise ValueError(f"target {name!r} has no norm behind its last layer, which states before the norm need")
    return copy.deepcopy(found[-1]).cpu()
