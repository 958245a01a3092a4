"""Drafter: large language models answer faster without changing a token of the answer.

The public names are loaded on first use, so that ``import drafter`` (and ``drafter --help``) does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drafter.decoding.params import SamplingParams
    from drafter.engine.config import EngineConfig
    from drafter.engine.engine import Completion, Engine
    from drafter.models.config import DrafterConfig
    from drafter.models.drafter import RecurrentDrafter
    from drafter.targets.target import Target

__version__ = "0.1.0"

_HOME_OF = {
    "Completion": "drafter.engine.engine",
    "Engine": "drafter.engine.engine",
    "EngineConfig": "drafter.engine.config",
    "SamplingParams": "drafter.decoding.params",
    "DrafterConfig": "drafter.models.config",
    "RecurrentDrafter": "drafter.models.drafter",
    "Target": "drafter.targets.target",
}

__all__ = [
    "Completion",
    "DrafterConfig",
    "Engine",
    "EngineConfig",
    "RecurrentDrafter",
    "SamplingParams",
    "Target",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import the home of a public name when it is first asked for (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'drafter' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
