"""The kernels of attention in two parts in plain torch, for the CPU."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F


def put_kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a forward in two parts run on a CPU, in every dtype."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", _flash)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", _efficient)


def _flash(*given: object, scale: float, seqused_k: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel of ``aten._flash_attention_forward`` sequence by sequence, with its odd result for an empty one."""
    query, key, value, query_start, key_start, *_ = given
    assert isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
    outputs, lses = torch.zeros_like(query), torch.full((1, len(query)), torch.inf)
    for start, stop, first, used in zip(query_start, query_start[1:], key_start, seqused_k, strict=False):
        if used:
            scores = query[start:stop, 0] @ key[first : first + used, 0].T * scale
            outputs[start:stop, 0] = scores.softmax(dim=1) @ value[first : first + used, 0]
            lses[0, start:stop] = scores.logsumexp(dim=1)
    return outputs, lses


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, has_lse: bool, *, scale: float
) -> tuple[Tensor, Tensor]:
    """``aten._scaled_dot_product_efficient_attention``: rows of the bias are aligned, rows of the result padded."""
    assert bias.stride(2) % 16 == 0 and has_lse
    scores = query @ key.transpose(2, 3) * scale + bias
    return scores.softmax(dim=3) @ value, F.pad(scores.logsumexp(dim=3), (0, -query.shape[2] % 32))
