"""``drafter distill``: the target answers prompts, in this process, on a server or on a Ray cluster.

Answers are appended as they finish. A killed run continues: each prompt is answered once, and the answers equal those
of an uninterrupted run, because a seed depends on the prompt's id and the answer's number and not on the order.
"""

import hashlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from drafter.distill.endpoint import Endpoint
from drafter.distill.journal import Journal, check_name
from drafter.distill.magpie import MagpieSettings, Opening, invent_prompts
from drafter.distill.prompts import (
    AnswerSettings,
    AnswerStream,
    Exclusion,
    MadeAnswer,
    PromptRow,
    Shard,
    WantedAnswer,
    builtin_prompts,
    check_answer,
    keys_of,
    missing_answers,
    row_of,
    select_prompts,
)
from drafter.targets.chat import Chat

if TYPE_CHECKING:
    from drafter.engine.config import EngineConfig
    from drafter.models.drafter import RecurrentDrafter
    from drafter.targets.target import Target

MAGPIE = "magpie"


@dataclass
class DistillReport:
    """Counts of a run; ``num_prompts`` and ``num_answers`` count the whole file, the other fields this run."""

    num_prompts: int = 0
    num_answers: int = 0
    num_done_before: int = 0
    num_new: int = 0
    num_tokens: int = 0
    num_cut: int = 0
    num_too_long: int = 0
    num_refused: int = 0
    num_duplicates: int = 0
    num_excluded: int = 0
    num_torn_bytes: int = 0
    seconds: float = 0.0
    dropped_inventions: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The report as text, one line for each count that is not zero."""
        speed = f", {self.num_tokens / self.seconds:,.0f} tokens/s" if self.seconds > 0 and self.num_new else ""
        lines = [
            f"{self.num_done_before + self.num_new:,} of {self.num_answers:,} answers to {self.num_prompts:,} prompts; "
            f"new: {self.num_new:,} with {self.num_tokens:,} tokens{speed}"
        ]
        for count, what in (
            (self.num_torn_bytes, "bytes of an incomplete last line removed"),
            (self.num_cut, "new answers cut at --max-new-tokens"),
            (self.num_too_long, "answers left out: the prompt leaves no room in the context"),
            (self.num_refused, "prompts refused by the server"),
            (self.num_duplicates, "repeated prompts left out"),
            (self.num_excluded, "prompts left out: on the excluded list"),
        ):
            if count:
                lines.append(f"{count:,} {what}")
        for reason, count in sorted(self.dropped_inventions.items()):
            lines.append(f"{count:,} invented prompts dropped: {reason}")
        return lines


class Answerer(Protocol):
    """Anything that makes answers: an engine, a server, a cluster."""

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that, with prompts and sampling parameters, determine the answers."""

    def answer(self, wanted: Sequence[WantedAnswer], settings: AnswerSettings) -> AnswerStream: ...


class EngineAnswerer:
    """Answers by an engine of this process; a drafter makes the same answers faster.

    Args:
        draft_model: a smaller model for ``config.method`` draft-model.
        config: the engine's settings (default: chosen by :func:`drafter.engine.defaults.choose`).
        batch_size: most rows at the same time.
        batch_tokens: most cache slots at the same time (rows x longest prompt and answer).
    """

    def __init__(
        self,
        target: "Target",
        drafter: "RecurrentDrafter | None" = None,
        *,
        draft_model: "Target | None" = None,
        config: "EngineConfig | None" = None,
        batch_size: int = 64,
        batch_tokens: int = 65536,
    ) -> None:
        assert batch_size > 0 and batch_tokens > 0, (batch_size, batch_tokens)
        self.target, self._drafter, self._draft_model, self._config = target, drafter, draft_model, config
        self._batch_size, self._batch_tokens = batch_size, batch_tokens

    @property
    def identity(self) -> dict[str, Any]:
        return {"target_fingerprint": self.target.fingerprint, "dtype": str(self.target.dtype).removeprefix("torch.")}

    def answer(self, wanted: Sequence[WantedAnswer], settings: AnswerSettings) -> AnswerStream:
        texts = self.target.encode_chats([Chat(item.prompt.messages, item.prompt.tools) for item in wanted])
        encoded = list(zip(wanted, texts, strict=True))
        limit = self.target.max_length - settings.max_new_tokens
        for item, ids in encoded:
            if len(ids) > limit:
                yield item, None
        fitting = sorted((pair for pair in encoded if len(pair[1]) <= limit), key=lambda pair: -len(pair[1]))
        for group in _groups([len(ids) + settings.max_new_tokens for _, ids in fitting]):
            yield from self._answer_group(fitting[group], settings)

    def sample_openings(
        self, opening: Opening, seeds: Sequence[int], settings: MagpieSettings
    ) -> list[tuple[str, bool]]:
        """One continuation of the user turn's opening for each seed: (text, whether the text is complete)."""
        from drafter.decoding.params import SamplingParams

        params = [
            SamplingParams(
                max_new_tokens=settings.max_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                seed=seed,
                stop=opening.stop,
                stop_token_ids=opening.stop_token_ids,
            )
            for seed in seeds
        ]
        engine = self._engine(len(seeds), len(opening.token_ids) + settings.max_tokens)
        completions = engine.generate([opening.token_ids] * len(seeds), params)
        return [(completion.text, completion.finish_reason == "stop") for completion in completions]

    def _answer_group(self, pairs: Sequence[tuple[WantedAnswer, list[int]]], settings: AnswerSettings) -> AnswerStream:
        from drafter.decoding.params import SamplingParams

        params = [
            SamplingParams(
                max_new_tokens=settings.max_new_tokens,
                temperature=item.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                min_p=settings.min_p,
                seed=item.seed,
            )
            for item, _ in pairs
        ]
        engine = self._engine(len(pairs), len(pairs[0][1]) + settings.max_new_tokens)
        for event in engine.stream([ids for _, ids in pairs], params):
            done = event.completion
            if done is not None:
                is_whole = done.finish_reason == "stop"
                yield (
                    pairs[event.index][0],
                    MadeAnswer(
                        done.text,
                        "stop" if is_whole else "length",
                        len(done.token_ids),
                        prompt_ids=done.prompt_ids,
                        token_ids=done.token_ids,
                    ),
                )

    def _engine(self, num_rows: int, num_slots: int) -> Any:
        from drafter.engine.defaults import choose
        from drafter.engine.engine import Engine

        if self._config is None:
            self._config = choose(self.target, self._drafter, given={"max_num_seqs": self._batch_size}).config
        rows = max(1, min(num_rows, self._batch_size, self._batch_tokens // num_slots))
        return Engine(
            self.target, self._drafter, replace(self._config, max_num_seqs=rows), draft_model=self._draft_model
        )


def _groups(lengths: Sequence[int]) -> Iterator[slice]:
    """Slices of descending lengths whose longest is at most 1.5 times the shortest; one cache serves a slice."""
    start = 0
    for index in range(1, len(lengths) + 1):
        if index == len(lengths) or 1.5 * lengths[index] < lengths[start]:
            yield slice(start, index)
            start = index


def distill(
    answerer: Answerer,
    prompts: str | Path | None,
    out: str | Path,
    settings: AnswerSettings | None = None,
    *,
    shard: str = "1/1",
    num_prompts: int | None = None,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    exclude: str | None = None,
    progress: bool = True,
) -> DistillReport:
    """Answer prompts and append the conversations to ``out``, one ``messages`` row each.

    Args:
        answerer: an engine (:class:`EngineAnswerer`), a server (:class:`Endpoint`) or a cluster.
        prompts: file or hub data set; ``magpie``: the target invents ``num_prompts`` prompts; None: the package's
            prompts.
        out: .jsonl file; an existing file is continued.
        settings: sampling parameters and number of answers; None: greedy, one answer to each prompt.
        shard: ``"3/8"``: the third of eight parts of the prompts; every part needs its own ``out``.
        num_prompts: largest number of prompts of a file; with ``magpie`` the number of prompts to invent.
        format, columns: see :func:`drafter.data.formats.read_rows`.
        exclude: file of texts that no prompt may share 13 consecutive words with.
        progress: show a bar.

    Returns:
        Counts of the run.

    Raises:
        ValueError: wrong options or prompts; ``out`` was written with other settings, or holds answers to excluded
            prompts.
        OSError: the disk is full or the server does not answer; finished rows are kept.
    """
    settings = settings or AnswerSettings()
    check_name(out)
    report = DistillReport()
    part, unwanted = Shard.parse(shard), Exclusion.read(exclude)
    origin: dict[str, Any] = {"prompts": MAGPIE}
    if prompts == MAGPIE:
        wanted = _invented(answerer, Path(out), num_prompts, settings.seed, part, unwanted, report, progress)
    else:
        file = prompts or builtin_prompts()
        found = select_prompts(file, format=format, columns=columns, limit=num_prompts, shard=part, exclude=unwanted)
        wanted, report.num_duplicates, report.num_excluded = found
        origin = {"prompts": _digest(wanted)}
    recorded = {**asdict(settings), "shard": str(part), **origin, **answerer.identity}
    with Journal(out, recorded, check_answer) as journal:
        _check_excluded(journal, unwanted)
        _answer_all(answerer, wanted, settings, journal, report, progress)
    return report


def _check_excluded(journal: Journal, exclude: Exclusion) -> None:
    """ValueError when the file holds answers to excluded prompts, from a run without this exclusion."""
    ids = {row["id"]: None for row in journal.rows if exclude.matches_any(row["messages"][:-1])}
    if ids:
        shown = ", ".join(list(ids)[:3]) + (", ..." if len(ids) > 3 else "")
        raise ValueError(
            f"--out {journal.path} holds answers to {len(ids)} prompts that are on the excluded list (id {shown}): "
            "remove their lines to go on, or give another --out"
        )


def _answer_all(
    answerer: Answerer,
    prompts: list[PromptRow],
    settings: AnswerSettings,
    journal: Journal,
    report: DistillReport,
    progress: bool,
) -> None:
    from tqdm import tqdm

    done = keys_of(journal.rows, str(journal.path))
    wanted = missing_answers(prompts, settings, done)
    report.num_prompts = len(prompts)
    report.num_answers = len(prompts) * settings.num_answers
    report.num_done_before = report.num_answers - len(wanted)
    report.num_torn_bytes = journal.num_torn_bytes
    if isinstance(answerer, Endpoint):
        answers = answerer.answer(wanted, settings, num_answered_before=len(done))
    else:
        answers = answerer.answer(wanted, settings)
    start = time.perf_counter()
    with tqdm(
        total=report.num_answers,
        initial=report.num_done_before,
        desc="answering",
        unit="answer",
        disable=not progress,
        file=sys.stderr,
    ) as bar:
        for item, answer in answers:
            report.seconds = time.perf_counter() - start
            if answer is None:
                report.num_too_long += not isinstance(answerer, Endpoint)
                report.num_refused += isinstance(answerer, Endpoint)
                continue
            journal.append(row_of(item, answer))
            report.num_new += 1
            report.num_tokens += answer.num_tokens
            report.num_cut += answer.finish_reason == "length"
            bar.set_postfix_str(f"{report.num_tokens / report.seconds:,.0f} tokens/s", refresh=False)
            bar.update()


def _invented(
    answerer: Answerer,
    out: Path,
    num_prompts: int | None,
    seed: int,
    shard: Shard,
    exclude: Exclusion,
    report: DistillReport,
    progress: bool,
) -> list[PromptRow]:
    if not isinstance(answerer, EngineAnswerer):
        raise ValueError(
            "--prompts magpie needs --target on this machine: a chat endpoint cannot continue an open user turn. "
            "Invent the prompts here first, then answer the .prompts.jsonl file with --endpoint or --ray"
        )
    if num_prompts is None:
        raise ValueError("--prompts magpie needs --num-prompts, the number of prompts to invent")
    prompts, report.dropped_inventions = invent_prompts(
        out.with_name(out.name.removesuffix(".jsonl") + ".prompts.jsonl"),
        answerer.target.tokenizer,
        answerer.sample_openings,
        MagpieSettings(num_prompts, seed=seed),
        target_name=answerer.target.name,
        identity=answerer.identity,
        shard=shard,
        exclude=exclude,
        progress=progress,
    )
    return prompts


def _digest(prompts: Sequence[PromptRow]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        asked = (prompt.id, prompt.messages, prompt.tools) if prompt.tools else (prompt.id, prompt.messages)
        hasher.update(repr(asked).encode())
    return hasher.hexdigest()
