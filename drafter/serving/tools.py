"""Calls of functions in an answer's text, in the forms that chat templates show to their models.

Qwen's and Hermes' models write ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` anywhere in a text. Llama's
write an object alone, with ``parameters``, and Mistral's a list of objects; both begin with the text, because control
tokens are no text. A text that is not quite a call stays text.
"""

import json
import re
import secrets
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{"])')
_TAIL = re.compile(r"\s*\}?\s*(?:</tool_call>)?")
_BETWEEN = re.compile(r"[\s,;\[\]]*")  # around objects without marks
_LETTERS = string.ascii_letters + string.digits
_LONGEST = 1 << 16  # characters of an object that may become a call


def has_marks(template: str) -> bool | None:
    """Whether calls stand between marks, in the form that a chat template shows; None: the template takes no tools."""
    return OPEN in template if "tools" in template else None


def structure_of_call(tools: Sequence[Mapping[str, Any]], template: str) -> dict[str, Any]:
    """What an answer must look like that calls one of the functions, as fields of SamplingParams."""
    key = "parameters" if '"parameters"' in template and OPEN not in template else "arguments"
    calls = []
    for function in (tool["function"] for tool in tools):
        properties = {"name": {"const": function["name"]}, key: function.get("parameters") or {"type": "object"}}
        form = {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
        calls.append(form)
    schema = json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})
    if OPEN not in template:
        return {"json_schema": schema}
    return {"grammar": f'start: "{OPEN}\\n" call "\\n{CLOSE}"\ncall: %json {schema}'}


class ToolParser:
    """Finds calls in a growing text.

    Args:
        names: functions that may be called.
        marks: whether calls stand between ``<tool_call>`` and ``</tool_call>``.

    Attributes:
        num_calls: calls that were found.
    """

    def __init__(self, names: Collection[str], *, marks: bool) -> None:
        self._names, self._marks = names, marks
        self._rest, self._space = "", ""  # text that nobody was told of, and white space before a mark
        self._step = self._text if marks else self._head
        self._value = _Value()
        self._is_last = False
        self.num_calls = 0

    def push(self, text: str, *, is_last: bool = False) -> dict[str, Any]:
        """The new part of a message, as in a stream: ``content``, and ``tool_calls`` with their ``index``."""
        self._rest, self._is_last = self._rest + text, is_last
        content, calls = "", dict[int, dict[str, Any]]()
        while True:
            before, parts = (self._step, self._rest), list(self._step())
            for part in parts:
                if isinstance(part, str):
                    content += part
                    continue
                name, arguments = part
                index = self.num_calls - 1
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                if name:
                    # Nine letters and digits: Mistral's template takes no other id.
                    call |= {"id": "".join(secrets.choice(_LETTERS) for _ in range(9)), "type": "function"}
                    call["function"] = {"name": name} | call["function"]
                call["function"]["arguments"] += arguments
            if before == (self._step, self._rest):
                found: dict[str, Any] = {"content": content} if content else {}
                return found | ({"tool_calls": list(calls.values())} if calls else {})

    # Each step takes text from ``_rest``, yields content or (name, arguments), and names the next step. A step that
    # changes nothing waits for more text.

    def _text(self) -> Iterator[str]:
        """Content up to a mark, or to what may become one; white space waits for what follows."""
        place = self._rest.find(OPEN) if self._marks else -1
        if place >= 0:
            self._step = self._head
        elif not self._marks or self._is_last:
            place = len(self._rest)
        else:
            sizes = (size for size in range(1, len(OPEN)) if self._rest.endswith(OPEN[:size]))
            place = len(self._rest[: len(self._rest) - max(sizes, default=0)].rstrip())
        text = self._rest[:place]
        content = text if self._step == self._text else text.rstrip()
        self._rest, self._space = self._rest[place:], text[len(content) :]
        if content and not (self.num_calls and not content.strip()):
            yield content

    def _head(self) -> Iterator[str | tuple[str, str]]:
        """A name where a call begins; the text itself where no call does."""
        start = len(OPEN) if self._marks else _BETWEEN.match(self._rest).end()  # type: ignore[union-attr]  # may be empty
        body = self._rest[start:]
        head, end = _HEAD.match(body), _end_of_object(body)
        if head and head[1] in self._names:
            self.num_calls += 1
            self._step, self._value, self._rest = self._arguments, _Value(), body[head.end() :]
            yield head[1], ""
        elif end is not None and (call := _call(body[:end], self._names)):  # in another order
            self.num_calls += 1
            self._step, self._rest = self._tail, body[end:]
            yield call
        elif self._is_last or head or end is not None or len(body) > _LONGEST or body.lstrip()[:1] not in ("", "{"):
            self._step = self._text
            if self._marks:  # the mark is text, and the search goes on behind the mark
                self._rest = body
                yield self._space + OPEN
            elif self.num_calls and not body:
                self._rest = ""

    def _arguments(self) -> Iterator[tuple[str, str]]:
        length = self._value.read(self._rest)
        piece, self._rest = self._rest[:length], self._rest[length:]
        if self._value.is_whole:
            self._step = self._tail
        if piece:
            yield "", piece

    def _tail(self) -> Iterator[tuple[str, str]]:
        """The end of an object and its mark."""
        tail = _TAIL.match(self._rest)
        assert tail is not None
        rest = self._rest[tail.end() :]
        if self._is_last or (not CLOSE.startswith(rest) if self._marks else "}" in tail[0]) or CLOSE in tail[0]:
            self._rest, self._step = rest, self._text if self._marks else self._head
        yield from ()


class _Value:
    """Finds the end of an object, a list or a text in a growing JSON text."""

    def __init__(self) -> None:
        self._depth, self._is_text, self._is_escaped = 0, False, False
        self.is_whole = False

    def read(self, text: str) -> int:
        """Number of characters of the text that belong to the value."""
        for at, char in enumerate(text):
            if self._is_text:
                self._is_text = self._is_escaped or char != '"'
                self._is_escaped = not self._is_escaped and char == "\\"
            else:
                self._is_text = char == '"'
                self._depth += (char in "{[") - (char in "}]")
            if self._depth <= 0 and not self._is_text and char in '}]"':
                self.is_whole = True
                return at + 1
        return len(text)


def _end_of_object(text: str) -> int | None:
    """The place behind the object at a text's beginning; None where there is none, or the text ends before."""
    value, start = _Value(), len(text) - len(text.lstrip())
    length = value.read(text[start:]) if text[start : start + 1] == "{" else 0
    return start + length if value.is_whole else None


def _call(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments of an object, if the object is a call."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    arguments = found.get("arguments", found.get("parameters"))
    if found.get("name") not in names or not isinstance(arguments, dict | str):
        return None
    return found["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
