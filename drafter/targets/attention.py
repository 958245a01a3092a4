"""Attention over a slot cache whose query heads share keys: the heads of a group become further queries of one head.

transformers' own SDPA attention copies the keys and values of every layer once for each query head of a group when
several tokens come with a mask. Here they are read where they are. Registered as an attention implementation of
transformers, by its own interface; the model's code stays as it is.

Attention computes in the dtype of the keys that the cache hands over. In bfloat16 the order of a sum changes its
roundings, and a token's ancestors stand in other slots while the token is part of a tree than after its acceptance. A
cache that is read in float64 hides the order: the differences lie at least 2^-40 below the last digit that is kept.

Shapes: B rows · N queries · S slots · H heads · G key/value heads · R heads of a group · K head dimension.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "drafter_sdpa"


def use_folded_attention(model: "PreTrainedModel") -> bool:
    """Switch a model that runs with SDPA over to :func:`folded_attention`; whether it runs with that now."""
    if model.config._attn_implementation != "sdpa":
        return bool(model.config._attn_implementation == NAME)
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, folded_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return True


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
    """Scaled dot product attention under a mask that all heads share.

    Args:
        module: the model's attention layer.
        query: [B, H, N, K].
        key, value: [B, G, S, K]; head h reads those of head h // R. Of the dtype that is computed in.
        attention_mask: [B, 1, N, S], bool or added to the scores.
        dropout: as transformers calls it; none is applied to a frozen model.
        scaling: of the scores.
        **kwargs: of other attention implementations.

    Returns:
        [B, N, H, K] in the query's dtype, and no weights.
    """
    dtype, query = query.dtype, query.to(key.dtype)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.to(key.dtype)
    num_heads, num_groups = query.shape[1], key.shape[1]
    is_plain = (
        attention_mask is not None
        and attention_mask.shape[1] == 1
        and num_heads > num_groups
        and kwargs.get("position_bias") is None
        and kwargs.get("softcap") is None
        and kwargs.get("s_aux") is None
    )
    if not is_plain:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output.to(dtype), None
    assert attention_mask is not None
    num_rows, _, num_queries, size = query.shape
    heads_per_group = num_heads // num_groups
    folded = F.scaled_dot_product_attention(
        query.reshape(num_rows, num_groups, heads_per_group * num_queries, size),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, heads_per_group, 1),
        scale=scaling,
    )
    output = folded.reshape(num_rows, num_heads, num_queries, value.shape[3])
    return output.transpose(1, 2).to(dtype).contiguous(), None
