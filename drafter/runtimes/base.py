"""The protocol of a runtime: who runs a target's forward, and what the rest of the project may ask of a runtime.

Shapes: B rows · T tokens of one forward · L moved slots · V vocabulary · D hidden size · C context size (D, or D times
the number of selected layers).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from drafter.targets.slots import Slots as Slots
from drafter.targets.slots import TargetOutput as TargetOutput

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BITS = {"int8": 8, "int4": 4}  # of --quantization


class Unsuitable(Exception):
    """A runtime cannot run a target; the text says why, and another runtime may. Where the refusal ``is_expected``, the
    runtime is not for what was asked, and nobody has to hear of the reason.
    """

    def __init__(self, reason: str, *, is_expected: bool = False) -> None:
        super().__init__(reason)
        self.is_expected = is_expected


class Spec(NamedTuple):
    """What :func:`drafter.runtimes.loading.load_target` was asked for."""

    name: str
    device: torch.device
    # float32, bfloat16, float16; stored: the weights as the file has them; auto: each runtime's own choice (torch:
    # bfloat16 on an accelerator, float32 on a CPU).
    dtype: str = "auto"
    revision: str | None = None  # of the hub
    trust_remote_code: bool = False  # run code that comes with the model; never done unless asked for
    num_shards: int = 1  # processes of a node that share the weights (:mod:`drafter.runtimes.torch.spread`)
    device_map: str | None = None  # auto, or a file of devices (the same)
    # int8 or int4 rounds the weights of all linear layers: the target is then another model, with its own text.
    quantization: str = "none"
    is_trainable: bool = False  # plain numbers in torch, for export and for transformers' own `generate`

    @property
    def is_whole(self) -> bool:
        """Whether one process on one device holds the target."""
        return self.num_shards == 1 and self.device_map is None


@cache
def process_threads() -> int:
    """Threads of torch at the first call, before a runtime with threads of its own takes the cores."""
    return torch.get_num_threads()


def check_rotation(config: dict[str, Any]) -> None:
    """ValueError for rotary positions that turn more numbers than a head has, or whose base is no base of powers."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for name, is_fit in (("partial_rotary_factor", lambda n: 0 <= n <= 1), ("rope_theta", lambda n: n > 1)):
        number = given.get(name, config.get(name))
        if isinstance(number, int | float) and not is_fit(number):
            raise ValueError(f"config.json: {name} is {number}, which makes no rotation")


class Traits(NamedTuple):
    """Facts about a runtime and the weights that the runtime holds."""

    number_format: str  # as people read the format: ``float32``, ``bfloat16``, ``float16``, ``stored``
    is_compilable: bool = False  # torch may record whole steps as CUDA graphs
    is_uniform: bool = True  # all layers on one device, with keys of one shape, so that measurements of the device hold
    is_trainable: bool = False  # the weights are plain numbers in modules of torch
    has_plain_logits: bool = True  # logits are ``output_weight_VD @ hidden`` and no more (no bias, scale or soft cap)
    cheap_tokens: int | None = None  # that a forward verifies at little more than the cost of one; None: the device's
    layer_devices: tuple[torch.device, ...] = ()  # where each layer computes; empty: all on one device
    num_threads: int = 1  # that compute on a CPU


class RowCache(Protocol):
    """Keys and values of ``num_rows`` rows and ``num_slots`` slots; a spare slot of each row takes padding."""

    num_rows: int
    num_slots: int
    spare_slot: int

    def move_slots(self, source_BL: Tensor, destination_BL: Tensor) -> None:
        """Copy slots within rows 0 .. B-1, all layers at once; every source is read before anything is written."""

    def copy_row(self, source: int, destination: int, num_slots: int) -> None:
        """Copy the first ``num_slots`` slots of one row over those of another row."""


C = TypeVar("C", bound=RowCache)


class Runtime(Protocol[C]):
    """Runs a target's forward. ``name`` is a word of ``--runtime``; token ids go to ``device``, and hidden states come
    from there; ``dtype`` is that of embeddings, hidden states and contexts. Others ask ``traits`` instead of looking
    inside. ``num_parameters`` counts each shared one once.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    traits: Traits
    vocab_size: int
    hidden_size: int
    num_parameters: int

    @property
    def embedding_weight_VD(self) -> Tensor:
        """Input embeddings as plain numbers, [V, D]; may be made at the first call, as may the output matrix."""

    @property
    def output_weight_VD(self) -> Tensor: ...

    def output_rows(self, token_X: Tensor) -> Tensor:
        """Rows of the output matrix as plain numbers: int64 [X] -> [X, D]."""

    def embed(self, token: Tensor) -> Tensor:
        """Input embeddings as the first layer gets them, scale included: int64 [...] -> [..., D]."""

    def final_norm(self) -> nn.Module:
        """A copy, on the CPU, of the norm behind the last layer (ValueError: the target has no such module)."""

    def prepare_decoding(self) -> None:
        """Called before the first step of an engine."""

    def new_cache(self, num_rows: int, num_slots: int) -> C:
        """An empty cache; 0 rows and 0 slots are allowed."""

    def cache_bytes(self, num_rows: int, num_slots: int) -> int:
        """Bytes that a cache of this size takes, with what forwards over its rows need beside."""

    def forward(
        self, token_BT: Tensor, slots: Slots | None, cache: C | None, context_layers: Sequence[int] = ()
    ) -> TargetOutput:
        """Run the decoder without its output matrix, and write keys and values to the tokens' slots: int64 [B, T] ->
        hidden [B, T, D], after the final norm, and context [B, T, C].

        Without slots and cache: a causal forward from position 0, nothing kept; padding on the right is harmless.
        ``context_layers`` are indices into the hidden states (0 = embeddings, i = after layer i; the last layer's index
        gives the states after the final norm) that make the context. Empty: the final hidden states.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Output logits [..., V] of final hidden states [..., D], scaling and soft cap included."""
