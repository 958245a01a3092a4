"""Rows of data sets become token ids with a loss mask over the tokens that the target writes.

Rows of token ids are used as they are: the mask covers exactly the answer's ids. Text that came without ids is
rendered by the target's chat template and tokenised; the mask covers the tokens of the answers, found by their
characters, and the special token that closes a turn.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from drafter.data.formats import ChatMessage, Row, parse_row
from drafter.data.reading import RawRow, fingerprint_of, read_records
from drafter.data.rows import TokenRows, row_features
from drafter.data.template import Rendered, find_all_answers
from drafter.targets.chat import Chat

_BATCH_ROWS = 256  # rows that are rendered and tokenised in one call
# Part of the cache's key: raise the number when a change of this file changes tokens or masks.
ENCODING_VERSION = 4
NO_ANSWER, EMPTY = "without an answer", "an empty answer"
_MARK = "an answer ends with a special token as text: remove the token from the file"
TOO_LONG = "the answer begins after the maximal length"
_PARTS = "an answer has reasoning or tool calls and no token ids: let the target answer (`drafter distill`)"


@dataclass(frozen=True)
class RowSettings:
    """Settings that, with file and tokenizer, determine the token rows.

    Attributes:
        max_length: longest row in tokens; longer rows are cut, and plain text continues in a further row.
        columns: see :func:`drafter.data.formats.read_rows`.
        vocab_size: the target's, where it has ids that the tokenizer lacks; None: the tokenizer's.
    """

    max_length: int | None = 1024
    columns: Mapping[str, str] | None = None
    vocab_size: int | None = None


class EncodedRow(NamedTuple):
    """One row of the encoded data set.

    Attributes:
        token_ids, loss_mask: the mask is True where a token is trained on; both are empty for a dropped row.
        is_foreign: the tokens were made from text here, so the target may not have written them.
        problem: the reason of a dropped row, or empty.
        is_cut: the row was longer than the maximal length.
        where: file and line.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    is_foreign: bool = False
    problem: str = ""
    is_cut: bool = False
    where: str = ""


@dataclass(frozen=True)
class EncodeReport:
    """Counts of rows: kept, changed, and dropped by reason.

    Attributes:
        num_foreign: kept rows of text without the target's token ids.
        dropped: rows by reason.
        first: file and line of the first row that was dropped for a reason.
    """

    num_rows: int
    num_kept: int
    num_tokens: int
    num_trained_tokens: int
    num_foreign: int
    num_cut: int
    dropped: Counter[str]
    first: dict[str, str]

    @classmethod
    def of(cls, dataset: Any) -> "EncodeReport":
        """The counts of an encoded ``datasets.Dataset``."""
        found = dataset.select_columns(["problem", "is_foreign", "is_cut", "where", "length", "num_trained"])[:]
        problems, places = found["problem"], found["where"]
        return cls(
            num_rows=len(problems),
            num_kept=problems.count(""),
            num_tokens=sum(found["length"]),
            num_trained_tokens=sum(found["num_trained"]),
            num_foreign=sum(found["is_foreign"]),
            num_cut=sum(found["is_cut"]),
            dropped=Counter(filter(None, problems)),
            first=dict(zip(reversed(problems), reversed(places), strict=True)),
        )

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
        for reason, count in self.dropped.most_common():
            lines.append(f"{count:,} rows dropped, such as {self.first[reason]}: {reason}")
        if self.num_cut:
            lines.append(f"{self.num_cut:,} rows cut at the maximal length")
        return lines


def encode_files(
    names: Sequence[str], tokenizer: Any, settings: RowSettings, *, target_name: str = "", progress: bool = True
) -> tuple[TokenRows, EncodeReport]:
    """The token rows of files and hub data sets, from the cache of `datasets` where possible, and the counts.

    Args:
        names: files, or ``owner/name[:split]`` of hub data sets.
        tokenizer: the target's tokenizer.
        settings: what to do with the rows.
        target_name: the target's name, for messages.
        progress: show a bar.

    Raises:
        FileNotFoundError, ValueError: see :func:`read_records` and :func:`parse_row`, and a file without a usable row.
    """
    import datasets

    datasets.enable_progress_bars() if progress else datasets.disable_progress_bars()
    encoder, parts = RowEncoder(tokenizer, settings, target_name), []
    for name in names:
        parts.append(_encoded(name, encoder))
        report = EncodeReport.of(parts[-1])
        if not report.num_kept:
            details = "; ".join(report.lines()[1:])
            raise ValueError(f"{name}: nothing to train on: {details}. Make answers with `drafter distill`")
    whole = datasets.concatenate_datasets(parts)
    kept = [index for index, problem in enumerate(whole["problem"][:]) if not problem]
    return TokenRows(whole if len(kept) == len(whole) else whole.select(kept)), EncodeReport.of(whole)


def _encoded(name: str, encoder: "RowEncoder") -> Any:
    """The encoded rows of a file or hub data set as a ``datasets.Dataset``, dropped ones included."""
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError

    features = row_features() | {"is_foreign": Value("bool"), "problem": Value("string"), "is_cut": Value("bool")}
    features |= {"where": Value("string")}

    def rows() -> Iterator[dict[str, Any]]:
        records = read_records(name, streaming=False)
        while batch := list(itertools.islice(records, _BATCH_ROWS)):
            for row in encoder.encode(batch):
                yield row._asdict() | {"length": len(row.token_ids), "num_trained": sum(row.loss_mask)}

    key = json.dumps([fingerprint_of(name), name, encoder.key], sort_keys=True)
    try:
        fingerprint = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        return Dataset.from_generator(rows, features=Features(features), fingerprint=fingerprint)
    except DatasetGenerationError as error:
        raise (error.__cause__ or error) from None


class RowEncoder:
    """Encodes rows with one tokenizer and its chat template.

    Args:
        tokenizer: the target's tokenizer.
        settings: what to do with the rows.
        name: the target's name, for messages.
    """

    def __init__(self, tokenizer: Any, settings: RowSettings, name: str = "") -> None:
        self._tokenizer, self._settings, self._name = tokenizer, settings, name
        self._size = max(len(tokenizer), settings.vocab_size or 0)
        self._stop_ids = stop_token_ids(tokenizer)
        self._marks = tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)

    @property
    def key(self) -> list[Any]:
        """What the encoded rows depend on beside the rows themselves."""
        return [tokenizer_fingerprint(self._tokenizer), asdict(self._settings), ENCODING_VERSION]

    def encode(self, records: Sequence[RawRow]) -> Iterator[EncodedRow]:
        """The encoded rows in the order of the records; a dropped row has a ``problem``.

        Raises:
            ValueError: an invalid row, or a conversation for a target without a chat template.
        """
        rows = [parse_row(record, columns=self._settings.columns) for record in records]
        conversations = self._conversations([row for row in rows if row.is_chat])
        for row in rows:
            self._check_ids(row)
            if row.is_chat:
                found = [self._cut(next(conversations))]
            elif row.text is not None:
                found = list(self._chunks_of_text(row.text))
            else:
                mask = [False] * len(row.prompt_ids) + [True] * len(row.token_ids or ())
                found = [self._cut(EncodedRow([*row.prompt_ids, *(row.token_ids or ())], mask))]
            yield from (encoded._replace(where=row.where) for encoded in found)

    def _check_ids(self, row: Row) -> None:
        """ValueError for token ids that the target lacks."""
        largest = max((*row.prompt_ids, *(row.token_ids or ())), default=0)
        if largest >= self._size:
            raise ValueError(
                f"{row.where}: token id {largest} is outside the vocabulary of target {self._name!r} with {self._size} "
                "tokens: the row is another model's"
            )

    def _conversations(self, rows: Sequence[Row]) -> Iterator[EncodedRow]:
        """The encoded conversations, rendered by one process with limits."""
        chats = [self._problem_of(row) or Chat(_asked(row), row.tools) for row in rows]
        if not self._tokenizer.chat_template and any(isinstance(chat, Chat) for chat in chats):
            raise ValueError(
                f"target {self._name!r} has no chat template, so conversations cannot be rendered: give plain `text` "
                "rows, or choose an instruction-tuned target"
            )
        rendered = find_all_answers(self._tokenizer, chats, self._name)
        encodings = iter(self._tokenise([text for item in rendered for text in _texts_of(item)]))
        for row, item in zip(rows, rendered, strict=True):
            if isinstance(item, str):
                yield EncodedRow([], [], problem=item)
            else:
                yield self._masked(item, [next(encodings) for _ in _texts_of(item)], has_end=not row.is_cut)

    def _tokenise(self, texts: list[str]) -> Sequence[Any]:
        """Encodings with ``ids`` and character ``offsets``. The tokenizer encodes the texts of a call on all cores."""
        if not texts:
            return []
        _backend(self._tokenizer)
        encoded = self._tokenizer(texts, add_special_tokens=False, truncation=False, padding=False)
        encodings: Sequence[Any] = encoded.encodings
        return encodings

    def _problem_of(self, row: Row) -> str:
        """The reason to drop a conversation before it is rendered, or empty."""
        messages = _asked(row)
        if messages[-1]["role"] != "assistant":
            return NO_ANSWER
        if row.has_parts:
            return _PARTS
        answers = [message["content"].rstrip() for message in messages if message["role"] == "assistant"]
        if not all(answers):
            return EMPTY
        return _MARK if any(answer.endswith(self._marks) for answer in answers) else ""

    def _masked(self, rendered: Rendered, encodings: Sequence[Any], *, has_end: bool) -> EncodedRow:
        """Token ids and mask of one conversation, whose prefixes are compared token by token.

        ``encodings``: of the conversation and its prefixes.

        A token belongs to an answer if all its characters do. A token of one byte covers the byte's whole character.
        The token that ends the last answer belongs to the mask if ``has_end``.
        """
        whole, *prefixes = encodings
        ids, spans = whole.ids, whole.offsets
        loss_mask = [False] * len(ids)
        for number, (prefix, answer) in enumerate(zip(prefixes, rendered.answers, strict=True), start=1):
            index = len(prefix.ids)
            if ids[:index] != prefix.ids:
                return EncodedRow([], [], problem="the tokens before an answer change when the answer is added")
            while index < len(ids) and spans[index][0] < answer.start:
                index += 1
            while index < len(ids) and spans[index][1] <= answer.end:
                loss_mask[index] = True
                index += 1
            if number == len(prefixes) and not has_end:
                break
            if index < len(ids) and ids[index] in self._stop_ids and spans[index][0] >= answer.end:
                loss_mask[index] = True
        return EncodedRow(ids, loss_mask, is_foreign=True)

    def _chunks_of_text(self, text: str) -> Iterator[EncodedRow]:
        """Plain text with the special tokens that the tokenizer adds; all tokens but the first are trained on."""
        ids = list(self._tokenizer(text)["input_ids"])
        size = self._settings.max_length or max(1, len(ids))
        for start in range(0, max(1, len(ids)), size):
            piece = ids[start : start + size]
            kept = self._cut(EncodedRow(piece, [False] + [True] * (len(piece) - 1), is_foreign=True))
            if not start or not kept.problem:
                yield kept

    def _cut(self, row: EncodedRow) -> EncodedRow:
        """The row, cut at the maximal length; dropped if nothing is trained on."""
        size = self._settings.max_length
        if size is not None and len(row.token_ids) > size:
            row = row._replace(token_ids=row.token_ids[:size], loss_mask=row.loss_mask[:size], is_cut=True)
        if row.problem or any(row.loss_mask):
            return row
        return EncodedRow([], [], problem=TOO_LONG if row.is_cut else EMPTY)


def _asked(row: Row) -> list[ChatMessage]:
    """The messages of a row, without a last question that has no answer."""
    messages = list(row.messages)
    return messages[:-1] if messages[-1]["role"] == "user" and len(messages) > 2 else messages


def _texts_of(rendered: Rendered | str) -> list[str]:
    """A conversation, and the part before each of its answers; nothing for the reason to drop a conversation."""
    return [] if isinstance(rendered, str) else [rendered.text, *(answer.prefix for answer in rendered.answers)]


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
