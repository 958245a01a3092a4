"""The table of the proposers: one line for each method."""

from collections.abc import Callable

from drafter.decoding.compile import Compiler
from drafter.decoding.proposer import Contexts, Proposer, RootOnly
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers import beam, draft_model, lookup
from drafter.proposers.options import DraftOptions, Method
from drafter.proposers.parts import Parts
from drafter.targets.target import Target

PROPOSERS: dict[Method, Callable[[Parts], Proposer]] = {
    "none": lambda parts: RootOnly(parts.config.num_nodes),
    "drafter": beam.make,
    "lookup": lookup.make,
    "draft-model": draft_model.make,
}


def make_proposer(
    config: DraftOptions,
    target: Target,
    drafter: RecurrentDrafter | None,
    draft_model: Target | None,
    compiler: Compiler | None = None,
    *,
    prefill_chunk: int = 256,
) -> Proposer:
    """The proposer of ``config.method``.

    Args:
        config: settings.
        target: the target.
        drafter: a trained drafter; ``drafter`` needs one.
        draft_model: a smaller model of the same tokenizer; ``draft-model`` needs one.
        compiler: the compiler of the engine's steps.
        prefill_chunk: prompt tokens per forward of a draft model.

    Raises:
        ValueError: a model that the method needs is missing or does not fit the target.
    """
    if config.num_nodes == 1:
        return RootOnly()
    return PROPOSERS[config.method](Parts(config, target, drafter, draft_model, compiler, prefill_chunk))


def contexts_of(config: DraftOptions, target: Target, drafter: RecurrentDrafter | None) -> Contexts:
    """The context vectors that the drafter of ``config.method`` reads."""
    if config.method != "drafter" or drafter is None:
        return Contexts((), target.hidden_size)
    layers, size = tuple(drafter.config.context_layers), drafter.config.context_size
    if max(layers, default=0) > target.num_layers:
        raise ValueError(f"the drafter reads layers {list(layers)} but target {target.name!r} has {target.num_layers}")
    if drafter.history is None:
        return Contexts(layers, size)
    return Contexts(
        layers,
        size,
        lambda context_BC, hidden_BTH, token_BT: drafter.read(context_BC, hidden_BTH, target.embed(token_BT)),
    )
