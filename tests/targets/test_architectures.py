"""The committed table of architectures holds."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.sizes import size
from tests.targets.zoo import panel

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "results" / "architectures.jsonl"
FEW = slice(None, None, 5)  # every fifth type; the fast tests have those that users meet most


def verdicts() -> dict[str, str]:
    rows = map(json.loads, TABLE.read_text().splitlines())
    return {row["model_type"]: row["verdict"] for row in rows}


def test_no_type_is_broken() -> None:
    assert set(verdicts().values()) <= {"identical", "refused", "not built"}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(verdicts())[size(FEW, slice(None))])
def test_the_table_holds(model_type: str) -> None:
    assert panel.judge(model_type).verdict == verdicts()[model_type]


def test_the_page_counts_what_the_table_holds() -> None:
    page = (ROOT / "docs" / "interop.md").read_text()
    counts = Counter(verdicts().values())
    counted = f"{counts['identical']} types are identical, {counts['refused']} refused, none broken"
    assert f"{counted}, {counts['not built']} not built" in " ".join(page.split())
