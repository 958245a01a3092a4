"""Sampling parameters of one request. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from drafter.utils.validate import SEED, Checked, Range, within

GREEDY_BELOW = 1e-5  # logits divided by a smaller temperature overflow
MAX_BIASED = 1024  # tokens with a bias
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
STRUCTURES = ("json_schema", "regex", "choice", "grammar")  # what an answer must look like; a request has one at most


@dataclass(frozen=True)
class SamplingSettings(Checked):
    """Length and sampling of answers.

    Attributes:
        max_new_tokens: largest number of generated tokens, the stop token included
        temperature: divisor of the logits; 0 is greedy, and so is anything below 0.00001
        top_k: keep the k likeliest tokens; 0 is off
        top_p: keep the smallest set of likeliest tokens whose probability reaches top_p; 1 is off
        min_p: keep tokens at least min_p times as likely as the likeliest token; 0 is off
        seed: any 64-bit integer, signed or unsigned; the same seed gives the same text with any proposer and batch
    """

    rare: ClassVar[tuple[str, ...]] = ("min_p",)  # those that a command's short help leaves out
    max_new_tokens: int = within(128, low=1, high=2**24)
    temperature: float = within(0.0, low=0.0, mend="0 is greedy")
    top_k: int = within(0, low=0, high=2**31, mend="0 turns it off")
    top_p: float = within(1.0, above=0.0, high=1.0, mend="1 turns it off")
    min_p: float = within(0.0, low=0.0, high=1.0, mend="0 turns it off")
    seed: int = within(0, **SEED)


@dataclass(frozen=True)
class SamplingParams(SamplingSettings):
    """Sampling parameters of one request. The text depends on prompt and parameters alone, not on other requests.

    Attributes:
        stop: string that ends the answer and is no part of the text
        stop_token_ids: tokens that end the answer, besides the target's own stop tokens
        ignore_eos: generate on after the target's own stop tokens
        presence_penalty: is subtracted from the logits of tokens that the answer holds; 0 is off
        frequency_penalty: is subtracted for every occurrence in the answer; 0 is off
        repetition_penalty: divides the logits of tokens of prompt and answer (multiplies negative ones); 1 is off
        json_schema: the answer is JSON of this schema, a text or a dict
        regex: the answer matches this regular expression of Rust's syntax
        choice: the answer is one of these texts
        grammar: the answer follows this grammar, in the notation of llguidance (Lark) or GBNF
        logit_bias: numbers from -100 to 100, added to the logits of tokens, by token id
    """

    prefix: ClassVar[str] = ""  # arguments of Python
    rare = (*SamplingSettings.rare, *PENALTIES, *STRUCTURES[1:], "stop_token_ids", "ignore_eos", "logit_bias")
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = within((), low=0)
    ignore_eos: bool = False
    presence_penalty: float = within(0.0, low=-2.0, high=2.0, mend="0 turns it off")
    frequency_penalty: float = within(0.0, low=-2.0, high=2.0, mend="0 turns it off")
    repetition_penalty: float = within(1.0, above=0.0, high=100.0, mend="1 turns it off")
    json_schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    logit_bias: dict[int, float] = field(
        default_factory=dict, hash=False, metadata={"range": Range(low=-100.0, high=100.0)}
    )

    def __new__(cls, *_: Any, **given: Any) -> Self:
        if "max_tokens" in given:
            raise TypeError("SamplingParams has no max_tokens: the name is max_new_tokens")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "choice"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ValueError(f"{name} must be a sequence, not {value!r}")
            object.__setattr__(self, name, tuple(value))
        object.__setattr__(self, "logit_bias", _token_bias(self.logit_bias))
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        given = [name for name in STRUCTURES if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} both say what the answer looks like: give one of them")
        super().__post_init__()
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)
        for name, text in [("stop", text) for text in self.stop] + [("choice", text) for text in self.choice]:
            if not isinstance(text, str) or not text:
                raise ValueError(f"{name} holds {text!r}: every {name} must be text with at least one character")

    @property
    def structure(self) -> tuple[str, str] | None:
        """The kind and the text of what the answer must look like, if something is asked for."""
        kind = next((name for name in STRUCTURES if getattr(self, name)), None)
        value = getattr(self, kind) if kind is not None else None
        return None if kind is None else (kind, value if isinstance(value, str) else json.dumps(value))

    @property
    def rules(self) -> list[str]:
        """The names of the rules that change logits (:mod:`drafter.decoding.rules`)."""
        used = {
            "bias": bool(self.logit_bias),
            "grammar": self.structure is not None,
            "penalties": any(getattr(self, name) != getattr(SamplingParams, name) for name in PENALTIES),
        }
        return [name for name, is_used in used.items() if is_used]

    @property
    def signed_seed(self) -> int:
        """The seed as the signed 64-bit integer with the same bits."""
        return (self.seed + 2**63) % 2**64 - 2**63


def _token_bias(given: object) -> dict[int, float]:
    """The bias of each token, whose range is still unknown (ValueError: another form, or too many)."""
    if not isinstance(given, Mapping) or not all(type(token) is int and token >= 0 for token in given):
        raise ValueError(f"logit_bias is {given!r} but must be numbers by token id")
    if len(given) > MAX_BIASED:
        raise ValueError(f"logit_bias has {len(given)} tokens but may have {MAX_BIASED}")
    return dict(given)
