"""Training data by the target itself: it answers prompts, from a file or invented by it, through our own engine or a
server.

Answers are appended as they finish. A run that is killed goes on where it stopped: no prompt is lost or answered
twice, and the answers are those of an uninterrupted run (seeds follow from prompt and answer number, not from the
order).
"""

import hashlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from drafter.distill.endpoint import Endpoint
from drafter.distill.jobs import Answer, AnswerSettings, Job, keys_of, make_jobs, row_of
from drafter.distill.journal import Journal, check_name
from drafter.distill.magpie import MagpieSettings, Opening, invent_prompts
from drafter.distill.prompts import Exclusion, Prompt, Shard, builtin_prompts, read_prompts

if TYPE_CHECKING:
    from drafter.engine.config import EngineConfig
    from drafter.models.drafter import RecurrentDrafter
    from drafter.targets.target import Target

MAGPIE = "magpie"


@dataclass
class DistillReport:
    """What a run did, in counts; ``num_answers`` and ``num_rows`` are of the whole file, the rest of this run."""

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
        """The report for people."""
        speed = f", {self.num_tokens / self.seconds:,.0f} tokens/s" if self.seconds > 0 and self.num_new else ""
        lines = [
            f"{self.num_done_before + self.num_new:,} of {self.num_answers:,} answers to {self.num_prompts:,} prompts; "
            f"new: {self.num_new:,} with {self.num_tokens:,} tokens{speed}"
        ]
        for count, what in (
            (self.num_torn_bytes, "bytes of a torn last line cut off"),
            (self.num_cut, "new answers cut at --max-new-tokens"),
            (self.num_too_long, "answers left out whose prompt leaves no room for them"),
            (self.num_refused, "prompts refused by the server"),
            (self.num_duplicates, "repeated prompts left out"),
            (self.num_excluded, "prompts left out that are on the excluded list"),
        ):
            if count:
                lines.append(f"{count:,} {what}")
        for reason, count in sorted(self.dropped_inventions.items()):
            lines.append(f"{count:,} invented prompts dropped: {reason}")
        return lines


class Answerer(Protocol):
    """Answers jobs in any order; None for a prompt it cannot answer."""

    @property
    def identity(self) -> dict[str, Any]:
        """What, beside prompts and settings, decides about the answers."""

    def answer(self, jobs: Sequence[Job], settings: AnswerSettings) -> Iterator[tuple[Job, Answer | None]]: ...


class EngineAnswerer:
    """Answers with our own engine, with a drafter if one is given (the same answers, sooner).

    Args:
        batch_size: most rows at a time.
        batch_tokens: most cache slots at a time (rows x longest prompt and answer): fewer rows for longer prompts.
    """

    def __init__(
        self,
        target: "Target",
        drafter: "RecurrentDrafter | None" = None,
        *,
        batch_size: int = 64,
        batch_tokens: int = 65536,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"--batch-size {batch_size} must be at least 1")
        if batch_tokens < 1:
            raise ValueError(f"--batch-tokens {batch_tokens} must be at least 1")
        self._target = target
        self._drafter = drafter
        self._batch_size = batch_size
        self._batch_tokens = batch_tokens
        self._config: EngineConfig | None = None

    @property
    def identity(self) -> dict[str, Any]:
        return {"target_fingerprint": self._target.fingerprint, "dtype": str(self._target.dtype).removeprefix("torch.")}

    def answer(self, jobs: Sequence[Job], settings: AnswerSettings) -> Iterator[tuple[Job, Answer | None]]:
        encoded = [(job, self._target.encode_chat(job.prompt.messages)) for job in jobs]
        limit = self._target.max_length - settings.max_new_tokens
        for job, ids in encoded:
            if len(ids) > limit:
                yield job, None
        fitting = sorted((pair for pair in encoded if len(pair[1]) <= limit), key=lambda pair: -len(pair[1]))
        for group in _groups([len(ids) + settings.max_new_tokens for _, ids in fitting]):
            yield from self._answer_group(fitting[group], settings)

    def sample_openings(
        self, opening: Opening, seeds: Sequence[int], settings: MagpieSettings
    ) -> list[tuple[str, bool]]:
        """Continue the opening of a user's turn once per seed: (text, whether it ended by itself)."""
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

    def _answer_group(
        self, pairs: Sequence[tuple[Job, list[int]]], settings: AnswerSettings
    ) -> Iterator[tuple[Job, Answer | None]]:
        from drafter.decoding.params import SamplingParams

        params = [
            SamplingParams(
                max_new_tokens=settings.max_new_tokens,
                temperature=job.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                min_p=settings.min_p,
                seed=job.seed,
            )
            for job, _ in pairs
        ]
        engine = self._engine(len(pairs), len(pairs[0][1]) + settings.max_new_tokens)
        for event in engine.stream([ids for _, ids in pairs], params):
            done = event.completion
            if done is not None:
                is_whole = done.finish_reason == "stop"
                answer = Answer(done.text, "stop" if is_whole else "length", len(done.token_ids))
                yield pairs[event.index][0], answer

    def _engine(self, num_rows: int, num_slots: int) -> Any:
        from drafter.engine.defaults import choose
        from drafter.engine.engine import Engine

        if self._config is None:
            self._config = choose(self._target, self._drafter, given={"max_rows": self._batch_size}).config
        rows = max(1, min(num_rows, self._batch_size, self._batch_tokens // num_slots))
        return Engine(self._target, self._drafter, replace(self._config, max_rows=rows))


def _groups(lengths: Sequence[int]) -> Iterator[slice]:
    """Runs of descending lengths of which the longest is at most 1.5 times the shortest: rows of one cache."""
    start = 0
    for index in range(1, len(lengths) + 1):
        if index == len(lengths) or 1.5 * lengths[index] < lengths[start]:
            yield slice(start, index)
            start = index


def distill(
    target: "Target | None",
    prompts: str | Path | None,
    out: str | Path,
    *,
    max_new_tokens: int = 256,
    temperature: float | Sequence[float] = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    num_answers: int = 1,
    seed: int = 0,
    shard: str = "1/1",
    num_prompts: int | None = None,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    exclude: str | None = None,
    drafter: "RecurrentDrafter | None" = None,
    batch_size: int = 64,
    batch_tokens: int = 65536,
    endpoint: Endpoint | None = None,
    answerer: Answerer | None = None,
    progress: bool = True,
) -> DistillReport:
    """Answer prompts and append the conversations to ``out``, one ``messages`` row each.

    Args:
        target: who answers; None with ``endpoint``.
        prompts: file or hub data set, ``magpie`` (the target invents ``num_prompts`` of them), None for the package's
            own.
        out: a .jsonl file, continued if it exists.
        temperature: one, or a mix that the answers go through.
        shard: ``"3/8"``: the third of eight parts of the prompts; every part needs its own ``out``.
        num_prompts: at most so many prompts of a file; how many to invent, all of them before the first is answered.
        exclude: a file of texts that must not be among the prompts (13 words in a row count as the same).
        drafter: makes answering faster.
        batch_size, batch_tokens: see :class:`EngineAnswerer`.
        endpoint: a server to ask instead of running the target here.
        answerer: whoever else answers, such as a cluster.

    Raises:
        ValueError: bad options or prompts, or ``out`` was begun with other settings or holds answers to prompts that
            are excluded now.
        OSError: the disk is full, or the server does not answer (finished rows are kept).
    """
    mix = (float(temperature),) if isinstance(temperature, float | int) else tuple(float(t) for t in temperature)
    settings = AnswerSettings(max_new_tokens, mix, top_k, top_p, min_p, num_answers, seed)
    if num_prompts is not None and num_prompts < 1:
        raise ValueError(f"--num-prompts {num_prompts} must be at least 1")
    check_name(out)
    if answerer is not None and endpoint is not None:
        raise ValueError("--endpoint and --ray both say who is to answer: give one of them")
    answerer = answerer or _choose_answerer(target, drafter, endpoint, batch_size, batch_tokens)
    report = DistillReport()
    part, unwanted = Shard.parse(shard), Exclusion.read(exclude)
    origin: dict[str, Any] = {"prompts": MAGPIE}
    if prompts == MAGPIE:
        wanted = _invented(target, answerer, Path(out), num_prompts, seed, part, unwanted, report, progress)
    else:
        file = prompts or builtin_prompts()
        found = read_prompts(file, format=format, columns=columns, limit=num_prompts, shard=part, exclude=unwanted)
        wanted, report.num_duplicates, report.num_excluded = found
        origin = {"prompts": _digest(wanted)}
    with Journal(out, {**asdict(settings), "shard": str(part), **origin, **answerer.identity}) as journal:
        _check_excluded(journal, unwanted)
        _answer_all(answerer, wanted, settings, journal, report, progress)
    return report


def _choose_answerer(
    target: "Target | None",
    drafter: "RecurrentDrafter | None",
    endpoint: Endpoint | None,
    batch_size: int,
    batch_tokens: int,
) -> Answerer:
    if endpoint is not None:
        if drafter is not None:
            raise ValueError("--drafter speeds up our own engine; with --endpoint it is the server that decodes")
        return endpoint
    if target is None:
        raise ValueError("who is to answer? Give --target or --endpoint")
    return EngineAnswerer(target, drafter, batch_size=batch_size, batch_tokens=batch_tokens)


def _check_excluded(journal: Journal, exclude: Exclusion) -> None:
    """ValueError when the file holds answers to excluded prompts: it was begun before they were excluded."""
    ids = {str(row.get("id")): None for row in journal.rows if exclude.matches_any(row.get("messages", [])[:-1])}
    if ids:
        shown = ", ".join(list(ids)[:3]) + (", ..." if len(ids) > 3 else "")
        raise ValueError(
            f"--out {journal.path} holds answers to {len(ids)} prompts that are on the excluded list (id {shown}): "
            "remove their lines to go on, or give another --out"
        )


def _answer_all(
    answerer: Answerer,
    prompts: list[Prompt],
    settings: AnswerSettings,
    journal: Journal,
    report: DistillReport,
    progress: bool,
) -> None:
    from tqdm import tqdm

    done = keys_of(journal.rows, str(journal.path))
    jobs = make_jobs(prompts, settings, done)
    report.num_prompts = len(prompts)
    report.num_answers = len(prompts) * settings.num_answers
    report.num_done_before = report.num_answers - len(jobs)
    report.num_torn_bytes = journal.num_torn_bytes
    if isinstance(answerer, Endpoint):
        answers = answerer.answer(jobs, settings, num_answered_before=len(done))
    else:
        answers = answerer.answer(jobs, settings)
    start = time.perf_counter()
    with tqdm(
        total=report.num_answers,
        initial=report.num_done_before,
        desc="answering",
        unit="answer",
        disable=not progress,
        file=sys.stderr,
    ) as bar:
        for job, answer in answers:
            report.seconds = time.perf_counter() - start
            if answer is None:
                report.num_too_long += not isinstance(answerer, Endpoint)
                report.num_refused += isinstance(answerer, Endpoint)
                continue
            journal.append(row_of(job, answer))
            report.num_new += 1
            report.num_tokens += answer.num_tokens
            report.num_cut += answer.finish_reason == "length"
            bar.set_postfix_str(f"{report.num_tokens / report.seconds:,.0f} tokens/s", refresh=False)
            bar.update()


def _invented(
    target: "Target | None",
    answerer: Answerer,
    out: Path,
    num_prompts: int | None,
    seed: int,
    shard: Shard,
    exclude: Exclusion,
    report: DistillReport,
    progress: bool,
) -> list[Prompt]:
    if target is None or not isinstance(answerer, EngineAnswerer):
        raise ValueError(
            "--prompts magpie needs --target, and that on this machine: a server's chat endpoint cannot be given half "
            "a template. Invent the prompts first, then answer the .prompts.jsonl file with --endpoint or --ray"
        )
    if num_prompts is None:
        raise ValueError("--prompts magpie needs --num-prompts: how many prompts to invent")
    prompts, report.dropped_inventions = invent_prompts(
        out.with_name(out.name.removesuffix(".jsonl") + ".prompts.jsonl"),
        target.tokenizer,
        answerer.sample_openings,
        MagpieSettings(num_prompts, seed=seed),
        target_name=target.name,
        identity=answerer.identity,
        shard=shard,
        exclude=exclude,
        progress=progress,
    )
    return prompts


def _digest(prompts: Sequence[Prompt]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        hasher.update(repr((prompt.id, prompt.messages)).encode())
    return hasher.hexdigest()
