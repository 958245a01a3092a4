"""Pictures of a benchmark as PNG and SVG. The only place with matplotlib.

A bar at each mark spans the least and the greatest of the rounds. Titles name what is drawn; readers judge.
"""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from drafter.bench.summary import Condition, Span, Summary, Tables, by_batch_size

_INK, _FAINT, _GRID = "#222222", "#8a8a8a", "#dddddd"
# Okabe, Ito: "Color Universal Design", 2008, without the yellow, which is hard to see on white.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_BASELINE_STYLE = {"color": "#6b6b6b", "marker": "."}
_OFFSET = 0.7  # share of a category's row over which the marks of the methods spread, so that none hides another
_STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 10, "axes.titlesize": 12, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.titlepad": 26, "axes.edgecolor": _FAINT, "axes.labelcolor": _INK,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "text.color": _INK,
    "xtick.color": _INK, "ytick.color": _INK,
    "svg.hashsalt": "drafter",  # the same picture is the same file
    "svg.fonttype": "none",
}  # fmt: skip


def draw_all(tables: Tables, out: Path) -> list[Path]:
    """Every picture that the results have data for, as PNG and SVG in the folder ``out``; the PNG files."""
    pictures: dict[str, Figure | None] = {}
    with matplotlib.rc_context(_STYLE):
        for condition, methods in tables.items():
            suffix = f"{_suffix(condition)}-batch{condition.batch_size}"
            pictures[f"speedup-by-category-{suffix}"] = plot_categories(condition, methods)
            pictures[f"speedup-by-tree-size-{suffix}"] = plot_tree_sizes(condition, methods)
        for condition, by_size in by_batch_size(tables).items():
            pictures[f"tokens-per-second-by-batch-{_suffix(condition)}"] = plot_rates(condition, by_size)
        return [_save(figure, out, name) for name, figure in pictures.items() if figure is not None]


def plot_categories(condition: Condition, methods: Sequence[Summary]) -> Figure | None:
    """Speed over plain decoding by kind of prompt: one band for each category, one mark for each method."""
    shown = _fastest([s for s in methods if len(s.category_speedups) > 1 and not s.is_baseline])
    if not shown:
        return None
    best = max(shown, key=lambda s: s.speedup.middle if s.speedup else 0.0)
    categories = sorted(best.category_speedups, key=lambda name: best.category_speedups[name].middle)
    title = "Speed over plain decoding by kind of prompt"
    height = 1.3 + len(categories) * (0.2 + 0.13 * len(shown))
    figure, axes = _figure(7.0, height, title, f"{_subtitle(condition)}, batch size {condition.batch_size}")
    axes.axvline(1.0, color=_FAINT, linewidth=1)
    for edge in range(len(categories) - 1):
        axes.axhline(edge + 0.5, color=_GRID, linewidth=0.8)
    for place, (summary, style) in enumerate(zip(shown, _styles(shown), strict=True)):
        known = [
            (row, summary.category_speedups[n]) for row, n in enumerate(categories) if n in summary.category_speedups
        ]
        offset = _OFFSET * (0.5 - (place + 0.5) / len(shown))
        middles, ranges = [span.middle for _, span in known], _errors([span for _, span in known])
        heights = [row + offset for row, _ in known]
        axes.errorbar(middles, heights, xerr=ranges, linestyle="", markersize=6, label=summary.label, **style)
    axes.set_yticks(range(len(categories)), categories)
    axes.set_ylim(-0.5, len(categories) - 0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("speed relative to plain decoding (1x)")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}x"))
    _legend(axes)
    return figure


def plot_rates(condition: Condition, by_size: dict[int, list[Summary]]) -> Figure:
    """Tokens per second of all rows together against the batch size."""
    sizes = sorted(by_size)
    shown = {s.label: s for size in sizes for s in _fastest(by_size[size])}
    figure, axes = _figure(6.2, 3.8, "Tokens per second by batch size", _subtitle(condition))
    for place, (label, style) in enumerate(zip(shown, _styles(list(shown.values())), strict=True)):
        known = [(size, s.rate) for size in sizes for s in by_size[size] if s.label == label]
        x, y = [size * _aside(place, len(shown)) for size, _ in known], [rate.middle for _, rate in known]
        axes.errorbar(x, y, yerr=_errors([rate for _, rate in known]), label=label, **style)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=_GRID, linewidth=0.6)
    _log_ticks(axes, sizes)
    axes.set_xlabel("batch size")
    axes.set_ylabel("tokens per second")
    _legend(axes)
    return figure


def plot_tree_sizes(condition: Condition, methods: Sequence[Summary]) -> Figure | None:
    """The sweep: speed over plain decoding against the nodes of a tree; of each draft length the fastest beam width."""
    best: dict[tuple[int, int], Span] = {}
    for summary in methods:
        if summary.size is not None and summary.speedup is not None:
            key = (summary.size.draft_length, summary.size.tree_size)
            best[key] = max(summary.speedup, best.get(key, summary.speedup))
    sizes, lengths = sorted({size for _, size in best}), sorted({length for length, _ in best})
    if len(sizes) < 3:
        return None
    title = "Speed over plain decoding by tree size"
    figure, axes = _figure(7.2, 4.0, title, f"{_subtitle(condition)}, batch size {condition.batch_size}")
    axes.axhline(1.0, color=_FAINT, linewidth=1)
    styles = cycle({"color": colour, "marker": marker} for colour, marker in zip(_COLOURS, _MARKERS, strict=True))
    for place, (length, style) in enumerate(zip(lengths, styles, strict=False)):
        known = [size for size in sizes if (length, size) in best]
        x, spans = [size * _aside(place, len(lengths)) for size in known], [best[length, size] for size in known]
        label = f"L = {length}"
        axes.errorbar(x, [span.middle for span in spans], yerr=_errors(spans), label=label, **style)
    axes.grid(axis="y", color=_GRID, linewidth=0.6)
    _log_ticks(axes, sizes)
    axes.set_xlabel("nodes in the tree, root included")
    axes.set_ylabel("speed relative to plain decoding")
    _legend(axes)
    return figure


def _save(figure: Figure, out: Path, name: str) -> Path:
    """Write a figure as NAME.png and NAME.svg; the path of the former."""
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    figure.savefig(out / f"{name}.png", bbox_inches="tight", dpi=160)
    return out / f"{name}.png"


def _errors(spans: Sequence[Span]) -> list[list[float]]:
    """Distances from the median to the least and to the greatest, as matplotlib's errorbar takes them."""
    return [[span.middle - span.low for span in spans], [span.high - span.middle for span in spans]]


def _aside(place: int, num: int) -> float:
    """A factor on a logarithmic axis that moves the marks of one of ``num`` lines aside, so that none hides another."""
    return float(2 ** (0.12 * (place - (num - 1) / 2) / max(1, num - 1)))


def _fastest(methods: Sequence[Summary]) -> list[Summary]:
    """As many as there are colours, in the given order; plain decoding has its own."""
    ranked = sorted((s for s in methods if not s.is_baseline), key=lambda s: -s.rate.middle)[: len(_COLOURS)]
    kept = {s.label for s in ranked}
    return [s for s in methods if s.is_baseline or s.label in kept]


def _styles(shown: Sequence[Summary]) -> list[dict[str, Any]]:
    """Colour and marker of each method; plain decoding is always the same grey."""
    palette = cycle({"color": colour, "marker": marker} for colour, marker in zip(_COLOURS, _MARKERS, strict=True))
    return [_BASELINE_STYLE if summary.is_baseline else next(palette) for summary in shown]


def _legend(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _figure(width: float, height: float, title: str, subtitle: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), dpi=100)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.annotate(subtitle, (0, 1), (0, 10), "axes fraction", "offset points", color=_FAINT, annotation_clip=False)
    return figure, axes


def _subtitle(condition: Condition) -> str:
    return f"{condition.target} in {condition.dtype}, {condition.device}; {condition.prompts}, {condition.sampling}"


def _suffix(condition: Condition) -> str:
    seed = "" if condition.seed is None else f"-seed{condition.seed}"
    return f"{condition.prompts}-t{condition.temperature:g}{seed}"


def _log_ticks(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(sizes)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
