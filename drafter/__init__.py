"""Drafter: large language models answer faster, and no token of the answer changes.

The public names are loaded on first use, so that ``import drafter`` (and ``drafter --help``) does not import torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from drafter.utils import VERSION as __version__

if sys.platform == "win32":
    raise ImportError("drafter needs fcntl and resource, which Windows lacks: use Linux, or WSL on Windows")

if TYPE_CHECKING:
    from drafter.decoding.params import SamplingParams as SamplingParams
    from drafter.engine.engine import Engine as Engine
    from drafter.engine.loading import load_drafter as load_drafter
    from drafter.engine.request import Request as Request
    from drafter.engine.settings import EngineConfig as EngineConfig
    from drafter.models.config import DrafterConfig as DrafterConfig
    from drafter.models.drafter import RecurrentDrafter as RecurrentDrafter
    from drafter.runtimes.loading import load_target as load_target
    from drafter.targets.target import Target as Target

_HOME_OF = {
    "Engine": "drafter.engine.engine",
    "EngineConfig": "drafter.engine.settings",
    "Request": "drafter.engine.request",
    "SamplingParams": "drafter.decoding.params",
    "DrafterConfig": "drafter.models.config",
    "RecurrentDrafter": "drafter.models.drafter",
    "Target": "drafter.targets.target",
    "load_drafter": "drafter.engine.loading",
    "load_target": "drafter.runtimes.loading",
}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    """Import the module of a public name on the first use of the name (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'drafter' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
