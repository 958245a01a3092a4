"""``drafter distill``: the target answers prompts, in this process, on a server or on a Ray cluster.

Answers are appended as they finish. A killed run continues: each prompt is answered once, and the answers equal those
of an uninterrupted run, because a seed depends on the prompt's id and the answer's number and not on the order.
"""

import hashlib
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from drafter.data.hidden_states import StatesOfAnswers
from drafter.data.reading import BUILTIN_PROMPTS
from drafter.distill.journal import open_journal
from drafter.distill.magpie import invent_prompts
from drafter.distill.prompts import AnswerSettings, AnswerStream, WantedAnswer, missing_answers, row_of, select_prompts
from drafter.engine.engine import Engine
from drafter.targets.chat import Chat

MAGPIE = "magpie"
_FIRST_ROWS = 8  # answers that are made alone at first, so that the first rows come soon
NO_ANSWER = "prompts without an answer: refused by the server, or too long for the context"


@dataclass
class DistillReport:
    """Counts of a run; ``num_answers`` is of the whole file, tokens and seconds of this run, ``notes`` are the rest."""

    num_prompts: int = 0
    num_answers: int = 0
    num_done_before: int = 0
    num_new: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    notes: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """The report as text, one line for each count that is not zero."""
        speed = f", {self.num_tokens / self.seconds:,.0f} tokens/s" if self.seconds > 0 and self.num_new else ""
        num_done = self.num_done_before + self.num_new
        total = f"{num_done:,} of {self.num_answers:,} answers to {self.num_prompts:,} prompts"
        lines = [f"{total}; new: {self.num_new:,} with {self.num_tokens:,} tokens{speed}"]
        return lines + [f"{count:,} {what}" for what, count in self.notes.items() if count]


class Answerer(Protocol):
    """Anything that makes answers: an engine, a server, a cluster."""

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that, with prompts and sampling parameters, determine the answers."""

    def answer(self, wanted: Sequence[WantedAnswer]) -> AnswerStream:
        """The row of each wanted answer as it is finished, or None where the prompt has no answer."""


@dataclass
class EngineAnswerer:
    """Answers by an engine of this process; ``states`` keeps their hidden states, of an engine with these layers."""

    engine: Engine
    states: StatesOfAnswers | None = None

    def __post_init__(self) -> None:
        target = self.engine.target
        if not getattr(target.tokenizer, "chat_template", None):
            raise ValueError(f"target {target.name!r} has no chat template: use an instruction-tuned one")

    @property
    def identity(self) -> dict[str, Any]:
        target = self.engine.target
        return {"target_fingerprint": target.fingerprint, "dtype": str(target.dtype).removeprefix("torch.")}

    def answer(self, wanted: Sequence[WantedAnswer]) -> AnswerStream:
        """See :class:`Answerer`. The shortest prompts come first: requests of a step are alike."""
        target = self.engine.target
        of_chats = iter(target.encode_chats([Chat(each.messages, each.tools) for each, *_ in wanted if each.messages]))
        texts = [next(of_chats) if each.text is None else target.encode(each.text) for each, *_ in wanted]
        if self.states is not None and wanted:
            self.states.say_size(len(wanted), wanted[0].params.max_new_tokens)
        fitting = []
        for item, ids in sorted(zip(wanted, texts, strict=True), key=lambda pair: len(pair[1])):
            if len(ids) + item.params.max_new_tokens <= target.max_length:
                fitting.append((item, ids))
            else:
                yield None
        unfinished = Counter[int]()
        try:
            for part in fitting[:_FIRST_ROWS], fitting[_FIRST_ROWS:]:
                for event in self.engine.stream([ids for _, ids in part], [item.params for item, _ in part]):
                    unfinished[event.index] += len(event.token_ids)
                    if (done := event.completion) is not None:
                        item, ids = part[event.index]
                        if self.states is not None:  # before the row: who finds the row finds its states
                            self.states.write(ids, done.token_ids, partial(self.engine.states, done))
                        del unfinished[event.index]
                        yield row_of(item, done)
        finally:
            if unfinished:
                lost = f"{len(unfinished):,} unfinished answers with {unfinished.total():,} tokens are lost"
                print(f"{lost}; a lower --max-num-seqs loses fewer", file=sys.stderr)


def distill(
    answerer: Answerer,
    prompts: str | Path | None,
    out: str | Path,
    settings: AnswerSettings | None = None,
    *,
    num_prompts: int | None = None,
    columns: Mapping[str, str] | None = None,
    exclude: str | None = None,
) -> DistillReport:
    """Answer prompts and append the answers to ``out``, a .jsonl file, one row each
    (:func:`drafter.distill.prompts.row_of`); an existing file is continued.

    Args:
        answerer: an engine (:class:`EngineAnswerer`), a server (:class:`drafter.distill.endpoint.Endpoint`) or a
            cluster (:class:`drafter.distill.ray_answers.RayAnswerer`).
        prompts: file or hub data set; ``magpie``: the target invents ``num_prompts`` prompts; None: the package's.
        settings: sampling parameters and number of answers; None: greedy, one answer to each prompt.
        num_prompts, columns, exclude: ``limit`` and others of :func:`drafter.distill.prompts.select_prompts`.

    Raises:
        ValueError: wrong options or prompts; ``out`` was written with other settings.
        OSError: the disk is full or the server does not answer; finished rows are kept.
    """
    settings, report = settings or AnswerSettings(), DistillReport()
    if Path(out).suffix != ".jsonl":
        raise ValueError(f"--out {out}: rows are appended line by line: give a name that ends with .jsonl")
    file = prompts or BUILTIN_PROMPTS
    if prompts == MAGPIE:
        if not isinstance(answerer, EngineAnswerer):
            raise ValueError(
                "--prompts magpie needs --target on this machine: a chat endpoint cannot continue an open user turn. "
                "Invent the prompts here first, then answer the .prompts.jsonl file with --endpoint or --ray"
            )
        if num_prompts is None:
            raise ValueError("--prompts magpie needs --num-prompts, the number of prompts to invent")
        columns, file = None, Path(out).with_suffix(".prompts.jsonl")
        dropped = invent_prompts(file, answerer.engine, num_prompts, recorded=answerer.identity, seed=settings.seed)
        report.notes.update({f"invented prompts dropped: {reason}": count for reason, count in sorted(dropped.items())})
    rows, left_out = select_prompts(file, columns=columns, limit=num_prompts, exclude=exclude)
    report.notes += left_out
    report.num_prompts, report.num_answers = len(rows), len(rows) * settings.num_answers
    asked = repr([(row.id, row.text or row.messages, row.tools) for row in rows])
    origin = MAGPIE if prompts == MAGPIE else hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()
    recorded = {**asdict(settings), "prompts": origin, **answerer.identity}
    recorded |= {} if exclude is None else {"exclude": exclude}
    with open_journal(out, recorded, {"id": str, "answer": int}) as journal:
        wanted = missing_answers(rows, settings, {(row["id"], row["answer"]) for row in journal.rows})
        report.num_done_before, start = report.num_answers - len(wanted), time.perf_counter()
        with tqdm(total=report.num_answers, initial=report.num_done_before, desc="answering", unit="answer") as bar:
            for row in answerer.answer(wanted):
                report.seconds = time.perf_counter() - start
                if row is None:
                    report.notes[NO_ANSWER] += 1
                    continue
                journal.append(row)
                report.num_new += 1
                report.num_tokens += row["num_tokens"]
                report.notes["new answers cut at --max-new-tokens"] += row["finish_reason"] == "length"
                bar.set_postfix_str(f"{report.num_tokens / report.seconds:,.0f} tokens/s", refresh=False)
                bar.update()
    if report.num_done_before + report.num_new == 0:
        raise OSError(f"no prompt was answered: {report.notes[NO_ANSWER]:,} {NO_ANSWER}")
    return report
