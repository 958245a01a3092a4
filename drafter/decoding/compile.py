"""Compilation of a step's parts: the target's tree forward, the beam search, accept, commit (torch.compile).

On CUDA every part becomes a CUDA graph for each bucket of rows and each tree size (``reduce-overhead``), over all slots
of a row. On a CPU (inductor) the numbers of rows, nodes and visible slots are dynamic, so that a part is compiled only
a few times; torch specialises the size 1. Inductor freezes the weights of the models and reorders the weights of linear
layers for the CPU's kernels. Frozen weights are copies: later changes of a model have no effect, so a model in training
must not be compiled.

All compilation happens within :meth:`Compiler.warming_up`, in steps of all shapes that can occur.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

# Dimensions of a part's positional tensor arguments that differ between calls, by argument.
Dynamic = Sequence[tuple[int, ...]]

_MOST_SHAPES = 1024  # of one part; torch stops compiling after 8 unless told otherwise


def is_compiled(compile: bool | None, device: torch.device) -> bool:
    """The value of ``EngineConfig.compile``; None is True for CUDA and False elsewhere."""
    return device.type == "cuda" if compile is None else compile


class Compiler:
    """Compiles the parts of a step for a device, or returns them unchanged.

    Args:
        device: where the steps run.
        is_on: False: every part stays a plain function.
    """

    def __init__(self, device: torch.device, *, is_on: bool) -> None:
        self.is_on = is_on
        self.has_static_shapes = is_on and device.type == "cuda"
        self._is_cuda, self._is_cpu = device.type == "cuda", device.type == "cpu"
        self._is_warming = False

    def __call__(self, function: Callable[P, R], dynamic: Dynamic = ()) -> Callable[P, R]:
        """The part, which compiles at its first calls.

        Args:
            function: tensors in, tensors out, without a wait for the device.
            dynamic: see :data:`Dynamic`.
        """
        if not self.is_on:
            return function
        if self._is_cuda:
            return torch.compile(function, fullgraph=True, dynamic=False, mode="reduce-overhead")
        compiled = torch.compile(function, fullgraph=True)

        @wraps(function)
        def marked(*args: P.args, **kwargs: P.kwargs) -> R:
            if self._is_warming:
                for tensor, dims in zip(args, dynamic, strict=False):
                    if isinstance(tensor, Tensor):
                        mark_dynamic(tensor, dims)
            return compiled(*args, **kwargs)

        return marked

    def keep(self, *state: tuple[Tensor, tuple[int, ...]]) -> None:
        """Register tensors that live as long as their owner and are written in place.

        CUDA graphs then do not copy the tensors. On a CPU the given dimensions, which differ between owners, become
        dynamic, so that the next owner needs no compilation.
        """
        for tensor, dims in state:
            if self.is_on and self._is_cuda:
                torch._dynamo.mark_static_address(tensor)
            elif self.is_on:
                mark_dynamic(tensor, dims)

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """A context with the compiler settings of the parts; torch's own settings are restored afterwards."""
        import torch._dynamo.config
        import torch._inductor.config
        import torch.fx.experimental._config

        with ExitStack() as stack:
            limits: dict[str, Any] = {"recompile_limit": _MOST_SHAPES, "accumulated_recompile_limit": _MOST_SHAPES}
            stack.enter_context(torch._dynamo.config.patch(limits))
            if self._is_cpu:
                stack.enter_context(torch._inductor.config.patch(freezing=True))
            if not self._is_cuda:
                # Dimensions that are equal by chance must not be treated as one.
                shapes: Any = torch.fx.experimental._config
                stack.enter_context(shapes.patch(use_duck_shape=False))
            self._is_warming = True
            try:
                yield
            finally:
                self._is_warming = False

    def begin_step(self) -> None:
        """Allow the CUDA graphs to overwrite the results of the last step."""
        if self.is_on and self._is_cuda:
            torch.compiler.cudagraph_mark_step_begin()


def mark_dynamic(tensor: Tensor, dims: Sequence[int]) -> None:
    """Mark dimensions that differ between calls. Torch always specialises dimensions of size 1."""
    for dim in dims:
        if tensor.shape[dim] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
