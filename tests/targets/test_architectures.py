"""The committed table of architectures holds for the types that users meet most."""

import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from tests.sizes import size

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "results" / "architectures.jsonl"
COMMON = [
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt_oss",
    "olmo2",
    "olmo3",
    "cohere",
    "cohere2",
    "smollm3",
    "granite",
    "glm4",
    "starcoder2",
    "gpt_neox",
    "gpt2",
    "opt",
    "stablelm",
    "falcon",
    "deepseek_v2",
    "deepseek_v3",
    "mamba",
    "jamba",
    "qwen3_next",
    "mamba2",
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "gemma4",
    "mistral3",
    "qwen3_vl",
    "bloom",
    "gpt_neo",
    "moshi",
]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("architectures", ROOT / "scripts" / "architectures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["architectures"] = module
    spec.loader.exec_module(module)
    return module


def verdicts() -> dict[str, str]:
    rows = map(json.loads, TABLE.read_text().splitlines())
    return {row["model_type"]: row["verdict"] for row in rows}


def test_no_type_is_broken() -> None:
    assert set(verdicts().values()) <= {"identical", "refused", "not built"}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", size(COMMON, sorted(verdicts())))
def test_the_table_holds(model_type: str) -> None:
    assert script().judge(model_type).verdict == verdicts()[model_type]


def test_the_page_counts_what_the_table_holds() -> None:
    page = (ROOT / "docs" / "interop.md").read_text()
    counts = Counter(verdicts().values())
    for verdict in ("identical", "refused", "broken", "not built"):
        assert re.search(rf"^\| {verdict}\b.*\| {counts[verdict]} \|$", page, re.MULTILINE), verdict
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"each of {counts.total()} types" in readme
