#!/usr/bin/env python3
"""The measured tables of README.md and docs/*.md, made from their results files.

    python scripts/tables.py            # write the tables
    python scripts/tables.py --check    # exit code 1 if a table differs from its results file

A table stands between `<!-- table NAME: begin -->` and `<!-- table NAME: end -->`. Nothing stands there while
docs/results has no file of that name.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from drafter.bench.report import about, load_table, provenance
from drafter.bench.results import Summary, read_results, summarise
from drafter.bench.tune import COLUMNS, table_rows
from drafter.engine.sizes import read_tuned
from drafter.utils.tables import markdown_table

DOCS = Path(__file__).resolve().parent.parent / "docs"
_MARKED = re.compile(r"(<!-- table ([\w.-]+): begin -->\n).*?(<!-- table \2: end -->)", re.DOTALL)


def speeds(path: Path) -> str:
    """Speed, tokens per step and equal texts: one row for each method and condition of a results file."""
    records = read_results([path])
    rows, texts = [], []
    for condition, methods in summarise(records).items():
        texts.append(about(condition, methods))
        for method in methods:
            span = method.speedup
            over = "-" if span is None else f"{span.middle:.2f}x ({span.low:.2f} to {span.high:.2f})"
            name = f"{condition.batch_size}, {condition.sampling}"
            rows.append([method.label, name, f"{method.rate.middle:.1f}", over, *_texts(method)])
    columns = ["method", "batch size", "tokens/s", "over plain decoding", "tokens per step", "identical texts"]
    return "\n".join([provenance(records), *dict.fromkeys(texts), markdown_table(columns, rows)])


def acceptances(path: Path) -> str:
    """Tokens per step and equal texts of each method, without the speeds, which a busy machine gives no meaning."""
    records = read_results([path])
    cells: dict[str, dict[str, str]] = {}
    texts, names = [], []
    for condition, methods in summarise(records).items():
        texts.append(about(condition, methods))
        names.append(f"batch {condition.batch_size}, {condition.sampling}")
        for method in methods:
            cells.setdefault(method.label, {})[names[-1]] = "; ".join(_texts(method))
    rows = [[label, *(found.get(name, "-") for name in names)] for label, found in cells.items()]
    table = markdown_table(["tokens per step; identical texts", *names], rows)
    return "\n".join([provenance(records), *dict.fromkeys(texts), table])


def _texts(method: Summary) -> list[str]:
    steps = "-" if method.tokens_per_step is None else f"{method.tokens_per_step:.2f}"
    same = "-" if method.num_identical is None else f"{method.num_identical}/{method.num_prompts}"
    return [steps, same]


_WORDS = {
    "none": "plain decoding",
    "drafter:W4:L2:N8": "drafter, 8 nodes, 2 drafting steps",
    "drafter:W4:L3:N8": "drafter, 8 nodes, 3 drafting steps (the default)",
    "hf-generate": "`generate`",
    "llama-cpp:BF16": "BF16 weights",
    "llama-cpp:BF16:ngram-cache": "BF16 weights, n-gram speculation",
    "llama-cpp:Q4_1": "Q4_1 weights (4 bits)",
    "openvino-genai:F16": "F16 weights",
    "openvino-genai:F16:lookup": "F16 weights, prompt lookup",
}


def engines(path: Path) -> str:
    """This package beside other engines, the fastest first."""
    records = read_results([path])
    ((condition, methods),) = summarise(records).items()
    rows = []
    for method in sorted(methods, key=lambda each: each.rate.middle, reverse=True):
        over = [method.speedup_over_llama_cpp, method.speedup]
        rows.append(
            [
                f"{method.engine}, {_WORDS.get(method.label, method.label)}",
                f"{method.rate.middle:.1f} ({method.rate.low:.1f} to {method.rate.high:.1f})",
                *("-" if span is None else f"{span.middle:.2f}x ({span.low:.2f} to {span.high:.2f})" for span in over),
                "-" if method.tokens_per_step is None else f"{method.tokens_per_step:.2f}",
                f"{method.peak_bytes / 2**30:.1f}",
            ]
        )
    columns = [
        "engine and method",
        "tokens/s",
        "over llama.cpp BF16",
        "over our plain decoding",
        "tokens per step",
        "peak GiB",
    ]
    return "\n".join([provenance(records), about(condition, methods), markdown_table(columns, rows)])


def servers(path: Path) -> str:
    """Servers under the same load, one line for each round."""
    records = read_results([path])
    return "\n".join([provenance(records), load_table(records)])


def tree_sizes(path: Path) -> str:
    """The trees that `drafter tune` chose."""
    return markdown_table(COLUMNS, table_rows(read_tuned(path)))


# Name of a table -> its results file, and the function that reads the file.
TABLES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "engines": ("peers-cpu.jsonl", engines),
    "int8": ("peers-cpu-int8.jsonl", engines),
    "servers": ("servers-cpu.jsonl", servers),
    "batches": ("smollm2-135m-cpu-batches.jsonl", speeds),
    "identity": ("smollm2-135m-cpu-identity.jsonl", acceptances),
    "sizes": ("tuned-smollm2-135m-cpu.json", tree_sizes),
}


def made(page: str) -> str:
    """The text of a page with every table as its results file gives it."""

    def table(found: re.Match[str]) -> str:
        name, make = TABLES[found[2]]
        path = DOCS / "results" / name
        return found[1] + (make(path) if path.is_file() else "") + found[3]

    return _MARKED.sub(table, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    pages = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
    stale = [page for page in pages if made(page.read_text("utf-8")) != page.read_text("utf-8")]
    for page in stale:
        print(page.relative_to(DOCS.parent))
        if not args.check:
            page.write_text(made(page.read_text("utf-8")), "utf-8")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
