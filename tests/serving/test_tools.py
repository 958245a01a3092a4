"""Calls of functions in texts: each form, whole and in any pieces; what is no call stays text."""

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from drafter.serving.tools import CLOSE, OPEN, ToolParser, has_marks, structure_of_call
from tests.data.tiny import tiny_tokenizer
from tests.serving.live import MODEL, Live

ADD, NOW = ("add", '{"a": 1, "b": "}\\"{"}'), ("now", "{}")
HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


def read(text: str, *, marks: bool, sizes: tuple[int, ...]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, of a text that comes in pieces, as a client joins them."""
    parser, chance, content, calls = ToolParser({"add", "now"}, marks=marks), random.Random(1), "", dict[int, Any]()
    while True:
        size = chance.choice(sizes)
        piece, text = text[:size], text[size:]
        delta = parser.push(piece, is_last=not text)
        content += delta.get("content", "")
        for part in delta.get("tool_calls", []):
            if "id" in part:
                assert part["index"] not in calls and len(part["id"]) == 9 and part["type"] == "function"
                calls[part["index"]] = [part["function"]["name"], ""]
            calls[part["index"]][1] += part["function"]["arguments"]
        if not text:
            assert parser.num_calls == len(calls) and list(calls) == list(range(len(calls)))
            return content, [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("sizes", [(10_000,), (1,), (1, 2, 3, 7)])
@pytest.mark.parametrize(
    ("marks", "text", "content", "calls"),
    [
        (True, HERMES.format(*ADD), "", [ADD]),
        (True, f"First.\n{HERMES.format(*ADD)}\n{HERMES.format(*NOW)}", "First.", [ADD, NOW]),
        (True, f"{HERMES.format(*NOW)} Done, I think.", " Done, I think.", [NOW]),
        (True, '<tool_call>{"arguments": {"a": 2}, "name": "add"}</tool_call>', "", [("add", '{"a": 2}')]),
        (True, '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", [NOW]),  # as a text
        (True, '<tool_call>{"name": "now", "arguments": {}}', "", [NOW]),  # cut before the mark
        (True, 'Look:\n```json\n{\n  "name": "now",\n  "arguments": {}\n}\n```\n', "Look:", [NOW]),  # a fence
        (True, f'```\n{{"name": "now", "arguments": {{}}}}\n{{"name": "add", "arguments": {ADD[1]}}}\n```', "",
         [NOW, ADD]),
        (True, '<tool_call>\n{"name": "add", "arguments": {"a": ', "", [("add", '{"a": ')]),  # cut within
        (False, '{"name": "add", "parameters": {"a": 1, "b": "}\\"{"}}', "", [ADD]),
        (False, ' [{"name": "now", "arguments": {}}, {"name": "add", "arguments": {"a": 1}}]', "",
         [NOW, ("add", '{"a": 1}')]),
        # No calls: other names, other objects, marks in prose, a list.
        *((marks, text, text, []) for marks, text in (
            (True, "Use \n<tool_call> to call, a < b, x <tool"), (True, HERMES.format("other", "{}")),
            (True, "<tool_call>{oops}</tool_call>\n"),
            (True, '```json\n{"a": 1}\n``` and `x`, ```\nprint()\n```'), (False, '{"name": "other", "parameters": {}}'),
            (False, '{"colour": "red"} and more'), (False, '[1, 2] is a list'), (False, 'Say {"name": "now"}'),
            (False, '{"name": "add"'), (True, ""), (False, " \n"),
            (True, '<tool_call>{"name": ["now"], "arguments": {}}</tool_call>'),
            (True, f'<tool_call>{{"arguments": {"[" * 2000}{"]" * 2000}}}</tool_call>'),
        )),
    ],
)  # fmt: skip
def test_forms(marks: bool, text: str, content: str, calls: list[tuple[str, str]], sizes: tuple[int, ...]) -> None:
    assert read(text, marks=marks, sizes=sizes) == (content, calls)
    for _, arguments in calls:
        assert json.loads(arguments) or arguments == "{}" if not text.endswith(": ") else arguments


def test_what_was_told_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    call_at, places = ToolParser._call_at, list[int]()
    monkeypatch.setattr(ToolParser, "_call_at", lambda parser, at: places.append(at) or call_at(parser, at))
    text = OPEN * 50 + HERMES.format(*NOW) * 50
    assert read(text, marks=True, sizes=(len(OPEN),)) == (OPEN * 50, [NOW] * 50)
    assert len(places) < len(text) / 5 and places == sorted(places)


def test_the_form_is_the_templates() -> None:
    assert has_marks("{{ messages }}") is None
    assert has_marks("{% if tools %}<tool_call>{% endif %}") is True
    assert has_marks("{% if tools %}[AVAILABLE_TOOLS]{% endif %}") is False


def test_marks_that_are_tokens_are_tokens_of_the_form() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([OPEN, CLOSE])
    form = structure_of_call([{"function": {"name": "now"}}], OPEN, tokenizer.get_vocab())
    matcher = LLMatcher(from_tokenizer(tokenizer), LLMatcher.grammar_from_lark(form["grammar"]))
    token_ids = tokenizer(HERMES.format(*NOW), add_special_tokens=False)["input_ids"]
    assert matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("template", ["{{ tools }} <tool_call>", '{{ tools }} "parameters"'])
def test_a_required_call_has_the_schema_of_its_function(live: Live, monkeypatch, template: str) -> None:
    monkeypatch.setattr(live.server, "_template", template)
    monkeypatch.setattr(live.server, "_has_marks", has_marks(template))
    properties = {"n": {"$ref": "#/$defs/number"}, "is_on": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["n", "is_on"], "additionalProperties": False,
              "$defs": {"number": {"enum": [1, 22]}}}  # fmt: skip
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("add", "now")]
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "tools": tools, "seed": 1}
    create = live.client.chat.completions.create
    for choice, names in (("required", {"add", "now"}), ({"type": "function", "function": {"name": "now"}}, {"now"})):
        answer = create(**body, tool_choice=choice).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        (call,) = answer.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name in names and arguments["n"] in (1, 22) and isinstance(arguments["is_on"], bool)
        *_, last = chunks = list(create(**body, tool_choice=choice, stream=True))
        parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
        assert [part.id is not None for part in parts] == [True] + [False] * (len(parts) - 1), "once"
        assert "".join(part.function.arguments for part in parts) == call.function.arguments
        assert last.choices[0].finish_reason == "tool_calls"
    with live.http() as http:
        for odd in ({"type": "oops"}, {"minlength": 3}):
            given = [{"type": "function", "function": {"name": "add", "parameters": odd}}]
            answer = http.post("/v1/chat/completions", json=body | {"tools": given, "tool_choice": "required"})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
