"""Trees sized by measurement: the file of `drafter tune`, and the choice of a tree for each step.

The choice changes the speed of decoding and no token.
"""

import hashlib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field

from drafter.engine.scheduler import bucket
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target
from drafter.utils.fingerprint import same_fingerprint
from drafter.utils.parse import read_json, validated
from drafter.utils.provenance import cpu_name

SCHEMA: Literal["drafter-tuned/1"] = "drafter-tuned/1"

Size = Annotated[int, Field(ge=1, le=4096)]  # a number of a tree in a file

_WINDOW = 128  # row-steps in the exponential average of acceptance
_MEMORY = 2048  # plain steps in which most of a bad acceptance is forgotten, so that a tree is tried again
_GAIN_TO_SWITCH = 1.02  # speed-up for which the present tree is replaced
_NUM_FIRST = 2  # trees that are tried at the beginning
_TRIAL_STEPS = 3  # steps of a trial of a tree
_TRIAL_COST = 0.003  # of the time, for the trials of each tree
_LEAST_LOSS = 0.05  # a tree that is nearly as fast as the best is tried as if it lost so much
_TIMES = 2 * _TRIAL_STEPS  # durations of a tree whose median counts
_PAUSE = 12  # steps between two trials, after which a start is over; a short answer pays for few trials


class Tree(NamedTuple):
    """Size of a tree: beam width W, draft length L, nodes N (root included). N = 1 is plain decoding."""

    beam_width: int
    draft_length: int
    tree_size: int

    @property
    def is_plain(self) -> bool:
        return self.tree_size == 1


PLAIN = Tree(1, 1, 1)
# What an engine tries on a CPU where nothing was measured, with the tokens per step of a usual drafter.
LIVE_TREES = {Tree(2, 2, 4): 1.9, PLAIN: 1.0, Tree(1, 1, 2): 1.5, Tree(4, 3, 8): 2.3}


@dataclass(frozen=True)
class MeasuredTree:
    """A tree with its measured speed at some number of rows.

    Attributes:
        beam_width, draft_length, tree_size: size of the tree.
        tokens_per_step: tokens of a row in a step, on the calibration prompts.
        step_seconds: duration of a step of all rows.
    """

    beam_width: Size
    draft_length: Size
    tree_size: Size
    tokens_per_step: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    step_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]

    @property
    def tree(self) -> Tree:
        """The size alone."""
        return Tree(self.beam_width, self.draft_length, self.tree_size)

    def rate(self, ratio: float = 1.0) -> float:
        """Tokens per second of one row if drafts are accepted ``ratio`` times as often as in calibration."""
        return (1.0 + ratio * (self.tokens_per_step - 1.0)) / self.step_seconds


@dataclass(frozen=True)
class RowPlan:
    """The measured trees for at most ``num_rows`` rows.

    Attributes:
        num_rows: number of rows of the measurement.
        choices: plain decoding, and every tree that is fastest at some acceptance.
    """

    num_rows: Annotated[int, Field(ge=1)]
    choices: Annotated[tuple[MeasuredTree, ...], Field(fail_fast=True)]

    @property
    def plain(self) -> MeasuredTree:
        """The measurement of plain decoding."""
        return next(choice for choice in self.choices if choice.tree.is_plain)

    def best(self, ratio: float = 1.0) -> MeasuredTree:
        """The fastest choice at an acceptance of ``ratio``; of equal choices the smaller tree."""
        return max(self.choices, key=lambda choice: (choice.rate(ratio), -choice.tree_size))


@dataclass(frozen=True, kw_only=True)
class TunedSizes:
    """The measured plans of one machine, target and drafter: the content of the file of `drafter tune`.

    Attributes:
        device, dtype, runtime, compile, target_fingerprint, drafter_fingerprint: what the measurement depends on
            (:func:`conditions_of`). Without the fingerprint of a drafter the plans are for every drafter of the shape.
        plans: plans in the order of their rows.
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
        """The calibrated choice for each number of rows, in one line."""
        sizes = []
        for plan in self.plans:
            tree = plan.best().tree
            size = "plain" if tree.is_plain else f"W {tree.beam_width} L {tree.draft_length} N {tree.tree_size}"
            sizes.append(f"{plan.num_rows}: {size}")
        return "drafter, trees by rows: " + "; ".join(sizes)


def read_tuned(path: Path) -> TunedSizes:
    """The measured sizes of a file; further keys of the file are ignored.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another schema, or impossible numbers.
    """
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
    """Whether `drafter tune` wrote the file."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("schema") == SCHEMA


class TreeSizer:
    """Chooses the fastest measured tree for the number of rows and the recent acceptance.

    The recent acceptance is a ratio: accepted draft tokens over the accepted draft tokens of the calibration. Both
    numbers decay exponentially. The ratio scales the tokens per step of all trees alike, which is an approximation.
    Plain decoding is the fastest choice where no tree pays. Plain steps show no acceptance, so they slowly forget the
    low ratio, until a tree is the fastest choice again for a few steps.

    Args:
        plans: the measured plans, in the order of their rows.

    Attributes:
        trees: all trees that the sizer may choose, plain decoding included.
    """

    calibration_weight = 16.0  # in drafted tokens

    def __init__(self, plans: Sequence[RowPlan]) -> None:
        self._plans = plans
        self.trees = list(dict.fromkeys([PLAIN, *(choice.tree for plan in plans for choice in plan.choices)]))
        self.forget()

    def forget(self) -> None:
        """Forget all observations: start again with the acceptance of the calibration."""
        self._kept = 0.0
        self._expected = 0.0
        self._prior = self.calibration_weight
        self._present: MeasuredTree | None = None

    @property
    def ratio(self) -> float:
        """Recent acceptance relative to the calibration."""
        expected = self._expected + self._prior
        return (self._kept + self._prior) / expected if expected > 0 else 1.0

    def choose(self, num_rows: int) -> Tree:
        """The tree for the next step of ``num_rows`` rows."""
        plan = self._plan_for(num_rows)
        if plan is None:
            self._present = None  # no measurement for so many rows
            return PLAIN
        best = plan.best(self.ratio)
        tree = None if self._present is None else self._present.tree
        present = next((choice for choice in plan.choices if choice.tree == tree), best)
        is_clear = best.rate(self.ratio) > _GAIN_TO_SWITCH * present.rate(self.ratio)
        self._present = best if is_clear else present
        if self._present.tree.is_plain:
            self._fade(1 - 1 / _MEMORY)
            self._prior += (self.calibration_weight - self._prior) / _MEMORY
        return self._present.tree

    def _plan_for(self, num_rows: int) -> RowPlan | None:
        return next((plan for plan in self._plans if plan.num_rows >= num_rows), None)

    def observe(self, num_accepted: Sequence[int], seconds: float) -> None:
        """What the step has shown: accepted draft tokens of each row that used its drafts, and its duration."""
        if self._present is None or self._present.tree.is_plain or not num_accepted:
            return
        keep = (1 - 1 / _WINDOW) ** len(num_accepted)
        self._fade(keep)
        self._prior *= keep
        self._kept += sum(num_accepted)
        self._expected += len(num_accepted) * (self._present.tokens_per_step - 1.0)

    def _fade(self, keep: float) -> None:
        """Weigh all earlier observations less."""
        self._kept *= keep
        self._expected *= keep


@dataclass
class _Trials:
    """What an engine knows of its trees at one number of rows.

    A step takes up to twice its time after a start, a third more after a prefill, and the speed of a machine drifts. So
    the duration of a tree is that of its trial over the pace of the steps just before, in units of the first tree.

    Attributes:
        plan: the trees that were tried, with the medians of their durations.
        durations: the latest durations of each tree, from its trials.
        paces: seconds a unit in the steps since the last trial, the latest ``_PAUSE``.
        pace: the median of the last of them when the present trial began; None: the trial of the first tree.
        used: the step of the last use of each tree.
    """

    plan: RowPlan
    durations: defaultdict[Tree, deque[float]] = field(
        default_factory=lambda: defaultdict(partial(deque, maxlen=_TIMES))
    )
    paces: deque[float] = field(default_factory=partial(deque, maxlen=_PAUSE))
    pace: float | None = None
    used: dict[Tree, int] = field(default_factory=dict)


class LiveSizer(TreeSizer):
    """Sizes trees by the steps of this engine alone, where nothing was measured before.

    After the first tree the second is tried for a few steps, and the faster one goes on. Another tree is tried first
    where the next larger or smaller tree is the fastest; a tree that was tried is tried again, a slow one more seldom
    than a fast one, so that its trials cost at most ``_TRIAL_COST`` of the time. Trials keep a distance.

    Args:
        expected: tokens per step of a usual drafter with each tree, plain decoding included.
    """

    calibration_weight = 8.0  # a guess about drafters weighs less than a measurement of one

    def __init__(self, expected: Mapping[Tree, float]) -> None:
        self._choices = {tree: MeasuredTree(*tree, number, 1.0) for tree, number in expected.items()}
        super().__init__([RowPlan(1, tuple(self._choices.values()))])
        self._by_size = sorted(self.trees, key=lambda tree: tree.tree_size)
        self._trials_of: dict[int, _Trials] = {}  # by bucket of rows
        self._num_steps = self._num_left = self._rows = 0

    def choose(self, num_rows: int) -> Tree:
        """The tree for the next step of ``num_rows`` rows: the fastest, or a tree on trial."""
        self._num_steps += 1
        is_same, self._rows = bucket(num_rows) == self._rows, bucket(num_rows)
        trials = self._trials_of.setdefault(self._rows, _Trials(RowPlan(num_rows, ())))
        self._num_left = self._num_left - 1 if is_same else 0
        if self._num_left > 0 and self._present is not None:
            tree = self._present.tree
        elif (due := self._due(trials)) is not None:
            self._present, self._num_left, tree = self._choices[due], _TRIAL_STEPS, due
            trials.pace = median(list(trials.paces)[-_TRIAL_STEPS:]) if trials.paces else None
            trials.paces.clear()
        else:
            tree = super().choose(num_rows)
        trials.used[tree] = self._num_steps
        return tree

    def observe(self, num_accepted: Sequence[int], seconds: float) -> None:
        """Learn as the base class does, and from the duration of the step."""
        assert self._present is not None
        trials, tree = self._trials_of[self._rows], self._present.tree
        durations = trials.durations[tree]
        if self._num_left > 0 and trials.pace is not None:
            durations.append(seconds / trials.pace)
        else:
            if not durations:
                durations.append(1.0)
            trials.paces.append(seconds / median(durations))
        timed = replace(self._choices[tree], step_seconds=median(durations))
        others = (choice for choice in trials.plan.choices if choice.tree != tree)
        trials.plan = replace(trials.plan, choices=(*others, timed))
        super().observe(num_accepted, seconds)

    def _due(self, trials: _Trials) -> Tree | None:
        """The tree whose trial begins now."""
        choices, ratio = trials.plan.choices, self.ratio
        if choices and len(trials.paces) < _PAUSE:
            return None
        if len(choices) < _NUM_FIRST:
            return next(tree for tree in self._choices if tree not in trials.used)
        best = trials.plan.best(ratio)
        place = self._by_size.index(best.tree)
        for tree in self._by_size[max(place - 1, 0) : place + 2]:
            if tree not in trials.used:
                return tree
        for choice in choices:
            loss = max(best.rate(ratio) / choice.rate(ratio) - 1, _LEAST_LOSS)
            if self._num_steps - trials.used[choice.tree] > _TRIAL_STEPS * loss / _TRIAL_COST:
                return choice.tree
        return None

    def _plan_for(self, num_rows: int) -> RowPlan:
        return self._trials_of[self._rows].plan


def device_name(target: Target) -> str:
    """Name of the accelerator, or name of the processor and number of threads, for measured step times."""
    device = target.device
    if device.type != "cpu":
        accelerator = torch.get_device_module(device)
        return str(accelerator.get_device_name(device)) if hasattr(accelerator, "get_device_name") else device.type
    return f"{cpu_name() or device.type}, {target.traits.num_threads} threads"


def fingerprint_of_weights(drafter: RecurrentDrafter) -> str:
    """Short hash of a drafter's weights in memory; differs between training steps and between number formats."""
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def conditions_of(target: Target, drafter: RecurrentDrafter, *, is_compiled: bool) -> dict[str, Any]:
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
