"""A plug-in of vLLM: a recurrent drafter drafts a chain of tokens for a target that vLLM serves.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` of this package, in every process that vLLM
starts. `drafter export --format vllm` writes the folder that vLLM then takes as ``model`` of a speculative config.
"""

import logging

_log = logging.getLogger(__name__)

# vLLM takes the name of a draft model of its method "eagle3" as it is where the name ends so.
ARCHITECTURE = "RecurrentDrafterEagle3"
TESTED_VERSIONS = ("0.32.0",)


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
