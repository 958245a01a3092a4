"""Calls of functions in an answer's text, in the forms that chat templates show to their models.

Qwen's and Hermes' models write ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` anywhere in a text. Llama's
write an object alone, with ``parameters``, and Mistral's a list of objects; both begin with the text, because control
tokens are no text. Small models write a fence of Markdown for ``<tool_call>``. A text that is not quite a call stays
text.
"""

import json
import re
import secrets
import string
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

from drafter.engine.grammars import checked_schema

OPEN, CLOSE, FENCE = "<tool_call>", "</tool_call>", "```"
_MARK = re.compile(r"<tool_call>|```(?:json)?\s")
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BRACE, _TAIL = re.compile(r"\s*\}?"), re.compile(r"\s*\}?\s*(</tool_call>|```)?")
_BETWEEN = string.whitespace + ",;[]"  # around objects without marks
_BEGIN = re.compile(r"\s*(\{|\Z)")  # of an object, or of nothing yet
# Of JSON: a text, the beginning of an open text, a bracket. Nothing is given back, so an open text is read once.
_PIECE = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.DOTALL)
_LETTERS = string.ascii_letters + string.digits


def has_marks(template: str) -> bool | None:
    """Whether calls stand between marks, in the form that a chat template shows; None: the template takes no tools."""
    return OPEN in template if "tools" in template else None


def structure_of_call(tools: Sequence[Mapping[str, Any]], template: str, vocabulary: Container[str]) -> dict[str, Any]:
    """What an answer must look like that calls one of the functions, as fields of SamplingParams (ValueError)."""
    key = "parameters" if '"parameters"' in template and OPEN not in template else "arguments"
    form = {"type": "object", "required": ["name", key], "additionalProperties": False}
    calls = []
    for place, function in enumerate(tool["function"] for tool in tools):
        own = json.dumps(function.get("parameters") or {"type": "object"})
        own = own.replace('"$ref": "#', f'"$ref": "#/anyOf/{place}/properties/{key}')  # the place of this schema
        calls.append({"properties": {"name": {"const": function["name"]}, key: json.loads(own)}} | form)
    schema = json.dumps({"anyOf": calls})
    if OPEN not in template:
        return {"json_schema": schema}
    first, last = (mark if mark in vocabulary else f'"{mark}"' for mark in (OPEN, CLOSE))  # tokens stand without quotes
    return {"grammar": f'start: {first} "\\n" call "\\n" {last}\ncall: %json {checked_schema(schema)}'}


class ToolParser:
    """Finds calls of the named functions in a growing text. What was told stays, and is not read again.

    ``marks``: whether calls stand between ``<tool_call>`` and ``</tool_call>``. ``num_calls``: calls that were found.
    """

    def __init__(self, names: Collection[str], *, marks: bool) -> None:
        self._names, self._marks, self._text = names, marks, ""
        self.num_calls = 0
        self._place = 0  # the text before was told
        self._is_free = not marks  # a call without a mark may follow: in a fence, a further one
        self._num_told: int | None = None  # characters of the arguments of a call that has not ended
        self._scanned = 0, 0, 0  # where a value begins, a place in the value, and the open brackets before the place

    def push(self, text: str, *, is_last: bool = False) -> dict[str, Any]:
        """The new part of a message, as in a stream: ``content``, and ``tool_calls`` with their ``index``."""
        self._text += text
        content, parts = "", list[dict[str, Any]]()
        while True:
            start, body = self._place, len(self._text) - len(self._text[self._place :].lstrip(_BETWEEN))
            if not self._is_free:
                found = _MARK.search(self._text, self._place) if self._marks else None
                start, body = found.span() if found else (-1, -1)
            content += self._content(start, is_last=is_last)
            if start < 0:
                break
            call = self._call_at(body)
            if call is not None and call[0]:
                name, arguments, value_end = call
                parts += self._told(name, arguments)
                end = None if value_end is None else self._end_of_call(value_end, is_last=is_last)
                if end is None:
                    break
                self._place, self._num_told = end, None
                self._is_free |= self._text.startswith(FENCE, start)
            elif call is not None and not is_last:
                break
            elif not self._is_free:  # the mark is text
                content += self._text[self._place : body]
                self._place = body
            elif body == len(self._text) and self.num_calls:
                break
            else:
                self._is_free = False
        return ({"content": content} if content else {}) | ({"tool_calls": parts} if parts else {})

    def _content(self, start: int, *, is_last: bool) -> str:
        """What is certainly content up to a mark, or of all text (-1): no white space before marks or behind calls."""
        content = self._text[self._place : start if start >= 0 else None]
        if start < 0 and self._marks and not is_last:  # a mark may begin
            sizes = [at for mark in (OPEN, "```json ") for at in range(1, len(mark)) if content.endswith(mark[:at])]
            content = content[: len(content) - max(sizes, default=0)]
        if start >= 0 or not is_last or self.num_calls:
            content = content.rstrip()
        self._place += len(content)
        return content

    def _told(self, name: str, arguments: str) -> list[dict[str, Any]]:
        """The part of a call that nobody was told of, if there is any."""
        told, self._num_told = self._num_told, len(arguments)
        if told is not None:
            part = {"index": self.num_calls - 1, "function": {"arguments": arguments[told:]}}
            return [part] if len(arguments) > told else []
        self.num_calls += 1
        # Nine letters and digits: Mistral's template takes no other id.
        own = {"id": "".join(secrets.choice(_LETTERS) for _ in range(9)), "type": "function"}
        return [{"index": self.num_calls - 1} | own | {"function": {"name": name, "arguments": arguments}}]

    def _call_at(self, body: int) -> tuple[str, str, int | None] | None:
        """Name and arguments of the call that begins here, and the place behind the arguments or the object, unless
        the text ends before; no name: more text may make a call; None: no call begins.
        """
        text, head, begin = self._text, _HEAD.match(self._text, body), _BEGIN.match(self._text, body)
        if head and head[1] in self._names:
            end = self._end_of_value(head.end())
            return head[1], text[head.end() : end], end
        if head or not begin:
            return None
        end = self._end_of_value(begin.start(1)) if begin[1] else None
        if end is None:
            return "", "", None
        call = _call(text[body:end], self._names)
        return None if call is None else (*call, end)

    def _end_of_call(self, value_end: int, *, is_last: bool) -> int | None:
        """The place behind the call's object and mark; None: more text may belong to them."""
        tail = (_TAIL if self._marks else _BRACE).match(self._text, value_end)
        assert tail is not None
        rest = self._text[tail.end() : tail.end() + len(CLOSE)]
        is_whole = not (CLOSE.startswith(rest) or FENCE.startswith(rest)) if self._marks else "}" in tail[0]
        return tail.end() if is_last or is_whole or (self._marks and tail[1]) else None

    def _end_of_value(self, start: int) -> int | None:
        """The place behind the object, list or text that begins here; None where the text ends before."""
        _, place, depth = self._scanned if self._scanned[0] == start else (start, start, 0)
        for found in _PIECE.finditer(self._text, place):
            deeper = depth + (found[0] in "{[") - (found[0] in "}]")
            if found[0] == '"' or deeper <= 0:
                self._scanned = start, place, depth
                return found.end() if found[0] != '"' else None
            place, depth = found.end(), deeper
        self._scanned = start, place, depth
        return None


def _call(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments of an object, if the object is a call."""
    try:
        found = json.loads(text)
        name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
        if not isinstance(name, str) or name not in names or not isinstance(arguments, dict | str):
            return None
        return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
