#!/usr/bin/env python3
"""Tokens per step against trained positions: decode the same prompts with each of some checkpoints.

    scripts/curve.py --prompts prompts.jsonl --label light runs/light/*.ckpt --label published runs/paper/*.ckpt
    scripts/curve.py --plot                        only draw what the results hold

A row of JSON for each checkpoint goes to --results (one that is there already is not decoded again), the picture to
--pictures as PNG and SVG. Checkpoints are files of `drafter train` or exported folders; greedy decoding.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from drafter import EngineConfig, SamplingParams, Target
from drafter.cli.decode import read_prompts
from drafter.training.callbacks import tokens_per_step
from drafter.training.checkpoint import drafter_of_checkpoint, read_checkpoint

ROOT = Path(__file__).resolve().parent.parent
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7")  # as in drafter/bench/plots.py
_MARKERS = ("o", "s", "^", "D")


def main() -> None:
    args = arguments()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rows(args.results)
    wanted = [(label, path) for label, *paths in args.label or [] for path in paths]
    if wanted and not args.plot:
        target = Target.load(args.target, dtype=args.dtype)
        prompts = [prompt.value for prompt in read_prompts((), str(args.prompts), raw=False)]
        prompts = prompts[:: max(1, len(prompts) // args.num_prompts)][: args.num_prompts]
        known = {(row["label"], row["positions"], row["tree"]) for row in rows}
        for label, path in wanted:
            for tree in args.tree:
                row = {"label": label, "positions": num_positions(Path(path)), "tree": tree, "dtype": args.dtype}
                if (label, row["positions"], tree) in known:
                    continue
                width, length, size = (int(part[1:]) for part in tree.split())
                config = EngineConfig(
                    max_num_seqs=args.batch_size, beam_width=width, draft_length=length, tree_size=size
                )
                drafter: Any = drafter_of_checkpoint(path).bind(target)
                params = SamplingParams(max_new_tokens=args.max_new_tokens)
                row["tokens_per_step"] = round(tokens_per_step(target, drafter, prompts, config, params), 3)
                row |= {"num_prompts": len(prompts), "max_new_tokens": args.max_new_tokens}
                rows.append(row)
                with args.results.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
    for path in draw(rows, args.pictures):
        print(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", nargs="+", action="append", metavar=("NAME", "CHECKPOINT"), help="a curve's points")
    parser.add_argument("--prompts", type=Path, help="prompts to decode, held out")
    parser.add_argument("--tree", nargs="+", default=["W8 L4 N24"], help="trees (default: 'W8 L4 N24')")
    parser.add_argument("--num-prompts", type=int, default=16, help="prompts, spread over the file (default: 16)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens for each (default: 64)")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts at the same time (default: 8)")
    parser.add_argument("--dtype", default="bfloat16", help="of target and drafter (default: bfloat16)")
    parser.add_argument("--target", default="smollm2-135m", help="(default: smollm2-135m)")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results" / "curve.jsonl")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "img", help="folder (default: docs/img)")
    parser.add_argument("--plot", action="store_true", help="decode nothing, draw the results")
    args = parser.parse_args()
    if args.label and not args.plot and args.prompts is None:
        parser.error("--prompts is needed to decode")
    return args


def num_positions(path: Path) -> int:
    """Positions a checkpoint was trained on."""
    if path.is_dir():
        record = json.loads((path / "run.json").read_text(encoding="utf-8"))
        return int(record["settings"]["trained_positions"])
    return int(read_checkpoint(path)["num_positions"])


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def draw(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """The curves, on a logarithmic axis of positions: each is named at its end. Empty without at least two points."""
    curves: dict[str, list[tuple[int, float]]] = {}
    trees = sorted({row["tree"] for row in rows})
    labels = {row["label"] for row in rows}
    for row in sorted(rows, key=lambda row: row["positions"]):
        # Whatever is the same for all curves is not said at each.
        names = [row["label"]] if len(labels) > 1 or len(trees) == 1 else []
        name = ", ".join([*names, *([row["tree"]] if len(trees) > 1 else [])])
        curves.setdefault(name, []).append((row["positions"], row["tokens_per_step"]))
    if len(rows) < 2:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullFormatter

    style = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "svg.fonttype": "none"}
    with matplotlib.rc_context({**style, "svg.hashsalt": "drafter"}):
        figure, axes = pyplot.subplots(figsize=(7.2, 4.0))
        for place, (name, points) in enumerate(curves.items()):
            x, y = zip(*points, strict=True)
            colour = _COLOURS[place % len(_COLOURS)]
            axes.plot(
                x, y, color=colour, marker=_MARKERS[place % len(_MARKERS)], linewidth=1.8, markeredgecolor="white"
            )
            axes.annotate(
                f" {name} {y[-1]:.2f}", (x[-1], y[-1]), color=colour, fontweight="bold", va="center",
                xytext=(6, 0), textcoords="offset points",
            )  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        # Few ticks of a logarithmic axis fall on powers of ten where positions span little.
        axes.set_xticks(sorted({row["positions"] for row in rows})[:: max(1, len(rows) // 8)])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("trained positions")
        axes.set_ylabel("tokens per step")
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_title("What more training buys", loc="left", fontweight="bold", fontsize=12)
        last = rows[-1]
        figure.text(
            0.125, 0.005, f"greedy, {last['num_prompts']} prompts x {last['max_new_tokens']} tokens"
            + (f", {trees[0]}" if len(trees) == 1 else ""), color="#8a8a8a", fontsize=8,
        )  # fmt: skip
        figure.subplots_adjust(right=0.78, bottom=0.16)
        folder.mkdir(parents=True, exist_ok=True)
        drawn = [folder / f"tokens-per-step-by-positions.{kind}" for kind in ("png", "svg")]
        for path in drawn:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=150, bbox_inches="tight", metadata=metadata)
        pyplot.close(figure)
    return drawn


def short_number(value: float) -> str:
    """
    >>> short_number(250_000), short_number(1_000_000), short_number(12_500_000)
    ('250k', '1M', '12.5M')
    """
    return f"{value / 1e6:.3g}M" if value >= 999_500 else f"{value / 1e3:.3g}k"


if __name__ == "__main__":
    main()
