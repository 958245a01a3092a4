"""Rows of any known format, parsed into messages.

The keys of a row show its format, in the order of this table. Rows of tokens are what
every answerer of this package writes, what a server records, and what vLLM replies (``choices[0].token_ids``).

=========== ============================================= =====================================
format      keys                                          becomes
=========== ============================================= =====================================
tokens      prompt_token_ids, token_ids                   the tokens as they are, no template
messages    messages [{role, content}]                    the conversation (OpenAI)
sharegpt    conversations [{from, value}]                 the conversation
alpaca      instruction, input (optional), output         user turn, assistant turn
prompt      prompt, completion / response / text (opt.)   user turn, assistant turn if given
turns       turns [text, ...]                             the first user turn (MT-bench)
text        text                                          plain text, every token trained on
=========== ============================================= =====================================

A row may have ``tools``, the functions that were offered; the target's chat template renders them. Answers with
reasoning or tool calls need token ids: as text they are not used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from reprlib import repr as short
from typing import Any

from drafter.data.reading import RawRow, read_records

_TURN_KEYS = {"messages": "messages", "sharegpt": "conversations"}
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
}
ChatMessage = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A conversation (system messages, then user and assistant in turn) or a plain text.

    Attributes:
        messages: the conversation; empty for plain text.
        text: the plain text, or None.
        id: the row's own id as text, or None.
        source: origin of the row by its own field, or None.
        where: file and line, for error messages.
        is_cut: the last answer ended at a length limit, without an end-of-turn token.
        has_parts: an answer has reasoning or tool calls, whose form in tokens is not known from the text.
        later_turns: further user turns of a conversation without answers (MT-bench).
        tools: functions that the target may call, in OpenAI's form.
        prompt_ids, token_ids: the tokens of prompt and answer, where the file gives tokens.
    """

    messages: tuple[ChatMessage, ...] = ()
    text: str | None = None
    id: str | None = None
    source: str | None = None
    where: str = ""
    is_cut: bool = False
    has_parts: bool = False
    later_turns: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] | None = None

    @property
    def is_chat(self) -> bool:
        """Whether the row is a conversation of text, without the target's token ids."""
        return self.text is None and self.token_ids is None

    @property
    def prompt(self) -> tuple[ChatMessage, ...]:
        """The messages up to and including the last user turn."""
        last = max((i for i, message in enumerate(self.messages) if message["role"] == "user"), default=-1)
        return self.messages[: last + 1]


def read_rows(name: str | Path, *, columns: Mapping[str, str] | None = None) -> Iterator[Row]:
    """The rows of a file (.jsonl, .json, both also .gz; .parquet, .csv) or of a hub data set, one by one.

    Args:
        name: path, or ``owner/name[:split]`` of a hub data set.
        columns: our key -> the file's key, such as ``{"prompt": "question"}``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an invalid row, with its file and line.
    """
    for record in read_records(name):
        yield parse_row(record, columns=columns)


def parse_row(record: RawRow, *, columns: Mapping[str, str] | None = None) -> Row:
    """The parsed row; ValueError with its place if no key is known or the turns are out of order."""
    fields = dict(record.fields)
    for ours, theirs in (columns or {}).items():
        if theirs not in fields:
            raise ValueError(f"{record.where}: --column {ours}={theirs}: the row has no key {theirs!r}{_keys(fields)}")
        fields[ours] = fields[theirs]
    named = {ours: fields[ours] for ours in columns or ()}
    kind = recognise(named) or recognise(fields)
    if kind is None:
        raise ValueError(
            f"{record.where}: no known keys{_keys(fields)}; known are messages, conversations, instruction + output, "
            "prompt, turns, text: rename the keys, or give --column to distill and data inspect"
        )
    common: dict[str, Any] = {
        "id": _text_or_none(fields.get("id", fields.get("question_id"))),
        "source": _text_or_none(fields.get("source")),
        "where": record.where,
        "is_cut": fields.get("finish_reason") == "length",
        "tools": _tools(fields, record.where),
    }
    if kind == "tokens":
        common |= {"prompt_ids": _ids(fields, "prompt_token_ids", record.where)}
        common |= {"token_ids": _ids(answer_of(fields), "token_ids", record.where)}
        if not fields.get("messages"):
            return Row(**common)
        kind = "messages"
    if kind == "text":
        return Row(text=_text(fields, "text", record.where), **common)
    messages = _READERS[kind](fields, record.where)
    if kind == "turns":
        first, *later = messages
        return Row(messages=(first,), later_turns=tuple(message["content"] for message in later), **common)
    check_turns(messages, record.where)
    turns = fields[_TURN_KEYS[kind]] if kind in _TURN_KEYS else ()
    return Row(messages=tuple(messages), has_parts=any(map(_has_parts, turns)), **common)


def recognise(fields: Mapping[str, Any]) -> str | None:
    """The format that the keys of a row show; None if no key is known."""
    if isinstance(fields.get("prompt_token_ids"), list) and isinstance(answer_of(fields).get("token_ids"), list):
        return "tokens"
    for kind, key in _TURN_KEYS.items():
        if isinstance(fields.get(key), list):
            return kind
    if "instruction" in fields:
        return "alpaca"
    if "prompt" in fields:
        return "prompt"
    if isinstance(fields.get("turns"), list):
        return "turns"
    return "text" if "text" in fields else None


def answer_of(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object that holds ``token_ids``: the row, or the first choice of a stored reply of vLLM."""
    choices = fields.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else fields


def check_turns(messages: Sequence[ChatMessage], where: str) -> None:
    """ValueError unless the turns are system (optional), then user and assistant in turn."""
    wanted = "user"
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if role == "system" and number == 1:
            continue
        if role != wanted:
            raise ValueError(
                f"{where}: turns out of order: turn {number} is {role!r}, expected {wanted!r}; "
                "a conversation is system (optional), then user and assistant in turn"
            )
        wanted = "assistant" if wanted == "user" else "user"
    if not any(message["role"] == "user" for message in messages):
        raise ValueError(f"{where}: the conversation has no user turn")


def _read_turns(
    fields: Mapping[str, Any], where: str, *, key: str, names: tuple[tuple[str, ...], tuple[str, ...]]
) -> list[ChatMessage]:
    turns = fields.get(key)
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise ValueError(f"{where}: {key} must be an array of turns{_keys(fields)}")
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, Mapping):
            raise ValueError(f"{where}: turn {number} of {key} must be an object, not {type(turn).__name__}")
        role, content = (next((turn[name] for name in group if name in turn), None) for group in names)
        if not isinstance(role, str) or role not in _ROLES:
            raise ValueError(f"{where}: turn {number} has the role {short(role)}; known are {', '.join(_ROLES)}")
        text = "" if content is None and _has_parts(turn) else _content(content, f"{where}: turn {number}")
        messages.append({"role": _ROLES[role], "content": text})
    if not messages:
        raise ValueError(f"{where}: {key} is empty")
    return messages


def _has_parts(turn: Mapping[str, Any]) -> bool:
    """Whether a turn has reasoning or tool calls beside its text."""
    return any(turn.get(key) for key in ("reasoning_content", "reasoning", "tool_calls"))


def _tools(fields: Mapping[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    tools = fields.get("tools") or ()
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"{where}: tools must be an array of objects")
    return tuple(map(dict, tools))


def _ids(fields: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    value = fields.get(key)
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise ValueError(f"{where}: {key} must be an array of token ids{_keys(fields)}")
    return tuple(value)


def _content(value: Any, where: str) -> str:
    """The text of a turn. A list of text parts, as in OpenAI's API, is joined."""
    if isinstance(value, str):
        return _encodable(value, where)
    if isinstance(value, Sequence) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in value):
        return _encodable("".join(part["text"] for part in value), where)
    kinds = [part.get("type") for part in value if isinstance(part, Mapping)] if isinstance(value, Sequence) else []
    other = next((kind for kind in kinds if kind not in (None, "text")), None)
    if other is not None:
        raise ValueError(f"{where} has a part of type {other!r}: only text can be used")
    raise ValueError(f"{where} is {type(value).__name__}, not text: only text turns can be used")


def _read_pair(fields: Mapping[str, Any], where: str, *, key: str, answers: Sequence[str]) -> list[ChatMessage]:
    """A question, and the first of the answers that the row has."""
    question, extra = _text(fields, key, where), fields.get("input")
    if key == "instruction" and isinstance(extra, str) and extra.strip():
        question += "\n\n" + extra
    messages = [{"role": "user", "content": question}]
    answer = next((name for name in answers if fields.get(name) is not None), None)
    return messages + ([{"role": "assistant", "content": _text(fields, answer, where)}] if answer else [])


def _read_user_turns(fields: Mapping[str, Any], where: str) -> list[ChatMessage]:
    """The user turns of a conversation without answers."""
    turns = fields.get("turns")
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise ValueError(f"{where}: turns must be an array of at least one text{_keys(fields)}")
    return [
        {"role": "user", "content": _content(turn, f"{where}: turn {number}")} for number, turn in enumerate(turns, 1)
    ]


_READERS: dict[str, Callable[[Mapping[str, Any], str], list[ChatMessage]]] = {
    "messages": partial(_read_turns, key="messages", names=(("role",), ("content",))),
    "sharegpt": partial(_read_turns, key="conversations", names=(("from", "role"), ("value", "content", "text"))),
    "alpaca": partial(_read_pair, key="instruction", answers=("output",)),
    "prompt": partial(_read_pair, key="prompt", answers=("completion", "response", "text")),
    "turns": _read_user_turns,
}


def _text(fields: Mapping[str, Any], key: str, where: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key} must be text, not {type(value).__name__}{_keys(fields)}")
    if key in ("instruction", "prompt", "text") and not value.strip():
        raise ValueError(f"{where}: {key} is empty")
    return _encodable(value, f"{where}: {key}")


def _encodable(value: str, where: str) -> str:
    """The text; ValueError for half a surrogate pair, which JSON can express and no tokenizer accepts."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds half a surrogate pair at character {error.start}, which is no text") from error
    return value


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)


def _keys(fields: Mapping[str, Any]) -> str:
    names = [repr(str(key)[:40]) for key in fields]
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f" (the row has {shown})" if names else " (the row is empty)"
