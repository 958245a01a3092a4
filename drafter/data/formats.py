"""Rows of any known format, parsed into messages.

The keys of a row show its format, in the order of this table. Rows of tokens are what every answerer of this package
writes, what a server records, and what vLLM replies (``choices[0].token_ids``).

=========== ============================================= =====================================
format      keys                                          becomes
=========== ============================================= =====================================
tokens      prompt_token_ids, token_ids                   the tokens as they are, no template
messages    messages [{role, content}] (OpenAI)           the conversation
sharegpt    conversations [{from, value}]                 the conversation
prompt      prompt, completion / response / text (opt.)   user turn, assistant turn if given
turns       turns [text, ...]                             the first user turn (MT-bench)
text        text                                          plain text, every token trained on
=========== ============================================= =====================================

A row may have ``tools``, the functions that were offered; the target's chat template renders them. Answers with
reasoning or tool calls need token ids: as text they are not used.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from drafter.data.reading import RawRow, read_json_lines, read_records
from drafter.utils.parse import validated

_FORMAT_KEYS = ("prompt_token_ids", "messages", "conversations", "prompt", "turns", "text")
_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"),
}
ChatMessage = dict[str, str]


def _turn_of(turn: Any) -> Any:
    """A turn with OpenAI's keys, from those or ShareGPT's, in which a list of text parts is one text."""
    if not isinstance(turn, Mapping):
        return turn
    names = ("role", "from"), ("content", "value", "text")
    role, content = (next((turn[name] for name in group if turn.get(name) is not None), None) for group in names)
    if content is None and (_has_parts(turn) or _ROLES.get(str(role)) == "assistant"):
        content = ""  # no answer drops a row, as an empty one does; a question has to be there
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        others = [part.get("type") for part in content if not isinstance(part.get("text"), str)]
        if others:
            raise ValueError(f"a part of type {others[0]!r}: only text can be used")
        content = "".join(part["text"] for part in content)
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"the role is {short(role)}; known are {', '.join(_ROLES)}")
    return {"role": _ROLES[role], "content": content}


def _has_parts(turn: Any) -> bool:
    """Whether a turn has reasoning or tool calls beside its text."""
    names = ("reasoning_content", "reasoning", "tool_calls")
    return isinstance(turn, Mapping) and any(turn.get(name) for name in names)


def _in_turn(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    """The messages; ValueError unless they are system (optional), then user and assistant in turn."""
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns:
        raise ValueError("the conversation has no user turn")
    if any(role != ("user", "assistant")[number % 2] for number, role in enumerate(turns)):
        shown = ", ".join(roles[:8])
        raise ValueError(f"turns out of order ({shown}): first system (optional), then user and assistant in turn")
    return messages


# A constraint makes pydantic read the text, and so refuse half a surrogate pair, which JSON can express.
_Words = Annotated[str, Field(min_length=0)]
_Ids = Annotated[tuple[Annotated[int, Field(strict=True, ge=0)], ...], Field(fail_fast=True)]
_Turn = Annotated[dict[str, _Words], BeforeValidator(_turn_of)]
_Messages = Annotated[tuple[_Turn, ...], Field(fail_fast=True)]


class Row(BaseModel):
    """A conversation (system messages, then user and assistant in turn) or a plain text.

    Attributes:
        messages: the conversation; empty for plain text.
        text: the plain text, or None.
        id: the row's own id as text, or empty.
        where: file and line, for error messages.
        is_cut: the last answer ended at a length limit, without an end-of-turn token.
        has_parts: an answer has reasoning or tool calls, whose form in tokens is not known from the text.
        tools: functions that the target may call, in OpenAI's form.
        prompt_ids, token_ids: the tokens of prompt and answer, where the file gives tokens.
    """

    model_config = ConfigDict(frozen=True)

    messages: Annotated[_Messages, AfterValidator(_in_turn)] = ()
    text: _Words | None = None
    id: Annotated[str, BeforeValidator(lambda value: "" if value is None else str(value))] = ""
    where: str = ""
    is_cut: bool = False
    has_parts: bool = False
    tools: Annotated[tuple[dict[str, Any], ...], Field(fail_fast=True)] = ()
    prompt_ids: _Ids = Field((), validation_alias="prompt_token_ids")
    token_ids: _Ids | None = None

    @property
    def prompt(self) -> tuple[ChatMessage, ...]:
        """The messages up to and including the last user turn."""
        last = max((i for i, message in enumerate(self.messages) if message["role"] == "user"), default=-1)
        return self.messages[: last + 1]


def read_rows(name: str | Path, *, columns: Mapping[str, str] | None = None) -> Iterator[Row]:
    """The rows of a file (.jsonl, .json, both also .gz; .parquet, .csv) or of a hub data set ``owner/name[:split]``.

    ``columns``: our key -> the file's key, such as ``{"prompt": "question"}``. FileNotFoundError; ValueError for an
    invalid row, with its file and line.
    """
    return (parse_row(record, columns=columns) for record in read_records(name))


def parse_row(record: RawRow, *, columns: Mapping[str, str] | None = None) -> Row:
    """The parsed row; ValueError with its place if no key is known or the turns are out of order."""
    fields, where = record
    if columns:  # a named format goes before all others
        for ours, theirs in columns.items():
            if theirs not in fields:
                raise ValueError(f"{where}: --column {ours}={theirs}: the row has no key {theirs!r}{_keys(fields)}")
        others = _FORMAT_KEYS if not columns.keys().isdisjoint(_FORMAT_KEYS) else ()
        named = {ours: fields[theirs] for ours, theirs in columns.items()}
        fields = {key: value for key, value in fields.items() if key not in others} | named
    found = _content_of(fields)
    asked = next((fields[key] for key in ("prompt", "text") if key in fields), None)
    if isinstance(asked, str) and not asked.strip():
        raise ValueError(f"{where}: the text is empty")
    if not found:
        raise ValueError(
            f"{where}: no known keys{_keys(fields)}; known are messages, conversations, prompt, turns, text: rename "
            "the keys, or give --column to distill and data inspect"
        )
    found |= {"id": fields.get("id", fields.get("question_id")), "is_cut": fields.get("finish_reason") == "length"}
    found |= {"tools": fields["tools"]} if "tools" in fields else {}
    return validated(Row, found | {"where": where}, where)


def _content_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a :class:`Row`, by the first format whose keys the fields have; empty if no key is known."""
    ids = ids_of(fields)
    found = ids if all(isinstance(value, list) for value in ids.values()) else {}
    turns = next((fields[key] for key in ("messages", "conversations") if isinstance(fields.get(key), list)), None)
    if turns is not None and (turns or not found):
        return found | {"messages": turns, "has_parts": any(map(_has_parts, turns))}
    if found:
        return found
    if "prompt" in fields:
        answer = next((fields[key] for key in ("completion", "response", "text") if key in fields), None)
        turns = [{"role": "user", "content": fields["prompt"]}]
        return {"messages": turns + ([] if answer is None else [{"role": "assistant", "content": answer}])}
    if isinstance(fields.get("turns"), list):
        return {"messages": [{"role": "user", "content": turn} for turn in fields["turns"][:1]]}
    return {"text": fields["text"]} if "text" in fields else {}


def ids_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``prompt_token_ids`` and ``token_ids``, unchecked, of a row or of the first choice of a reply of vLLM."""
    choices = fields.get("choices")
    answer = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else fields
    return {"prompt_token_ids": fields.get("prompt_token_ids"), "token_ids": answer.get("token_ids")}


def check_ids(ids: Sequence[int], vocab_size: int, where: str) -> None:
    """ValueError for token ids that the target lacks."""
    if (largest := max(ids, default=0)) >= vocab_size:
        raise ValueError(
            f"{where}: token id {largest} is outside the target's vocabulary of {vocab_size} tokens: the row or "
            "the tokenizer is another model's"
        )


def _keys(fields: Mapping[str, Any]) -> str:
    return f" (the row has {', '.join(repr(str(key)[:40]) for key in fields)})" if fields else " (the row is empty)"


# -- recorded traffic ----------------------------------------------------------------------------------------------


class TrafficRow(NamedTuple):
    """One answer: the tokens of its prompt, and its own."""

    prompt_token_ids: list[int]
    token_ids: list[int]


def read_traffic(path: str | Path, *, vocab_size: int | None = None) -> list[TrafficRow]:
    """The rows of a file, or of all ``.jsonl`` files of a folder in the order of their names; equal rows count once.

    A server may be writing: a last line that is not written to its end is left out, and a file of a folder may be gone
    before it is read. ``vocab_size``: the target's, which refuses larger token ids.

    Raises:
        ValueError: a row without ``prompt_token_ids`` and ``token_ids``, an id outside the vocabulary, or no row with
            tokens in both; names file and line.
        OSError: no such file or folder.
    """
    path = Path(path).expanduser()
    is_folder = path.is_dir()
    rows: dict[tuple[tuple[int, ...], tuple[int, ...]], TrafficRow] = {}
    for file in sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")]) if is_folder else [path]:
        with contextlib.suppress(*[FileNotFoundError] if is_folder else []):
            for record in read_json_lines(file, str(file), skip_torn=True):
                ids = ids_of(record.fields)
                if lacking := [name for name, value in ids.items() if value is None]:
                    raise ValueError(f"{record.where} lacks {', '.join(lacking)}: the row is no recorded answer")
                row = parse_row(RawRow(ids, record.where))
                if vocab_size is not None:
                    check_ids((*row.prompt_ids, *(row.token_ids or ())), vocab_size, row.where)
                if row.prompt_ids and row.token_ids:
                    rows[row.prompt_ids, row.token_ids] = TrafficRow(list(row.prompt_ids), list(row.token_ids))
    if not rows:
        raise ValueError(f"{path} holds no recorded answers: name a folder of `drafter serve --record`")
    return list(rows.values())
