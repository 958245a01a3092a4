"""Counts the operators of one step, without a GPU: ``python -m tests.accelerator.count`` prints the table of
docs/performance.md.

A target of 8 billion parameters and its drafter run eagerly on the device of :mod:`tests.accelerator.device`. A kernel
is an operator that writes memory; views are free. Its bytes are those of the tensors that it reads and writes, once:
of a table that is indexed the rows that are read, of a store that is written into the numbers that are written.
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
_READS_ROWS = {"embedding", "index", "index_select", "gather", "take_along_dim", "slice", "select"}
_WRITES_PLACES = {"index_put_", "scatter_", "copy_", "index_copy_", "_index_put_impl_"}


class Count(TorchDispatchMode):
    """Kernels, bytes and floating point operations of the parts of a step; :meth:`part` names the part under way."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
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
        name = func._schema.name.removeprefix("aten::")
        if func._schema.is_mutable or any(not _is_view(item, given) for item in made):
            self.kernels[self._part] += 1
            self.bytes[self._part] += _bytes_of(name, given, made)
            self.flops[self._part] += _flops_of(name, given, made)
        return result


def _is_view(made: Tensor, given: list[Tensor]) -> bool:
    return any(made.untyped_storage()._cdata == item.untyped_storage()._cdata for item in given)


def _size(tensor: Tensor) -> int:
    """Bytes of the different numbers of a tensor: an expanded dimension holds one."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    number = tensor.element_size()
    for size, stride in sizes:
        number *= size if stride else 1
    return number


def _bytes_of(name: str, given: list[Tensor], made: list[Tensor]) -> int:
    if name in _WRITES_PLACES:
        return sum(2 * _size(item) for item in given[1:])
    if name in _READS_ROWS:
        return sum(_size(item) for item in given[1:]) + 2 * sum(map(_size, made))
    different = {(item.untyped_storage()._cdata, item.storage_offset()): item for item in given}
    return sum(map(_size, different.values())) + sum(map(_size, made))


def _flops_of(name: str, given: list[Tensor], made: list[Tensor]) -> int:
    if name in ("linear", "mm", "matmul", "bmm"):
        return 2 * made[0].numel() * given[0].shape[-1]
    if "scaled_dot_product" in name:
        query, key, value = given[:3]
        return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    return 0


def target_of_8b(num_layers: int) -> Target:
    """A target of this shape on the device."""
    config = AutoConfig.for_model("llama", **_SHAPE, num_hidden_layers=num_layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.eval().requires_grad_(False)
    small = cpu_target("llama").capabilities
    return placed(lambda: model, small._replace(cache_shape=CacheShape(num_layers, 8, 128, 128)), "8b")


def engine_of(target: Target, num_rows: int, num_nodes: int) -> Engine:
    """An engine with rows that decode."""
    width, length = _TREES[num_nodes]
    method: Any = "drafter" if num_nodes > 1 else "none"
    plan = Plan(method=method, max_num_seqs=num_rows, beam_width=width, draft_length=length, tree_size=num_nodes)
    drafter = drafter_of(target, **_DRAFTER) if num_nodes > 1 else None
    engine = Engine(target, drafter, plan)
    params = SamplingParams(max_new_tokens=500, ignore_eos=True)
    for _ in range(num_rows):
        engine.add(list(range(_CONTEXT)), params)
    while not engine.step():
        pass
    engine.step()
    return engine


def count_step(target: Target, num_rows: int, num_nodes: int) -> tuple[Count, int]:
    """One step, and the bytes that any step of this kind must read: weights, keys and values."""
    engine = engine_of(target, num_rows, num_nodes)
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
    embedding = target.embedding_weight_VD
    weights = sum(_size(parameter) for parameter in target.model.parameters()) - _size(embedding)
    return count, weights + target.cache_shape.num_bytes(num_rows, _CONTEXT, target.dtype)


def main(num_layers: int, batch_sizes: tuple[int, ...]) -> None:
    """Print the table, one line for each number of nodes."""
    unpack_outside()
    cpu_target("llama")
    with refuser.on():
        target = target_of_8b(num_layers)
        for num_nodes in _TREES:
            cells = [str(num_nodes)]
            for num_rows in batch_sizes:
                count, needed = count_step(target, num_rows, num_nodes)
                gib = [number / 2**30 for number in (count.bytes["target"], needed, count.bytes["rest"])]
                teraflops = count.flops["target"] / 1e12
                if num_rows == 1:
                    cells += [str(count.kernels["target"]), str(count.kernels["rest"])]
                cells += [f"{gib[0]:.1f} ({gib[1]:.1f})", f"{gib[2]:.2f} ({gib[2] / gib[0]:.1%})", f"{teraflops:.2f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(*((1, (1,)) if sys.argv[1:] == ["--quick"] else (32, (1, 32))))
