"""Pictures of a benchmark, each with one message: PNG for the screen, SVG for print. The only place with matplotlib.

Methods are told apart by colour (Okabe and Ito's palette, made for colour-blind readers), by marker and by a label that
stands beside the curve; there are no legends to look up.
"""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from drafter.bench.methods import BASELINE
from drafter.bench.results import Condition, Size, Summary, Tables

_INK = "#222222"
_FAINT = "#8a8a8a"
_GRID = "#dddddd"
# Okabe, Ito: "Color Universal Design", 2008, without the yellow, which is hard to see on white.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_BASELINE_STYLE = ("#6b6b6b", ".")
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
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.hashsalt": "drafter",  # the same picture is the same file
    "svg.fonttype": "none",
}

_LINE_POINTS = 12.5  # between two lines of labels
_HALO = [withStroke(linewidth=2.5, foreground="white")]


class Curve(NamedTuple):
    """A method's points; error bars from low to high where they are known."""

    label: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


def draw_all(tables: Tables, out: Path) -> list[Path]:
    """Every picture that the results have data for, as PNG and SVG in the folder ``out``; the PNG files."""
    drawn: list[Path] = []
    with matplotlib.rc_context(_STYLE):
        for condition, methods in tables.items():
            suffix = _suffix(condition)
            pictures: list[tuple[str, Figure | None]] = [
                (f"speedup-by-category-{suffix}", plot_categories(condition, methods)),
                (f"acceptance-by-depth-{suffix}", plot_acceptance(condition, methods)),
                (f"speedup-by-width-and-length-{suffix}", plot_widths_and_lengths(condition, methods)),
                (f"speed-by-tree-size-{suffix}", plot_tree_sizes(condition, methods)),
            ]
            drawn += [save(figure, out, name) for name, figure in pictures if figure is not None]
        for condition, by_size in _grids(tables).items():
            suffix = _suffix(condition).rpartition("-batch")[0]
            drawn.append(save(plot_rates(condition, by_size), out, f"tokens-per-second-by-batch-{suffix}"))
    return drawn


def save(figure: Figure, out: Path, name: str) -> Path:
    """Write a figure as NAME.png and NAME.svg; the path of the former."""
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    figure.savefig(out / f"{name}.png", bbox_inches="tight", dpi=160)
    return out / f"{name}.png"


def plot_categories(condition: Condition, methods: Sequence[Summary]) -> Figure | None:
    """How much faster than plain decoding, by kind of prompt: one row a category, one mark a method."""
    shown = _fastest([s for s in methods if len(s.category_speedups) > 1 and s.name != BASELINE])
    if not shown:
        return None
    best = max(shown, key=lambda s: s.speedup.middle if s.speedup else 0.0)
    categories = sorted(best.category_speedups, key=lambda name: best.category_speedups[name])
    low, high = min(best.category_speedups.values()), max(best.category_speedups.values())
    title = f"{best.label} answers {low:.1f} to {high:.1f} times as fast as plain decoding"
    figure, axes = _figure(7.0, 1.3 + 0.34 * len(categories), title, _subtitle(condition), title_pad=46)
    axes.axvline(1.0, color=_FAINT, linewidth=1)
    for row in range(len(categories)):
        axes.axhline(row, color=_GRID, linewidth=0.8, zorder=0)
    top = len(categories) - 1
    labels = []
    for summary, (colour, marker) in zip(shown, _styles(shown), strict=True):
        x = [summary.category_speedups[name] for name in categories]
        axes.plot(x, range(len(categories)), marker, color=colour, markersize=8, markeredgecolor="white", zorder=3)
        labels.append((x[top], summary.label, colour))
    axes.set_yticks(range(len(categories)), categories)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(-0.6, top + 0.5)
    axes.set_xlabel("speed relative to plain decoding (1x)")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    _labels_above(axes, labels, top)
    return figure


def plot_acceptance(condition: Condition, methods: Sequence[Summary]) -> Figure | None:
    """How deep drafts hold: share of steps that keep at least d drafted tokens."""
    shown = _fastest([s for s in methods if s.survival])
    if not shown:
        return None
    best = max(shown, key=lambda s: s.tokens_per_step or 0.0)
    title = f"{best.label} keeps {best.tokens_per_step or 0:.1f} tokens per step of the target"
    figure, axes = _figure(6.2, 3.6, title, _subtitle(condition))
    curves = [Curve(s.label, list(range(1, len(s.survival) + 1)), [100 * v for v in s.survival]) for s in shown]
    deepest = max(len(s.survival) for s in shown)
    axes.set_ylim(0, 100)
    axes.set_xlim(0.8, deepest + 0.2)
    _draw_curves(axes, curves, _styles(shown))
    axes.xaxis.set_major_locator(FixedLocator(list(range(1, deepest + 1))))
    axes.set_xlabel("drafted tokens kept, at least")
    axes.set_ylabel("share of steps, %")
    return figure


def plot_rates(condition: Condition, by_size: dict[int, list[Summary]]) -> Figure:
    """Tokens per second of all rows together against the batch size."""
    sizes = sorted(by_size)
    labels = list(dict.fromkeys(s.label for size in sizes for s in _fastest(by_size[size])))[: len(_COLOURS) + 1]
    curves, shown = [], []
    for label in labels:
        points = [(size, s) for size in sizes for s in by_size[size] if s.label == label]
        y, low, high = zip(*(s.rate for _, s in points), strict=True)
        curves.append(Curve(label, [size for size, _ in points], list(y), list(low), list(high)))
        shown.append(points[0][1])
    subtitle = _subtitle(condition).replace(", batch size 0", "")
    figure, axes = _figure(6.2, 3.8, _rate_title(by_size), subtitle)
    axes.set_yscale("log")
    axes.grid(axis="y", color=_GRID, linewidth=0.6)
    _log_ticks(axes, sizes)
    values = [value for curve in curves for value in curve.y]
    axes.set_ylim(min(values) / 1.15, max(values) * 1.15)
    axes.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.1)
    _draw_curves(axes, curves, _styles(shown))
    ticks = round_ticks(min(values), max(values))
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("batch size")
    axes.set_ylabel("tokens per second")
    return figure


def plot_widths_and_lengths(condition: Condition, methods: Sequence[Summary]) -> Figure | None:
    """The sweep: speedup over plain decoding for each beam width and draft length, the best tree size of each."""
    found: dict[tuple[int, int], float] = {}
    for size, speedup in _sized(methods):
        key = (size.beam_width, size.draft_length)
        found[key] = max(speedup, found.get(key, 0.0))
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
        is_dark = abs(float(norm(value)) - 0.5) > 0.3
        axes.text(
            widths.index(width), lengths.index(length), f"{value:.2f}", ha="center", va="center",
            color="white" if is_dark else _INK, fontweight="bold" if (width, length) == best else "normal",
        )  # fmt: skip
    axes.set_xticks(range(len(widths)), [str(width) for width in widths])
    axes.set_yticks(range(len(lengths)), [str(length) for length in lengths])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("beam width")
    axes.set_ylabel("draft length")
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.03)
    bar.outline.set_visible(False)
    bar.set_label("speed relative to plain decoding")
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
        values = [best[size][column] for size in sizes]
        axes.plot(sizes, values, color=colour, linewidth=2, marker="o", markersize=6, markeredgecolor="white")
        axes.axvline(fastest, color=_GRID, zorder=0)
        place = sizes.index(fastest)
        axes.annotate(
            f"{values[place]:.2f}", (fastest, values[place]), xytext=(0, 7), textcoords="offset points",
            ha="center", color=colour, fontweight="bold", path_effects=_HALO,
        )  # fmt: skip
        axes.set_ylabel(name)
        axes.set_ylim(min(0.95, *values), max(values) + 0.18 * (max(values) - min(0.95, *values)))
        axes.grid(axis="y", color=_GRID, linewidth=0.6)
    lower.axhline(1.0, color=_FAINT, linewidth=1)
    lower.set_xlabel("nodes in the tree, root included")
    _log_ticks(lower, sizes)
    upper.tick_params(labelbottom=False)
    return figure


# -- parts -----------------------------------------------------------------------------------------------------------


def _rate_title(by_size: dict[int, list[Summary]]) -> str:
    ours = [
        (size, s.speedup.middle)
        for size in sorted(by_size)
        for s in by_size[size]
        if s.name == "redrafter" and s.speedup
    ]
    if not ours:
        return "Throughput against batch size"
    first, last = min(ours)[0], max(ours)[0]
    gain = [max(value for size, value in ours if size == at) for at in (first, last)]
    return f"redrafter: {gain[0]:.2f} times plain decoding at batch {first}, {gain[1]:.2f} at {last}"


def _draw_curves(axes: Axes, curves: Sequence[Curve], styles: Sequence[tuple[str, str]]) -> None:
    """Lines with markers, a band from low to high, and each line's name at its right end. Limits must be set before."""
    ends = []
    for curve, (colour, marker) in zip(curves, styles, strict=True):
        axes.plot(curve.x, curve.y, color=colour, marker=marker, markersize=6, linewidth=1.8, markeredgecolor="white")
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
        ends.append((curve.x[-1], curve.y[-1], curve.label, colour))
    pixels = [axes.transData.transform((x, y)) for x, y, _, _ in ends]
    points = axes.figure.dpi / 72
    # A curve that ends early has its name above its end, where no longer curve runs through it.
    last = max(x for x, _, _, _ in ends)
    wanted = [
        float(place[1]) + (9 * points if x < last else 0) for place, (x, _, _, _) in zip(pixels, ends, strict=True)
    ]
    heights = spread_apart(wanted, _LINE_POINTS * points)
    for (x, y, label, colour), place, height in zip(ends, pixels, heights, strict=True):
        offset = (height - float(place[1])) / points
        axes.annotate(
            label, (x, y), xytext=(11, offset), textcoords="offset points", color=colour, va="center",
            annotation_clip=False, path_effects=_HALO,
            arrowprops=_leader(colour) if abs(offset) > 2 else None,
        )  # fmt: skip


def _labels_above(axes: Axes, labels: Sequence[tuple[float, str, str]], row: float) -> None:
    """Names over the marks of the uppermost row, pushed apart where they would overlap."""
    scale = 72 / axes.figure.dpi
    order = sorted(range(len(labels)), key=lambda index: labels[index][0])
    end = -1e9  # where the last name ends, in points
    for index in order:
        x, label, colour = labels[index]
        own = float(axes.transData.transform((x, row))[0]) * scale
        half = 2.9 * len(label)
        place = max(own, end + half + 6)
        end = place + half
        axes.annotate(
            label, (x, row), xytext=(place - own, 17), textcoords="offset points", color=colour, ha="center",
            va="bottom", fontsize=9.5, annotation_clip=False, arrowprops={**_leader(colour), "shrinkB": 4},
        )  # fmt: skip


def _leader(colour: str) -> dict[str, Any]:
    return {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}


def _fastest(methods: Sequence[Summary]) -> list[Summary]:
    """As many as there are colours, in the given order; plain decoding has its own."""
    ranked = sorted((s for s in methods if s.name != BASELINE), key=lambda s: -s.rate.middle)[: len(_COLOURS)]
    kept = {s.label for s in ranked}
    return [s for s in methods if s.name == BASELINE or s.label in kept]


def _styles(shown: Sequence[Summary]) -> list[tuple[str, str]]:
    """Colour and marker of each method; plain decoding is always the same grey."""
    palette = cycle(zip(_COLOURS, _MARKERS, strict=True))
    return [_BASELINE_STYLE if summary.name == BASELINE else next(palette) for summary in shown]


def _figure(width: float, height: float, title: str, subtitle: str, *, title_pad: float = 26) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), dpi=100)
    axes = figure.add_subplot()
    axes.set_title(title, pad=title_pad)
    axes.annotate(
        subtitle, (0, 1), xytext=(0, title_pad - 16), xycoords="axes fraction", textcoords="offset points",
        color=_FAINT, fontsize=9, annotation_clip=False,
    )  # fmt: skip
    return figure, axes


def _subtitle(condition: Condition) -> str:
    return (
        f"{condition.target} in {condition.dtype}, {condition.device}; {condition.prompts}, {condition.sampling}, "
        f"batch size {condition.batch_size}"
    )


def _suffix(condition: Condition) -> str:
    seed = "" if condition.seed is None else f"-seed{condition.seed}"
    return f"{condition.prompts}-t{condition.temperature:g}{seed}-batch{condition.batch_size}"


def _grids(tables: Tables) -> dict[Condition, dict[int, list[Summary]]]:
    """Conditions that differ in batch size only, where there are several."""
    grids: dict[Condition, dict[int, list[Summary]]] = {}
    for condition, methods in tables.items():
        grids.setdefault(condition._replace(batch_size=0), {})[condition.batch_size] = methods
    return {condition: by_size for condition, by_size in grids.items() if len(by_size) > 1}


def _sized(methods: Sequence[Summary]) -> list[tuple[Size, float]]:
    return [(s.size, s.speedup.middle) for s in methods if s.size is not None and s.speedup is not None]


def _log_ticks(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(sizes)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def spread_apart(places: Sequence[float], distance: float) -> list[float]:
    """The same places moved as little as a few rounds of pushing need, so that none are nearer than ``distance``."""
    moved = list(places)
    order = sorted(range(len(moved)), key=lambda index: moved[index])
    for _ in range(200):
        is_settled = True
        for below, above in zip(order, order[1:], strict=False):
            gap = moved[above] - moved[below]
            if gap < distance - 1e-6:
                push = (distance - gap) / 2
                moved[below] -= push
                moved[above] += push
                is_settled = False
        if is_settled:
            break
    return moved


def round_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, 20, ... from below the lowest to above the highest value."""
    ticks = [factor * 10.0**power for power in range(-3, 8) for factor in (1, 2, 5)]
    start = max((tick for tick in ticks if tick <= low), default=ticks[0])
    return [tick for tick in ticks if start <= tick <= 1.3 * high]
