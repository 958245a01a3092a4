"""Compiled decoder layers: the small kernels of a layer become few. All layers share their code, whatever the numbers
of rows and tokens. CUDA graphs of whole steps (:mod:`drafter.engine.graphs`) record the kernels.

Writing to the cache and attention stay as they are: the compiler ends a graph before them, so nothing in a graph
depends on the layer's number. Products of matrices keep their library.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from tqdm import tqdm

from drafter.runtimes.base import Slots
from drafter.runtimes.torch.attention import FOLDED_ATTENTION, OPAQUE_ATTENTION, folded_attention, set_attention
from drafter.runtimes.torch.cache import SlotCache
from drafter.runtimes.torch.capabilities import layers_of
from drafter.utils.io import first_line

_log = logging.getLogger(__name__)
# Rows of the cache, rows and tokens of a forward. The compiler makes code of its own for the number one, and for some
# layouts of its first example; it takes equal numbers for the same.
_SHAPES = ((11, 3, 5), (11, 3, 7), (11, 1, 5), (11, 3, 1), (11, 1, 1), (1, 1, 5), (1, 1, 1))
_NUM_SLOTS = 61
# The same rounding as without a compiler: the drafter has learned from such hidden states.
_HOW: dict[str, Any] = {"options": {"emulate_precision_casts": True}}


def compile_layers(runtime: Any, context_layers: Sequence[int]) -> type[SlotCache]:
    """Compile a runtime's layers for forwards with these layers of contexts, with a bar; the class of its caches from
    now on. Layers that the compiler refuses run as before, with a warning.
    """
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    if runtime.model.config._attn_implementation == FOLDED_ATTENTION:
        set_attention(runtime.model, OPAQUE_ATTENTION, torch.compiler.disable(folded_attention))
    layers: Any = ()
    # A layer's number is no constant; one process compiles, because a pool of forked ones may hang at the end.
    limits: dict[str, Any] = {"allow_unspec_int_on_nn_module": True}
    limits |= {"recompile_limit": 1024, "accumulated_recompile_limit": 4096}  # a process may hold many targets
    try:
        with torch.inference_mode(), dynamo.patch(limits), inductor.patch(compile_threads=1):
            layers = layers_of(runtime.model, type(runtime.model).__name__)
            for layer in layers:
                layer._compiled_call_impl = layer._compiled_call_impl or _in_steps(layer)
            for num_cached, num_rows, num_tokens in tqdm(_SHAPES, desc="Compiling layers", unit="shape"):
                shape, device = runtime.capabilities.cache_shape, runtime.device
                slot_cache = _cache_type()(shape, num_cached, _NUM_SLOTS, dtype=runtime.dtype, device=device)
                place_BT = torch.arange(num_tokens, device=device).repeat(num_rows, 1)
                tree_BTT = place_BT.new_ones(num_rows, num_tokens, num_tokens, dtype=torch.bool)
                for ancestor_BTT in (tree_BTT, None):  # of a step, of a prompt
                    slots = Slots(place_BT, place_BT, ancestor_BTT, 0, _NUM_SLOTS)
                    runtime.forward(torch.zeros_like(place_BT), slots, slot_cache, context_layers)
    except Exception as error:
        _log.warning("the layers are not compiled: %s", first_line(error))
        for layer in layers:
            layer._compiled_call_impl = None
    return _cache_type()


@cache
def _cache_type() -> type[SlotCache]:
    """One class for all targets, because the compiler makes code of its own for each class."""
    return type("OpaqueCache", (SlotCache,), {"update": torch.compiler.disable(SlotCache.update)})


def _in_steps(layer: Any) -> Callable[..., Any]:
    """The compiled layer in steps, which run in inference mode; the layer as it is elsewhere, as in training: the
    compiler would make code for each mode, and gives up after some codes.
    """
    compiled = torch.compile(layer._call_impl, dynamic=True, **_HOW)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_inference_mode_enabled() else layer._call_impl)(*args, **kwargs)

    return call
