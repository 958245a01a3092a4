"""Tune: decode with every candidate tree on this machine, and choose a tree for each number of rows.

The candidates and plain decoding take turns, step by step, while the same rows answer calibration prompts. Every step
gives the seconds of the whole step for its number of rows. The tokens of the steps are counted over all numbers of
rows, because acceptance does not depend on the other rows.
"""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle, islice
from statistics import fmean, median

from tqdm import tqdm

from drafter.bench.settings import LARGEST_TREE, TuneOptions
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.request import Request
from drafter.engine.settings import EngineConfig
from drafter.engine.tuned import PLAIN, MeasuredTree, RowPlan, Tree, TreeSizer, TunedSizes, conditions_of
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target
from drafter.utils.tables import format_table

_NUM_ROUNDS = 40  # most steps of each candidate for each number of rows
_MIN_ROUNDS = 2  # counted rounds, whatever the time
_RATIOS = (0.4, 0.7, 1.0, 1.3)  # acceptance, relative to the calibration, for which the engine should have a tree
# Least speed-up of a tree over plain decoding, and its rise for every doubling of the rows: drafts let
# rows that start together end at different steps, and the last rows step nearly alone.
_WORTH, _WORTH_PER_DOUBLING = 1.03, 0.01
_TREE_SIZES_CPU, _TREE_SIZES = (2, 4, 6, 8, 12, 16), (4, 8, 16, 32, 48, 64)
# Largest tree size, with beam width and draft length up to this size.
_SHAPES = ((2, 2, 1), (6, 4, 2), (12, 4, 3), (24, 8, 4), (81, 16, 5), (LARGEST_TREE, 64, 16))


def candidates(tree_sizes: tuple[int, ...] | None, device: str, widest: int) -> list[Tree]:
    """The candidates on a device, by rising size, with beams of at most ``widest``."""
    sizes = tree_sizes or (_TREE_SIZES_CPU if device == "cpu" else _TREE_SIZES)
    shapes = [(size, *next(shape[1:] for shape in _SHAPES if size <= shape[0])) for size in sorted(set(sizes))]
    return [Tree(min(width, widest), length, size) for size, width, length in shapes]


def tune(target: Target, drafter: RecurrentDrafter, prompts: Sequence[list[int]], options: TuneOptions) -> TunedSizes:
    """Measure the candidates of the options on a loaded target and its drafter, and choose.

    Raises:
        ValueError: no tree can be drafted, or no prompt leaves room for an answer.
    """
    fitting = [prompt for prompt in prompts if 0 < len(prompt) <= target.max_length // 2]
    if not fitting:
        raise ValueError(
            f"--prompts hold none of at most {target.max_length // 2} tokens, half of the target's context"
        )
    calibration = Calibration(target, drafter, fitting, options)
    rows = sorted(set(options.batch_sizes))
    end = time.perf_counter() + options.seconds
    for place, num_rows in enumerate(tqdm(rows, desc="Tuning", unit="size", disable=None)):
        calibration.measure(num_rows, (end - time.perf_counter()) / (len(rows) - place))
    conditions = conditions_of(target, drafter, is_compiled=calibration.engine.plan.compile)
    return TunedSizes(**conditions, plans=tuple(RowPlan(num_rows, calibration.choices(num_rows)) for num_rows in rows))


class _Steered(TreeSizer):
    """A sizer whose caller sets the next tree."""

    def __init__(self, trees: list[Tree]) -> None:
        super().__init__(())
        self.trees, self.tree = trees, PLAIN

    def choose(self, num_rows: int) -> Tree:
        return self.tree


class Calibration:
    """Measures plain decoding and the candidates, for one number of rows after another.

    Attributes:
        engine: decodes the calibration prompts.
        seconds: durations of the steps by number of rows and tree.
        emitted: tokens of every step of every row by tree.
    """

    def __init__(
        self, target: Target, drafter: RecurrentDrafter, prompts: Sequence[list[int]], options: TuneOptions
    ) -> None:
        self._eos = target.eos_token_ids
        self._trees = [PLAIN, *candidates(options.tree_sizes, target.device.type, drafter.config.num_outputs)]
        self._steer = _Steered(self._trees)
        most = max(options.batch_sizes)
        config = EngineConfig(method="drafter", max_num_seqs=most, compile=options.compile, tuned="none")
        self.engine = Engine(target, drafter, config, sizer=self._steer)
        longest = max(map(len, prompts))
        max_new_tokens = max(1, min(options.max_new_tokens, target.max_length - longest))
        self.engine.reserve(longest + max_new_tokens + self._trees[-1].tree_size)
        # Rows decode on after the end of their answers, so that the number of rows does not change.
        self._params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        self._prompts = cycle(prompts)
        self.seconds: dict[int, dict[Tree, list[float]]] = {}
        self.emitted: defaultdict[Tree, list[int]] = defaultdict(list)

    def measure(self, num_rows: int, seconds: float) -> None:
        """Rounds of one step with each tree, while the time lasts.

        Candidates that plain decoding beats even with much easier text are left out, also for more rows.
        """
        end = time.perf_counter() + seconds
        times = self.seconds[num_rows] = {tree: [] for tree in self._trees}
        requests: list[Request] = []
        num_rounds = 0
        # The first round does not count.
        while num_rounds <= _MIN_ROUNDS or (num_rounds <= _NUM_ROUNDS and time.perf_counter() < end):
            for tree in self._trees:
                if not requests or any(request.is_finished for request in requests):
                    requests = self._start(num_rows)
                elapsed = self._step(tree, requests)
                if num_rounds > 0:
                    times[tree].append(elapsed)
            num_rounds += 1
            if num_rounds == 1 + _MIN_ROUNDS:
                fastest = {tree: self.measured(tree, min(times[tree])) for tree in self._trees}
                least = fastest.pop(PLAIN).rate()
                self._trees = [PLAIN, *(tree for tree, each in fastest.items() if each.rate(max(_RATIOS)) > least)]

    def _start(self, num_rows: int) -> list[Request]:
        """New requests, prefilled, instead of the running ones."""
        engine = self.engine
        engine.drop()
        self._steer.tree = PLAIN
        prompts = islice(self._prompts, num_rows)
        requests = [engine.add(engine.make_request(prompt, self._params, want_text=False)) for prompt in prompts]
        while not all(request.is_prefilled for request in requests):
            engine.step()
        return requests

    def _step(self, tree: Tree, requests: list[Request]) -> float:
        """Seconds of a step with one tree; its tokens are counted for rows whose answers go on."""
        is_going = {request.request_id: set(self._eos).isdisjoint(request.token_ids) for request in requests}
        self._steer.tree = tree
        start = time.perf_counter()
        updates = self.engine.step()
        seconds = time.perf_counter() - start
        for update in updates:
            if is_going[update.request.request_id] and not update.request.is_finished:
                self.emitted[tree].append(len(update.token_ids))
        return seconds

    def measured(self, tree: Tree, seconds: float) -> MeasuredTree:
        """A tree with its tokens per step so far, and the seconds of a step."""
        return MeasuredTree(*tree, max(1.0, fmean(self.emitted[tree] or [1])), seconds)

    def choices(self, num_rows: int) -> tuple[MeasuredTree, ...]:
        """Plain decoding, and the trees that are fastest at some acceptance and faster than plain decoding."""
        times = {tree: median(seconds) for tree, seconds in self.seconds[num_rows].items()}
        # A step with a tree is never cheaper than a plain step: a lower figure is noise.
        plain, *trees = (self.measured(tree, max(seconds, times[PLAIN])) for tree, seconds in times.items())
        least = (_WORTH + _WORTH_PER_DOUBLING * math.log2(num_rows)) * plain.rate()
        worth = RowPlan(num_rows, tuple(tree for tree in trees if tree.rate() > least))
        best = {worth.best(ratio) for ratio in _RATIOS if worth.choices}
        return (plain, *sorted(best, key=lambda choice: choice.tree[::-1]))


def tuned_table(sizes: TunedSizes) -> str:
    """The choice for each number of rows."""
    rows = []
    for plan in sizes.plans:
        best, plain = plan.best(), plan.plain
        tree = ["1", "-", "-"] if best.tree.is_plain else [str(best.tree[index]) for index in (2, 0, 1)]
        seconds = [f"{1000 * choice.step_seconds:.1f}" for choice in (best, plain)]
        rate = f"{plan.num_rows * best.rate():.1f}"
        speedup = f"{best.rate() / plain.rate():.2f}x"
        rows.append([str(plan.num_rows), *tree, f"{best.tokens_per_step:.2f}", *seconds, rate, speedup])
    columns = ("rows", "N", "W", "L", "tokens/step", "step ms", "plain ms", "tokens/s", "speedup")
    return format_table(columns, rows)
