"""Which proposer a configuration asks for."""

from typing import NamedTuple

from drafter.decoding.compile import Compiler
from drafter.decoding.proposer import Contexts, Proposer, RootOnly
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers.beam import BeamProposer, BeamSearch
from drafter.proposers.draft_model import DraftModelProposer
from drafter.proposers.hybrid import BeamSource, HitRates, HybridProposer, Source, no_hits
from drafter.proposers.lookup import LookupSource, PromptLookupProposer
from drafter.proposers.options import SIZED_METHODS, DraftOptions
from drafter.proposers.recycling import MAX_DEPTH, NUM_FOLLOWERS, FollowerTable, RecyclingProposer, RecyclingSource
from drafter.targets.target import Target

_SPARE_DRAFTS = 3


class Learnt(NamedTuple):
    """What a hybrid learns while it decodes: who follows whom, and how often each source was right."""

    table: FollowerTable
    rates: HitRates

    def forget(self) -> None:
        """Nothing is learnt any more. In place: whoever holds the parts sees it."""
        self.table.forget()
        self.rates.forget_all()


def nothing_learnt(target: Target, drafter: RecurrentDrafter | None) -> Learnt:
    """For hybrids of a target, with or without a drafter, that are to share what they learn."""
    table = FollowerTable(target.vocab_size, NUM_FOLLOWERS, target.device)
    return Learnt(table, no_hits(2 + (drafter is not None), target.device))


def make_proposer(
    config: DraftOptions,
    target: Target,
    drafter: RecurrentDrafter | None,
    draft_model: Target | None,
    compiler: Compiler | None = None,
    learnt: Learnt | None = None,
    *,
    prefill_chunk: int = 256,
) -> Proposer:
    """The proposer of ``config.method``.

    Args:
        config: settings.
        target: the model whose answers are wanted.
        drafter: a trained drafter; ``redrafter`` needs one.
        draft_model: a smaller model of the same tokenizer; ``draft-model`` needs one.
        compiler: of the engine's steps; it compiles the drafter's beam search.
        learnt: what a hybrid or recycling goes on learning, and hybrids may share; None: something of its own.
        prefill_chunk: prompt tokens per forward of a draft model.

    Raises:
        ValueError: what the method needs is missing or does not fit the target.
    """
    if config.method == "autoregressive" or config.num_nodes == 1:
        return RootOnly(config.num_nodes)
    if config.method == "redrafter":
        if drafter is None:
            raise ValueError("--method redrafter needs a drafter: give --drafter DIR, or --method autoregressive")
        search = _beam_search(config, target, drafter, compiler)
        return BeamProposer(search, config.num_nodes, config.tree_policy, coupled=config.coupled, compiler=compiler)
    if config.method == "lookup":
        return PromptLookupProposer(_lookup(config, target), config.num_nodes)
    if config.method == "recycling":
        return RecyclingProposer(
            _recycling(config, target, (learnt or nothing_learnt(target, None)).table), config.num_nodes
        )
    if config.method == "hybrid":
        return _hybrid(config, target, drafter, compiler, learnt or nothing_learnt(target, drafter))
    if config.method == "draft-model":
        if draft_model is None:
            raise ValueError("--method draft-model needs a draft model: give --draft-model NAME")
        return DraftModelProposer(
            draft_model,
            target,
            config.num_draft_tokens,
            verify=config.verify,
            coupled=config.coupled,
            prefill_chunk=prefill_chunk,
        )
    raise AssertionError(config.method)


def contexts_of(config: DraftOptions, target: Target, drafter: RecurrentDrafter | None) -> Contexts:
    """What the proposer wants to know of the text so far."""
    if config.method not in SIZED_METHODS or drafter is None:
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


def _beam_search(
    config: DraftOptions, target: Target, drafter: RecurrentDrafter, compiler: Compiler | None
) -> BeamSearch:
    # A tree of N nodes is at most N - 1 deep.
    length = min(config.draft_length, config.num_nodes - 1)
    is_frozen = compiler is not None and compiler.is_on
    return BeamSearch(drafter, target, config.beam_width, length, config.tau, config.noise_weight, is_frozen=is_frozen)


def _lookup(config: DraftOptions, target: Target) -> LookupSource:
    length = min(config.lookup_length, config.num_nodes - 1)
    return LookupSource(config.beam_width, length, config.max_ngram, target.device)


def _recycling(config: DraftOptions, target: Target, table: FollowerTable) -> RecyclingSource:
    # What is likely depends on the stored logits too, so more is drafted than is kept.
    num_drafted = _SPARE_DRAFTS * config.num_nodes
    return RecyclingSource(table, num_drafted, min(MAX_DEPTH, config.num_nodes - 1), coupled=config.coupled)


def _hybrid(
    config: DraftOptions, target: Target, drafter: RecurrentDrafter | None, compiler: Compiler | None, learnt: Learnt
) -> HybridProposer:
    """The recurrent drafter's beam if there is a drafter, lookup, and recycling."""
    sources: list[Source] = [_lookup(config, target), _recycling(config, target, learnt.table)]
    if drafter is not None:
        search = _beam_search(config, target, drafter, compiler)
        sources.insert(0, BeamSource(search, coupled=config.coupled, compiler=compiler))
    return HybridProposer(sources, config.num_nodes, target.device, learnt.rates)
