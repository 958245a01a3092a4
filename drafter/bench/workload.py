"""Workloads: the prompts of a benchmark in their order. Imports no torch."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drafter.utils.io import first_line

Message = dict[str, str]


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
        queues: dict[str, list[int]] = {}
        for index, item in enumerate(self.items):
            queues.setdefault(item.category, []).append(index)
        order = sorted(
            (place, rank, index)
            for rank, queue in enumerate(queues.values())
            for place, index in enumerate(queue)
        )  # fmt: skip
        chosen = sorted(index for _, _, index in order[:num_prompts])
        return Workload(self.name, tuple(self.items[index] for index in chosen))


def item_of(
    fields: Mapping[str, object], messages: Sequence[Message], text: str | None, *, id: str, where: str
) -> Item:
    """One row of a prompt file as a conversation.

    Args:
        fields: the row of the file; ``turns`` (a list of texts) and ``category`` are read.
        messages: the row's messages; the messages up to the last user turn are the prompt. Unused when there are turns.
        text: plain text, for rows without messages.
        id: the row's name.
        where: file and line, for error messages.

    Raises:
        ValueError: turns that are no list of texts, or a category that is no text.
    """
    category = fields.get("category") or ""
    if not isinstance(category, str):
        raise ValueError(f"{where}: category is {category!r} but must be text")
    turns = fields.get("turns")
    if turns is not None:
        texts = [turn for turn in turns if isinstance(turn, str) and turn.strip()] if isinstance(turns, list) else []
        if not texts or not isinstance(turns, list) or len(texts) < len(turns):
            raise ValueError(f"{where}: turns must be a list of at least one text, none of them empty")
        return Item(id, category, tuple(texts))
    if text is not None:
        return Item(id, category, (text,), is_raw=True)
    last = max(index for index, message in enumerate(messages) if message["role"] == "user")
    return Item(id, category, (messages[last]["content"],), tuple(dict(message) for message in messages[:last]))


def as_raw(items: Iterable[Item]) -> tuple[Item, ...]:
    """The same prompts as text without chat template.

    Raises:
        ValueError: an item has several turns or a history.
    """
    made = []
    for item in items:
        if len(item.turns) > 1 or item.history:
            raise ValueError(
                f"prompt {item.id}: --raw takes single prompts, this one is a conversation: leave --raw out"
            )
        made.append(Item(item.id, item.category, item.turns, is_raw=True))
    return tuple(made)


# -- Prompt sets ---


@dataclass(frozen=True)
class HubSet:
    """Place of a named prompt set, and the names of its columns.

    Attributes:
        path: hub data set, or a builder of the `datasets` package with `data_files`.
        split: its split.
        config: its configuration.
        data_files: address of the file, for a set outside the hub.
        columns: our key -> the set's key.
        category: category of all rows, for a set without a column of categories.
    """

    path: str
    split: str
    config: str | None = None
    data_files: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    category: str = ""


HUB_SETS = {
    "mtbench": HubSet("HuggingFaceH4/mt_bench_prompts", "train", columns={"turns": "prompt", "id": "prompt_id"}),
    "specbench": HubSet(
        "json",
        "train",
        data_files="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        columns={"id": "question_id"},
    ),
    "humaneval": HubSet("openai/openai_humaneval", "test", columns={"id": "task_id"}, category="code"),
    "gsm8k": HubSet("openai/gsm8k", "test", config="main", columns={"prompt": "question"}, category="math"),
}


def read_prompt_set(name: str, *, raw: bool = False) -> Workload:
    """A prompt set by name (`HUB_SETS`), a file or hub data set that `drafter decode --prompts` takes, or `default`.

    A row with `turns` is a conversation whose turns follow the method's own answers; a row with `category` belongs to
    that column of the results.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a wrong row, with file and line, or the hub cannot be reached.
    """
    if name in HUB_SETS:
        items = tuple(_hub_items(name, HUB_SETS[name]))
        label = name
    else:
        from drafter.distill.prompts import builtin_prompts

        items = tuple(_file_items(str(builtin_prompts()) if name == "default" else name))
        label = Path(name).name.partition(".")[0] or name
    return Workload(label, as_raw(items) if raw else items)


def _file_items(name: str) -> Iterator[Item]:
    from drafter.data.formats import parse_row
    from drafter.data.reading import read_records

    for record in read_records(name):
        if "turns" in record.fields:
            row_id = record.fields.get("id", record.fields.get("question_id"))
            yield item_of(record.fields, (), None, id=_name(row_id, record.number), where=record.where)
        else:
            row = parse_row(record)
            yield item_of(record.fields, row.prompt, row.text, id=_name(row.id, record.number), where=record.where)


def _name(row_id: object, number: int) -> str:
    return str(number - 1) if row_id is None else str(row_id)


def _hub_items(name: str, place: HubSet) -> Iterator[Item]:
    for number, row in enumerate(load_hub_rows(name, place)):
        fields = {"category": place.category, **row}
        for ours, theirs in place.columns.items():
            fields[ours] = row[theirs]
        where = f"{name}, row {number + 1}"
        if "turns" not in fields:
            fields["turns"] = [fields["prompt"]]
        yield item_of(fields, (), None, id=_name(fields.get("id"), number + 1), where=where)


def load_hub_rows(name: str, place: HubSet) -> list[dict[str, Any]]:
    """Fetch a named set through the `datasets` package.

    Raises:
        ValueError: it cannot be fetched.
    """
    import datasets

    files = {} if place.data_files is None else {"data_files": place.data_files}
    try:
        rows = datasets.load_dataset(place.path, place.config, split=place.split, **files)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"--prompts {name} cannot be fetched from {place.data_files or place.path}: {first_line(error)}; "
            "give a file of prompts instead"
        ) from error
    return [dict(row) for row in rows]
