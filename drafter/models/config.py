"""DrafterConfig: shape and target of a drafter, in ``config.json`` beside the weights."""

import re
import struct
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from transformers import PreTrainedConfig

Cell = Literal["rnn"]
Context = Literal["last", "fused"]
Head = Literal["full", "tied"]

_DTYPES = ("float32", "bfloat16", "float16")
# Limits of the sizes in a file, far above every known model.
_RANGES = {
    "vocab_size": (2, 2**24),
    "hidden_size": (1, 2**18),
    "num_res_blocks": (0, 64),
    "draft_length": (1, 256),
}
_MAX_CONTEXT_LAYERS = 64
_FINGERPRINT = re.compile("([0-9a-f]{4})*(-[a-z0-9]+)?")  # hex digits, and a scheme of rounding

# Keys that transformers itself writes into or passes through a config; any other unknown key is a mistake.
_LIBRARY_KEYS = {
    "model_type",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "name_or_path",
    "_name_or_path",
    "_commit_hash",
    "attn_implementation",
    "output_attentions",
    "_attn_implementation_autoset",
}


class DrafterConfig(PreTrainedConfig):
    """Shape of a recurrent drafter and the target it belongs to. Validated on construction; unknown keys are errors.

    Attributes:
        vocab_size: V, rows of the target's output matrix.
        hidden_size: D, the target's hidden size, and the size of the recurrent state.
        cell: ``rnn``: s' = SiLU(W e + U s + b), as published.
        context: ``last``: the target's final hidden state; ``fused``: hidden states of ``context_layers``, each
            normalised, through one linear layer.
        context_layers: indices into the target's hidden states (0 = embeddings), the final one last; only with
            ``fused``.
        head: ``full``: own R x 2D output matrix, as published; ``tied``: a 2D -> D projection before the target's own
            frozen output rows.
        num_res_blocks: residual blocks x + SiLU(linear(x)) between [h; s] and the head.
        block_rank: rank of the residual blocks' matrices (each a product of two narrow ones); None: full matrices.
        draft_vocab_size: R, or None for the whole vocabulary.
        draft_length: the depth of training.
        hidden_scale: constant on the h half of a linear layer's input, which brings the half to rms 1.
        embedding_scale: constant on e before the cell, which brings e to rms 1. Both fold into the weights.
        target_name: name of the drafter's target, for messages and as a default.
        target_revision: its hub revision, if any.
        target_fingerprint: sample of the target's output matrix; empty = unchecked.

    Raises:
        ValueError: a value out of range, or an unknown key.
    """

    model_type = "recurrent_drafter"

    vocab_size: int = 32000
    hidden_size: int = 4096
    cell: str = "rnn"
    context: str = "last"
    context_layers: tuple[int, ...] | list[int] = ()
    head: str = "full"
    num_res_blocks: int = 2
    block_rank: int | None = None
    draft_vocab_size: int | None = None
    draft_length: int = 4
    hidden_scale: float = 1.0
    embedding_scale: float = 1.0
    target_name: str = ""
    target_revision: str | None = None
    target_fingerprint: str = ""

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.get("head_rank", 0) is None:
            del kwargs["head_rank"]  # a key of earlier versions
        unknown = sorted(set(kwargs) - _LIBRARY_KEYS)
        if unknown:
            raise ValueError(f"drafter config has unknown key {unknown[0]!r}: remove it, or correct its spelling")
        if not isinstance(self.context_layers, list | tuple):
            raise ValueError(f"drafter context_layers are {self.context_layers!r} but must be a list of integers")
        self.context_layers = tuple(self.context_layers)
        super().__post_init__(**kwargs)
        self._check()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], where: str) -> Self:
        """The config of a file's or checkpoint's fields; ValueError naming `where` and the field that is wrong."""
        model_type, dtype = fields.get("model_type", cls.model_type), fields.get("dtype")
        if model_type != cls.model_type:
            raise ValueError(f"{where}: model_type is {model_type!r}, a drafter has {cls.model_type!r}")
        if dtype is not None and (not isinstance(dtype, str) or dtype not in _DTYPES):
            raise ValueError(f"{where}: dtype is {dtype!r} but must be one of {', '.join(_DTYPES)}")
        # Fields of the library do not describe a drafter, and may hold any value.
        own = {name: value for name, value in fields.items() if name not in _LIBRARY_KEYS}
        try:
            return cls(**own)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error

    @property
    def num_outputs(self) -> int:
        """R: how many tokens the drafter can propose."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def context_size(self) -> int:
        """C: size of the context that the target hands over."""
        return self.hidden_size * (len(self.context_layers) if self.context == "fused" else 1)

    def _check(self) -> None:
        for name, allowed in (("cell", get_args(Cell)), ("context", get_args(Context)), ("head", get_args(Head))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"drafter {name} is {getattr(self, name)!r} but must be one of {', '.join(allowed)}")
        for name, (low, high) in _RANGES.items():
            _check_integer(name, getattr(self, name), low, high)
        for name, low, high in (("block_rank", 1, 2 * self.hidden_size), ("draft_vocab_size", 2, self.vocab_size)):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), low, high)
        for name in ("target_name", "target_revision", "target_fingerprint"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name == "target_revision"):
                raise ValueError(f"drafter {name} is {value!r} but must be a text")
        if not _FINGERPRINT.fullmatch(self.target_fingerprint):
            raise ValueError(f"drafter target_fingerprint is {self.target_fingerprint[:40]!r} but must be hex digits")
        if any(isinstance(layer, bool) or not isinstance(layer, int) or layer < 0 for layer in self.context_layers):
            raise ValueError(f"drafter context_layers are {list(self.context_layers)} but must be integers from 0 on")
        if len(self.context_layers) > _MAX_CONTEXT_LAYERS:
            raise ValueError(f"drafter context_layers are {len(self.context_layers)} but at most {_MAX_CONTEXT_LAYERS}")
        if (self.context == "fused") != bool(self.context_layers):
            raise ValueError(
                f"drafter context {self.context!r} with context_layers {list(self.context_layers)}: "
                "fused needs layers, the others take none"
            )
        for name in ("hidden_scale", "embedding_scale"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0.0 < value < float("inf")):
                raise ValueError(f"drafter {name} is {value!r} but must be a positive number")


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"drafter {name} is {value!r} but must be an integer from {low} to {high}")


def same_fingerprint(first: str, second: str) -> bool:
    """Whether two samples (bfloat16 values in hex) show the same matrix, up to the rounding of a float16 copy.

    >>> same_fingerprint("803f", "813f"), same_fingerprint("803f", "0040")
    (True, False)

    The part after a hyphen names a scheme of rounding (:func:`rounding_of`); the comparison ignores the part.
    """
    values = [_bfloat16_values(sample) for sample in (first, second)]
    if len(values[0]) != len(values[1]):
        return False
    return all(abs(a - b) <= 2.0**-6 * max(abs(a), abs(b)) + 1e-6 for a, b in zip(*values, strict=True))


def rounding_of(sample: str) -> str:
    """The scheme that rounded the weights of a sample's target; empty for weights as they were loaded.

    >>> rounding_of("803f-int8"), rounding_of("803f")
    ('int8', '')
    """
    return sample.partition("-")[2]


def _bfloat16_values(sample: str) -> list[float]:
    """Little-endian bfloat16 numbers of a hex string: each is the upper half of a float32."""
    raw = bytes.fromhex(sample.partition("-")[0])
    return [struct.unpack("<f", b"\0\0" + raw[i : i + 2])[0] for i in range(0, len(raw) - 1, 2)]
