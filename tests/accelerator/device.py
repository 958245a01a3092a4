"""A device of torch's own without arithmetic: tensors have shapes and a device, and no numbers.

A GPU accepts programs that read its numbers in the middle of a step, and shapes that depend on numbers; both are slow
there without a word. Here they raise, and so does an operation on tensors of this device and of the CPU. The device is
registered for the whole process, so the cases run in a process of their own (:mod:`tests.accelerator.cases`).

    reads of numbers        ``.item()``, ``bool()``, ``.tolist()``, ``.numpy()``: raised; ``.cpu()`` and other copies to
                            the CPU: counted, and all numbers are 1 there
    shapes from numbers     ``nonzero``, boolean masks, ``unique``, ``repeat_interleave``: raised
    two devices             raised, but for numbers of no dimension, which torch allows
    copies to the device    counted where the host would wait: not from pinned memory
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "refuser"
Module = TypeVar("Module", bound=nn.Module)


_BACKEND: Any = SimpleNamespace(  # what torch asks the module of a device
    is_available=lambda: True,
    is_initialized=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
)
backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_BACKEND)  # type: ignore[no-untyped-call]
DEVICE = torch.device(NAME, 0)


class HiddenReadError(Exception):
    """The host asks for numbers of the device past the dispatcher."""


class TwoDevicesError(Exception):
    """An index on another device than the tensor, which FakeTensorMode lets pass."""


class Copies(TorchDispatchMode):
    """Counts copies between the host and the device: ``read`` and ``sent``."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name.startswith("aten::index") and isinstance(args[1], list | tuple):
            _expect_one_device(args[0], args[1])
        if name not in ("aten::to", "aten::_to_copy", "aten::copy_"):
            return func(*args, **kwargs)
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        source = given["src" if name == "aten::copy_" else "self"]
        device = given.get("device") or given.get("other", source).device
        if name != "aten::copy_" and source.device.type == "cpu" and torch.device(device).type == NAME:
            # A small tensor of the CPU keeps its numbers, which have no place on the device.
            result = torch.empty(source.shape, dtype=given.get("dtype") or source.dtype, device=device)
        else:
            result = func(*args, **kwargs)
        if name != "aten::copy_" and source.device.type == NAME and result.device.type == "cpu":
            with unset_fake_temporarily():
                result = torch.ones(result.shape, dtype=result.dtype)
        places = source.device.type, result.device.type
        if places == (NAME, "cpu"):
            self.found["read"] += 1
        elif places == ("cpu", NAME) and not given.get("non_blocking"):
            self.found["sent"] += 1
        return result


def _expect_one_device(tensor: Tensor, indices: Sequence[Tensor | None]) -> None:
    """torch refuses an index on the device of a tensor on the CPU, and copies an index of the CPU to the device."""
    places = {index.device for index in indices if index is not None and index.ndim > 0} - {tensor.device}
    if places:
        raise TwoDevicesError(f"indices on {places} of a tensor on {tensor.device}")


class Refuser:
    """The device, switched on by :meth:`on`; ``copies`` by kind, counted since the last ``clear()``."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._copies = Copies()
        self.copies, self.clear = self._copies.found, self._copies.found.clear

    @contextmanager
    def on(self) -> Iterator[None]:
        """Tensors that are made in here have no numbers."""
        make = torch.tensor

        def tensor(data: Any, *, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            with unset_fake_temporarily():
                made = make(data, **kwargs)
            return made if device is None else made.to(device)

        def refuse(read: Any) -> Any:
            def refused(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                if tensor.device.type == NAME:
                    raise HiddenReadError(f"{read.__name__} of {tuple(tensor.shape)}")
                with unset_fake_temporarily():
                    return read(tensor, *args, **kwargs)

            return refused

        reads = {name: refuse(getattr(Tensor, name)) for name in ("tolist", "numpy", "item")}
        with patch.object(torch, "tensor", tensor), patch.multiple(Tensor, **reads), self.mode, self._copies:
            yield

    def numberless(self, *shape: int) -> Tensor:
        """A float32 tensor of the device."""
        with self.mode:
            return torch.empty(shape, device=DEVICE)

    def put(self, make: Callable[[], Module]) -> Module:
        """A module that is made on the CPU, with tensors of the device in place of all weights and buffers."""
        with unset_fake_temporarily():
            module = make()
        with self.mode:
            return module.to_empty(device=DEVICE)
