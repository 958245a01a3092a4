"""Write a drafter as the folder that vLLM reads (:mod:`drafter.integrations.vllm`).

Shapes: T tokens · D hidden size.
"""

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from drafter.integrations import vllm as plugin
from drafter.integrations.vllm.copies import PLACE_SIZE
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.models.files import WEIGHTS
from drafter.targets.target import Target

_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")
_REFUSAL = "this drafter cannot be written for vLLM"
_CARD = Path(__file__).parent / "card.md"


def write_vllm(folder: Path, drafter: RecurrentDrafter, target: Target, *, copying: bool) -> None:
    """Write a drafter of a target with plain weights into a folder that exists (ValueError: vLLM cannot run the drafter
    or lend it what it needs; the message names the field).
    """
    layers, last = drafter.config.context_layers, target.num_layers
    if layers and (layers[-1] != last or max(layers) > last or len(set(layers)) < len(layers)):
        # vLLM hands over the states behind chosen layers once, the last of them before the final norm.
        raise ValueError(
            f"{_REFUSAL}: context_layers {list(layers)}: each may stand once, and the last one must be the final "
            f"hidden state, {last}"
        )
    gain_D, epsilon = _rms_norm_of(target)
    config = copy.deepcopy(drafter.config)
    config.embedding_scale *= _embedding_scale(target)
    config.target_name = config.target_name or target.name
    config.target_fingerprint = config.target_fingerprint or target.fingerprint
    tensors: dict[str, Tensor] = dict(drafter.state_dict()) | {plugin.FINAL_NORM: gain_D}
    if config.head == "tied" and not plugin.shares_head(config):
        tensors[plugin.OUTPUT_ROWS] = target.runtime.output_rows(drafter.draft_token_ids_R)
    tensors = {
        name: tensor.detach().cpu().to(drafter.dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    fields = _config(config, target, epsilon, drafter.dtype, copying)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    card = _CARD.read_text(encoding="utf-8").format(
        name=config.target_name,
        versions=", ".join(plugin.TESTED_VERSIONS),
        draft_length=min(3, config.draft_length),
        copying="yes" if copying else "no",
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _config(config: DrafterConfig, target: Target, epsilon: float, dtype: torch.dtype, copying: bool) -> dict[str, Any]:
    """``config.json``: vLLM reads a Llama of the size of a state, whose one layer has keys of the target's shape."""
    text = target.config.get_text_config(decoder=True)
    num_heads = int(text.num_attention_heads)
    layers = config.context_layers or (target.num_layers,)
    num_more = -(-PLACE_SIZE // num_heads) * num_heads if copying else 0  # heads share a hidden size evenly
    return {
        "architectures": [plugin.ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": 2 * config.hidden_size + num_more,
        "intermediate_size": 2 * config.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(getattr(text, "num_key_value_heads", None) or num_heads),
        "head_dim": int(getattr(text, "head_dim", None) or config.hidden_size // num_heads),
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.num_outputs,
        "max_position_embeddings": target.max_length,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": sorted(set(layers)),
        plugin.COPYING_KEY: copying,
        plugin.DRAFTER_KEY: config.to_diff_dict(),
        plugin.TARGET_KEY: {"num_layers": target.num_layers, "norm_epsilon": epsilon},
    }


def _rms_norm_of(target: Target) -> tuple[Tensor, float]:
    """Gain [D] and epsilon of the target's final norm, whatever form its weights have (Gemma's add 1 to them);
    ValueError: there is none, or the norm is no root mean square norm with a gain.
    """
    try:
        norm = target.runtime.final_norm().float()
    except ValueError as error:
        raise ValueError(f"{_REFUSAL}: target {target.name!r} has no final norm") from error
    named = [getattr(norm, name, None) for name in _EPSILON_NAMES]
    epsilon = next((float(value) for value in named if isinstance(value, int | float)), 0.0)
    size = target.hidden_size
    probe_TD = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        gain_D = norm(torch.ones(1, size))[0] * math.sqrt(1 + epsilon)
        is_rms = torch.allclose(norm(probe_TD), F.rms_norm(probe_TD, (size,), gain_D, epsilon), rtol=1e-3, atol=1e-4)
    if not is_rms:
        raise ValueError(
            f"{_REFUSAL}: the final norm of target {target.name!r}, {type(norm).__name__}, "
            "is no root mean square norm with a gain"
        )
    return gain_D, epsilon


def _embedding_scale(target: Target) -> float:
    """The factor between the target's input embeddings and the rows of its matrix, which vLLM's embeddings lack
    (ValueError: the embeddings are no multiple of the rows).
    """
    token_T = torch.linspace(0, target.vocab_size - 1, 64, device=target.device).long()
    row_TD = target.runtime.embedding_weight_VD[token_T].float()
    embedding_TD = target.runtime.embed(token_T).float()
    scale = float((embedding_TD * row_TD).sum() / row_TD.square().sum())
    tolerance = 1e-4 if target.dtype == torch.float32 else 2e-2
    if not torch.allclose(embedding_TD, scale * row_TD, rtol=tolerance, atol=tolerance * float(row_TD.abs().max())):
        raise ValueError(
            f"{_REFUSAL}: the input embeddings of target {target.name!r} are no multiple "
            "of the rows of its embedding matrix"
        )
    return 1.0 if math.isclose(scale, 1.0, rel_tol=tolerance) else scale
