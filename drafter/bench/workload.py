"""Workloads: the prompts of a benchmark in their order. Imports no torch."""

import hashlib
import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drafter.engine.request import encode_prompts
from drafter.utils import ASSETS

if TYPE_CHECKING:
    from drafter.targets.target import Target


class Item(NamedTuple):
    """One prompt: turns up to a user's, token ids, or raw text; ``category``: a column of the results, or empty."""

    category: str
    prompt: tuple[dict[str, Any], ...] | tuple[int, ...] | str


class Workload(NamedTuple):
    """A named set of prompts, in the order of the file."""

    name: str
    items: tuple[Item, ...]

    @property
    def categories(self) -> list[str]:
        """Categories in order of first appearance; empty when no prompt has one."""
        return [name for name in dict.fromkeys(item.category for item in self.items) if name]

    @property
    def digest(self) -> str:
        """Sixteen hex digits that change with any prompt, its category or its order."""
        return hashlib.sha256(json.dumps(self.items, sort_keys=True).encode()).hexdigest()[:16]

    def encode(self, target: "Target") -> list[list[int]]:
        """Token ids of the prompts."""
        return encode_prompts(target, [item.prompt for item in self.items], raw=True)

    def take(self, num_prompts: int | None) -> "Workload":
        """At most ``num_prompts`` prompts, one of each category in turn; None: all."""
        groups: dict[str, list[int]] = {}
        for place, item in enumerate(self.items):
            groups.setdefault(item.category, []).append(place)
        turns = [place for turn in zip_longest(*groups.values()) for place in turn if place is not None]
        return Workload(self.name, tuple(self.items[place] for place in sorted(turns[:num_prompts])))


# Place on the hub, configuration, split, and the category of all rows for a set without a column of categories.
HUB_SETS = {
    "mtbench": ("HuggingFaceH4/mt_bench_prompts", None, "train", ""),
    "humaneval": ("openai/openai_humaneval", None, "test", "code"),
    "gsm8k": ("openai/gsm8k", "main", "test", "math"),
}


def read_prompt_set(name: str) -> Workload:
    """A prompt set by name, a file or hub data set of prompts, or a folder of recorded traffic.

    The names are `evaluation` and `code` (twenty prompts each that come with the package), `default` (the package's
    prompts for calibration) and :data:`HUB_SETS`. A row with `turns` asks the first of them; `category` is a column of
    the results; token ids, such as those of recorded answers, are asked as they are.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a wrong row, with file and line, or the hub cannot be reached.
    """
    from drafter.data.formats import parse_row, read_traffic
    from drafter.data.reading import BUILTIN_PROMPTS, read_records

    if name in HUB_SETS:
        return Workload(name, tuple(_hub_items(name)))
    own = {"evaluation": ASSETS / "evaluation-prompts.jsonl", "default": BUILTIN_PROMPTS}
    own["code"] = ASSETS / "evaluation-prompts-code.jsonl"
    path = Path(own.get(name, name))
    if path.is_dir():
        return Workload(path.name, tuple(Item("", tuple(row.prompt_token_ids)) for row in read_traffic(path)))
    items = []
    for record in read_records(str(path)):
        category, row = record.fields.get("category") or "", parse_row(record)
        if not isinstance(category, str):
            raise ValueError(f"{record.where}: category is {category!r} but must be text")
        if row.text is None and not row.prompt_ids and not (row.prompt and row.prompt[-1]["content"].strip()):
            raise ValueError(f"{record.where}: the row has no text of a user")
        items.append(Item(category, row.text if row.text is not None else row.prompt_ids or row.prompt))
    return Workload(Path(name).name.partition(".")[0] or name, tuple(items))


def _hub_items(name: str) -> Iterator[Item]:
    """The prompts of a named set; ValueError if the hub gives none."""
    import datasets
    import huggingface_hub.utils.logging as hub_logging

    from drafter.data.reading import reading

    hub_logging.set_verbosity_error()  # a hub that does not answer is told once, by us
    path, config, split, category = HUB_SETS[name]
    with reading(f"--prompts {name}", is_hub=True):
        rows = datasets.load_dataset(path, config, split=split)
    for row in rows:
        prompt = row["question"] if "question" in row else row["prompt"]
        text = prompt[0] if isinstance(prompt, list) else prompt
        yield Item(category or row["category"], ({"role": "user", "content": text},))
