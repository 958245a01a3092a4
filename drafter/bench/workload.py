"""Workloads: what every method of a benchmark is asked, and in which order. No torch here."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

Message = dict[str, str]


@dataclass(frozen=True)
class Item:
    """One conversation.

    Attributes:
        id: its name, for messages.
        category: the column of the results it belongs to; empty when the prompt set has none.
        turns: what the user says, turn by turn; each turn but the first follows the method's own earlier answers.
        history: messages that stand before the first turn (a system message, earlier turns).
        is_raw: the only turn is text for the model as it is, without chat template.
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
        name: what the results call it.
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
        """The same conversations, each broken off after ``num_turns`` turns; all turns when None."""
        if num_turns is None:
            return self
        return Workload(self.name, tuple(replace(item, turns=item.turns[:num_turns]) for item in self.items))

    def take(self, num_prompts: int | None) -> "Workload":
        """At most ``num_prompts`` conversations: one of each category in turn, so that all are there; all when None.

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
        fields: the row as it stands in the file; ``turns`` (a list of texts) and ``category`` are looked at.
        messages: the row's messages; those up to the last user turn are the prompt. Unused when there are turns.
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
    """The same prompts as text without chat template; conversations cannot be.

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
