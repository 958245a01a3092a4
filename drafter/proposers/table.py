"""The table of the proposers: one branch for each method."""

from drafter.decoding.proposer import Compiler, Proposer, RootOnly
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers.beam import BeamProposer
from drafter.proposers.draft_model import DraftModelProposer
from drafter.proposers.lookup import LookupProposer
from drafter.proposers.options import Drafting
from drafter.targets.target import Target


def make_proposer(
    drafting: Drafting,
    target: Target,
    drafter: RecurrentDrafter | None = None,
    draft_model: Target | None = None,
    compiler: Compiler | None = None,
) -> Proposer:
    """The proposer of ``drafting.method``.

    Args:
        drafting: the method and its numbers.
        target: the target.
        drafter: a trained drafter; ``drafter`` needs one.
        draft_model: a smaller model of the same tokenizer; ``draft-model`` needs one.
        compiler: the compiler of the engine's steps.

    Raises:
        ValueError: a model does not fit the target.
    """
    if drafting.method == "none" or drafting.tree_size == 1:
        return RootOnly(drafting.tree_size)
    if drafting.method == "drafter":
        assert drafter is not None, "method drafter without a drafter"
        return BeamProposer(drafter, target, drafting, compiler)
    if drafting.method == "lookup":
        return LookupProposer(drafting, target.device, compiler)
    assert draft_model is not None, "method draft-model without a draft model"
    return DraftModelProposer(draft_model, target, drafting)


def context_layers_of(drafter: RecurrentDrafter | None, target: Target) -> tuple[int, ...]:
    """The layers of the target whose hidden states the drafter reads; empty: the final hidden state alone."""
    layers = () if drafter is None else tuple(drafter.config.context_layers)
    if max(layers, default=0) > target.num_layers:
        raise ValueError(f"the drafter reads layers {list(layers)} but target {target.name!r} has {target.num_layers}")
    return layers
