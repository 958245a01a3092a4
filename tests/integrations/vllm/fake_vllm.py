"""Stand-ins for the few names of vLLM that the plug-in imports, for tests without vLLM; test_served.py has the real."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


class Registry:
    """vLLM's table of models, and how often a model was added."""

    def __init__(self) -> None:
        self.added: list[tuple[str, str]] = []

    def get_supported_archs(self) -> list[str]:
        return [name for name, _ in self.added]

    def register_model(self, name: str, place: str) -> None:
        self.added.append((name, place))


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0+cpu") -> Registry:
    """Put the stand-ins where imports find them."""
    registry = Registry()
    layers = "vllm.model_executor.layers"
    for name, content in {
        "vllm": {"ModelRegistry": registry, "__version__": version},
        "vllm.config": {"VllmConfig": object},
        f"{layers}.attention": {"Attention": Attention},
        f"{layers}.attention.attention": {"get_attention_context": lambda name: (None, None, torch.tensor([]), None)},
        f"{layers}.logits_processor": {"LogitsProcessor": LogitsProcessor},
        f"{layers}.vocab_parallel_embedding": {"ParallelLMHead": ParallelLMHead},
        "vllm.model_executor.models.llama_eagle3": {"Eagle3LlamaForCausalLM": nn.Module},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.delitem(sys.modules, "drafter.integrations.vllm.model", raising=False)
    return registry


def config_of(config: dict[str, Any], target: Any, **changes: Any) -> Any:
    """What vLLM hands to a draft model: the folder's config, and the sizes of the target that it serves."""
    text = target.model.config.get_text_config(decoder=True)
    sizes = {
        "hidden_size": target.hidden_size,
        "total_num_hidden_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "head_size": config["head_dim"],
        "num_attention_heads": text.num_attention_heads,
        "num_kv_heads": text.num_key_value_heads,
    } | changes
    model = SimpleNamespace(
        **{"model": "nowhere", "revision": None, "dtype": torch.float32, "use_mla": False} | changes,
        **{f"get_{name}": lambda *_, value=value: value for name, value in sizes.items()},
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(pipeline_parallel_size=changes.get("pipeline_parallel_size", 1)),
        cache_config=None,
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**config))),
    )
