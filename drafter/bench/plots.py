"""The picture of a benchmark as PNG and SVG. The only place with matplotlib.

A bar at each mark spans the least and the greatest of the rounds. Titles name what is drawn; readers judge.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from drafter.bench.report import Measured, Span, sampling_of, target_of

_INK, _FAINT, _GRID = "#222222", "#8a8a8a", "#dddddd"
# Okabe, Ito: "Color Universal Design", 2008, without the yellow, which is hard to see on white.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_OFFSET = 0.7  # share of a band's height over which the marks of the methods spread, so that none hides another
_STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 10, "axes.titlesize": 12, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.titlepad": 26, "axes.edgecolor": _FAINT, "axes.labelcolor": _INK,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "text.color": _INK,
    "xtick.color": _INK, "ytick.color": _INK,
    "svg.hashsalt": "drafter",  # the same picture is the same file
    "svg.fonttype": "none",
}  # fmt: skip


def draw_all(tables: Sequence[Sequence[Measured]], out: Path) -> list[Path]:
    """A picture of each table that has speedups, as PNG and SVG in the folder ``out``; the PNG files."""
    files = []
    with matplotlib.rc_context(_STYLE):
        for methods in tables:
            if (figure := plot_speedups(methods)) is not None:
                run = methods[0].rounds[0]
                seed = f"-seed{run['seed']}" if run["temperature"] and run.get("seed") else ""
                place = out / f"speedup-{run['prompts']['name']}-t{run['temperature']:g}{seed}"
                figure.savefig(f"{place}.svg", bbox_inches="tight", metadata={"Date": None})
                figure.savefig(f"{place}.png", bbox_inches="tight", dpi=160)
                files.append(Path(f"{place}.png"))
    return files


def plot_speedups(methods: Sequence[Measured]) -> Figure | None:
    """Speed over plain decoding: a band for each category and each batch size, a mark for each method."""
    by_label: dict[str, dict[str, Span]] = {}
    for each in methods:
        if each.speedup is not None and not each.is_baseline:
            own = by_label.setdefault(each.label, {})
            own |= each.by_category | {_all_at(each.batch_size): each.speedup}
    ranked = sorted(by_label, key=lambda label: -max(span.middle for span in by_label[label].values()))
    labels = [label for label in by_label if label in ranked[: len(_COLOURS)]]
    if not labels:
        return None
    sizes = sorted({each.batch_size for each in methods}, reverse=True)
    totals = [_all_at(size) for size in sizes]
    categories = dict.fromkeys(name for label in labels for name in by_label[label] if name not in totals)
    bands = [*reversed(categories), *totals]  # from the bottom to the top
    figure = Figure(figsize=(7.0, 1.3 + len(bands) * (0.2 + 0.13 * len(labels))), dpi=100)
    axes: Any = figure.add_subplot()
    axes.set_title("Speed over plain decoding")
    run = methods[0].rounds[0]
    subtitle = (
        f"{target_of(run)} in {run['target']['dtype']}, {run['device']}; {run['prompts']['name']}, {sampling_of(run)}"
    )
    subtitle += f"; the {len(labels)} fastest of {len(by_label)} methods" if len(labels) < len(by_label) else ""
    axes.annotate(subtitle, (0, 1), (0, 10), "axes fraction", "offset points", color=_FAINT, annotation_clip=False)
    axes.axvline(1.0, color=_FAINT, linewidth=1)
    for edge in range(len(bands) - 1):
        axes.axhline(edge + 0.5, color=_GRID, linewidth=0.8)
    for place, (label, colour, marker) in enumerate(zip(labels, _COLOURS, _MARKERS, strict=False)):
        offset = _OFFSET * (0.5 - (place + 0.5) / len(labels))
        known = [(row + offset, by_label[label][name]) for row, name in enumerate(bands) if name in by_label[label]]
        spans = [span for _, span in known]
        ranges = [[span.middle - span.low for span in spans], [span.high - span.middle for span in spans]]
        axes.errorbar(
            [span.middle for span in spans], [height for height, _ in known], xerr=ranges,
            linestyle="", markersize=6, label=label, color=colour, marker=marker,
        )  # fmt: skip
    axes.set_yticks(range(len(bands)), bands)
    axes.set_ylim(-0.5, len(bands) - 0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("speed relative to plain decoding (1x) at the same batch size")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}x"))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _all_at(batch_size: int) -> str:
    return "all prompts" if batch_size == 1 else f"all, batch size {batch_size}"
