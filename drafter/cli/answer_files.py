"""Prompts in, answers out: the files of `drafter decode`. Answers get their name when all of them are there."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from drafter.decoding.params import SamplingParams
from drafter.engine.config import EngineConfig

if TYPE_CHECKING:
    from drafter.engine.engine import Completion


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt with its name. `value`: text, or the messages of a conversation."""

    id: str
    value: str | list[dict[str, str]]

    @property
    def shown(self) -> str | list[dict[str, str]]:
        """What the results name it by: its text if it is one user message, else all messages."""
        if isinstance(self.value, list) and len(self.value) == 1:
            return self.value[0]["content"]
        return self.value


def read_prompts(texts: Sequence[str], name: str | None, *, raw: bool) -> list[NamedPrompt]:
    """Prompts of the command line, then those of the file or data set `name`; ids are the row's own or its number."""
    from drafter.data.formats import read_rows

    found: list[NamedPrompt] = []
    for text in texts:
        if not text:
            raise ValueError("--prompt is empty: give some text")
        found.append(NamedPrompt(str(len(found)), text))
    for row in read_rows(name) if name is not None else ():
        value: str | list[dict[str, str]] = row.text if row.text is not None else [dict(turn) for turn in row.prompt]
        if raw and isinstance(value, list):
            if len(value) > 1:
                raise ValueError(
                    f"{row.where}: --raw takes single prompts, this row is a conversation: leave --raw out"
                )
            value = value[0]["content"]
        found.append(NamedPrompt(row.id if row.id is not None else str(len(found)), value))
    return found


def record_of(prompt: NamedPrompt, completion: "Completion") -> dict[str, Any]:
    """The row of --out: token ids are the generated ones, the stop token included where one was produced."""
    return {
        "id": prompt.id,
        "prompt": prompt.shown,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "num_tokens": len(completion.token_ids),
        "num_target_forwards": completion.num_target_forwards,
        "tokens_per_step": round(completion.tokens_per_step, 4),
        "finish_reason": completion.finish_reason,
        "seconds": round(completion.seconds, 4),
    }


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


@contextmanager
def partial_file(out: Path | None) -> Iterator[IO[str] | None]:
    """Where answers go as they are finished; what is there when a run is broken off stays, unless it is empty."""
    if out is None:
        yield None
        return
    partial = _partial(out)
    try:
        with partial.open("w", encoding="utf-8") as stream:
            yield stream
    except KeyboardInterrupt:
        if partial.stat().st_size:
            print(f"the finished answers are in {partial}", file=sys.stderr)
        raise
    finally:
        if partial.stat().st_size == 0:
            partial.unlink()


def write_answer(stream: IO[str], prompt: NamedPrompt, completion: "Completion") -> None:
    stream.write(json.dumps(record_of(prompt, completion), ensure_ascii=False) + "\n")
    stream.flush()


def finish_file(out: Path, records: list[dict[str, Any]], params: SamplingParams, config: EngineConfig) -> None:
    from drafter.utils.io import write_atomic
    from drafter.utils.provenance import write_run_record

    write_atomic(out, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    write_run_record(out, seed=params.seed, settings={"sampling": vars(params), "engine": vars(config)})
    _partial(out).unlink(missing_ok=True)


def shortened(prompt: NamedPrompt, width: int) -> str:
    """The last turn of a prompt on one line of at most `width` characters."""
    last = prompt.value if isinstance(prompt.value, str) else prompt.value[-1]["content"]
    text = " ".join(last.split())
    return text if len(text) <= width else text[: width - 3] + "..."
