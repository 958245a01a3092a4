"""The engine and keys of a server, from its options."""

import logging
import os
from typing import TYPE_CHECKING

from drafter.serving.options import DEFAULT_CONTEXT, ServeOptions

if TYPE_CHECKING:
    from drafter.engine.engine import Engine
    from drafter.engine.options import Models

_log = logging.getLogger("drafter.serving")
KEY_VARIABLE = "DRAFTER_API_KEY"


def load_engine(options: ServeOptions, models: "Models | None" = None) -> "Engine":
    """The engine with its cache in place; ``models``: what was loaded before.

    Raises:
        ValueError: a model cannot be loaded, or the cache does not fit into memory.
    """
    from drafter.engine.engine import Engine
    from drafter.engine.memory import available_bytes, cache_bytes
    from drafter.engine.options import load_models

    models = models or load_models(options)
    target = models.target
    config, reason = models.choose(options, **options.engine_fields(min(target.max_length, DEFAULT_CONTEXT)))
    _log.info("drafting: %s", reason)
    engine = Engine(target, models.drafter, config, draft_model=models.draft_model)
    num_slots = min(config.max_length or target.max_length, target.max_length) + engine.proposer.num_nodes
    num_bytes = cache_bytes(target, config.max_rows, num_slots)
    free = available_bytes(target.device)
    try:
        if free is not None and num_bytes > free:  # Linux would promise the memory, and kill the process later
            raise MemoryError
        engine.reserve(num_slots)
    except (RuntimeError, MemoryError) as error:
        raise ValueError(
            f"the cache of {config.max_rows} rows of {num_slots} slots takes {num_bytes / 2**30:.1f} GiB, "
            f"{'more than there is' if free is None else f'of which {free / 2**30:.1f} GiB are free'}: "
            "lower --max-rows or --max-length"
        ) from error
    return engine


def api_keys_of(options: ServeOptions) -> tuple[str, ...]:
    """The keys of the options, and the one of the environment."""
    variable = os.environ.get(KEY_VARIABLE, "").strip()
    return (*options.api_key, *([variable] if variable else []))
