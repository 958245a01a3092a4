"""What answers must look like: JSON schemas, regular expressions, choices and grammars, compiled to guides.

llguidance compiles, and makes the masks of tokens. A client's schema is tried in a fork with limits of time and memory,
then compiled here without Python's lock. JSON has one space behind each comma and colon, as ``json.dumps`` writes, so
that a schema leaves one text between two values.
"""

import contextlib
import json
from collections.abc import Iterator
from functools import cached_property
from threading import Lock
from typing import Any, cast

from drafter.decoding.params import SamplingParams
from drafter.decoding.rules import Guide
from drafter.targets.chat import Fork, ForkError
from drafter.targets.target import Target

_MOST_CHARS = 1 << 18  # of a text
_MOST_SECONDS = 0.4  # of processor time, for the trial
_NUM_KEPT = 64  # compiled texts
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# What the parts of a schema may say; llguidance refuses some of them by name, and takes unknown ones as comments.
_OF_ONE = {"items", "additionalProperties"}
_OF_MANY = {"anyOf", "oneOf", "allOf", "prefixItems"}
_OF_NAMED = {"properties", "patternProperties", "$defs", "definitions"}
_KNOWN = _OF_ONE | _OF_MANY | _OF_NAMED | {
    "type", "enum", "const", "$ref", "required", "format", "pattern", "minLength", "maxLength", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems", "minProperties", "maxProperties",
    "title", "description", "default", "examples", "$schema", "$id", "id", "$anchor", "$comment", "deprecated",
    "readOnly", "writeOnly",
}  # fmt: skip


class Grammars:
    """Makes the guides of a target's requests, for any thread. The first call reads the tokenizer, for seconds in
    which no other thread runs: a server calls :meth:`prepare` before its first client.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._compiled: dict[tuple[str, str], Any] = {}  # matchers at the beginning of an answer
        self._lock = Lock()

    def prepare(self) -> None:
        """Read the tokenizer, and fork the process of the trials; without effect where the target has no tokens."""
        with contextlib.suppress(ValueError):
            self.guide(SamplingParams(choice=("a",)))

    def guide(self, params: SamplingParams) -> Guide | None:
        """The guide of a request; None: its answer may be any text (ValueError: a part that is not understood, a text
        that takes too much time, or a target without tokenizer).
        """
        structure = params.structure
        if structure is None:
            return None
        matcher = self._compiled.get(structure)  # another thread may drop it
        if matcher is None:
            kind, text = structure
            if len(text) > _MOST_CHARS:
                raise ValueError(f"{kind} has {len(text):,} characters but may have {_MOST_CHARS:,}")
            with self._lock:
                trial = self._trial
            try:
                trial.map([structure], _MOST_SECONDS)
            except ForkError as error:
                raise ValueError(str(error) if error.reason in ("time", "memory") else f"{kind}: {error}") from error
            matcher = self._matcher(kind, text)
            with self._lock:
                self._compiled[structure] = matcher
                while len(self._compiled) > _NUM_KEPT:
                    del self._compiled[next(iter(self._compiled))]
        return Guide(matcher.deep_copy(), self._target.eos_token_ids)

    @cached_property
    def _tokenizer(self) -> Any:
        """The target's tokenizer, as llguidance reads it."""
        from llguidance.hf import from_tokenizer

        target, tokenizer = self._target, cast(Any, self._target.tokenizer)
        if tokenizer is None or not target.eos_token_ids:
            lacking = "tokenizer" if tokenizer is None else "token that ends an answer"
            raise ValueError(f"target {target.name!r} has no {lacking}: the form of an answer cannot be asked for")
        return from_tokenizer(tokenizer, target.vocab_size, list(target.eos_token_ids))

    @cached_property
    def _trial(self) -> Fork:
        """Compiles a text, and makes its first mask, for the error alone."""
        _ = self._tokenizer  # which forks share

        def compile_once(structure: tuple[str, str]) -> None:
            self._matcher(*structure, is_trial=True)

        return Fork(compile_once, "the form that the answer should have")

    def _matcher(self, kind: str, text: str, *, is_trial: bool = False) -> Any:
        """The matcher of a text (ValueError); a trial makes its first mask."""
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(
            self._tokenizer, _grammar_of(kind, text), log_level=0, limits=LLParserLimits(verbose_errors=False)
        )
        if is_trial and not matcher.is_error():
            matcher.compute_bitmask()  # fails where definitions refer to each other alone
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:500]
            raise ValueError("no text has this form" if reason.startswith("NoExtensionBias") else reason)
        return matcher


def _grammar_of(kind: str, text: str) -> str:
    """The text in llguidance's own form (ValueError)."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in json.loads(text)))
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    return LLMatcher.grammar_from_json_schema(checked_schema(text))


def checked_schema(text: str) -> str:
    """A JSON schema in llguidance's form (ValueError: a part that nobody knows, or another form)."""
    try:
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise ValueError(f"a schema is an object, not {text[:50]!r}")
        if (unknown := next(_unknown_parts(schema), None)) is not None:
            raise ValueError(f"the schema's {unknown!r} is not supported")
        return json.dumps(schema | {"x-guidance": _SPACING})
    except RecursionError as error:
        raise ValueError("the schema is nested too deeply") from error


def _unknown_parts(schema: Any) -> Iterator[str]:
    """The keywords of a schema that nobody knows."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key not in _KNOWN:
            yield key
        elif key in _OF_ONE:
            yield from _unknown_parts(value)
        elif key in _OF_MANY and isinstance(value, list) or key in _OF_NAMED and isinstance(value, dict):
            for part in value.values() if isinstance(value, dict) else value:
                yield from _unknown_parts(part)
