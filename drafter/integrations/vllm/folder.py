"""The folder that vLLM reads: names of its tensors, keys of its config, and the checks of both.

``model.safetensors`` holds the drafter's own tensors, and two more that the target lends:

    final_norm.weight [D]      gain of the norm behind the target's last layer: vLLM hands over states before that norm
    lm_head.weight    [R, D]   output rows of the draft vocabulary, for a tied head over a part of the vocabulary

A tied head over the whole vocabulary shares the target's output matrix in vLLM's memory. ``config.json`` describes to
vLLM a draft model of hidden size 2D or a few more with one attention layer; the drafter's own fields stand under
``drafter``, the target's under ``target``, and ``copying`` says whether drafts are mixed with copies from the text.

Shapes: R draft vocabulary · D the target's hidden size.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafter.models.config import DrafterConfig, same_fingerprint
from drafter.models.files import FLOATS
from drafter.utils.parse import check_shape

DRAFTER_KEY, TARGET_KEY, COPYING_KEY = "drafter", "target", "copying"
FINAL_NORM, OUTPUT_ROWS = "final_norm.weight", "lm_head.weight"


class TargetFacts(NamedTuple):
    """What a folder says about the target that it belongs to.

    Attributes:
        name: the name of the training run.
        fingerprint: sample of the output matrix; empty: unchecked.
        hidden_size: D.
        num_layers: decoder layers.
        vocab_size: rows of the output matrix.
        norm_epsilon: of the final norm, which is x / sqrt(mean(x^2) + epsilon) times a gain.
    """

    name: str
    fingerprint: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    norm_epsilon: float

    @classmethod
    def read(cls, fields: Any) -> Self:
        """The facts of a config's ``target``; ValueError naming the key that is missing or of another type."""
        check_shape(fields, dict(cls.__annotations__), f"config.json, {TARGET_KEY}")
        return cls(**{name: fields[name] for name in cls._fields})

    def check(self, *, hidden_size: int, num_layers: int, vocab_size: int, fingerprint: str | None) -> None:
        """Compare with the target that vLLM loads; ValueError naming what differs. No fingerprint is not compared."""
        for what, wanted, found in (
            ("hidden size", self.hidden_size, hidden_size),
            ("number of layers", self.num_layers, num_layers),
            ("vocabulary", self.vocab_size, vocab_size),
        ):
            if wanted != found:
                raise ValueError(
                    f"the drafter belongs to target {self.name!r} ({what} {wanted}), and vLLM serves another model "
                    f"({what} {found}): export a drafter that was trained for this model"
                )
        if fingerprint and self.fingerprint and not same_fingerprint(self.fingerprint, fingerprint):
            raise ValueError(
                f"the drafter belongs to target {self.name!r}, and vLLM serves a model with another output matrix: "
                "export a drafter that was trained for this model"
            )


def shares_head(config: DrafterConfig) -> bool:
    """Whether the head reads the target's whole output matrix, which then lies in memory once."""
    return config.head == "tied" and config.num_outputs == config.vocab_size


def split_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The file's tensors as the drafter's own and the target's: final norm, and rows of a tied and reduced head.

    Raises:
        ValueError: a tensor of the target is missing, or its shape is another than the config asks for.
    """
    lent: dict[str, tuple[int, ...]] = {FINAL_NORM: (config.hidden_size,)}
    if config.head == "tied" and not shares_head(config):
        lent[OUTPUT_ROWS] = (config.num_outputs, config.hidden_size)
    for name, shape in lent.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            raise ValueError(f"the drafter's folder lacks tensor {name!r} of shape {list(shape)}: export it again")
    own = {name: tensor for name, tensor in tensors.items() if name not in lent}
    return own, {name: tensors[name] for name in lent}


def fingerprint_in(place: str, revision: str | None = None) -> str | None:
    """Fingerprint of the output matrix in a model's safetensors files, of which only the sampled rows are read.

    None where the model, a folder or hub id, is not on this machine, or stores no such matrix in plain numbers.
    """
    from transformers.utils import cached_file

    from drafter.targets.capabilities import fingerprint_of

    try:
        folder = Path(str(cached_file(place, "config.json", revision=revision, local_files_only=True))).parent
        files = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
    except (OSError, SafetensorError):
        return None
    found = {name: file for file in files for name in file.keys()}  # noqa: SIM118  # a file is no dict
    ends = ("lm_head.weight", "embed_tokens.weight")  # tied: the embeddings are the output matrix
    name = next((name for end in ends for name in found if name.endswith(end)), None)
    weight_VD = None if name is None else found[name].get_tensor(name)
    return None if weight_VD is None or weight_VD.dtype not in FLOATS.values() else fingerprint_of(weight_VD)
