"""Linear layers whose weights are 8-bit integers with one scale for each output: a smaller model, with its own numbers.

A product is the sum over the integers, times the scale. Integers up to 127 and scales of 8 significant bits have an
exact form in float32 and bfloat16, so every device and runtime holds the same weights.

For inference only: a rounded layer has no gradient.

Shapes: X any leading dimensions · I input size · O output size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_LARGEST = 127
_SMALLEST_SCALE = 1e-8  # of an output whose weights are zero


class RoundedLinear(nn.Module):
    """Takes the place of an ``nn.Linear``; symmetric rounding to the nearest integer.

    Attributes:
        rounded_OI: int8 [O, I].
        scale_O: in the layer's dtype, [O].
        bias: of the layer.
    """

    rounded_OI: Tensor
    scale_O: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight_OI = linear.weight.detach().float()
        scale_O = (weight_OI.abs().amax(1) / _LARGEST).clamp_min(_SMALLEST_SCALE).bfloat16()
        # A scale that bfloat16 rounded down would push the largest weight beyond 127; the clamp costs half a unit.
        rounded_OI = (weight_OI / scale_O.float()[:, None]).round().clamp(-_LARGEST, _LARGEST)
        self.register_buffer("rounded_OI", rounded_OI.to(torch.int8))
        self.register_buffer("scale_O", scale_O.to(linear.weight.dtype))

    @property
    def weight(self) -> Tensor:
        """The weights as numbers of the layer's dtype, [O, I]; computed at each access."""
        return self.rounded_OI.to(self.scale_O.dtype) * self.scale_O[:, None]

    def forward(self, x_XI: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        if torch.compiler.is_exporting():  # the form in which a runtime recognises 8-bit weights
            return F.linear(x_XI, self.weight, self.bias)
        product_XO = F.linear(x_XI, self.rounded_OI.to(x_XI.dtype)) * self.scale_O
        return product_XO if self.bias is None else product_XO + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def round_linears(module: nn.Module) -> int:
    """Replace every ``nn.Linear`` in ``module`` (not its subclasses) and return the number of replaced layers."""
    num_rounded = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                parent.add_module(name, RoundedLinear(child))
                num_rounded += 1
    return num_rounded
