"""Linear layers whose weights lie in memory as the CPU's matrix kernels want them.

Decoding multiplies a few rows (N nodes of a tree) with every weight of the model. The kernels of a plain ``nn.Linear``
find the weight in the order of training and are far from the speed of memory; over weights that oneDNN has reordered
once, a step of the target takes about two thirds of the time, and a tree of eight nodes little more than one token.
The numbers are those of the same kernels in another order of summation at most: equal to rounding in float32.

For inference only: a packed layer has no gradient, and its model is not to be saved, moved or cast.

Shapes: X any leading dimensions · I input size · O output size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ROWS = 8  # the number of rows that the order is chosen for; the gain hardly depends on it
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class PackedMatrix(nn.Module):
    """A weight [O, I] in the order of the CPU's kernels; ``linear`` multiplies with it.

    A module with a buffer, and so something whose weight a compiler may freeze.
    """

    _weight: Tensor

    def __init__(self, weight_OI: Tensor) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), _ROWS)
        self.register_buffer("_weight", packed, persistent=False)

    def linear(self, x_XI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x W^T + b: [..., I] -> [..., O]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x_XI, self._weight, bias_O, "none", [], "")
        return product


class PackedLinear(nn.Module):
    """Takes the place of an ``nn.Linear``.

    Args:
        linear: the layer.
        keep_weight: keep the weight as it was, too, for those who read ``weight``.
    """

    def __init__(self, linear: nn.Linear, *, keep_weight: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        if keep_weight:
            self.weight = linear.weight
        self._matrix = PackedMatrix(linear.weight)

    def forward(self, x_XI: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return self._matrix.linear(x_XI, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine's kernels take packed weights of this number format, and give the right product."""
    if device.type != "cpu" or dtype not in _TOLERANCE or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(48, 32, generator=generator).to(dtype)
    x_XI = torch.randn(3, 5, 32, generator=generator).to(dtype)
    try:
        product = PackedMatrix(weight_OI).linear(x_XI)
    except (AttributeError, RuntimeError):  # another release of torch, or a CPU without the instructions
        return False
    expected = F.linear(x_XI.double(), weight_OI.double())
    return bool((product.double() - expected).abs().max() <= _TOLERANCE[dtype] * expected.abs().max())


def pack_linears(module: nn.Module, *, keep: tuple[nn.Module, ...] | bool = ()) -> int:
    """Replace every ``nn.Linear`` in ``module`` (subclasses stay as they are); how many there were.

    Args:
        module: on a device and in a dtype for which :func:`can_pack` holds.
        keep: layers whose weights are still read as ``weight``; True: all.
    """
    num_packed = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                is_kept = keep is True or (keep is not False and any(child is other for other in keep))
                parent.add_module(name, PackedLinear(child, keep_weight=is_kept))
                num_packed += 1
    return num_packed


def count_parameters(module: nn.Module) -> int:
    """Parameters of a model, each shared one once, those in packed layers included."""
    total = sum(parameter.numel() for parameter in module.parameters())
    packed: Any = (layer for layer in module.modules() if isinstance(layer, PackedLinear))
    return total + sum(layer.in_features * layer.out_features for layer in packed if not hasattr(layer, "weight"))
