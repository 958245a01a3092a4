"""Tune: measure this machine's step times and this drafter's acceptance, and choose a tree for each number of rows.

A step of B rows with trees of N nodes, drafted W wide and L deep, takes

    verify(B, N) + draft(B, W, L, N),    draft(B, W, L, N) = a(B, W) + b(B, W) L + c(B) N,

and gives each row tokens_per_step(W, L, N); c is 0 for the drafter alone, and for the hybrid what its other sources
cost. The curves are measured apart (a whole grid would take hours), the best few of their product are then measured as
they are, and those times go into the file.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, Protocol

from tqdm import tqdm

from drafter.bench.hybrid_ranks import Recording, record_hybrids
from drafter.bench.ranks import Acceptance, Drafts, draft_everywhere
from drafter.bench.steptime import Budget, FixedTree, StepClock, Timed
from drafter.decoding.compile import is_compiled
from drafter.decoding.params import SamplingParams
from drafter.decoding.proposer import Proposer, RootOnly
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.sizes import (
    PLAIN,
    MeasuredTree,
    RowPlan,
    Tree,
    TunedSizes,
    device_name,
    dtype_name,
    fingerprint_of_weights,
)
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers.beam import BeamProposer
from drafter.proposers.options import SIZED_METHODS, Method
from drafter.proposers.parts import new_memory
from drafter.proposers.table import make_proposer
from drafter.targets.target import Target

_RATIOS = (0.4, 0.7, 1.0, 1.3)  # acceptance, relative to calibration, that the engine should have a tree for
_NUM_BEST = 3  # trees of the best prediction that are measured
# A tree must promise so much more than plain decoding, and so much more again for every doubling of the rows: rows that
# began together end apart when they are drafted for, and the last ones step nearly alone.
_WORTH, _WORTH_PER_DOUBLING = 1.03, 0.01
_ROWS_AT_ONCE = 8  # rows that answer calibration prompts at the same time
_NUM_VERIFIED = 8  # nodes of the trees that a hybrid learns from while its drafts are recorded
# W and L of a hybrid's beam to choose from: what is left to it beside the other sources is small.
_HYBRID_SHAPES: dict[str, tuple[int, ...]] = {"beam_widths": (2, 4), "draft_lengths": (2, 3)}


@dataclass(frozen=True)
class TuneSettings:
    """What is measured, and how long that may take.

    Attributes:
        method: redrafter or hybrid.
        batch_sizes: numbers of rows.
        beam_widths, draft_lengths, tree_sizes: W, L and N to choose from.
        max_new_tokens: longest calibration answer.
        context_length: tokens that rows hold when steps are timed.
        num_rounds: steps of each kind, at most.
        seconds: about how long it may take in all.
        compile: compile the steps; None: on CUDA only.
    """

    method: Method = "redrafter"
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    beam_widths: tuple[int, ...] = (1, 2, 4, 8, 16)
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    tree_sizes: tuple[int, ...] = (2, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64)
    max_new_tokens: int = 64
    context_length: int = 128
    num_rounds: int = 9
    seconds: float = 150.0
    compile: bool | None = None

    @classmethod
    def for_method(cls, method: Method, **given: Any) -> "TuneSettings":
        """Settings of which those that are None are the method's own."""
        chosen = {name: value for name, value in given.items() if value is not None}
        return cls(method=method, **{**(_HYBRID_SHAPES if method == "hybrid" else {}), **chosen})

    def __post_init__(self) -> None:
        if self.method not in SIZED_METHODS:
            raise ValueError(f"--method is {self.method!r} but must be one of {', '.join(SIZED_METHODS)}")
        for name in ("batch_sizes", "beam_widths", "draft_lengths", "tree_sizes"):
            values = getattr(self, name)
            low = 2 if name == "tree_sizes" else 1
            if not values or min(values) < low:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is {','.join(map(str, values)) or 'empty'} but must be at least {low}")
        if self.seconds <= 0:
            raise ValueError(f"--seconds is {self.seconds} but must be above 0")

    def trees(self) -> Iterator[Tree]:
        """Every size that can be drafted, plain decoding left out."""
        for width, length, size in product(self.beam_widths, self.draft_lengths, self.tree_sizes):
            if self.method == "hybrid":  # other sources fill what the beam leaves free
                is_fit = length < size or length == min(self.draft_lengths)
            else:
                is_fit = length < size <= 1 + width * length
            if is_fit:
                yield Tree(width, length, size)


class Tuning(NamedTuple):
    """What was found.

    Attributes:
        sizes: the plans.
        curves: what was measured, as the file holds it.
        num_prompts, num_positions: of the calibration.
    """

    sizes: TunedSizes
    curves: dict[str, list[list[float]]]
    num_prompts: int
    num_positions: int


class _RowCurves(NamedTuple):
    """Step times of one number of rows, in seconds."""

    verify: dict[int, float]  # by N; 1 is plain decoding
    draft: dict[tuple[int, int], float]  # by (W, L), at the least and the greatest L, in trees of `base` nodes
    base: int = 0
    draft_per_node: float = 0.0  # for every node more than `base`

    def step_seconds(self, tree: Tree) -> float:
        """Predicted duration of a step."""
        if tree.is_plain:
            return self.verify[1]
        lengths = sorted({length for width, length in self.draft if width == tree.beam_width})
        short, long = lengths[0], lengths[-1]
        low, high = (self.draft[tree.beam_width, length] for length in (short, long))
        slope = (high - low) / (long - short) if long > short else low
        drafting = low + slope * (tree.draft_length - short) + self.draft_per_node * (tree.tree_size - self.base)
        return self.verify[tree.tree_size] + max(0.0, drafting)


class Foreseen(Protocol):
    """What a recording tells of acceptance."""

    num_positions: int

    def tokens_per_step(self, width: int, length: int, tree_size: int) -> float:
        """Generated tokens / target forwards."""
        ...


def tune(target: Target, drafter: RecurrentDrafter, prompts: Sequence[list[int]], settings: TuneSettings) -> Tuning:
    """Measure and choose.

    Args:
        target: the model, as it will be used (dtype, device).
        drafter: bound to it.
        prompts: calibration prompts, token ids.
        settings: what to measure.

    Raises:
        ValueError: no size can be drafted, or the target's context is too short to measure in.
    """
    widest = min(max(settings.beam_widths), drafter.config.num_outputs)
    trees = [tree for tree in settings.trees() if tree.beam_width <= widest]
    if not trees:
        raise ValueError("--tree-sizes hold none that --beam-widths and --draft-lengths can draft: give smaller ones")
    budget = Budget(settings.seconds)
    num_units = len(prompts) + len(settings.batch_sizes) * 3 * (settings.num_rounds + 1)
    with tqdm(total=num_units, desc="Tuning", unit="round", disable=None) as bar:
        bar.set_postfix_str("acceptance")
        record = _record_hybrid if settings.method == "hybrid" else _record
        acceptance = record(target, drafter, prompts, settings, trees, bar)
        kept = {tree: acceptance.tokens_per_step(*tree) for tree in trees}
        plans, curves = [], {}
        every = sorted(set(settings.batch_sizes))
        for place, num_rows in enumerate(every):
            bar.set_postfix_str(f"step times of {num_rows} rows")
            share = budget.left / (len(every) - place)
            bench = _RowBench(target, drafter, settings, num_rows, kept, share, bar)
            curves[num_rows] = bench.curves()
            plans.append(bench.plan(curves[num_rows]))
        bar.update(num_units - bar.n)
    sizes = TunedSizes(
        device_name(target.device), dtype_name(target.dtype), is_compiled(settings.compile, target.device),
        target.fingerprint, tuple(plans), fingerprint_of_weights(drafter), settings.method,
    )  # fmt: skip
    return Tuning(sizes, _as_lists(curves, kept), len(prompts), acceptance.num_positions)


def _record(
    target: Target,
    drafter: RecurrentDrafter,
    prompts: Sequence[list[int]],
    settings: TuneSettings,
    trees: Sequence[Tree],
    bar: "tqdm[Any]",
) -> Foreseen:
    """Let the target answer, then draft from every position; as many answers as a third of the time allows."""
    engine = Engine(target, drafter, EngineConfig(max_rows=min(_ROWS_AT_ONCE, len(prompts))))
    params = SamplingParams(max_new_tokens=settings.max_new_tokens)
    widest = max(tree.beam_width for tree in trees)
    search = BeamProposer(drafter, target, widest, max(settings.draft_lengths), tau=engine.config.tau)
    budget = Budget(settings.seconds / 3)
    drafts: list[Drafts] = []
    for start in range(0, len(prompts), _ROWS_AT_ONCE):
        for completion in engine.generate(list(prompts[start : start + _ROWS_AT_ONCE]), params):
            if not drafts or budget.left:
                drafts.append(draft_everywhere(target, search, completion.prompt_ids, completion.token_ids))
            bar.update()
        if not budget.left:
            break
    return Acceptance(drafts)


def _record_hybrid(
    target: Target,
    drafter: RecurrentDrafter,
    prompts: Sequence[list[int]],
    settings: TuneSettings,
    trees: Sequence[Tree],
    bar: "tqdm[Any]",
) -> Foreseen:
    """Let the target answer with hybrids of all beams drafting along, as far as a third of the time allows."""
    shapes = sorted({(tree.beam_width, tree.draft_length) for tree in trees})
    largest = max(tree.tree_size for tree in trees)
    recording = Recording(shapes, largest, _NUM_VERIFIED, settings.max_new_tokens, _ROWS_AT_ONCE)
    return record_hybrids(target, drafter, prompts, recording, Budget(settings.seconds / 3), lambda: _advance(bar))


def _advance(bar: "tqdm[Any]") -> None:
    bar.update()


class _RowBench:
    """Measures one number of rows."""

    def __init__(
        self,
        target: Target,
        drafter: RecurrentDrafter,
        settings: TuneSettings,
        num_rows: int,
        kept: dict[Tree, float],
        seconds: float,
        bar: "tqdm[Any]",
    ) -> None:
        self._seconds = seconds
        self._target = target
        self._drafter = drafter
        self._settings = settings
        self._num_rows = num_rows
        self._kept = kept
        self._bar = bar
        self._memory = new_memory(target, drafter)
        self._sizes = sorted({tree.tree_size for tree in kept})
        num_kinds = 2 * len(self._sizes) + 2 * len({tree.beam_width for tree in kept}) + len(_RATIOS) + _NUM_BEST + 1
        context_length = min(settings.context_length, target.max_length // 8)
        # A step may commit several tokens: in a short context fewer rounds have room.
        room = (target.max_length - context_length - self._sizes[-1]) // (2 * num_kinds)
        self._num_rounds = max(2, min(settings.num_rounds, room - 2))
        self._clock = StepClock(
            target, drafter, num_rows, context_length=context_length, largest=self._sizes[-1],
            num_steps=num_kinds * (self._num_rounds + 2), compile=settings.compile,
        )  # fmt: skip

    def curves(self) -> _RowCurves:
        """Verification by N, and drafting by W, L and, for the hybrid, N."""
        vocab_size, device = self._target.vocab_size, self._target.device
        trees: dict[int, Proposer] = {1: RootOnly()}
        plain = self._quick(trees[1])
        for size in self._sizes:
            tree = FixedTree(size, vocab_size, device)
            # Larger trees take longer still; a tree that would not pay if texts were much easier is not measured.
            most = max(kept for tree_, kept in self._kept.items() if tree_.tree_size <= size)
            if self._quick(tree) > plain * (1 + 1.5 * (most - 1) + 0.5):
                break
            trees[size] = tree
        verify = self._compare(trees)
        return _RowCurves(verify, *self._draft_curves(max(verify)))

    def _draft_curves(self, largest: int) -> tuple[dict[tuple[int, int], float], int, float]:
        """Seconds by W and L, the nodes of the trees they were measured with, and seconds for each node more."""
        lengths = sorted({tree.draft_length for tree in self._kept})
        widths = sorted({tree.beam_width for tree in self._kept})
        is_hybrid = self._settings.method == "hybrid"
        base = lengths[-1] + 1  # the beam is as deep as in all larger trees
        sized = {
            (width, length): Tree(width, length, base if is_hybrid else length + 1)
            for width in widths
            for length in (lengths[0], lengths[-1])
        }
        first = next(iter(sized))
        trees = [*sized.values(), *([Tree(*first, largest)] if is_hybrid and largest > base else [])]
        timed = {tree: Timed(self._proposer(tree), self._target.device) for tree in trees}
        self._compare(timed)
        seconds = {tree: _middle(proposer.seconds[1:]) for tree, proposer in timed.items()}
        more = (seconds[trees[-1]] - seconds[sized[first]]) / (largest - base) if len(trees) > len(sized) else 0.0
        return {shape: seconds[tree] for shape, tree in sized.items()}, base, max(0.0, more)

    def plan(self, curves: _RowCurves) -> RowPlan:
        """Plain decoding and the trees that are best at some acceptance, each measured as it is."""
        predicted = [
            MeasuredTree(tree, kept, max(curves.step_seconds(tree), curves.verify[1]))
            for tree, kept in self._kept.items()
            if tree.tree_size in curves.verify
        ]
        ranked = sorted(predicted, key=lambda choice: -choice.rate())[:_NUM_BEST]
        for ratio in _RATIOS:
            ranked += sorted(predicted, key=lambda choice, ratio=ratio: -choice.rate(ratio))[:1]  # type: ignore[misc]
        trees = list(dict.fromkeys([PLAIN, *(choice.tree for choice in ranked)]))
        proposers = {tree: self._proposer(tree) for tree in trees[1:]}
        plain = self._proposer(next(iter(self._kept))).plain  # with what learning from its steps takes
        assert plain is not None, self._settings.method
        seconds = self._compare({PLAIN: plain, **proposers})
        # No tree is cheaper than none: what looks so is noise.
        choices = [MeasuredTree(tree, self._kept.get(tree, 1.0), max(seconds[tree], seconds[PLAIN])) for tree in trees]
        least = (_WORTH + _WORTH_PER_DOUBLING * math.log2(self._num_rows)) * choices[0].rate()
        worth = [choice for choice in choices[1:] if choice.rate() > least]
        return RowPlan(self._num_rows, (choices[0], *_useful(worth)))

    def _proposer(self, tree: Tree) -> Proposer:
        width, length, size = tree
        config = EngineConfig(
            method=self._settings.method, beam_width=width, draft_length=length, tree_size=size,
            compile=self._settings.compile,
        )  # fmt: skip
        proposer = make_proposer(config, self._target, self._drafter, None, self._clock.compiler, self._memory)
        proposer.reserve(self._num_rows, 0)
        return proposer

    def _quick(self, proposer: Proposer) -> float:
        return min(self._clock.step(proposer) for _ in range(2))

    def _compare(self, proposers: Any) -> Any:
        return self._clock.compare(proposers, self._num_rounds, Budget(self._seconds / 3), lambda: _advance(self._bar))


def _useful(choices: Sequence[MeasuredTree]) -> list[MeasuredTree]:
    """Those that are the best of all at some acceptance, by rising size."""
    best = {max(choices, key=lambda choice, ratio=ratio: choice.rate(ratio)) for ratio in _RATIOS if choices}  # type: ignore[misc]
    return sorted(best, key=lambda choice: choice.tree[::-1])


def _middle(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _as_lists(curves: dict[int, _RowCurves], kept: dict[Tree, float]) -> dict[str, list[list[float]]]:
    """The curves as rows of numbers: [rows, N, seconds], [rows, W, L, seconds] in trees of a base of nodes (for the
    hybrid: [rows, base, seconds for each node more]), [W, L, N, tokens per step].
    """
    return {
        "verify_seconds": [
            [rows, size, round(seconds, 6)] for rows, curve in curves.items() for size, seconds in curve.verify.items()
        ],
        "draft_seconds": [
            [rows, *key, round(seconds, 6)] for rows, curve in curves.items() for key, seconds in curve.draft.items()
        ],
        "draft_node_seconds": [[rows, curve.base, round(curve.draft_per_node, 6)] for rows, curve in curves.items()],
        "tokens_per_step": [[*tree, round(value, 4)] for tree, value in kept.items()],
    }


def table_rows(sizes: TunedSizes) -> list[list[str]]:
    """What was chosen for each number of rows, as cells: see :data:`COLUMNS`."""
    rows = []
    for plan in sizes.plans:
        best, plain = plan.best(), plan.plain
        tree = ["1", "-", "-"] if best.tree.is_plain else [str(best.tree[index]) for index in (2, 0, 1)]
        seconds = [f"{1000 * choice.step_seconds:.1f}" for choice in (best, plain)]
        rate = f"{plan.num_rows * best.rate():.1f}"
        speedup = f"{best.rate() / plain.rate():.2f}x"
        rows.append([str(plan.num_rows), *tree, f"{best.tokens_per_step:.2f}", *seconds, rate, speedup])
    return rows


COLUMNS = ["rows", "N", "W", "L", "tokens/step", "step ms", "plain ms", "tokens/s", "speedup"]
