"""Recorded traffic: one JSON line for each answer, token ids and sampling parameters alone.

    {"prompt_token_ids": [1, 5, 9], "token_ids": [7, 7, 2], "temperature": 0.8, "top_k": 0, ..., "seed": 3}

The files ``traffic-*.jsonl`` of a folder sort by age (:class:`drafter.serving.record.Recorder` writes them).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROMPT_IDS, ANSWER_IDS = "prompt_token_ids", "token_ids"  # keys of every row of traffic, whoever wrote the row
_TEXT_FIELDS = ("stop",)  # sampling parameters that hold a client's text


def traffic_row(prompt_ids: Sequence[int], token_ids: Sequence[int], params: Mapping[str, Any]) -> dict[str, Any]:
    """The row of one answer; ``params``: its sampling parameters, of which the texts are left out."""
    kept = {name: value for name, value in params.items() if name not in _TEXT_FIELDS}
    return {PROMPT_IDS: list(prompt_ids), ANSWER_IDS: list(token_ids), **kept}


def traffic_files(folder: Path) -> list[Path]:
    """The files of a folder of traffic, the oldest first."""
    return sorted(folder.glob("traffic-*.jsonl"))
