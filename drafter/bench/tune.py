"""Tune: measure this machine's step times and this drafter's acceptance, and choose a tree for each number of rows.

A step of B rows with trees of N nodes, drafted W wide and L deep, takes

    verify(B, N) + draft(B, W, L),    draft(B, W, L) = a(B, W) + b(B, W) L,

and gives each row tokens_per_step(W, L, N). The three curves are measured apart (a whole grid would take hours), the
best few of their product are then measured as they are, and those times go into the file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from tqdm import tqdm

from drafter.bench.ranks import Acceptance, Drafts, draft_everywhere
from drafter.bench.steptime import Budget, FixedTree, StepClock, Timed
from drafter.decoding.beam import BeamSearch
from drafter.decoding.candidates import Proposer, RootOnly
from drafter.decoding.engine import Engine
from drafter.decoding.factory import make_proposer
from drafter.decoding.params import EngineConfig, SamplingParams
from drafter.decoding.sized import device_name, dtype_name, fingerprint_of_weights
from drafter.decoding.speculation import PLAIN, Choice, RowPlan, Speculation, Tree
from drafter.model.recurrent import RecurrentDrafter
from drafter.target.adapter import Target

_RATIOS = (0.4, 0.7, 1.0, 1.3)  # acceptance, relative to calibration, that the engine should have a tree for
_NUM_BEST = 3  # trees of the best prediction that are measured
_WORTH = 1.03  # a tree must promise so much more than plain decoding
_STEPS_PER_ROW_BLOCK = 8  # rows that answer calibration prompts at the same time


@dataclass(frozen=True)
class TuneSettings:
    """What is measured, and how long that may take.

    Attributes:
        batch_sizes: numbers of rows.
        beam_widths, draft_lengths, tree_sizes: W, L and N to choose from.
        max_new_tokens: longest calibration answer.
        context_length: tokens that rows hold when steps are timed.
        num_rounds: steps of each kind, at most.
        seconds: about how long it may take in all.
        compile: compile the steps.
    """

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    beam_widths: tuple[int, ...] = (1, 2, 4, 8, 16)
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    tree_sizes: tuple[int, ...] = (2, 4, 8, 12, 16, 24, 32, 48, 64)
    max_new_tokens: int = 64
    context_length: int = 128
    num_rounds: int = 9
    seconds: float = 150.0
    compile: bool = False

    def __post_init__(self) -> None:
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
            if length < size <= 1 + width * length:
                yield Tree(width, length, size)


class Tuning(NamedTuple):
    """What was found.

    Attributes:
        speculation: the plans.
        curves: what was measured, as the file holds it.
        num_prompts, num_positions: of the calibration.
    """

    speculation: Speculation
    curves: dict[str, list[list[float]]]
    num_prompts: int
    num_positions: int


class _RowCurves(NamedTuple):
    """Step times of one number of rows, in seconds."""

    verify: dict[int, float]  # by N; 1 is plain decoding
    draft: dict[tuple[int, int], float]  # by (W, L), at the least and the greatest L

    def step_seconds(self, tree: Tree) -> float:
        """Predicted duration of a step."""
        if tree.is_plain:
            return self.verify[1]
        lengths = sorted({length for width, length in self.draft if width == tree.beam_width})
        short, long = lengths[0], lengths[-1]
        low, high = (self.draft[tree.beam_width, length] for length in (short, long))
        slope = (high - low) / (long - short) if long > short else low
        return self.verify[tree.tree_size] + max(0.0, low + slope * (tree.draft_length - short))


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
        acceptance = _record(target, drafter, prompts, settings, widest, bar)
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
    speculation = Speculation(
        device_name(target.device), dtype_name(target.dtype), settings.compile, target.fingerprint, tuple(plans),
        fingerprint_of_weights(drafter),
    )  # fmt: skip
    return Tuning(speculation, _as_lists(curves, kept), len(prompts), acceptance.num_positions)


def _record(
    target: Target,
    drafter: RecurrentDrafter,
    prompts: Sequence[list[int]],
    settings: TuneSettings,
    widest: int,
    bar: "tqdm[Any]",
) -> Acceptance:
    """Let the target answer, then draft from every position; as many answers as a third of the time allows."""
    engine = Engine(target, drafter, EngineConfig(max_rows=min(_STEPS_PER_ROW_BLOCK, len(prompts))))
    params = SamplingParams(max_new_tokens=settings.max_new_tokens)
    search = BeamSearch(drafter, target, widest, max(settings.draft_lengths), engine.config.tau)
    budget = Budget(settings.seconds / 3)
    drafts: list[Drafts] = []
    for start in range(0, len(prompts), _STEPS_PER_ROW_BLOCK):
        for completion in engine.generate(list(prompts[start : start + _STEPS_PER_ROW_BLOCK]), params):
            if not drafts or budget.left:
                drafts.append(draft_everywhere(target, search, completion.prompt_ids, completion.token_ids))
            bar.update()
        if not budget.left:
            break
    return Acceptance(drafts)


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
        self._sizes = sorted({tree.tree_size for tree in kept})
        num_kinds = 2 * len(self._sizes) + 2 * len({tree.beam_width for tree in kept}) + len(_RATIOS) + _NUM_BEST
        context_length = min(settings.context_length, target.max_length // 8)
        # A step may commit several tokens: in a short context fewer rounds have room.
        room = (target.max_length - context_length - self._sizes[-1]) // (2 * num_kinds)
        self._num_rounds = max(2, min(settings.num_rounds, room - 2))
        self._clock = StepClock(
            target, drafter, num_rows, context_length=context_length, largest=self._sizes[-1],
            num_steps=num_kinds * (self._num_rounds + 2), compile=settings.compile,
        )  # fmt: skip

    def curves(self) -> _RowCurves:
        """Verification by N and drafting by W and L."""
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
        lengths = sorted({tree.draft_length for tree in self._kept})
        timed = {
            (width, length): Timed(self._proposer(Tree(width, length, min(length + 1, 1 + width * length))), device)
            for width in sorted({tree.beam_width for tree in self._kept})
            for length in {lengths[0], lengths[-1]}
        }
        self._compare(timed)
        draft = {key: _middle(proposer.seconds[1:]) for key, proposer in timed.items()}
        return _RowCurves(verify, draft)

    def plan(self, curves: _RowCurves) -> RowPlan:
        """Plain decoding and the trees that are best at some acceptance, each measured as it is."""
        predicted = [
            Choice(tree, kept, max(curves.step_seconds(tree), curves.verify[1]))
            for tree, kept in self._kept.items()
            if tree.tree_size in curves.verify
        ]
        ranked = sorted(predicted, key=lambda choice: -choice.rate())[:_NUM_BEST]
        for ratio in _RATIOS:
            ranked += sorted(predicted, key=lambda choice, ratio=ratio: -choice.rate(ratio))[:1]  # type: ignore[misc]
        trees = list(dict.fromkeys([PLAIN, *(choice.tree for choice in ranked)]))
        seconds = self._compare({tree: self._proposer(tree) for tree in trees})
        # No tree is cheaper than none: what looks so is noise.
        choices = [Choice(tree, self._kept.get(tree, 1.0), max(seconds[tree], seconds[PLAIN])) for tree in trees]
        worth = [choice for choice in choices[1:] if choice.rate() > _WORTH * choices[0].rate()]
        return RowPlan(self._num_rows, (choices[0], *_useful(worth)))

    def _proposer(self, tree: Tree) -> Proposer:
        if tree.is_plain:
            return RootOnly()
        width, length, size = tree
        config = EngineConfig(beam_width=width, draft_length=length, tree_size=size, compile=self._settings.compile)
        return make_proposer(config, self._target, self._drafter, None, self._clock.compiler)

    def _quick(self, proposer: Proposer) -> float:
        return min(self._clock.step(proposer) for _ in range(2))

    def _compare(self, proposers: Any) -> Any:
        return self._clock.compare(proposers, self._num_rounds, Budget(self._seconds / 3), self._tick)

    def _tick(self) -> None:
        self._bar.update()


def _useful(choices: Sequence[Choice]) -> list[Choice]:
    """Those that are the best of all at some acceptance, by rising size."""
    best = {max(choices, key=lambda choice, ratio=ratio: choice.rate(ratio)) for ratio in _RATIOS if choices}  # type: ignore[misc]
    return sorted(best, key=lambda choice: choice.tree[::-1])


def _middle(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _as_lists(curves: dict[int, _RowCurves], kept: dict[Tree, float]) -> dict[str, list[list[float]]]:
    """The curves as rows of numbers: [rows, N, seconds], [rows, W, L, seconds], [W, L, N, tokens per step]."""
    return {
        "verify_seconds": [
            [rows, size, round(seconds, 6)] for rows, curve in curves.items() for size, seconds in curve.verify.items()
        ],
        "draft_seconds": [
            [rows, *key, round(seconds, 6)] for rows, curve in curves.items() for key, seconds in curve.draft.items()
        ],
        "tokens_per_step": [[*tree, round(value, 4)] for tree, value in kept.items()],
    }


def table_rows(speculation: Speculation) -> list[list[str]]:
    """What was chosen for each number of rows, as cells: see :data:`COLUMNS`."""
    rows = []
    for plan in speculation.plans:
        best, plain = plan.best(), plan.plain
        tree = ["1", "-", "-"] if best.tree.is_plain else [str(best.tree[index]) for index in (2, 0, 1)]
        seconds = [f"{1000 * choice.step_seconds:.1f}" for choice in (best, plain)]
        rate = f"{plan.num_rows * best.rate():.1f}"
        speedup = f"{best.rate() / plain.rate():.2f}x"
        rows.append([str(plan.num_rows), *tree, f"{best.tokens_per_step:.2f}", *seconds, rate, speedup])
    return rows


COLUMNS = ["rows", "N", "W", "L", "tokens/step", "step ms", "plain ms", "tokens/s", "speedup"]
