"""Attention of several tokens under a mask, over the slots of a cache: the heads of a group are further queries of one
head. transformers' own SDPA copies the keys and values once for each query head of a group.

Shapes: B rows · N nodes · G key/value heads · H query heads · R query heads of a group · S visible slots · K head
dimension.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FOLDED_ATTENTION = "drafter_sdpa"
OPAQUE_ATTENTION = "drafter_sdpa_opaque"  # the same, which a compiler leaves alone


def use_folded_attention(model: "PreTrainedModel") -> None:
    if model.config._attn_implementation == "sdpa":
        set_attention(model, FOLDED_ATTENTION, folded_attention)


def set_attention(model: "PreTrainedModel", name: str, function: Any) -> None:
    """Let a model compute attention by a function, which transformers knows by the name from now on."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)


def folded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot product attention under a mask that all heads share: query [B, H, N, K], key and value [B, G, S, K],
    of the dtype that is computed in -> [B, N, H, K] in the query's dtype, and no weights.

    Head h reads key and value h // R. The mask [B, 1, N, S] is bool or added to the scores; ``dropout`` is not applied,
    because the model is frozen; ``kwargs`` are of other attention implementations.
    """
    num_heads, num_groups = query.shape[1], key.shape[1]
    is_plain = (
        attention_mask is not None
        and attention_mask.shape[1] == 1
        and all(kwargs.get(name) is None for name in ("position_bias", "softcap", "s_aux"))
    )
    if not is_plain or num_heads == num_groups:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    assert attention_mask is not None
    num_rows, _, num_queries, size = query.shape
    heads_per_group = num_heads // num_groups
    query = query.reshape(num_rows, num_groups, heads_per_group * num_queries, size)
    mask = attention_mask.repeat(1, 1, heads_per_group, 1)
    folded = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    output = folded.reshape(num_rows, num_heads, num_queries, value.shape[3])
    return output.transpose(1, 2).contiguous(), None
