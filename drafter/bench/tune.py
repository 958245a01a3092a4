"""Tune: the engine's own sizer over calibration prompts, with turns in place of choices, and its table as a file.

The candidates, copies alone and plain decoding take turns, step by step. The tokens of the steps are counted over all
numbers of rows, because acceptance does not depend on the other rows.
"""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from statistics import fmean

from tqdm import tqdm

from drafter.bench.settings import LARGEST_TREE, TuneOptions
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.engine.tuned import (
    COPIES,
    MANY_COPIES,
    PLAIN,
    MeasuredTree,
    RowPlan,
    Sizer,
    Tree,
    TunedSizes,
    conditions_of,
)
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
    """The candidates on a device: copies alone, then trees by rising size, with beams of at most ``widest``."""
    sizes = tree_sizes or (_TREE_SIZES_CPU if device == "cpu" else _TREE_SIZES)
    shapes = [(size, *next(shape[1:] for shape in _SHAPES if size <= shape[0])) for size in sorted(set(sizes))]
    return [COPIES, MANY_COPIES, *(Tree(min(width, widest), length, size) for size, width, length in shapes)]


def tune(target: Target, drafter: RecurrentDrafter, prompts: Sequence[list[int]], options: TuneOptions) -> TunedSizes:
    """The best of the candidates, measured; ValueError where no prompt leaves room for an answer."""
    fitting = [prompt for prompt in prompts if 0 < len(prompt) <= target.max_length // 2]
    if not fitting:
        raise ValueError(
            f"--prompts hold none of at most {target.max_length // 2} tokens, half of the target's context"
        )
    rows, longest = sorted(set(options.batch_sizes)), max(map(len, fitting))
    tour = Tour(candidates(options.tree_sizes, target.device.type, drafter.config.num_outputs))
    engine = Engine(target, drafter, EngineConfig(method="drafter", max_num_seqs=rows[-1], tuned="none"), sizer=tour)
    params = SamplingParams(max_new_tokens=max(1, min(options.max_new_tokens, target.max_length - longest)))
    engine.reserve(longest + params.max_new_tokens + engine.num_nodes)
    queue, end = cycle(fitting), time.perf_counter() + options.seconds
    for place, num_rows in enumerate(tqdm(rows, desc="Tuning", unit="size", disable=None)):
        stop = time.perf_counter() + (end - time.perf_counter()) / (len(rows) - place)
        while tour.goes_on(num_rows, is_late=time.perf_counter() > stop):
            while engine.num_running + engine.num_waiting < num_rows:
                engine.add(engine.make_request(next(queue), params, want_text=False))
            engine.step()
        engine.drop()
    conditions = conditions_of(target, drafter, is_compiled=engine.plan.compile)
    return TunedSizes(**conditions, plans=tuple(RowPlan(num_rows, tour.choices(num_rows)) for num_rows in rows))


class Tour(Sizer):
    """A sizer whose trees take turns, step by step.

    Attributes:
        seconds: durations of the steps by number of rows and tree.
        accepted: draft tokens of every step of every row by tree.
    """

    def __init__(self, trees: Sequence[Tree]) -> None:
        super().__init__()
        self.trees = [PLAIN, *trees]
        self._turns = list(self.trees)
        self.seconds: defaultdict[int, defaultdict[Tree, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.accepted: defaultdict[Tree, list[int]] = defaultdict(list)

    def choose(self, num_rows: int) -> Tree:
        """The tree with the fewest steps."""
        self._rows = num_rows
        self._tree = min(self._turns, key=lambda tree: len(self.seconds[num_rows][tree]))
        return self._tree

    def observe(self, num_accepted: Sequence[int], seconds: float, num_nodes: int) -> None:
        """Keep both. After some rounds, trees that lose to plain decoding even with much easier text have no turn."""
        times = self.seconds[self._rows]
        times[self._tree].append(seconds)
        self.accepted[self._tree].extend(num_accepted)
        if all(len(times[tree]) == _MIN_ROUNDS for tree in self._turns):
            rates = {tree: self._measured(tree, min(times[tree])).rate(max(_RATIOS)) for tree in self._turns}
            self._turns = [tree for tree in self._turns if tree.is_plain or rates[tree] > rates[PLAIN]]

    def goes_on(self, num_rows: int, *, is_late: bool) -> bool:
        """Whether these rows need more steps."""
        least = min(len(self.seconds[num_rows][tree]) for tree in self._turns)
        return least < (_MIN_ROUNDS if is_late else _NUM_ROUNDS)

    def _measured(self, tree: Tree, seconds: float) -> MeasuredTree:
        return MeasuredTree(*tree, 1.0 + fmean(self.accepted[tree] or [0]), seconds)

    def choices(self, num_rows: int) -> tuple[MeasuredTree, ...]:
        """Plain decoding, and the trees that are fastest at some acceptance and faster than plain decoding."""
        # The slowest tenth is other programs'. Trees of copies have fewer nodes where nothing is copied: no median.
        times = {
            tree: fmean(sorted(seconds)[: math.ceil(0.9 * len(seconds))])
            for tree, seconds in self.seconds[num_rows].items()
        }
        # A step with a tree is never cheaper than a plain step: a lower figure is noise.
        plain, *trees = (self._measured(tree, max(times[tree], times[PLAIN])) for tree in self.trees if tree in times)
        least = (_WORTH + _WORTH_PER_DOUBLING * math.log2(num_rows)) * plain.rate()
        worth = RowPlan(num_rows, tuple(tree for tree in trees if tree.rate() > least))
        best = {worth.best(ratio) for ratio in _RATIOS if worth.choices}
        return (plain, *sorted(best, key=lambda choice: choice.tree[::-1]))


def tuned_table(sizes: TunedSizes) -> str:
    """The choice for each number of rows."""
    lines = []
    for plan in sizes.plans:
        best, plain = plan.best(), next(each for each in plan.choices if each.tree.is_plain)
        tree = [str(best.tree_size), "-", "-"] if best.tree.is_plain else [str(best.tree[index]) for index in (2, 0, 1)]
        seconds = [f"{1000 * choice.step_seconds:.1f}" for choice in (best, plain)]
        speeds = [f"{plan.num_rows * best.rate():.1f}", f"{best.rate() / plain.rate():.2f}x"]
        lines.append([str(plan.num_rows), *tree, f"{best.tokens_per_step:.2f}", *seconds, *speeds])
    columns = ("rows", "N", "W", "L", "tokens/step", "step ms", "plain ms", "tokens/s", "speedup")
    return format_table(columns, lines)
