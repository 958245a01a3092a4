"""DrafterConfig: shape and target of a drafter, in ``config.json`` beside the weights."""

import re
from collections.abc import Mapping
from typing import Any, Self

from transformers import PreTrainedConfig

from drafter.models.files import FLOATS
from drafter.utils.validate import check_ranges, within

_CHOICES = {"context": ("last", "fused"), "head": ("full", "tied")}
_MAX_CONTEXT_LAYERS = 64
_NO_SHAPE = {"draft_length", "hidden_scale", "embedding_scale", "target_name", "target_revision", "target_fingerprint"}
_FINGERPRINT = re.compile("([0-9a-f]{4})*(-[a-z0-9]+)?")  # hex digits, and a scheme of rounding

# Keys that transformers itself writes into or passes through a config; any other unknown key is a mistake.
_LIBRARY_KEYS = {
    "model_type", "transformers_version", "architectures", "dtype", "torch_dtype", "name_or_path", "_name_or_path",
    "_commit_hash", "attn_implementation", "output_attentions", "_attn_implementation_autoset",
}  # fmt: skip


class DrafterConfig(PreTrainedConfig):
    """Shape of a recurrent drafter and the target it belongs to (ValueError: a value out of range, or an unknown key).
    The two scales bring h and e to rms 1; both fold into the weights that read them.
    """

    model_type = "recurrent_drafter"

    # The limits of the sizes lie far above every known model.
    vocab_size: int = within(32000, low=2, high=2**24)  # V, rows of the target's output matrix
    hidden_size: int = within(4096, low=1, high=2**18)  # D, of the target and of the recurrent state
    # last: the target's final hidden state; fused: states of `context_layers`, each normalised, and a linear layer.
    context: str = "last"
    # Indices into the target's hidden states (0 = embeddings), the final one last; only with `fused`.
    context_layers: tuple[int, ...] | list[int] = within((), low=0)
    # full: an own R x 2D output matrix, as published; tied: a 2D -> D projection, and the target's own output rows.
    head: str = "full"
    num_res_blocks: int = within(2, low=0, high=64)  # x + SiLU(linear(x)) between [h; s] and the head
    block_rank: int | None = within(None, low=1, high=2**19)  # their matrices are products of two narrow ones
    draft_vocab_size: int | None = within(None, low=2, high=2**24)  # R; None: the whole vocabulary
    draft_length: int = within(4, low=1, high=256)  # depth of training
    hidden_scale: float = within(1.0, above=0.0)  # of the h half of a linear layer's input
    embedding_scale: float = within(1.0, above=0.0)  # of e before the cell
    target_name: str = ""  # for messages, and as a default
    target_revision: str | None = None  # on the hub
    target_fingerprint: str = ""  # sample of the target's weights; empty: unchecked

    def __post_init__(self, **kwargs: Any) -> None:
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
        if dtype is not None and (not isinstance(dtype, str) or dtype not in FLOATS):
            raise ValueError(f"{where}: dtype is {dtype!r} but must be one of {', '.join(FLOATS)}")
        # Fields of the library do not describe a drafter, and may hold any value.
        own = {name: value for name, value in fields.items() if name not in _LIBRARY_KEYS}
        try:
            return cls(**own)
        except (AttributeError, TypeError, ValueError) as error:  # of transformers, too
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
        for name in DrafterConfig.__annotations__:
            value = getattr(self, name)
            if isinstance(value, list) or (value is None and getattr(DrafterConfig, name) is not None):
                raise ValueError(f"drafter {name} is {value} but must have one value")
        check_ranges(self, prefix="")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"drafter {name} is {getattr(self, name)!r} but must be one of {', '.join(allowed)}")
        for name, most in (("block_rank", 2 * self.hidden_size), ("draft_vocab_size", self.vocab_size)):
            if (getattr(self, name) or 0) > most:
                raise ValueError(f"drafter {name} is {getattr(self, name)} but must be at most {most}")
        for name in ("target_name", "target_revision", "target_fingerprint"):
            if not isinstance(getattr(self, name) or "", str):
                raise ValueError(f"drafter {name} is {getattr(self, name)!r} but must be a text")
        if not _FINGERPRINT.fullmatch(self.target_fingerprint):
            raise ValueError(f"drafter target_fingerprint is {self.target_fingerprint[:40]!r} but must be hex digits")
        if len(self.context_layers) > _MAX_CONTEXT_LAYERS:
            raise ValueError(f"drafter context_layers are {len(self.context_layers)} but at most {_MAX_CONTEXT_LAYERS}")
        if (self.context == "fused") != bool(self.context_layers):
            raise ValueError(
                f"drafter context {self.context!r} with context_layers {list(self.context_layers)}: "
                "fused needs layers, the others take none"
            )


def shape_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config on which the shapes of the weights, and the time of a drafting step, depend."""
    names = DrafterConfig.__annotations__.keys() - _NO_SHAPE
    found = {name: config.get(name, getattr(DrafterConfig, name)) for name in names}
    return found | {"context_layers": list(found["context_layers"] or ())}
