"""Linear layers with weights in the memory layout of the CPU's matrix kernels, which oneDNN has reordered once: a step
of the target, of a few rows, takes about two thirds of the time of plain ``nn.Linear`` layers. Products differ in the
order of summation at most. A packed layer has no gradient; do not save, move or cast a packed model.

The operators of ``torch.ops.mkldnn`` are not public: torch 2.11 to 2.15 were tested, and :func:`can_pack` tries others.

Shapes: X any leading dimensions · I input size · O output size.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

_ROWS = 8  # the number of rows that the layout is chosen for; the gain hardly depends on the number
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class PackedLinear(nn.Module):
    """Takes the place of an ``nn.Linear``; with ``keep_weight`` the plain weight stays as ``weight``, too."""

    def __init__(self, linear: nn.Linear, *, keep_weight: bool = False) -> None:
        super().__init__()
        self.bias = linear.bias
        if keep_weight:
            self.weight = linear.weight
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), _ROWS)

    def forward(self, x_XI: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return torch.ops.mkldnn._linear_pointwise(x_XI, self._packed, self.bias, "none", [], "")


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels of this machine take packed weights of this dtype and compute the right product."""
    if device.type != "cpu" or dtype not in _TOLERANCE or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    linear = nn.utils.skip_init(nn.Linear, 32, 48, bias=False, dtype=dtype).requires_grad_(False)
    linear.weight.copy_(torch.randn(48, 32, generator=generator))
    x_XI = torch.randn(3, 5, 32, generator=generator).to(dtype)
    try:
        product = PackedLinear(linear)(x_XI)
    except (AttributeError, RuntimeError):  # another release of torch, or a CPU without the instructions
        return False
    expected = linear.double()(x_XI.double())
    return bool((product.double() - expected).abs().max() <= _TOLERANCE[dtype] * expected.abs().max())


def pack_linears(module: nn.Module, *, keep: Collection[nn.Module] = ()) -> int:
    """Replace every ``nn.Linear`` (not its subclasses); their number. Those to ``keep`` keep the plain weight."""
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, child in found:
        parent.add_module(name, PackedLinear(child, keep_weight=child in keep))
    return len(found)
