"""The table of the proposers: one branch for each method."""

from drafter.decoding.proposer import Compiler, Contexts, Proposer, RootOnly
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
    *,
    prefill_chunk: int = 256,
) -> Proposer:
    """The proposer of ``drafting.method``.

    Args:
        drafting: the method and its numbers.
        target: the target.
        drafter: a trained drafter; ``drafter`` needs one.
        draft_model: a smaller model of the same tokenizer; ``draft-model`` needs one.
        compiler: the compiler of the engine's steps.
        prefill_chunk: prompt tokens per forward of a draft model.

    Raises:
        ValueError: a model does not fit the target.
    """
    size = drafting.tree_size
    if drafting.method == "none" or size == 1:
        return RootOnly(size)
    if drafting.method == "drafter":
        assert drafter is not None, "method drafter without a drafter"
        return BeamProposer(
            drafter,
            target,
            drafting.beam_width,
            min(drafting.draft_length, size - 1),  # a tree of N nodes is at most N - 1 deep
            size,
            drafting.tree_policy,
            tau=drafting.tau,
            noise_weight=drafting.noise_weight,
            coupled=drafting.coupled,
            copying=drafting.copying,
            compiler=compiler,
        )
    if drafting.method == "lookup":
        length = min(drafting.lookup_length, size - 1)
        return LookupProposer(drafting.num_matches, length, drafting.max_ngram, target.device, size, compiler)
    assert draft_model is not None, "method draft-model without a draft model"
    return DraftModelProposer(
        draft_model,
        target,
        drafting.num_speculative_tokens,
        verify=drafting.verify,
        coupled=drafting.coupled,
        prefill_chunk=prefill_chunk,
    )


def contexts_of(drafter: RecurrentDrafter | None, target: Target) -> Contexts:
    """The context vectors that the drafter reads; None: nobody reads them."""
    if drafter is None:
        return Contexts((), target.hidden_size)
    layers, size = tuple(drafter.config.context_layers), drafter.config.context_size
    if max(layers, default=0) > target.num_layers:
        raise ValueError(f"the drafter reads layers {list(layers)} but target {target.name!r} has {target.num_layers}")
    return Contexts(layers, size)
