"""Workloads: the prompts of a benchmark in their order. Imports no torch."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from drafter.utils.io import first_line

Message = dict[str, str]
EVALUATION = "evaluation"  # name of the prompts that come with the package for measurements
_ASSETS = Path(__file__).parent.parent / "assets"


@dataclass(frozen=True)
class Item:
    """One conversation.

    Attributes:
        id: name of the conversation, for messages.
        category: column of the results; empty when the prompt set has no categories.
        turns: the user's turns; each turn but the first follows the method's own earlier answers.
        history: messages that stand before the first turn (a system message, earlier turns).
        is_raw: True if the only turn is raw text, without chat template.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    history: tuple[Message, ...] = ()
    is_raw: bool = False

    def messages(self, answers: Sequence[str]) -> list[Message]:
        """The conversation up to the turn that comes after ``answers``."""
        messages = [dict(message) for message in self.history]
        for turn, answer in zip(self.turns, answers, strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": self.turns[len(answers)]}]


@dataclass(frozen=True)
class Workload:
    """A named set of conversations.

    Attributes:
        name: name of the set in the results.
        items: the conversations in the order of the file.
    """

    name: str
    items: tuple[Item, ...]

    def __post_init__(self) -> None:
        if not self.items:
            raise ValueError(f"--prompts {self.name} holds no prompts")

    @property
    def categories(self) -> list[str]:
        """Categories in order of first appearance; empty when no prompt has one."""
        return [name for name in dict.fromkeys(item.category for item in self.items) if name]

    @property
    def num_turns(self) -> int:
        """Turns of the longest conversation."""
        return max(len(item.turns) for item in self.items)

    @property
    def digest(self) -> str:
        """Sixteen hex digits that change with any prompt, its category or its order."""
        text = json.dumps([[i.category, i.turns, i.history, i.is_raw] for i in self.items], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def first_turns(self, num_turns: int | None) -> "Workload":
        """The same conversations, each cut after ``num_turns`` turns; None: all turns."""
        if num_turns is None:
            return self
        return Workload(self.name, tuple(replace(item, turns=item.turns[:num_turns]) for item in self.items))

    def take(self, num_prompts: int | None) -> "Workload":
        """At most ``num_prompts`` conversations, taken from each category in turn; None: all.

        Of the categories a, a, a, b, b three prompts are the first a, the first b, the second a.
        """
        if num_prompts is None or num_prompts >= len(self.items):
            return self
        num_seen: dict[str, int] = {}
        places = []
        for index, item in enumerate(self.items):
            place = num_seen[item.category] = num_seen.get(item.category, -1) + 1
            places.append((place, list(num_seen).index(item.category), index))
        chosen = sorted(index for _, _, index in sorted(places)[:num_prompts])
        return Workload(self.name, tuple(self.items[index] for index in chosen))


class _HubSet(NamedTuple):
    """Place of a named prompt set of the hub, and its columns."""

    path: str
    split: str
    prompt: str
    id: str = ""
    config: str | None = None
    category: str = ""  # of all rows, for a set without a column of categories


HUB_SETS = {
    "mtbench": _HubSet("HuggingFaceH4/mt_bench_prompts", "train", "prompt", "prompt_id"),
    "humaneval": _HubSet("openai/openai_humaneval", "test", "prompt", "task_id", category="code"),
    "gsm8k": _HubSet("openai/gsm8k", "test", "question", config="main", category="math"),
}


def read_prompt_set(name: str, *, raw: bool = False) -> Workload:
    """A prompt set by name, or a file or hub data set of prompts.

    The names are `evaluation` (twenty prompts that come with the package), `default` (the package's prompts for
    calibration) and :data:`HUB_SETS`. A row with `turns` is a conversation whose turns follow the method's own answers;
    a row with `category` belongs to that column of the results. With ``raw``, prompts are text without chat template.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a wrong row, with file and line, or the hub cannot be reached, or ``raw`` with a conversation.
    """
    from drafter.distill.prompts import builtin_prompts

    if name in HUB_SETS:
        items = list(_hub_items(name, HUB_SETS[name]))
    else:
        own = {EVALUATION: _ASSETS / "evaluation-prompts.jsonl", "default": builtin_prompts()}
        items = list(_file_items(str(own.get(name, name))))
    if raw:
        for item in items:
            if len(item.turns) > 1 or item.history:
                raise ValueError(f"prompt {item.id}: --raw takes single prompts, this one is a conversation")
        items = [replace(item, is_raw=True) for item in items]
    label = name if name in HUB_SETS else Path(name).name.partition(".")[0] or name
    return Workload(label, tuple(items))


def _file_items(name: str) -> Iterator[Item]:
    from drafter.data.formats import parse_row
    from drafter.data.reading import read_records

    for record in read_records(name):
        category = _category(record.fields, record.where)
        row_id = record.fields.get("id", record.fields.get("question_id", record.number - 1))
        if "turns" in record.fields:
            yield Item(str(row_id), category, _turns(record.fields["turns"], record.where))
            continue
        row = parse_row(record)
        if row.text is not None:
            yield Item(str(row_id), category, (row.text,), is_raw=True)
            continue
        last = max(index for index, message in enumerate(row.prompt) if message["role"] == "user")
        history = tuple(dict(message) for message in row.prompt[:last])
        yield Item(str(row_id), category, (row.prompt[last]["content"],), history)


def _hub_items(name: str, place: _HubSet) -> Iterator[Item]:
    for number, row in enumerate(_load_hub_rows(name, place)):
        where = f"{name}, row {number + 1}"
        prompt = row[place.prompt]
        turns = _turns(prompt if isinstance(prompt, list) else [prompt], where)
        category = place.category or _category(row, where)
        yield Item(str(row.get(place.id, number)), category, turns)


def _category(fields: Mapping[str, Any], where: str) -> str:
    category = fields.get("category") or ""
    if not isinstance(category, str):
        raise ValueError(f"{where}: category is {category!r} but must be text")
    return category


def _turns(turns: object, where: str) -> tuple[str, ...]:
    is_texts = isinstance(turns, list) and all(isinstance(turn, str) and turn.strip() for turn in turns)
    if not is_texts or not turns:
        raise ValueError(f"{where}: turns must be a list of at least one text, none of them empty")
    assert isinstance(turns, list)
    return tuple(turns)


def _load_hub_rows(name: str, place: _HubSet) -> list[dict[str, Any]]:
    """The rows of a named set; ValueError if the hub gives none."""
    import datasets

    try:
        rows = datasets.load_dataset(place.path, place.config, split=place.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"--prompts {name} cannot be fetched from {place.path}: {first_line(error)}; give a file of prompts, or "
            f"{EVALUATION}, which comes with the package"
        ) from error
    return [dict(row) for row in rows]
