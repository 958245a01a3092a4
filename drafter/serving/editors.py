"""What editors ask for: the text between a prefix and a suffix, in the form of llama.cpp's ``POST /infill``."""

import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, StrictInt, StrictStr, model_validator

from drafter.serving.answers import Answer, Choice
from drafter.serving.protocol import MAX_CHOICES, Generation, Text, refusal

_Rendered = TypeVar("_Rendered")
_MAX_FILES = 256
_SAMPLERS = ("top_k", "top_p", "min_p", "temperature", "infill")  # in any order, which changes nothing when greedy


class Extra(BaseModel):
    """A piece of another file."""

    text: Text = ""
    filename: Text = "unnamed"


class InfillRequest(Generation):
    """Body of ``POST /infill``, greedy unless a temperature is given."""

    input_prefix: Text = ""
    input_suffix: Text = ""
    prompt: Text = ""  # behind the prefix: the line up to the cursor
    input_extra: Annotated[list[Extra], Field(max_length=_MAX_FILES)] = []
    n_predict: Annotated[StrictInt, Field(ge=-1)] = -1
    n_cmpl: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    n_indent: Annotated[StrictInt, Field(ge=0)] = 0
    t_max_predict_ms: Annotated[StrictInt, Field(ge=-1)] = 0
    samplers: list[StrictStr] = []
    response_fields: Annotated[list[StrictStr], Field(max_length=64)] = []
    temperature: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0.0

    @model_validator(mode="after")
    def _take_names_of_llama_cpp(self) -> "InfillRequest":
        if other := [name for name in self.samplers if name not in _SAMPLERS]:
            raise refusal("samplers", f"{{name}} takes {', '.join(_SAMPLERS)}: leave {other[0][:100]!r} out")
        if self.n_predict >= 0:
            self.max_tokens = max(1, self.n_predict)  # nothing but the cache's content is wanted of 0 tokens
        self.n = self.n_cmpl if self.temperature > 0 else 1  # greedy texts are one text
        return self

    def cut(self, text: str, seconds: float) -> int | None:
        """Where the text so far must end although the model goes on; ``seconds``: since the first token."""
        lines = text.split("\n")
        length = len(lines[0])
        for line in lines[1:] if self.n_indent else []:
            rest = line.lstrip(" \t")
            if rest and len(line) - len(rest) < self.n_indent:
                return length
            length += 1 + len(line)
        return len(text) if 0 < self.t_max_predict_ms < 1000 * seconds and len(lines) > 1 else None


class InfillAnswer(Answer):
    """The answer in the form of llama.cpp."""

    end_of_stream = b""

    def whole(self, render: Callable[[Any], _Rendered]) -> _Rendered:
        """One object, or a list where ``n_cmpl`` asks for several."""
        assert isinstance(self.body, InfillRequest)
        found = [self._last(choice, choice.entry()["text"]) for choice in self.choices]
        found *= self.body.n_cmpl // len(found)
        return render(found if self.body.n_cmpl > 1 else found[0])

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Pieces of text; the last one of a text holds the numbers."""
        async for entry in self.entries():
            choice = self.choices[entry["index"]]
            if entry["finish_reason"] is not None:
                yield self._last(choice, entry["text"])
            else:
                yield {"index": entry["index"], "content": entry["text"], "tokens": [], "stop": False}

    def _last(self, choice: Choice, text: str) -> dict[str, Any]:
        body, request = self.body, choice.request
        assert isinstance(body, InfillRequest)
        num_new, now = len(request.prompt_ids) - request.num_shared, time.perf_counter()
        started, first = request.started or now, request.first_token or now
        timings: dict[str, float] = {"draft_n_accepted": sum(request.num_accepted)}
        parts = ("prompt", num_new, first - started), ("predicted", len(request.token_ids), now - first)
        for name, number, seconds in parts:
            seconds = max(seconds, 1e-6)
            timings |= {f"{name}_n": number, f"{name}_ms": 1000 * seconds, f"{name}_per_second": number / seconds}
            timings[f"{name}_per_token_ms"] = 1000 * seconds / max(1, number)
        is_end = request.finish_reason == "stop" and request.token_ids[-1] in request.stop_ids
        found = {
            "index": choice.index,
            "content": text if body.n_predict else "",
            "tokens": [],
            "stop": True,
            "stop_type": "eos" if is_end else "word" if request.finish_reason == "stop" else "limit",
            "model": self.model.name,
            "tokens_predicted": len(request.token_ids) if body.n_predict else 0,
            "tokens_evaluated": len(request.prompt_ids),
            "tokens_cached": request.num_shared,
            "truncated": False,
            "timings": timings,
        }
        if not body.response_fields:
            return found
        flat = found | {f"timings/{name}": value for name, value in timings.items()}
        return {name: flat[name] for name in body.response_fields if name in flat}
