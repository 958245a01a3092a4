"""Pictures of a benchmark, each with one message: PNG for the screen, SVG for print. The only place with matplotlib."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from drafter.bench.methods import BASELINE
from drafter.bench.results import Condition, Summary, Tables, by_batch_size

_INK, _FAINT, _GRID = "#222222", "#8a8a8a", "#dddddd"
# Okabe, Ito: "Color Universal Design", 2008, without the yellow, which is hard to see on white.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_BASELINE_STYLE = {"color": "#6b6b6b", "marker": "."}
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 26,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.hashsalt": "drafter",  # the same picture is the same file
    "svg.fonttype": "none",
}


def draw_all(tables: Tables, out: Path) -> list[Path]:
    """Every picture that the results have data for, as PNG and SVG in the folder ``out``; the PNG files."""
    pictures: dict[str, Figure | None] = {}
    with matplotlib.rc_context(_STYLE):
        for condition, methods in tables.items():
            suffix = _suffix(condition)
            pictures[f"speedup-by-category-{suffix}"] = plot_categories(condition, methods)
            pictures[f"speedup-by-width-and-length-{suffix}"] = plot_widths_and_lengths(condition, methods)
            pictures[f"speed-by-tree-size-{suffix}"] = plot_tree_sizes(condition, methods)
        for condition, by_size in by_batch_size(tables).items():
            suffix = _suffix(condition).rpartition("-batch")[0]
            pictures[f"tokens-per-second-by-batch-{suffix}"] = plot_rates(condition, by_size)
        return [save(figure, out, name) for name, figure in pictures.items() if figure is not None]


def save(figure: Figure, out: Path, name: str) -> Path:
    """Write a figure as NAME.png and NAME.svg; the path of the former."""
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    figure.savefig(out / f"{name}.png", bbox_inches="tight", dpi=160)
    return out / f"{name}.png"


def plot_categories(condition: Condition, methods: Sequence[Summary]) -> Figure | None:
    """Speed over plain decoding by kind of prompt: one row for each category, one mark for each method."""
    shown = _fastest([s for s in methods if len(s.category_speedups) > 1 and s.name != BASELINE])
    if not shown:
        return None
    best = max(shown, key=lambda s: s.speedup.middle if s.speedup else 0.0)
    categories = sorted(best.category_speedups, key=lambda name: best.category_speedups[name])
    low, high = min(best.category_speedups.values()), max(best.category_speedups.values())
    title = f"{best.label} answers {low:.1f} to {high:.1f} times as fast as plain decoding"
    figure, axes = _figure(7.0, 1.3 + 0.34 * len(categories), title, _subtitle(condition))
    axes.axvline(1.0, color=_FAINT, linewidth=1)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    for summary, style in zip(shown, _styles(shown), strict=True):
        speedups = [summary.category_speedups[name] for name in categories]
        axes.plot(speedups, range(len(categories)), linestyle="", markersize=8, label=summary.label, **style)
    axes.set_yticks(range(len(categories)), categories)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("speed relative to plain decoding (1x)")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}x"))
    _legend(axes)
    return figure


def plot_rates(condition: Condition, by_size: dict[int, list[Summary]]) -> Figure:
    """Tokens per second of all rows together against the batch size, with the least and the greatest of the rounds."""
    sizes = sorted(by_size)
    shown = {s.label: s for size in sizes for s in _fastest(by_size[size])}
    figure, axes = _figure(6.2, 3.8, _rate_title(by_size), _subtitle(condition).replace(", batch size 0", ""))
    for (label, first), style in zip(shown.items(), _styles(list(shown.values())), strict=True):
        points = [(size, s.rate) for size in sizes for s in by_size[size] if s.label == label]
        x, y = [size for size, _ in points], [rate.middle for _, rate in points]
        axes.plot(x, y, label=first.label, **style)
        low, high = [rate.low for _, rate in points], [rate.high for _, rate in points]
        axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=_GRID, linewidth=0.6)
    _log_ticks(axes, sizes)
    axes.set_xlabel("batch size")
    axes.set_ylabel("tokens per second")
    _legend(axes)
    return figure


def plot_widths_and_lengths(condition: Condition, methods: Sequence[Summary]) -> Figure | None:
    """The sweep: speedup over plain decoding for each beam width and draft length, the best tree size of each."""
    found: dict[tuple[int, int], float] = {}
    for summary in methods:
        if summary.size is not None and summary.speedup is not None:
            key = (summary.size.beam_width, summary.size.draft_length)
            found[key] = max(summary.speedup.middle, found.get(key, 0.0))
    widths, lengths = sorted({w for w, _ in found}), sorted({n for _, n in found})
    if len(widths) < 2 or len(lengths) < 2:
        return None
    best = max(found, key=lambda key: found[key])
    title = f"Beam width {best[0]} and draft length {best[1]} are fastest: {found[best]:.2f} times plain decoding"
    figure, axes = _figure(max(7.4, 1.6 + 0.75 * len(widths)), 1.5 + 0.5 * len(lengths), title, _subtitle(condition))
    values = [[found.get((width, length), float("nan")) for width in widths] for length in lengths]
    norm = TwoSlopeNorm(1.0, min(0.95, *found.values()), max(1.05, *found.values()))
    image = axes.imshow(values, cmap="PuOr", norm=norm, origin="lower", aspect="auto")
    for (width, length), value in found.items():
        ink = "white" if abs(float(norm(value)) - 0.5) > 0.3 else _INK
        axes.text(widths.index(width), lengths.index(length), f"{value:.2f}", ha="center", va="center", color=ink)
    axes.set_xticks(range(len(widths)), [str(width) for width in widths])
    axes.set_yticks(range(len(lengths)), [str(length) for length in lengths])
    axes.tick_params(length=0)
    axes.set_xlabel("beam width")
    axes.set_ylabel("draft length")
    figure.colorbar(image, ax=axes, shrink=0.9, pad=0.03, label="speed relative to plain decoding")
    return figure


def plot_tree_sizes(condition: Condition, methods: Sequence[Summary]) -> Figure | None:
    """Gain and cost of further nodes: tokens per step above, speed below, against N."""
    best: dict[int, tuple[float, float]] = {}
    for summary in methods:
        if summary.size is not None and summary.speedup is not None and summary.tokens_per_step is not None:
            entry = (summary.speedup.middle, summary.tokens_per_step)
            best[summary.size.tree_size] = max(entry, best.get(summary.size.tree_size, (0.0, 0.0)))
    if len(best) < 3:
        return None
    sizes = sorted(best)
    fastest = max(sizes, key=lambda size: best[size])
    title = f"{fastest} nodes are fastest; more of them are kept more often, but cost more"
    figure, upper = _figure(7.2, 4.4, title, _subtitle(condition))
    upper.set_position((0.12, 0.55, 0.78, 0.33))
    lower = figure.add_axes((0.12, 0.12, 0.78, 0.33), sharex=upper)
    for axes, column, colour, name in ((upper, 1, _COLOURS[1], "tokens per step"), (lower, 0, _COLOURS[0], "speedup")):
        axes.plot(sizes, [best[size][column] for size in sizes], color=colour, marker="o")
        axes.axvline(fastest, color=_GRID, zorder=0)
        axes.set_ylabel(name)
        axes.grid(axis="y", color=_GRID, linewidth=0.6)
    lower.axhline(1.0, color=_FAINT, linewidth=1)
    lower.set_xlabel("nodes in the tree, root included")
    _log_ticks(lower, sizes)
    upper.tick_params(labelbottom=False)
    return figure


# -- parts -----------------------------------------------------------------------------------------------------------


def _rate_title(by_size: dict[int, list[Summary]]) -> str:
    found = [(size, s.speedup.middle, s.label) for size in by_size for s in by_size[size] if s.speedup]
    ours = [entry for entry in found if entry[2] != BASELINE]
    if not ours:
        return "Throughput against batch size"
    label = max(ours, key=lambda entry: entry[1])[2]
    gains = sorted((size, gain) for size, gain, name in ours if name == label)
    (first, gain), (last, last_gain) = gains[0], gains[-1]
    return f"{label}: {gain:.2f} times plain decoding at batch {first}, {last_gain:.2f} at {last}"


def _fastest(methods: Sequence[Summary]) -> list[Summary]:
    """As many as there are colours, in the given order; plain decoding has its own."""
    ranked = sorted((s for s in methods if s.name != BASELINE), key=lambda s: -s.rate.middle)[: len(_COLOURS)]
    kept = {s.label for s in ranked}
    return [s for s in methods if s.name == BASELINE or s.label in kept]


def _styles(shown: Sequence[Summary]) -> list[dict[str, Any]]:
    """Colour and marker of each method; plain decoding is always the same grey."""
    palette = cycle({"color": colour, "marker": marker} for colour, marker in zip(_COLOURS, _MARKERS, strict=True))
    return [_BASELINE_STYLE if summary.name == BASELINE else next(palette) for summary in shown]


def _legend(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _figure(width: float, height: float, title: str, subtitle: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), dpi=100)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.annotate(subtitle, (0, 1), (0, 10), "axes fraction", "offset points", color=_FAINT, annotation_clip=False)
    return figure, axes


def _subtitle(condition: Condition) -> str:
    return (
        f"{condition.target} in {condition.dtype}, {condition.device}; {condition.prompts}, {condition.sampling}, "
        f"batch size {condition.batch_size}"
    )


def _suffix(condition: Condition) -> str:
    seed = "" if condition.seed is None else f"-seed{condition.seed}"
    return f"{condition.prompts}-t{condition.temperature:g}{seed}-batch{condition.batch_size}"


def _log_ticks(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(sizes)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
