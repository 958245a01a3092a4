"""Answers that must look like something: the plain tokens with every method, and parts that nobody understands."""

import json
import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor

from drafter.decoding.params import SamplingParams
from drafter.engine import grammars as grammars_module
from drafter.engine.engine import Engine
from drafter.engine.grammars import Grammars
from drafter.engine.settings import EngineConfig, Plan
from drafter.engine.tuned import PLAIN, Sizer
from tests.data.tiny import tiny_target as padded_target
from tests.engine.oracle import plan_of
from tests.engine.test_engine import hugging_face_answer
from tests.serving.tiny import tiny_drafter, tiny_target

TAGS = {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3}
PARTS: dict[str, Any] = {"name": {"type": "string", "maxLength": 9}, "size": {"type": "integer", "maximum": 999}}
SCHEMA = {
    "type": "object", "properties": {**PARTS, "inner": {"$ref": "#/$defs/inner"}}, "additionalProperties": False,
    "required": ["name", "size", "inner"],
    "$defs": {
        "inner": {"type": "object", "properties": {"tags": TAGS}, "required": ["tags"], "additionalProperties": False}
    },
}  # fmt: skip
FORMS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA}, {"regex": "[ab]{3,6}x"}, {"choice": ("red apple", "red pear")},
    {"grammar": 'start: "a" b "!"\nb: /[0-9]{2,5}/'}, {"json_schema": SCHEMA, "repetition_penalty": 1.3}, {},
]  # fmt: skip
PROMPT = [9, 80, 90, 100, 80, 90]


def params_of(temperature: float) -> list[SamplingParams]:
    own = {"max_new_tokens": 90, "temperature": temperature}
    return [SamplingParams(**own, seed=seed, **form) for seed, form in enumerate(FORMS)]  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["lookup", "drafter", "draft-model"])
def test_plain_and_drafted_answers_are_equal_and_look_as_they_must(method: Any) -> None:
    target = tiny_target()
    plain = Engine(target, config=EngineConfig(method="none", max_num_seqs=4))
    models = {"draft_model": target} if method == "draft-model" else {}
    sizes = {"beam_width": 4, "draft_length": 3, "tree_size": 12, "max_num_seqs": 3}
    drafted = Engine(target, tiny_drafter(), plan_of(method, **sizes), **models)
    for temperature in (0.0, 1.0):
        params = params_of(temperature)
        wanted, found = (engine.generate([PROMPT] * len(params), params) for engine in (plain, drafted))
        for form, one, other in zip(FORMS, wanted, found, strict=True):
            assert one.token_ids == other.token_ids and not other.error, form
            assert one.finish_reason == "stop" or not form, form
        texts = [answer.text for answer in found]
        assert list(json.loads(texts[0])) == list(json.loads(texts[4])) == ["name", "size", "inner"]
        assert re.fullmatch("[ab]{3,6}x", texts[1]) and texts[2] in FORMS[2]["choice"]
        assert re.fullmatch("a[0-9]{2,5}!", texts[3])
        assert found[2].num_target_forwards <= 5 < len(found[2].token_ids), "forced tokens are drafts"


def test_forced_tokens_have_room_where_nothing_is_drafted() -> None:
    """As far as the rows that have such tokens are worth a node's cost."""
    target, text = tiny_target(), "a long text that is certain"
    engine = Engine(target, config=Plan.of("lookup", tree_size=2, max_num_seqs=4))
    params = [SamplingParams(max_new_tokens=40, choice=(text,)), *[SamplingParams(max_new_tokens=40)] * 3]
    [alone] = engine.generate([PROMPT], params[:1])
    assert alone.text == text and alone.num_target_forwards <= 3
    for node_cost, most in ((0.2, 3), (0.5, 40)):  # one row of four
        engine._runner.node_cost = node_cost  # type: ignore[union-attr]
        one, *others = engine.generate([PROMPT] * 4, params)
        assert one.text == text and (one.num_target_forwards <= 3) == (most == 3)
    assert len({tuple(other.token_ids) for other in others}) == 1


def test_steps_are_measured_where_forced_tokens_made_no_tree_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    sizer, seen = Sizer((), {PLAIN: 1.0}), list[int]()
    monkeypatch.setattr(sizer, "observe", lambda accepted, seconds, num_nodes: seen.append(len(accepted)))
    engine = Engine(tiny_target(), config=EngineConfig(method="lookup", max_num_seqs=4), sizer=sizer)
    params = [SamplingParams(max_new_tokens=40, ignore_eos=True)] * 3
    params = [SamplingParams(max_new_tokens=10, choice=("a long text that is certain",)), *params]
    engine.generate([PROMPT] * 4, params)
    assert seen == [4] * 10 + [3] * 30, "a node that one row shares does not pay before its cost is known"
    [alone] = engine.generate([PROMPT], params[:1])
    assert alone.num_target_forwards < 10 and len(seen) == 40


class Masked(LogitsProcessor):
    """llguidance's masks for transformers."""

    def __init__(self, matcher: Any, num_prompt: int) -> None:
        self._matcher, self._num_prompt = matcher, num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > self._num_prompt:
            assert self._matcher.consume_token(int(input_ids[0, -1]))
        bits_X = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        is_allowed_V = torch.from_numpy(np.unpackbits(bits_X, bitorder="little")[: scores.shape[1]]).bool()
        return scores.masked_fill(~is_allowed_V, -torch.inf)


def test_transformers_generates_the_same_under_the_same_masks() -> None:
    target = tiny_target()
    matcher = Grammars(target)._matcher("json_schema", json.dumps(SCHEMA))
    masked = [Masked(matcher, len(PROMPT))]
    wanted = hugging_face_answer(target, PROMPT, 90, target.eos_token_ids, logits_processor=masked)
    params = SamplingParams(max_new_tokens=90, json_schema=SCHEMA)  # type: ignore[arg-type]
    [answer] = Engine(target, config=EngineConfig(method="lookup")).generate([PROMPT], params)
    assert answer.token_ids == wanted and answer.finish_reason == "stop"


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json_schema": {"type": "string", "minlength": 2}}, "'minlength' is not supported"),
        ({"json_schema": {"properties": {"a": {"uniqueItems": True}}}}, "'uniqueItems' is not supported"),
        ({"json_schema": {"type": "string", "format": "zzz"}}, "Unknown format: zzz"),
        ({"json_schema": {"type": "foo"}}, "Invalid type: foo"),
        ({"json_schema": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"json_schema": {"$ref": "https://a.b/c"}}, "https://a.b/c"),
        ({"json_schema": {"$ref": "#/$defs/a"}}, "/\\$defs/a"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        ({"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text has this form"),
        ({"json_schema": "{"}, "json_schema: "),
        ({"json_schema": "5"}, "a schema is an object"),
        ({"json_schema": nested(200)}, "recursion limit"),
        ({"json_schema": nested(10_000)}, "nested too deeply"),
        ({"json_schema": '{"title": "' + "x" * 2**20 + '"}'}, "has 1,048,589 characters"),
        ({"json_schema": {"properties": {f"p{i}": TAGS for i in range(2000)}}}, "longer than 0.2 seconds"),
        ({"regex": "((a{900}b){900}c){900}"}, "longer than 0.2 seconds"),
        ({"regex": "("}, "regex: "),
        ({"grammar": "start: x"}, "unknown name"),
    ],
)
def test_what_is_not_understood_or_explodes_is_named_at_once(form: dict[str, Any], message: str, monkeypatch) -> None:
    monkeypatch.setattr(grammars_module, "_MOST_SECONDS", 0.2)  # a quick processor compiles both within half a second
    grammars = Grammars(tiny_target())
    started = time.process_time()
    with pytest.raises(ValueError, match=message) as caught:
        grammars.guide(SamplingParams(**form))
    assert "\n" not in str(caught.value) and time.process_time() - started < 5


def test_circles_that_end_are_fine_and_a_request_has_one_form() -> None:
    target = padded_target(7, vocab_size=288)  # masks are whole words, of more tokens than the target's
    engine = Engine(target, config=EngineConfig(method="lookup"))
    circle = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}}}
    [answer] = engine.generate([PROMPT], SamplingParams(max_new_tokens=5, json_schema=circle))  # type: ignore[arg-type]
    assert answer.text.startswith("{")
    with pytest.raises(ValueError, match="json_schema and regex both say"):
        SamplingParams(json_schema="{}", regex="a")
    with pytest.raises(ValueError, match="choice holds ''"):
        SamplingParams(choice=("a", ""))
