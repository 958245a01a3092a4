"""``--quantization``: the weights of linear layers, rounded to small integers in groups of 32 inputs.

The target keeps plain numbers, those of its rounded weights: it is another model, with its own text.

Shapes: O outputs · I inputs.
"""

import numpy as np
import torch
from torch import Tensor, nn

BITS = {"int8": 8, "int4": 4}  # of --quantization
_GROUP = 32
_PART = 4096  # outputs that are rounded at a time


def round_weight(weight_OI: Tensor, bits: int) -> Tensor:
    """The numbers [O, I] nearest to a weight in groups of 32 inputs: Q8_0 of GGUF for 8 bits, Q4_1 for 4 bits.

    A number of inputs that 32 does not divide makes one group, of 8 bits.
    """
    import gguf

    if weight_OI.shape[1] % _GROUP:
        weight = weight_OI.detach().float().numpy()
        scale_O1 = np.maximum(np.abs(weight).max(1, keepdims=True) / 127, np.float32(1e-30))  # zeros have one, too
        return torch.from_numpy(np.rint(weight / scale_O1) * scale_O1).to(weight_OI)
    kind = gguf.GGMLQuantizationType.Q8_0 if bits == 8 else gguf.GGMLQuantizationType.Q4_1
    parts = (gguf.quants.quantize(part.detach().float().numpy(), kind) for part in weight_OI.split(_PART))
    return torch.cat([torch.from_numpy(gguf.quants.dequantize(part, kind)) for part in parts]).to(weight_OI)


def round_linears(model: nn.Module, bits: int) -> int:
    """Give every ``nn.Linear`` (not its subclasses) the numbers of its rounded weights; the number of layers.

    A matrix that also serves as embeddings stays there as it is.
    """
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
    for layer in layers:
        layer.weight = nn.Parameter(round_weight(layer.weight.data, bits), requires_grad=False)
    return len(layers)
