"""Drafter: large language models answer faster without changing a token of the answer.

The public names are loaded on first use, so that ``import drafter`` (and ``drafter --help``) does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drafter.decoding.engine import Completion, Engine
    from drafter.decoding.params import EngineConfig, SamplingParams
    from drafter.model.config import DrafterConfig
    from drafter.model.recurrent import RecurrentDrafter
    from drafter.target.adapter import Target

__version__ = "0.1.0"

_HOME_OF = {
    "Completion": "drafter.decoding.engine",
    "Engine": "drafter.decoding.engine",
    "EngineConfig": "drafter.decoding.params",
    "SamplingParams": "drafter.decoding.params",
    "DrafterConfig": "drafter.model.config",
    "RecurrentDrafter": "drafter.model.recurrent",
    "Target": "drafter.target.adapter",
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
