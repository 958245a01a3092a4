"""The engine and keys of a server, from its options."""

import logging
import os
from typing import TYPE_CHECKING

from drafter.serving.options import DEFAULT_CONTEXT, ServeOptions

if TYPE_CHECKING:
    from drafter.engine.engine import Engine

_log = logging.getLogger("drafter.serving")
KEY_VARIABLE = "DRAFTER_API_KEY"


def load_engine(options: ServeOptions) -> "Engine":
    """The engine with its cache in place.

    Raises:
        ValueError: a model cannot be loaded, or the cache does not fit into memory.
    """
    from drafter.engine.defaults import choose
    from drafter.engine.engine import Engine
    from drafter.engine.loading import load_drafter, load_target
    from drafter.engine.memory import available_bytes, cache_bytes

    how = {
        "dtype": options.dtype,
        "device": options.device,
        "trust_remote_code": options.trust_remote_code,
        "pack": not options.compile,
    }
    target = load_target(options.target, revision=options.revision, **how)  # type: ignore[arg-type]
    head = load_drafter(options.drafter_used, target) if options.drafter_used is not None else None
    draft = load_target(options.draft_model_used, **how) if options.draft_model_used else None  # type: ignore[arg-type]
    config, reason = choose(
        target,
        head,
        draft_model=draft,
        given=options.engine_fields(min(target.max_length, DEFAULT_CONTEXT)),
        tuned=options.tuned,
    )
    _log.info("%s", reason)
    engine = Engine(target, head, config, draft_model=draft)
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
