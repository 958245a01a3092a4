"""A plug-in of vLLM: a recurrent drafter drafts a chain of tokens for a target that vLLM serves.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins``, in every process that it starts. `drafter
export --format vllm` writes the folder that vLLM then takes as ``model`` of a speculative config. Its
``model.safetensors`` holds the drafter's own tensors, and two more that the target lends:

    final_norm.weight [D]      gain of the norm behind the target's last layer: vLLM hands over states before that norm
    lm_head.weight    [R, D]   output rows of the draft vocabulary, for a tied head over a part of the vocabulary

A tied head over the whole vocabulary shares the target's output matrix. ``config.json`` describes to vLLM a draft model
of hidden size 2D or a few more with one attention layer, with the drafter's own fields under ``drafter``.

Shapes: R draft vocabulary · D the target's hidden size.
"""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drafter.models.config import DrafterConfig

_log = logging.getLogger(__name__)

# vLLM takes the name of a draft model of its method "eagle3" as it is where the name ends so.
ARCHITECTURE = "RecurrentDrafterEagle3"
TESTED_VERSIONS = ("0.32.0",)
DRAFTER_KEY, TARGET_KEY, COPYING_KEY = "drafter", "target", "copying"
FINAL_NORM, OUTPUT_ROWS = "final_norm.weight", "lm_head.weight"


def shares_head(config: "DrafterConfig") -> bool:
    """Whether the head reads the target's whole output matrix, which then lies in memory once."""
    return config.head == "tied" and config.num_outputs == config.vocab_size


def register() -> None:
    """Tell vLLM which class reads a folder of `drafter export --format vllm`; a second call changes nothing."""
    from vllm import ModelRegistry, __version__

    if __version__.partition("+")[0] not in TESTED_VERSIONS:
        _log.warning(
            "recurrent-drafter was tested with vLLM %s, and this is vLLM %s: compare a few greedy answers with and "
            "without --speculative-config", ", ".join(TESTED_VERSIONS), __version__
        )  # fmt: skip
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, "drafter.integrations.vllm.model:RecurrentDrafterEagle3")
