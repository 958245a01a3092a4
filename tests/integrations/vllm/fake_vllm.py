"""Stand-ins for the few names of vLLM that the plug-in imports, for tests without vLLM; test_served.py has the real."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.integrations.vllm import ARCHITECTURE

LAYERS = "vllm.model_executor.layers"
MODULES = (
    *("vllm", "vllm.config", "vllm.model_executor", "vllm.model_executor.models"),
    *(LAYERS, f"{LAYERS}.attention", f"{LAYERS}.attention.attention", f"{LAYERS}.logits_processor"),
    *(f"{LAYERS}.vocab_parallel_embedding", "vllm.model_executor.models.llama_eagle3"),
)


class Attention(nn.Module):
    """Keeps its arguments; whoever calls it fails."""

    def __init__(self, num_heads: int, head_size: int, *, num_kv_heads: int, prefix: str, **_: Any) -> None:
        super().__init__()
        self.shape, self.prefix = (num_heads, head_size, num_kv_heads), prefix


class ParallelLMHead(nn.Module):
    """All rows in one process."""

    def __init__(self, num_rows: int, size: int, *, prefix: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size), requires_grad=False)
        self.weight.weight_loader = lambda parameter, rows: parameter.copy_(rows)  # type: ignore[attr-defined]


class LogitsProcessor(nn.Module):
    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows

    def forward(self, head: nn.Module, feature_TF: Tensor) -> Tensor:
        return F.linear(feature_TF, head.weight)[:, : self.num_rows]  # type: ignore[arg-type]


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0+cpu") -> Mock:
    """Put the stand-ins where imports find them; vLLM's table of models, which knows the drafter when asked again."""
    registry = Mock(**{"get_supported_archs.side_effect": [[], [ARCHITECTURE]]})
    module = SimpleNamespace(
        **{kind.__name__: kind for kind in (Attention, ParallelLMHead, LogitsProcessor)},
        ModelRegistry=registry,
        __version__=version,
        VllmConfig=object,
        Eagle3LlamaForCausalLM=nn.Module,
        get_attention_context=lambda name: (None, None, torch.tensor([]), None),
    )
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "drafter.integrations.vllm.model", raising=False)
    return registry


def config_of(config: dict[str, Any], target: Any, **changes: Any) -> Any:
    """What vLLM hands to a draft model: the folder's config, and the sizes of the target that it serves."""
    text = target.model.config.get_text_config(decoder=True)
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "head_size": config["head_dim"]}
    heads = {"num_attention_heads": text.num_attention_heads, "num_kv_heads": text.num_key_value_heads}
    sizes |= {"total_num_hidden_layers": target.num_layers, **heads, **changes}
    fields = {"model": "nowhere", "revision": None, "dtype": torch.float32, "use_mla": False} | changes
    return Mock(
        model_config=Mock(**fields, **{f"get_{name}.return_value": value for name, value in sizes.items()}),
        parallel_config=Mock(pipeline_parallel_size=changes.get("pipeline_parallel_size", 1)),
        speculative_config=Mock(draft_model_config=Mock(hf_config=SimpleNamespace(**config))),
    )
