"""Rows of data sets become token ids with a loss mask over the tokens that the target writes.

Rows of token ids are used as they are: the mask covers exactly the answer's ids. Text that came without ids is
rendered by the target's chat template and tokenised; the mask covers the tokens of the answers, found by their
characters, and the special token that closes a turn.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from drafter.data.formats import ChatMessage, Row, parse_row
from drafter.data.reading import Source, open_source
from drafter.data.rows import TokenRows, row_features
from drafter.data.template import PrefixError, Rendered, check_template, find_all_answers
from drafter.targets.chat import Chat

MAX_FAILED_SHARE = 0.01
# Part of the cache's key: raise the number when a change of this file changes tokens or masks.
ENCODING_VERSION = 3
NO_ANSWER, EMPTY = "rows without an answer", "rows with an empty answer"
_PARTS = "an answer has reasoning or tool calls and no token ids: let the target answer (`drafter distill`)"
TOO_LONG = "rows whose answer begins after the maximal length"


@dataclass(frozen=True)
class RowSettings:
    """Settings that, with file and tokenizer, determine the token rows.

    Attributes:
        max_length: longest row in tokens; longer rows are cut, and plain text continues in a further row.
        columns: see :func:`drafter.data.formats.read_rows`.
        keep_unanswered: keep rows without a trained token, for training on whole texts.
        vocab_size: the target's, where it has ids that the tokenizer lacks; None: the tokenizer's.
    """

    max_length: int | None = 1024
    columns: Mapping[str, str] | None = None
    keep_unanswered: bool = False
    vocab_size: int | None = None


class EncodedRow(NamedTuple):
    """One row of the encoded data set.

    Attributes:
        token_ids, loss_mask: the mask is True where a token is trained on; both are empty for a dropped row.
        kind: ``ids``: tokens as they came; ``rendered``: a conversation of text; ``text``: plain text.
        problem: the reason of a dropped row, or empty.
        is_cut: the row was longer than the maximal length.
        is_stripped: an answer lost an end mark that it held as text.
        num_rows: 1; 0 where the row continues the text of the row before.
        number: line or row number in the file.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    kind: str = "ids"
    problem: str = ""
    is_cut: bool = False
    is_stripped: bool = False
    num_rows: int = 1
    number: int = 0


@dataclass
class EncodeReport:
    """Counts of rows: kept, changed, and dropped by reason.

    Attributes:
        num_foreign: kept rows of text without the target's token ids.
        dropped: rows by reason.
        first_failure: place of the first conversation whose answers were not found.
    """

    num_rows: int = 0
    num_kept: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    num_foreign: int = 0
    num_cut: int = 0
    num_stripped: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first_failure: str = ""

    @property
    def failures(self) -> Counter[str]:
        """Conversations whose answers were not found, by reason."""
        usual = (NO_ANSWER, EMPTY, TOO_LONG)
        return Counter({reason: count for reason, count in self.dropped.items() if reason not in usual})

    def add(self, other: "EncodeReport") -> None:
        """Add the counts of another report."""
        for name, value in asdict(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        self.dropped += other.dropped
        self.first_failure = self.first_failure or other.first_failure

    def lines(self) -> list[str]:
        """The report as text: one line of totals, and one for each reason to drop or change rows."""
        share = self.num_trained_tokens / max(1, self.num_tokens)
        lines = [
            f"{self.num_kept:,} of {self.num_rows:,} rows kept: {self.num_tokens:,} tokens, "
            f"{self.num_trained_tokens:,} of them trained on ({share:.0%})"
        ]
        if self.num_foreign:
            lines.append(
                f"{self.num_foreign:,} of {self.num_kept:,} rows ({self.num_foreign / self.num_kept:.0%}) hold text "
                "without the target's token ids; a drafter learns less from text that the target did not write "
                "(`drafter distill` writes rows with token ids)"
            )
        lines += [f"{count:,} {reason} dropped" for reason, count in sorted(self.dropped.items())]
        if self.num_cut:
            lines.append(f"{self.num_cut:,} rows cut at the maximal length")
        if self.num_stripped:
            lines.append(f"{self.num_stripped:,} rows with an end mark as text in an answer, which was removed")
        if self.failures:
            lines.append(f"the first conversation without a mask: {self.first_failure}")
        return lines

    def check(self, name: str) -> None:
        """ValueError when more than 1% of the conversations failed, or nothing is left to train on."""
        num_failed = self.failures.total()
        num_tried = self.num_kept + num_failed + self.dropped[TOO_LONG]
        if num_failed > MAX_FAILED_SHARE * num_tried:
            reason = self.failures.most_common(1)[0][0]
            raise ValueError(
                f"{name}: {num_failed:,} of {num_tried:,} conversations cannot be masked, more than 1%: {reason} "
                f"(first: {self.first_failure}). "
                "See them with `drafter data inspect`; clean the rows or use another target"
            )
        if self.num_kept == 0:
            details = "; ".join(self.lines()[1:]) or "no rows"
            hint = " Make answers with `drafter distill`." if self.dropped[NO_ANSWER] else ""
            raise ValueError(f"{name}: nothing to train on: {details}.{hint}")


def encode_file(
    name: str, tokenizer: Any, settings: RowSettings, *, target_name: str = "", progress: bool = True
) -> tuple[TokenRows, EncodeReport]:
    """The token rows of one file or hub data set, from the cache of `datasets` where possible, and the counts.

    Args:
        name: file, or ``owner/name[:split]`` of a hub data set.
        tokenizer: the target's tokenizer.
        settings: what to do with the rows.
        target_name: the target's name, for messages.
        progress: show a bar.

    Raises:
        FileNotFoundError, ValueError: see :func:`open_source`, :func:`parse_row` and :meth:`EncodeReport.check`.
    """
    from datasets import Features, Value

    source = open_source(name, streaming=False)
    encoder = RowEncoder(tokenizer, settings, target_name)
    features = row_features() | {"kind": Value("string"), "problem": Value("string")}
    features |= {"is_cut": Value("bool"), "is_stripped": Value("bool")}
    features |= {"num_rows": Value("int32"), "number": Value("int64")}

    def encode(items: list[dict[str, Any]], numbers: list[int]) -> dict[str, list[Any]]:
        rows = list(encoder.encode(source, items, numbers))
        columns = {key: list(values) for key, values in zip(EncodedRow._fields, zip(*rows, strict=True), strict=False)}
        columns = columns or {key: [] for key in EncodedRow._fields}
        columns["length"] = [len(row.token_ids) for row in rows]
        columns["num_trained"] = [sum(row.loss_mask) for row in rows]
        return columns

    key = [source.dataset._fingerprint, tokenizer_fingerprint(tokenizer), asdict(settings), ENCODING_VERSION]
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()
    dataset = source.map(encode, features=Features(features), key=digest, progress=progress)
    report = _report_of(dataset, source)
    report.check(name)
    problems = dataset["problem"][:]
    kept = [index for index, problem in enumerate(problems) if not problem]
    return TokenRows(dataset if len(kept) == len(problems) else dataset.select(kept)), report


def _report_of(dataset: Any, source: Source) -> EncodeReport:
    columns = dataset.select_columns([name for name in dataset.column_names if name not in ("token_ids", "loss_mask")])
    found = columns[:]
    report = EncodeReport(
        num_rows=sum(found["num_rows"]),
        num_kept=found["problem"].count(""),
        num_tokens=sum(found["length"]),
        num_trained_tokens=sum(found["num_trained"]),
        num_foreign=sum(
            kind != "ids" and not problem for kind, problem in zip(found["kind"], found["problem"], strict=True)
        ),
        num_cut=sum(found["is_cut"]),
        num_stripped=sum(found["is_stripped"]),
        dropped=Counter(problem for problem in found["problem"] if problem),
    )
    failures = report.failures
    places = (number for number, problem in zip(found["number"], found["problem"], strict=True) if problem in failures)
    report.first_failure = next((f"{source.name}, {source.unit} {number}" for number in places), "")
    return report


class RowEncoder:
    """Encodes the rows of a data set, some at a time.

    Args:
        tokenizer: the target's tokenizer.
        settings: what to do with the rows.
        name: the target's name, for messages.
    """

    def __init__(self, tokenizer: Any, settings: RowSettings, name: str = "") -> None:
        self._tokenizer, self._settings, self._name = tokenizer, settings, name
        self._size = max(len(tokenizer), settings.vocab_size or 0)
        self._stop_ids = stop_token_ids(tokenizer)
        self._marks = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._is_template_checked = False

    def encode(
        self, source: Source, items: Sequence[Mapping[str, Any]], numbers: Sequence[int]
    ) -> Iterator[EncodedRow]:
        """The encoded rows in the order of the items; a dropped row has a ``problem``.

        Raises:
            ValueError: an invalid row; a template without usable prefixes.
        """
        records = [source.record(item, number) for item, number in zip(items, numbers, strict=True)]
        rows = [parse_row(record, columns=self._settings.columns) for record in records if record is not None]
        chats = {index: self._chat(row) for index, row in enumerate(rows) if row.is_chat}
        rendered = self._render(
            {index: chat for index, chat in chats.items() if isinstance(chat, Chat)},
            {index for index, row in enumerate(rows) if row.is_cut},
        )
        for index, row in enumerate(rows):
            self._check_ids(row)
            if row.token_ids is not None:
                found = [self._cut(_row_of_ids(row))]
            elif row.text is not None:
                found = list(self._chunks_of_text(row.text))
            else:
                chat = chats[index]
                is_stripped = isinstance(chat, Chat) and chat.messages != _asked(row)
                found = [chat if isinstance(chat, EncodedRow) else self._cut(rendered[index])]
                found[0] = found[0]._replace(is_stripped=is_stripped)
            yield from (encoded._replace(number=row.number) for encoded in found)

    def _check_ids(self, row: Row) -> None:
        """ValueError for token ids that the target lacks."""
        largest = max((*row.prompt_ids, *(row.token_ids or ())), default=0)
        if largest >= self._size:
            raise ValueError(
                f"{row.where}: token id {largest} is outside the vocabulary of target {self._name!r} with {self._size} "
                "tokens: the row is another model's"
            )

    def _chat(self, row: Row) -> Chat | EncodedRow:
        """The conversation to render, ending with an answer; a dropped row without one."""
        messages = [self._stripped(message) for message in _asked(row)]
        if messages[-1]["role"] != "assistant":
            return _dropped(NO_ANSWER)
        if row.has_parts:
            return _dropped(_PARTS)
        answers = [message for message in messages if message["role"] == "assistant"]
        if any(not message["content"].strip() for message in answers):
            return _dropped(EMPTY)
        return Chat(messages, row.tools)

    def _stripped(self, message: ChatMessage) -> ChatMessage:
        """The message without the special tokens, as text, that collectors of answers leave at its end."""
        content = message["content"]
        if message["role"] == "assistant":
            while mark := next((mark for mark in self._marks if mark and content.endswith(mark)), None):
                content = content[: -len(mark)]
        return message if content == message["content"] else {**message, "content": content.rstrip()}

    def _render(self, chats: Mapping[int, Chat], cut: Container[int]) -> dict[int, EncodedRow]:
        """The encoded conversations, under the same keys; ``cut``: keys whose last answer has no end."""
        if chats and not self._is_template_checked:
            check_template(self._tokenizer, self._name)
            self._is_template_checked = True
        found = find_all_answers(self._tokenizer, list(chats.values()), self._name)
        good = [item for item in found if isinstance(item, Rendered)]
        texts = [text for item in good for text in (item.text, *(answer.prefix for answer in item.answers))]
        encodings = iter(self._tokenise(texts))
        rows: dict[int, EncodedRow] = {}
        for index, item in zip(chats, found, strict=True):
            try:
                if isinstance(item, PrefixError):
                    raise item
                whole, prefixes = next(encodings), [next(encodings).ids for _ in item.answers]
                rows[index] = self._masked(whole, item, prefixes, has_end=index not in cut)
            except PrefixError as error:
                rows[index] = _dropped(error.reason)
        return rows

    def _tokenise(self, texts: Sequence[str]) -> Sequence[Any]:
        """Encodings with ``ids`` and character ``offsets``, from one call of the Rust tokenizer."""
        if not texts:
            return []
        _backend(self._tokenizer)
        encoded = self._tokenizer(list(texts), add_special_tokens=False, truncation=False, padding=False)
        encodings: Sequence[Any] = encoded.encodings
        return encodings

    def _masked(
        self, whole: Any, rendered: Rendered, prefixes: Sequence[list[int]], *, has_end: bool = True
    ) -> EncodedRow:
        """Token ids and mask of one conversation, whose prefixes are compared token by token.

        A token belongs to an answer if all its characters do. A token of one byte covers the byte's whole character.
        The token that ends the last answer belongs to the mask if ``has_end``.
        """
        ids, spans = whole.ids, whole.offsets
        loss_mask = [False] * len(ids)
        for number, (prefix_ids, answer) in enumerate(zip(prefixes, rendered.answers, strict=True), start=1):
            index = len(prefix_ids)
            if ids[:index] != prefix_ids:
                raise PrefixError("the tokens before an answer change when the answer is added")
            while index < len(ids) and spans[index][0] < answer.start:
                index += 1
            while index < len(ids) and spans[index][1] <= answer.end:
                loss_mask[index] = True
                index += 1
            if number == len(prefixes) and not has_end:
                break
            if index < len(ids) and ids[index] in self._stop_ids and spans[index][0] >= answer.end:
                loss_mask[index] = True
        return EncodedRow(ids, loss_mask, "rendered")

    def _chunks_of_text(self, text: str) -> Iterator[EncodedRow]:
        """Plain text with the special tokens that the tokenizer adds; all tokens but the first are trained on."""
        ids = list(self._tokenizer(text)["input_ids"])
        size = self._settings.max_length or max(1, len(ids))
        for start in range(0, max(1, len(ids)), size):
            piece = ids[start : start + size]
            row = EncodedRow(piece, [False] + [True] * (len(piece) - 1), "text", num_rows=int(start == 0))
            kept = self._cut(row)
            if not start or not kept.problem:
                yield kept

    def _cut(self, row: EncodedRow) -> EncodedRow:
        """The row, cut at the maximal length; dropped if nothing is trained on."""
        size = self._settings.max_length
        if size is not None and len(row.token_ids) > size:
            row = row._replace(token_ids=row.token_ids[:size], loss_mask=row.loss_mask[:size], is_cut=True)
        if row.problem or any(row.loss_mask) or (self._settings.keep_unanswered and row.token_ids):
            return row
        return _dropped(TOO_LONG if row.is_cut else EMPTY, num_rows=row.num_rows)


def _asked(row: Row) -> list[ChatMessage]:
    """The messages of a row, without a last question that has no answer."""
    messages = list(row.messages)
    return messages[:-1] if messages[-1]["role"] == "user" and len(messages) > 2 else messages


def _row_of_ids(row: Row) -> EncodedRow:
    assert row.token_ids is not None
    mask = [False] * len(row.prompt_ids) + [True] * len(row.token_ids)
    return EncodedRow([*row.prompt_ids, *row.token_ids], mask)


def _dropped(problem: str, num_rows: int = 1) -> EncodedRow:
    return EncodedRow([], [], problem=problem, num_rows=num_rows)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of everything that determines token ids: vocabulary, merges, added tokens, chat template."""
    state = json.loads(_backend(tokenizer).to_str())
    state.pop("truncation", None)
    state.pop("padding", None)
    text = json.dumps([state, tokenizer.chat_template, sorted(stop_token_ids(tokenizer))], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def stop_token_ids(tokenizer: Any) -> set[int]:
    """The tokens that can end a turn: the tokenizer's special tokens."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special | set(tokenizer.all_special_ids)


def _backend(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no character offsets of tokens, so answers cannot be found: "
            "a tokenizer with a tokenizer.json file is needed"
        )
    return backend
