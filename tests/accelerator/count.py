"""Counts the kernels of one step, without a GPU: ``python -m tests.accelerator.count`` prints the table of
docs/performance.md.

A target of 8 billion parameters and its drafter run eagerly on the device of :mod:`tests.accelerator.device`. A kernel
is an operator that writes memory; views are free.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import Plan
from drafter.targets.cache import CacheShape
from drafter.targets.target import Target
from tests.accelerator.cases import cpu_target, drafter_of, placed, refuser, unpack_outside

_SHAPE = {  # of Llama 3.1 8B
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
_DRAFTER: dict[str, Any] = {"num_res_blocks": 2, "block_rank": 1024, "draft_vocab_size": 32768}
_CONTEXT = 1000  # committed tokens of a row
_TREES = {1: (1, 1), 8: (4, 3), 24: (8, 4), 64: (16, 5)}  # nodes: beam width and draft length


class Count(TorchDispatchMode):
    """Kernels of the parts of a step; :meth:`part` names the part under way."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self._part = "rest"

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count for this part."""
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        made = [item for item in tree_leaves(result) if isinstance(item, Tensor)]
        self.kernels[self._part] += func._schema.is_mutable or any(not _is_view(item, given) for item in made)
        return result


def _is_view(made: Tensor, given: list[Tensor]) -> bool:
    return any(made.untyped_storage()._cdata == item.untyped_storage()._cdata for item in given)


def target_of_8b(num_layers: int) -> Target:
    """A target of this shape on the device."""
    config = AutoConfig.for_model("llama", **_SHAPE, num_hidden_layers=num_layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.eval().requires_grad_(False)
    small = cpu_target("llama").capabilities
    return placed(lambda: model, small._replace(cache_shape=CacheShape(num_layers, 8, 128, 128)), "8b")


def count_step(target: Target, num_nodes: int) -> Count:
    """One step of one row."""
    width, length = _TREES[num_nodes]
    method: Any = "drafter" if num_nodes > 1 else "none"
    plan = Plan(method=method, max_num_seqs=1, beam_width=width, draft_length=length, tree_size=num_nodes)
    engine = Engine(target, drafter_of(target, **_DRAFTER) if num_nodes > 1 else None, plan)
    engine.add(list(range(_CONTEXT)), SamplingParams(max_new_tokens=500, ignore_eos=True))
    while not engine.step():
        pass
    engine.step()
    count = Count()
    forward, logits = target.forward, target.logits

    def counted(function: Any) -> Any:
        def inner(*args: Any, **kwargs: Any) -> Any:
            with count.part("target"):
                return function(*args, **kwargs)

        return inner

    target.forward, target.logits = counted(forward), counted(logits)  # type: ignore[method-assign]
    try:
        with count:
            engine.step()
    finally:
        target.forward, target.logits = forward, logits  # type: ignore[method-assign]
    return count


def main(num_layers: int) -> None:
    """Print the table, one line for each number of nodes."""
    unpack_outside()
    cpu_target("llama")
    with refuser.on():
        target = target_of_8b(num_layers)
        for num_nodes in _TREES:
            kernels = count_step(target, num_nodes).kernels
            print(f"| {num_nodes} | {kernels['target']} | {kernels['rest']} |", flush=True)


if __name__ == "__main__":
    main(1 if sys.argv[1:] == ["--quick"] else 32)
