"""Calls of functions in an answer's text, in the forms that chat templates show to their models.

Qwen's and Hermes' models write ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` anywhere in a text. Llama's
write an object alone, with ``parameters``, and Mistral's a list of objects; both begin with the text, because control
tokens are no text. A text that is not quite a call stays text.
"""

import json
import re
import secrets
import string
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{"])')
_TAIL = re.compile(r"\s*\}?\s*(?:</tool_call>)?")
_BETWEEN = re.compile(r"[\s,;\[\]]*")  # around objects without marks
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|["{}\[\]]', re.DOTALL)  # of JSON: a text, an open text's beginning, a bracket
_LETTERS = string.ascii_letters + string.digits
_LONGEST = 1 << 16  # characters of an object that may become a call


def has_marks(template: str) -> bool | None:
    """Whether calls stand between marks, in the form that a chat template shows; None: the template takes no tools."""
    return OPEN in template if "tools" in template else None


def structure_of_call(tools: Sequence[Mapping[str, Any]], template: str, vocabulary: Container[str]) -> dict[str, Any]:
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
    first, last = (mark if mark in vocabulary else f'"{mark}"' for mark in (OPEN, CLOSE))  # tokens stand without quotes
    return {"grammar": f'start: {first} "\\n" call "\\n" {last}\ncall: %json {schema}'}


class ToolParser:
    """Finds calls of the named functions in a growing text, which is read again with each piece: what was told stays.

    ``marks``: whether calls stand between ``<tool_call>`` and ``</tool_call>``.
    """

    def __init__(self, names: Collection[str], *, marks: bool) -> None:
        self._names, self._marks, self._text = names, marks, ""
        self._num_told, self._told = 0, list[int]()  # characters of the content, and of the arguments of each call

    @property
    def num_calls(self) -> int:
        """Calls that were found."""
        return len(self._told)

    def push(self, text: str, *, is_last: bool = False) -> dict[str, Any]:
        """The new part of a message, as in a stream: ``content``, and ``tool_calls`` with their ``index``."""
        self._text += text
        content, calls = self._read(is_last=is_last)
        delta: dict[str, Any] = {"content": content[self._num_told :]} if len(content) > self._num_told else {}
        self._num_told, parts = len(content), []
        for index, (name, arguments) in enumerate(calls):
            part: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
            if index == len(self._told):
                # Nine letters and digits: Mistral's template takes no other id.
                own = {"id": "".join(secrets.choice(_LETTERS) for _ in range(9)), "type": "function"}
                parts.append(part | own | {"function": {"name": name, "arguments": arguments}})
                self._told.append(len(arguments))
            elif len(arguments) > self._told[index]:
                part["function"]["arguments"] = arguments[self._told[index] :]
                parts.append(part)
                self._told[index] = len(arguments)
        return delta | ({"tool_calls": parts} if parts else {})

    def _read(self, *, is_last: bool) -> tuple[str, list[tuple[str, str]]]:
        """Content, and name and arguments of the calls, as far as later text cannot change them."""
        text, content, calls, place = self._text, "", list[tuple[str, str]](), 0
        while True:
            start = text.find(OPEN, place) if self._marks else place
            if start < 0:
                rest = text[place:]
                if not is_last:  # a mark may begin; white space before a mark is no content
                    begun = max((size for size in range(1, len(OPEN)) if rest.endswith(OPEN[:size])), default=0)
                    rest = rest[: len(rest) - begun].rstrip()
                return content + (rest if rest.strip() or not calls else ""), calls
            body = start + len(OPEN) if self._marks else _BETWEEN.match(text, place).end()  # type: ignore[union-attr]
            found = self._call_at(body, is_last=is_last)
            if found is not None:
                content += text[place:start].rstrip()
                *call, place = found
                calls.append((call[0], call[1]))
            elif not is_last and self._may_begin(body):
                return content + text[place:start].rstrip(), calls
            elif self._marks:  # the mark is text
                content, place = content + text[place:body], body
            else:
                return content + (text[place:] if body < len(text) or not calls else ""), calls
            if place == len(text):
                return content, calls

    def _may_begin(self, body: int) -> bool:
        """Whether more text may make a call of what stands here."""
        text = self._text
        is_open = text[body:].lstrip()[:1] in ("", "{") and len(text) - body <= _LONGEST
        return is_open and not _HEAD.match(text, body) and _end_of_object(text, body) is None

    def _call_at(self, body: int, *, is_last: bool) -> tuple[str, str, int] | None:
        """Name and arguments of the call that begins here, and the place behind the call; None: no call begins."""
        text, head = self._text, _HEAD.match(self._text, body)
        if head and head[1] in self._names:
            end = _end_of_value(text, head.end())
            name, arguments = head[1], text[head.end() : end]
        else:
            end = _end_of_object(text, body)
            call = _call(text[body:end], self._names) if end is not None else None
            if call is None:
                return None
            name, arguments = call
        if end is None:
            return name, arguments, len(text)
        tail = _TAIL.match(text, end)
        assert tail is not None
        is_whole = not CLOSE.startswith(text[tail.end() :]) if self._marks else "}" in tail[0]
        return name, arguments, tail.end() if is_last or is_whole or CLOSE in tail[0] else len(text)


def _end_of_value(text: str, start: int) -> int | None:
    """The place behind the object, list or text that begins here; None where the text ends before."""
    depth = 0
    for found in _PIECE.finditer(text, start):
        depth += (found[0] in "{[") - (found[0] in "}]")
        if depth <= 0 or found[0] == '"':
            return found.end() if found[0] != '"' else None
    return None


def _end_of_object(text: str, body: int) -> int | None:
    """The same for an object behind white space; None where there is none."""
    start = body + len(text[body:]) - len(text[body:].lstrip())
    return _end_of_value(text, start) if text[start : start + 1] == "{" else None


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
