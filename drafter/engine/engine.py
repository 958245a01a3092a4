"""Engine: prompts in, answers out. ``step`` = schedule, prefill, propose, verify, accept, commit, hand out tokens."""

import logging
import time
from collections.abc import Generator, Sequence
from functools import cached_property
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from torch import Tensor

from drafter.decoding.params import SamplingParams
from drafter.decoding.proposer import Proposer, RootOnly
from drafter.engine.request import Prompt, Request, RequestOptions, Update, encode_prompts
from drafter.engine.runner import CacheWithStates, Runner, check_fit
from drafter.engine.scheduler import Scheduler, bucket, neighbours
from drafter.engine.settings import EngineConfig, EngineOptions, Plan, resolve
from drafter.engine.tuned import PLAIN, Sizer, Tree
from drafter.proposers.lookup import LookupDrafting
from drafter.targets.target import Target

if TYPE_CHECKING:
    from drafter.engine.grammars import Grammars
    from drafter.models.drafter import RecurrentDrafter

_log = logging.getLogger(__name__)
_NO_OPTIONS = RequestOptions()


class Engine:
    """Decodes batches of prompts. The tokens equal those of plain decoding; ``plan``, the settings in use, decides the
    speed alone. ``grammars`` compiles what answers must look like, for any thread.

    Args:
        target: the model that answers.
        drafter: a trained drafter; needed for ``method="drafter"``.
        config: what the user asks for; None: all is open. A :class:`Plan` is used as it is.
        draft_model: a smaller model of the same tokenizer; needed for ``method="draft-model"``.
        sizer: chooses the tree of every step; None: as the plan says.

    Raises:
        ValueError: the method needs another model, or the drafter belongs to another target.
    """

    def __init__(
        self,
        target: Target,
        drafter: "RecurrentDrafter | None" = None,
        config: EngineConfig | Plan | None = None,
        *,
        draft_model: Target | None = None,
        sizer: Sizer | None = None,
    ) -> None:
        self.target, self._draft_model = target, draft_model
        plan = config if isinstance(config, Plan) else resolve(config, target, drafter, draft_model)
        _log.info("%s", plan.reason)
        if sizer is None and (plan.sizes or plan.tries):
            sizer = Sizer(plan.sizes, plan.tries)
        self.plan, self._sizer = plan, sizer
        self._models = [target] if draft_model is None else [target, draft_model]
        for model in self._models:
            model.runtime.prepare_decoding()
        self.drafter = drafter
        self._plain: Proposer = RootOnly()
        self.proposer, self._by_tree = self._proposers(drafter)
        if isinstance(self.proposer, RootOnly):  # perhaps of padded trees
            self._plain = self.proposer
        self._scheduler = Scheduler(plan.max_num_seqs, shares_prefixes=plan.enable_prefix_caching)
        self._runner: Runner | None = None
        self._ids = count()
        self._is_arranged = True
        self._is_sized = False  # the sizer has chosen the tree of the present step
        self._has_told = False  # that the draft model does not pay

    @classmethod
    def load(cls, target: str, drafter: str | None = None, **settings: Any) -> "Engine":
        """The engine of a target and a drafter by name, with the defaults of the command line.

        Args:
            target: alias, hub id, folder or .gguf file of the language model.
            drafter: folder, hub id, or name of a drafter of the package; None: the target's own drafter where the
                package has one; ``"none"``: no drafter.
            settings: fields of :class:`EngineOptions` (``dtype``, ``device``, ``method``, ``max_num_seqs``, ...).

        ValueError: a model cannot be loaded, or a value is out of range. TypeError: a field of another name.
        """
        return cls.of(EngineOptions(target=target, drafter=drafter, **settings))

    @classmethod
    def of(cls, options: EngineOptions) -> "Engine":
        """The engine of a command's options; errors as of :meth:`load`."""
        target, drafter, draft_model = options.load_models()
        return cls(target, drafter, options, draft_model=draft_model)

    # -- whole calls -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        options: RequestOptions | None = None,
    ) -> list[Request]:
        """The finished requests of prompts, in the order of the prompts.

        Args:
            prompts: texts (one user message each, or raw text), message lists, or token id lists.
            params: one for all prompts, or one for each prompt.
            raw: texts go to the model as they are, without chat template.
            options: of every prompt.

        Raises:
            ValueError: an empty or too long prompt, parameters that need a tokenizer, or another call is running.
        """
        events = self.stream(prompts, params, raw=raw, options=options)
        done = {event.index: event.completion for event in events if event.completion is not None}
        return [done[index] for index in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        options: RequestOptions | None = None,
    ) -> Generator[Update, None, None]:
        """Answer prompts; yields the new tokens after every step. Arguments and errors as of :meth:`generate`."""
        if not prompts:
            return
        if self.has_work:
            raise ValueError("the engine is in the middle of another call: read its answers to the end first")
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} sampling parameters for {len(prompts)} prompts: give one, or one for each")
        encoded = encode_prompts(self.target, prompts, raw=raw)
        requests = [self.make_request(ids, one, options) for ids, one in zip(encoded, each, strict=True)]
        self.reserve(max(map(self._num_slots_of, requests)))
        place_of = {request.request_id: place for place, request in enumerate(requests)}
        try:
            for request in requests:
                self.add(request)
            while self.has_work:
                for update in self.step():
                    text = update.request.incremental_text
                    index = place_of[update.request.request_id]
                    yield update._replace(index=index, text="" if text is None else text.take())
        finally:
            # A caller that stops iterating leaves no running row.
            for request in requests:
                request.finish("abort")

    # -- the core, for servers -------------------------------------------------------------------------------------

    @cached_property
    def grammars(self) -> "Grammars":
        from drafter.engine.grammars import Grammars

        return Grammars(self.target)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return self._scheduler.has_work

    @property
    def num_running(self) -> int:
        return sum(not request.is_finished for request in self._scheduler.rows)

    @property
    def num_waiting(self) -> int:
        return sum(not request.is_finished for request in self._scheduler.waiting)

    @property
    def num_failed_drafts(self) -> int:
        """Steps that went on without drafts, because the drafts failed."""
        return 0 if self._runner is None else self._runner.num_failed_drafts

    def reserve(self, num_slots: int) -> None:
        """Allocate a cache of ``num_slots`` slots per row, unless one is there (ValueError: in use, or no memory)."""
        if self._runner is not None and self._runner.num_slots >= num_slots:
            return
        if self.has_work:
            raise ValueError(
                f"a request needs {num_slots} slots but running rows have {self._runner and self._runner.num_slots}: "
                "set --max-model-len to the longest prompt and answer together"
            )
        num_slots, plan, proposer = -(-num_slots // 64) * 64, self.plan, self.proposer
        self._scheduler = Scheduler(plan.max_num_seqs, shares_prefixes=plan.enable_prefix_caching)
        self._runner = None  # the old caches are freed before the new ones are made
        proposer.reserve(0, 0)
        check_fit(self._models, plan.max_num_seqs, num_slots, self.num_nodes)
        if plan.compile:
            layers_read = tuple(dict.fromkeys((*proposer.context_layers, *(plan.kept_layers or ()))))
            for model, layers in zip(self._models, (layers_read, ()), strict=False):
                if model.traits.is_compilable:
                    model.runtime.compile_layers(layers)
        self._runner = Runner(self.target, plan, num_slots, proposer.context_layers, self.num_nodes)
        proposer.reserve(plan.max_num_seqs, num_slots)
        if plan.compile:
            self._runner.warm_up([proposer, *self._by_tree.values(), self._plain])

    def make_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
        *,
        want_text: bool = True,
    ) -> Request:
        """A request for :meth:`add`, in any thread (ValueError: empty prompt, unknown id, or no room to answer)."""
        if not prompt_ids:
            raise ValueError("a prompt is empty: every prompt needs at least one token")
        room = self._max_model_len - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"a prompt has {len(prompt_ids)} tokens but the context is {self._max_model_len}: shorten it"
                + (" or raise --max-model-len" if self._max_model_len < self.target.max_length else "")
            )
        named = chain(prompt_ids, params.logit_bias)
        bad = next((token for token in named if not 0 <= token < self.target.num_tokens), None)
        if bad is not None:
            raise ValueError(f"token id {bad} is not in the vocabulary of {self.target.num_tokens} tokens")
        has_text = want_text and self.target.tokenizer is not None
        if params.stop and not has_text:
            raise ValueError(f"stop strings {params.stop} need a tokenizer of {self.target.name!r}, and want_text")
        own_stops = () if params.ignore_eos else self.target.eos_token_ids
        stop_ids = frozenset((*own_stops, *params.stop_token_ids))
        limit = min(params.max_new_tokens, room)
        request = Request(next(self._ids), list(prompt_ids), params, limit, stop_ids, options=options or _NO_OPTIONS)
        if params.structure is not None:
            request.guide = self.grammars.guide(params)
        request.incremental_text = request.new_text(self.target.decode) if has_text else None
        return request

    def add(self, request: Request) -> Request:
        """Queue a request (ValueError: no memory); ``request.finish("abort")`` ends a waiting or running one."""
        self.reserve(self._num_slots_of(request))
        self._scheduler.waiting.append(request)
        return request

    def step(self) -> list[Update]:
        """One step of all rows; the updates of the rows that decoded."""
        runner = self._runner
        assert runner is not None, "step without a request"
        self._arrange(runner)
        rows = self._scheduler.rows
        for run in neighbours(self._scheduler.prefill_chunks(self.plan.prefill_chunk)):
            runner.prefill(run)
            for chunk in run:
                chunk.request.num_prefilled = chunk.stop
        active = [request for request in rows if request.is_prefilled]
        if not active:
            return []
        proposer = self._proposer_for(active, runner)
        if proposer.reads_every_token:  # the prompts, and the tokens of steps without the proposer
            for request in active:
                if request.num_drafted < request.num_committed - 1:
                    proposer.admit(request.row, [*request.prompt_ids, *request.token_ids], request.num_drafted)
        num_rows = min(bucket(len(rows)), self.plan.max_num_seqs)
        started = time.perf_counter()
        emitted = runner.step(proposer, num_rows, active, max(request.num_committed for request in rows))
        seconds = time.perf_counter() - started
        # Forced nodes say nothing of drafts, and nothing of a tree's duration where they made the tree larger.
        drafted = [update for update in emitted if update.request.row not in runner.forced_rows]
        accepted = [update.num_accepted for update in drafted if update.request.options.speculate]
        is_own_tree = not runner.forced_rows or runner.num_verified == proposer.num_nodes
        if self._sizer is not None and self._is_sized and is_own_tree:
            self._sizer.observe(accepted, seconds, runner.num_verified)
            self._tell(self._sizer)
        updates = []
        for update in emitted:
            request = update.request
            taken = request.extend(update.token_ids)
            if proposer.reads_every_token:
                request.num_drafted = request.num_committed
            logprobs = update.logprobs and update.logprobs[: len(taken)]
            num_accepted, reason = request.num_accepted[-1], request.finish_reason
            updates.append(Update(request, taken, num_accepted, reason, logprobs, update.tree))
        return updates

    def replace_drafter(self, drafter: "RecurrentDrafter") -> None:
        """Draft with another drafter of the same target from the next step on, whose steps are compiled or tried first.
        Call between steps. ValueError, and the old drafter stays: there is none, or the new one does not fit.
        """
        if self.drafter is None or self.plan.method != "drafter":
            raise ValueError("this engine drafts without a drafter that could be replaced")
        proposer, by_tree = self._proposers(drafter)
        if proposer.context_layers != self.proposer.context_layers:
            raise ValueError("the drafter reads other hidden states of the target: restart with this drafter")
        if self._runner is not None:
            self._runner.warm_up([proposer, *by_tree.values()])
        self.drafter, self.proposer, self._by_tree = drafter, proposer, by_tree
        self.forget()

    def states(self, request: Request, start: int = 0) -> Tensor:
        """The hidden states that answering computed, where the plan has ``kept_layers``: bfloat16 [T, layers + 1, D],
        up to the token before the last one, whose state nobody computed. To be asked before the step after the
        request's last one.
        """
        assert self._runner is not None and isinstance(self._runner.cache, CacheWithStates)
        return self._runner.cache.states(request.row, start, request.num_committed)

    def drop(self, keep: int = 0) -> list[Request]:
        """After a step that raised: abort running requests, the latest first, until ``keep`` are left, which go on as
        if the step had not happened; the aborted ones. None is left if the step failed while rows were set up.
        """
        running = sorted(
            (item for item in self._scheduler.rows if not item.is_finished), key=lambda item: item.request_id
        )
        dropped = running[keep:] if self._is_arranged else running
        for request in dropped:
            request.finish("abort")
        if len(dropped) == len(running):
            self._scheduler.rows.clear()  # the content of their slots is unknown
        self._is_arranged = True
        self._scheduler.prefixes.held.clear()
        return dropped

    def forget(self) -> None:
        """Reset the state that drafting learned from earlier requests. No token changes. Call between requests."""
        if self._sizer is not None:
            self._sizer.forget()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _tell(self, sizer: Sizer) -> None:
        own = self.plan.drafting
        if self._has_told or own.method != "draft-model" or own.tree is None:
            return
        loss = sizer.loss(Tree(*own.tree))
        if loss > 0:
            self._has_told = True
            _log.warning(
                "the draft model does not pay here (%.2f of the speed without it): decoding goes on with what is "
                "faster; --num-speculative-tokens %d insists on the draft model",
                1 / (1 + loss),
                own.tree_size - 1,
            )

    def what_ran(self) -> str:
        """The trees of the steps since the last call, with their shares; empty where the size was given."""
        if self._sizer is None or not (total := self._sizer.used.total()):
            return ""
        words = [f"{count / total:.0%} {tree}" for tree, count in self._sizer.used.most_common()]
        self._sizer.used.clear()
        return ", ".join(words)

    def _proposers(self, drafter: "RecurrentDrafter | None") -> tuple[Proposer, dict[Tree, Proposer]]:
        """The method's largest proposer, and those of all trees of the sizer (ValueError: a model does not fit)."""
        drafting, models = self.plan.drafting, (self.target, drafter, self._draft_model)
        by_tree: dict[Tree, Proposer] = {}
        for tree in sorted(self._sizer.trees if self._sizer is not None else (), key=lambda tree: -tree.tree_size):
            if tree.is_plain:
                by_tree[tree] = self._plain
            elif tree.is_copies:
                by_tree[tree] = LookupDrafting(num_matches=tree.beam_width, tree_size=tree.tree_size).build(*models)
            else:
                by_tree[tree] = drafting.sized(*tree).build(*models)
        own = [each for tree, each in by_tree.items() if not tree.is_copies and tree != PLAIN]
        most = own[0] if own else drafting.build(*models)
        most.check(self.target)
        return most, by_tree

    @property
    def num_nodes(self) -> int:
        """N of the largest tree that a step may have."""
        return max(each.num_nodes for each in (self.proposer, *self._by_tree.values()))

    def _arrange(self, runner: Runner) -> None:
        self._is_arranged = False
        schedule = self._scheduler.schedule()
        for source, destination in schedule.moves:
            runner.move(source, destination, self._scheduler.rows[destination].num_committed)
            self.proposer.move(source, destination)
        for copy in schedule.copies:
            runner.cache.copy_row(*copy)
        for request in schedule.started:
            runner.admit(request)
            request.started = time.perf_counter()
        runner.vacate(len(self._scheduler.rows))
        self._is_arranged = True

    def _proposer_for(self, active: list[Request], runner: Runner) -> Proposer:
        self._is_sized = False
        if not any(item.options.speculate for item in active):
            return self._plain
        if self._sizer is not None:
            self._is_sized = True
            proposer = self._by_tree[self._sizer.choose(len(self._scheduler.rows))]
            runner.node_cost = self._sizer.node_cost
            proposer.expect_cost(runner.node_cost)
            return proposer
        return self.proposer

    @property
    def _max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return min(self.plan.max_model_len or self.target.max_length, self.target.max_length)

    def _num_slots_of(self, request: Request) -> int:
        """Slots that a request needs: all tokens up to its last root, and one tree."""
        length = len(request.prompt_ids) + request.limit
        if self.plan.max_model_len is not None:
            length = self._max_model_len  # one size for all requests: a server's cache is allocated once
        return length + self.num_nodes
