"""Trees sized by measurement: tables of step times by rows and tree, their file, and the choice of every step's tree.

The choice changes the speed of decoding and no token.
"""

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field

from drafter.engine.scheduler import bucket
from drafter.targets.target import Target
from drafter.utils.fingerprint import same_fingerprint
from drafter.utils.parse import read_json, validated

if TYPE_CHECKING:
    from drafter.models.drafter import RecurrentDrafter

SCHEMA: Literal["drafter-tuned/1"] = "drafter-tuned/1"

Size = Annotated[int, Field(ge=1, le=4096)]  # a number of a tree in a file

_AVERAGED = 128  # row-steps in the exponential average of acceptance
_MEMORY = 2048  # steps of other trees in which most of a bad acceptance is forgotten, so that a tree is tried again
_GAIN_TO_SWITCH = 1.02  # speed-up for which the present tree is replaced
_TRIAL_STEPS = 3  # steps of a trial of a tree
_TRIAL_COST = 0.003  # of the time, for the trials of each tree
_LEAST_LOSS = 0.05  # a tree that is nearly as fast as the best is tried as if it lost so much
_MOST_LOSS = 1.0  # a tree that loses more has no further step in its trial
_TIMES = 2 * _TRIAL_STEPS  # durations of a tree whose median counts
_MOST_ROWS = 8  # of more rows no tree is tried
_PAUSE = 12  # steps between two trials, after which a start is over; a short answer pays for few trials
_COPY_GAIN, _MOST_COPY_GAIN = 3.0, 8.0  # whole trees of vain copies that are allowed at first, and after a gain
_LEAST_COST = 0.005  # of a node, in plain steps
_COPY_MEMORY = 1024  # steps without copies in which most of a loss is forgotten
_LEAST_GAIN = 0.1  # a tree on trial may accept so much a step, whatever a calibration has seen


class Tree(NamedTuple):
    """Beam width W, draft length L, nodes N with the root. N = 1: plain decoding; L = 0: copies alone, of W matches."""

    beam_width: int
    draft_length: int
    tree_size: int

    @property
    def is_plain(self) -> bool:
        return self.tree_size == 1

    @property
    def is_copies(self) -> bool:
        return self.draft_length == 0 and not self.is_plain

    @property
    def kind(self) -> tuple[bool, bool]:
        return self.is_plain, self.is_copies

    def __str__(self) -> str:
        size = f"N {self.tree_size}"
        if self.is_plain:
            return "plain"
        return f"copies alone {size}" if self.is_copies else f"W {self.beam_width} L {self.draft_length} {size}"


PLAIN, COPIES, MANY_COPIES, DRAFTS = Tree(1, 1, 1), Tree(4, 0, 8), Tree(8, 0, 16), Tree(3, 3, 12)
# What an engine tries on a CPU, with the tokens per step of usual drafts. The first tree of each kind is tried at the
# beginning, in this order. Each step has as many of the nodes as are worth their cost.
LIVE_COPIES = {COPIES: 1.2, PLAIN: 1.0, MANY_COPIES: 1.25}
LIVE_TREES = {DRAFTS: 2.1, PLAIN: 1.0, **LIVE_COPIES}


@dataclass(frozen=True)
class MeasuredTree:
    """A tree's measured speed: a row's tokens in a step on the calibration prompts, and the step's duration."""

    beam_width: Size
    draft_length: Annotated[int, Field(ge=0, le=4096)]
    tree_size: Size
    tokens_per_step: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    step_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]

    @property
    def tree(self) -> Tree:
        return Tree(self.beam_width, self.draft_length, self.tree_size)

    def rate(self, ratio: float = 1.0) -> float:
        """Tokens per second of one row if drafts are accepted ``ratio`` times as often as in calibration."""
        return (1.0 + ratio * (self.tokens_per_step - 1.0)) / self.step_seconds


@dataclass(frozen=True)
class RowPlan:
    """The measured trees for at most ``num_rows`` rows: plain decoding, and all that are fastest at some acceptance."""

    num_rows: Annotated[int, Field(ge=1)]
    choices: Annotated[tuple[MeasuredTree, ...], Field(fail_fast=True)]

    def best(self, ratio: float = 1.0) -> MeasuredTree:
        """The fastest choice at an acceptance of ``ratio``; of equal choices the smaller tree."""
        return max(self.choices, key=lambda choice: (choice.rate(ratio), -choice.tree_size))


@dataclass(frozen=True, kw_only=True)
class TunedSizes:
    """The content of the file of `drafter tune`: plans in the order of their rows, and what the measurement depends on
    (:func:`conditions_of`). Without the fingerprint of a drafter the plans are for every drafter of the shape.
    """

    schema: Literal["drafter-tuned/1"] = SCHEMA
    device: str
    dtype: str
    runtime: str
    compile: bool
    target_fingerprint: str
    drafter_fingerprint: str | None = None
    plans: Annotated[tuple[RowPlan, ...], Field(min_length=1, fail_fast=True)]

    def summary(self) -> str:
        return "drafter, trees by rows: " + "; ".join(f"{plan.num_rows}: {plan.best().tree}" for plan in self.plans)


def read_tuned(path: Path) -> TunedSizes:
    """The measured sizes of a file (FileNotFoundError; ValueError: another schema, or impossible numbers)."""
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"--tuned {error}") from error
    try:
        found = validated(TunedSizes, content, "the file")
        for plan in found.plans:
            if PLAIN not in [choice.tree for choice in plan.choices]:
                raise ValueError(f"no measurement of plain decoding for {plan.num_rows} rows")
    except ValueError as error:
        raise ValueError(f"--tuned {path}: {error}: run `drafter tune` again") from error
    return replace(found, plans=tuple(sorted(found.plans, key=lambda plan: plan.num_rows)))


def is_tuned_file(path: Path) -> bool:
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("schema") == SCHEMA


@dataclass
class _Acceptance:
    """Accepted draft tokens over the expected ones, both decaying, approximately alike for the trees of one kind."""

    weight: float  # of the expectation, in drafted tokens
    kept: float = 0.0
    expected: float = 0.0
    prior: float = 0.0

    @property
    def ratio(self) -> float:
        expected = self.expected + self.prior
        return (self.kept + self.prior) / expected if expected > 0 else 1.0

    def add(self, kept: int, expected: float, num_rows: int) -> None:
        keep = (1 - 1 / _AVERAGED) ** num_rows
        self.kept, self.expected = self.kept * keep + kept, self.expected * keep + expected
        self.prior *= keep

    def fade(self) -> None:
        """A step of another kind, which shows nothing: a bad ratio is slowly forgotten."""
        self.kept, self.expected = self.kept * (1 - 1 / _MEMORY), self.expected * (1 - 1 / _MEMORY)
        self.prior += (self.weight - self.prior) / _MEMORY


@dataclass
class _Times:
    """What is measured of the trees at one number of rows: durations by tree and nodes, and seconds a unit.

    A step takes up to twice its time after a start, a third more after a prefill, and the speed of a machine drifts. So
    the duration of a tree is that of its trial over the pace of the steps just before, in units of the first tree. A
    tree has as many nodes as are worth their cost: durations are kept by nodes, and the tree's cost is their mean.
    """

    durations: defaultdict[tuple[Tree, int], deque[float]] = field(
        default_factory=lambda: defaultdict(partial(deque, maxlen=_TIMES))
    )
    paces: deque[float] = field(default_factory=partial(deque, maxlen=_PAUSE))  # of the steps since the last trial
    pace: float | None = None  # the median of the last when the present trial began; None: the trial of the first tree
    used: dict[Tree, int] = field(default_factory=dict)  # the step of the last use of each tree
    # How often each tree had so many nodes of late, decaying.
    weights: defaultdict[Tree, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    node_cost: float | None = None  # of these durations, once somebody has asked


class Sizer:
    """Chooses the fastest tree for the number of rows and the recent acceptance: one table of step times by rows and
    tree, which starts from measured or assumed ``plans``, and which trials go on measuring, if there is anything to
    try.

    A tree whose drafts are rejected gives way to smaller ones, copies alone and plain decoding. Its kind slowly forgets
    the low acceptance, until a tree is the fastest again for a few steps.

    **Trials** come where measuring is cheap. The first tree of each kind and plain decoding, which comes first for many
    rows, are tried for a few steps each, and the fastest goes on. Another tree is tried first where the next larger or
    smaller tree of its kind is the fastest; a tree that was tried is tried again, a slow one more seldom than a fast
    one, so that its trials cost at most ``_TRIAL_COST`` of the time. Trials keep a distance. ``tries``: tokens per step
    of usual drafts by tree, plain decoding included. ``used``: steps of each tree since the last look.
    """

    def __init__(self, plans: Sequence[RowPlan] = (), tries: Mapping[Tree, float] | None = None) -> None:
        self._plans = plans
        self._tries = {tree: MeasuredTree(*tree, number, 1.0) for tree, number in (tries or {}).items()}
        self.trees = list(dict.fromkeys([PLAIN, *self._tries, *(each.tree for plan in plans for each in plan.choices)]))
        self._table: dict[int, dict[Tree, MeasuredTree]] = {}
        if not self._tries:
            self._table = {plan.num_rows: {each.tree: each for each in plan.choices} for plan in plans}
        self._times: dict[int, _Times] = {}
        self._num_steps = self._num_left = self._rows = 0
        self._is_live = False  # trials go on at the present number of rows
        self.used: Counter[Tree] = Counter()
        self.forget()

    def forget(self) -> None:
        """Forget all acceptance: start again with the expected one."""
        # Drafted tokens: a guess weighs less than a measurement, and copies depend on the text more than on a drafter.
        weights = {False: 8.0, True: 0.6} if self._tries else {False: 16.0, True: 16.0}
        self._seen = {is_copies: _Acceptance(weight, prior=weight) for is_copies, weight in weights.items()}
        self._copy_gain = _COPY_GAIN
        self._present = MeasuredTree(*PLAIN, 1.0, 1.0)

    def _rate(self, choice: MeasuredTree) -> float:
        return choice.rate(self._seen[choice.tree.is_copies].ratio)

    def choose(self, num_rows: int) -> Tree:
        """The tree for the next step of ``num_rows`` rows: the fastest, or a tree on trial."""
        self._is_live = bool(self._tries) and num_rows <= _MOST_ROWS
        rows = bucket(num_rows) if self._is_live else next((each for each in self._table if each >= num_rows), 0)
        is_same, self._rows = rows == self._rows, rows
        goes_on = is_same and self._num_left > 1 and self.loss(self._present.tree) < _MOST_LOSS
        self._num_left = self._num_left - 1 if goes_on else 0
        self._num_steps += 1
        if self._is_live and rows not in self._times:
            self._start(rows, num_rows)
        if self._num_left <= 0 and (due := self._next_trial()) is not None:
            times = self._times[rows]
            times.pace = median(list(times.paces)[-_TRIAL_STEPS:]) if times.paces else times.pace
            times.paces.clear()
            if self.loss(due) >= _MOST_LOSS:  # the one step of its trial is measured alone
                for (tree, _), durations in times.durations.items():
                    if tree == due:
                        durations.clear()
            self._present, self._num_left = self._table[rows].get(due) or self._tries[due], _TRIAL_STEPS
        elif self._num_left <= 0:
            self._present = self._fastest()
        tree = self._present.tree
        if self._is_live:
            self._times[rows].used[tree] = self._num_steps
        for is_copies, seen in self._seen.items():
            if tree.is_plain or is_copies != tree.is_copies:
                seen.fade()
        self.used[tree] += 1
        return tree

    def observe(self, num_accepted: Sequence[int], seconds: float, num_nodes: int) -> None:
        """What the step has shown: accepted draft tokens of each row that used its drafts, duration, and nodes."""
        tree = self._present.tree
        if self._is_live:
            self._time(tree, seconds, num_nodes)
            self._count_copies(tree, num_accepted, num_nodes)
        if not tree.is_plain and num_accepted:
            expected = len(num_accepted) * (self._present.tokens_per_step - 1.0)
            self._seen[tree.is_copies].add(sum(num_accepted), expected, len(num_accepted))

    def loss(self, tree: Tree) -> float:
        """Time lost by a tree against the fastest one, as a share of the latter's; 0 before the tree is measured."""
        choices = self._table.get(self._rows, {})
        return max(map(self._rate, choices.values())) / self._rate(choices[tree]) - 1 if tree in choices else 0.0

    def _fastest(self) -> MeasuredTree:
        """The fastest tree; copies for plain decoding while they pay: with nothing to copy, a step is a plain one."""
        choices = self._table.get(self._rows)
        if not choices:
            return MeasuredTree(*PLAIN, 1.0, 1.0)
        best = max(choices.values(), key=lambda choice: (self._rate(choice), -choice.tree_size))
        present = choices.get(self._present.tree, best)
        fastest = best if self._rate(best) > _GAIN_TO_SWITCH * self._rate(present) else present
        copies = [choice for tree, choice in choices.items() if tree.is_copies]
        pays = self._is_live and fastest.tree.is_plain and self._copy_gain > 0
        return max(copies, key=self._rate) if pays and copies else fastest

    def _count_copies(self, tree: Tree, num_accepted: Sequence[int], num_nodes: int) -> None:
        """What copies saved of late, less what their nodes cost, in whole trees of nodes."""
        if not tree.is_copies:
            self._copy_gain += (_COPY_GAIN - self._copy_gain) / _COPY_MEMORY
        elif num_nodes > 1 and num_accepted:
            gain = sum(num_accepted) / len(num_accepted) - self._cost(tree, num_nodes)
            gain /= max(self.node_cost, _LEAST_COST) * (tree.tree_size - 1)
            self._copy_gain = min(self._copy_gain * (1 - 1 / _AVERAGED) + gain, _MOST_COPY_GAIN)

    def _cost(self, tree: Tree, num_nodes: int) -> float:
        """Plain steps that the nodes of a tree cost beyond the root; 0 before a plain step was measured."""
        durations = self._times[self._rows].durations
        plain = durations.get((tree, 1)) or durations.get((PLAIN, 1))
        return max(median(durations[tree, num_nodes]) / median(plain) - 1, 0.0) if plain else 0.0

    @property
    def node_cost(self) -> float:
        """Plain steps that one more node of a tree costs at the present number of rows; 0: not measured."""
        if (times := self._times.get(self._rows)) is None:
            return 0.0
        if times.node_cost is None:
            measured = [each for each, own in times.durations.items() if own and each[1] > 1]
            copies = [each for each in measured if each[0].is_copies]  # whose drafts cost nothing
            costs = [self._cost(tree, nodes) / (nodes - 1) for tree, nodes in copies or measured]
            times.node_cost = median(costs) if costs else 0.0
        return times.node_cost

    # -- trials ----------------------------------------------------------------------------------------------------

    def _start(self, rows: int, num_rows: int) -> None:
        """The table of another number of rows: of the plan for it, in units of its fastest tree, which comes first."""
        times = self._times[rows] = _Times()
        plan = next((plan for plan in self._plans if plan.num_rows >= num_rows), None)
        self._table[rows] = {}
        if plan is None or plan.best().tree.is_plain:  # then copies come first: a calibration has few
            return
        unit = plan.best().step_seconds
        for each in plan.choices:
            tokens = each.tokens_per_step if each.tree.is_plain else max(each.tokens_per_step, 1 + _LEAST_GAIN)
            self._table[rows][each.tree] = replace(each, tokens_per_step=tokens, step_seconds=each.step_seconds / unit)
            times.durations[each.tree, each.tree_size].append(each.step_seconds / unit)
            times.used[each.tree] = self._num_steps

    def _next_trial(self) -> Tree | None:
        if not self._is_live:
            return None
        times, choices = self._times[self._rows], self._table[self._rows]
        if COPIES in self._tries and self._plans and not choices:
            return COPIES
        kinds = {tree.kind for tree in choices}
        # Behind a first trial of drafts comes plain decoding at once, the measure of all.
        is_measured = any(tree.is_plain or tree.is_copies for tree in choices)
        if choices and len(times.paces) < (_PAUSE if is_measured else _TRIAL_STEPS):
            return None
        if len(choices) < len({tree.kind for tree in self._tries}):
            first = [PLAIN] if self._rows > 2 else []  # drafts of many rows may take several times as long
            return next(tree for tree in (*first, *self._tries) if tree.kind not in kinds)
        best = min(choices, key=self.loss)
        for is_copies in (False, True):
            own = [tree for tree in self._tries if tree.is_plain or tree.is_copies == is_copies]
            own.sort(key=attrgetter("tree_size"))
            if best in own:
                for tree in own[max(own.index(best) - 1, 0) : own.index(best) + 2]:
                    if tree not in choices:
                        return tree
        for tree in choices:
            if self._num_steps - times.used[tree] > _TRIAL_STEPS * max(self.loss(tree), _LEAST_LOSS) / _TRIAL_COST:
                return tree
        return None

    def _time(self, tree: Tree, seconds: float, num_nodes: int) -> None:
        """Keep the duration of a step, in units of the pace."""
        times, choices = self._times[self._rows], self._table[self._rows]
        durations = times.durations[tree, num_nodes]
        if self._num_left > 0 and times.pace is not None:
            durations.append(seconds / times.pace)
            times.node_cost = None
        else:
            if not durations or (times.paces and len(durations) < _TIMES):
                durations.append(seconds / median(list(times.paces)[-_TRIAL_STEPS:] or [times.pace or seconds]))
                times.node_cost = None
            times.paces.append(seconds / median(durations))
        kept = {nodes: weight * (1 - 1 / _AVERAGED) for nodes, weight in times.weights[tree].items()}
        times.weights[tree] = weights = {**kept, num_nodes: kept.get(num_nodes, 0.0) + 1.0}
        measured = {nodes: weight for nodes, weight in weights.items() if times.durations[tree, nodes]}
        cost = sum(weight * median(times.durations[tree, nodes]) for nodes, weight in measured.items())
        choices[tree] = replace(choices.get(tree) or self._tries[tree], step_seconds=cost / sum(measured.values()))


def trees_to_try(own: Tree, *, copying: bool, is_drafter: bool) -> dict[Tree, float]:
    """The trees that an engine tries on a CPU, with the tokens per step of usual drafts; ``own``: the method's."""
    drafts = {} if own.is_copies or is_drafter else {own: 1 + 0.6 * own.draft_length}
    trees = LIVE_TREES if is_drafter else {**drafts, **LIVE_COPIES}
    return {tree: number for tree, number in trees.items() if copying or not tree.is_copies}


def assumed_plan(tree: Tree, cheap_tokens: int) -> RowPlan:
    """A table where nothing was measured: a tree takes a seventh more time while its rows' tokens are cheap."""
    plain, assumed = MeasuredTree(*PLAIN, 1.0, 1.0), MeasuredTree(*tree, 1 + tree.tree_size**0.3, 1.15)
    return RowPlan(max(1, cheap_tokens // tree.tree_size), (plain, assumed))


def device_name(target: Target) -> str:
    """Name of the accelerator, or name of the processor and number of threads, for measured step times."""
    device = target.device
    if device.type != "cpu":
        accelerator = torch.get_device_module(device)
        return str(accelerator.get_device_name(device)) if hasattr(accelerator, "get_device_name") else device.type
    from drafter.utils.provenance import cpu_name

    return f"{cpu_name() or device.type}, {target.traits.num_threads} threads"


def fingerprint_of_weights(drafter: "RecurrentDrafter") -> str:
    """Short hash of a drafter's weights in memory; differs between training steps and between number formats."""
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def conditions_of(target: Target, drafter: "RecurrentDrafter", *, is_compiled: bool) -> dict[str, Any]:
    """What measured sizes depend on: machine, target, drafter, and whether the steps are compiled."""
    return {
        "device": device_name(target),
        "dtype": target.traits.number_format,
        "runtime": target.runtime.name,
        "compile": is_compiled,
        "target_fingerprint": target.fingerprint,
        "drafter_fingerprint": fingerprint_of_weights(drafter),
    }


def misfit(sizes: TunedSizes, present: Mapping[str, Any]) -> str:
    """The first condition of a measurement that is not the present one, in words; empty if the sizes fit."""
    for name, found in present.items():
        measured = getattr(sizes, name)
        is_same = name == "target_fingerprint" and same_fingerprint(measured, found)
        if measured not in (None, found) and not is_same:
            return f"was measured for another {name.partition('_')[0]} ({str(measured)[:99]}, not {str(found)[:99]})"
    return ""
