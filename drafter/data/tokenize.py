"""Conversations as token ids with a loss mask: which tokens a target would have generated itself.

The tokenizer's own chat template is rendered, never one of ours. For every answer k, the conversation before it
rendered with the opening of the assistant's turn is a *prefix*: the text of the whole conversation must begin with
it, and its token ids too. So the answer's tokens stand exactly where the target would have generated them. Trained on
are the answer's tokens and, if the template closes the turn with a special token, that one.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from drafter.data.formats import Message, Row

_CHUNK_ROWS = 256
MAX_FAILED_SHARE = 0.01
# Part of the cache's key: raise it when a change here changes the tokens or the mask of some row.
ENCODING_VERSION = 1


class Encoded(NamedTuple):
    """Token ids of a row, and for each whether it is trained on."""

    token_ids: list[int]
    loss_mask: list[bool]


class PrefixError(ValueError):
    """This conversation cannot be masked by template prefixes; ``reason`` is one of a few short phrases to be
    counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class EncodeReport:
    """What became of the rows, in counts. Rows that are not kept: without answer, empty answer, failed, too long."""

    num_rows: int = 0
    num_kept: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    num_without_answer: int = 0
    num_empty_answers: int = 0
    num_cut_at_max_length: int = 0
    num_beyond_max_length: int = 0
    num_suffixes_stripped: int = 0
    num_invalid: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    first_failure: str = ""

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    def add(self, other: "EncodeReport") -> None:
        """Count another report's rows in."""
        for name, value in asdict(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        for reason, count in other.failures.items():
            self.failures[reason] = self.failures.get(reason, 0) + count
        self.first_failure = self.first_failure or other.first_failure

    def lines(self) -> list[str]:
        """The report for people: one line of totals and one per kind of row that was dropped or changed."""
        share = self.num_trained_tokens / max(1, self.num_tokens)
        lines = [
            f"{self.num_kept:,} of {self.num_rows:,} rows kept: {self.num_tokens:,} tokens, "
            f"{self.num_trained_tokens:,} of them trained on ({share:.0%})"
        ]
        for count, what in (
            (self.num_without_answer, "rows without an answer dropped"),
            (self.num_empty_answers, "rows with an empty answer dropped"),
            (self.num_beyond_max_length, "rows dropped whose answer begins beyond the maximal length"),
            (self.num_cut_at_max_length, "rows cut at the maximal length"),
            (self.num_suffixes_stripped, "answers rid of a literal end mark"),
            (self.num_invalid, "invalid rows skipped"),
        ):
            if count:
                lines.append(f"{count:,} {what}")
        for reason, count in sorted(self.failures.items()):
            lines.append(f"{count:,} conversations dropped: {reason}")
        if self.num_failed:
            lines.append(f"first of them: {self.first_failure}")
        return lines

    def check(self, name: str) -> None:
        """ValueError when more than 1% of the conversations failed, or nothing is left to train on."""
        num_tried = self.num_kept + self.num_failed + self.num_beyond_max_length
        if self.num_failed > MAX_FAILED_SHARE * num_tried:
            reason = max(self.failures, key=lambda key: self.failures[key])
            raise ValueError(
                f"{name}: {self.num_failed:,} of {num_tried:,} conversations cannot be masked, more than 1%: {reason} "
                f"(first: {self.first_failure}). "
                "See them with `drafter data inspect`; clean the rows or use another target"
            )
        if self.num_kept == 0:
            details = "; ".join(self.lines()[1:]) or "no rows"
            hint = " Make answers with `drafter distill`." if self.num_without_answer else ""
            raise ValueError(f"{name}: nothing to train on: {details}.{hint}")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of what decides about ids: vocabulary, merges, added tokens, chat template."""
    state = json.loads(_backend(tokenizer).to_str())
    state.pop("truncation", None)
    state.pop("padding", None)
    text = json.dumps([state, tokenizer.chat_template, sorted(stop_token_ids(tokenizer))], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def stop_token_ids(tokenizer: Any) -> set[int]:
    """Tokens that can end a turn: the tokenizer's special ones."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special | set(tokenizer.all_special_ids)


def _backend(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"{type(tokenizer).__name__} does not tell which characters a token covers, so answers cannot be located: "
            "a tokenizer with a tokenizer.json file is needed"
        )
    return backend


def render(tokenizer: Any, messages: Sequence[Message], *, opening: bool = False) -> str:
    """The template's text; ``opening`` adds the opening of the assistant's turn. PrefixError if the template
    refuses."""
    import jinja2

    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opening))
    except jinja2.TemplateError as error:
        raise PrefixError(f"the chat template refuses it ({error})") from error


_PROBE = [
    {"role": "user", "content": "Zebra crossing?"},
    {"role": "assistant", "content": "Quiet violet."},
    {"role": "user", "content": "Maple engine?"},
    {"role": "assistant", "content": "Under seven hills."},
]


def check_template(tokenizer: Any, name: str) -> None:
    """Refuse a tokenizer whose answers cannot be located by template prefixes, with the reason.

    Raises:
        ValueError: no chat template; a template that fails, drops or rewrites earlier turns, or whose opening of the
            assistant's turn is not what stands before an answer.
    """
    _backend(tokenizer)
    if not tokenizer.chat_template:
        raise ValueError(
            f"target {name!r} has no chat template, so conversations cannot be rendered: give plain `text` rows, "
            "or take an instruction-tuned target"
        )
    for messages in (_PROBE[:2], _PROBE):
        try:
            plan_turns(tokenizer, messages)
        except PrefixError as error:
            turns = "a single question and answer" if len(messages) == 2 else "a second turn"
            raise ValueError(
                f"the chat template of target {name!r} cannot be used for a loss mask: "
                f"{error.reason}, seen with {turns}"
            ) from error


class Turn(NamedTuple):
    """One answer in the rendered text: its prefix, and the characters of its content."""

    prefix: str
    start: int
    end: int


def plan_turns(tokenizer: Any, messages: Sequence[Message]) -> tuple[str, list[Turn]]:
    """Render a conversation and find every answer in it. PrefixError when a prefix or an answer is not reproduced."""
    text = render(tokenizer, messages)
    turns = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prefix = render(tokenizer, messages[:index], opening=True)
        if not text.startswith(prefix):
            raise PrefixError("what stands before an answer changes once the answer is there (no usable prefix)")
        content = message["content"]
        start = text.find(content, len(prefix))
        if start != len(prefix):  # templates may trim an answer, or put something between opening and answer
            content = content.strip()
            start = text.find(content, len(prefix))
        if start < 0:
            raise PrefixError("the template does not show the answer as it is written")
        turns.append(Turn(prefix, start, start + len(content)))
    for turn, following in zip(turns, turns[1:], strict=False):
        if turn.end > len(following.prefix):
            raise PrefixError("the template does not show the answer as it is written")
    return text, turns


class ConversationEncoder:
    """Turns rows into token ids and loss masks, and counts what became of them in ``report``."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        name: str = "",
        max_length: int | None = None,
        strip_suffixes: Sequence[str] = (),
        strip_special_suffixes: bool = True,
        keep_unanswered: bool = False,
    ) -> None:
        """
        Args:
            name: the target's, for messages.
            max_length: rows are cut after so many tokens; plain text goes on in a further row.
            strip_suffixes: texts that are taken off the end of every answer.
            strip_special_suffixes: take the tokenizer's special tokens, written out at the end of an answer, off too.
                They are end marks of whoever collected the answers; as tokens they would teach a second end of turn.
            keep_unanswered: keep conversations without any trained token (ready text to train on as a whole).
        """
        self.tokenizer = tokenizer
        self.name = name
        self.max_length = max_length
        self.report = EncodeReport()
        self._stop_ids = stop_token_ids(tokenizer)
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._suffixes = tuple(strip_suffixes) + (tuple(special) if strip_special_suffixes else ())
        self._keep_unanswered = keep_unanswered
        self._is_template_checked = False

    def encode(self, rows: Iterable[Row]) -> Iterator[Encoded]:
        """Yield the rows that can be trained on, in order."""
        iterator = iter(rows)
        while chunk := list(islice(iterator, _CHUNK_ROWS)):
            yield from self._encode_chunk(chunk)

    def _encode_chunk(self, rows: Sequence[Row]) -> Iterator[Encoded]:
        plans = [(row, *plan) for row in rows if (plan := self._plan(row)) is not None]
        texts = [piece for _, text, turns in plans for piece in (text, *(turn.prefix for turn in turns))]
        encodings = iter(_backend_encode(self.tokenizer, texts))
        for row, _, turns in plans:
            whole = next(encodings)
            prefixes = [next(encodings).ids for _ in turns]
            if row.text is not None:
                yield from self._chunks_of_text(row.text)
                continue
            try:
                encoded = self._mask(whole, prefixes, turns, row.is_cut)
            except PrefixError as error:
                self._fail(row, error)
                continue
            yield from self._keep(encoded)

    def _plan(self, row: Row) -> tuple[str, list[Turn]] | None:
        """The text to tokenise and where its answers stand; None, and counted, when the row has nothing to train on."""
        self.report.num_rows += 1
        if row.text is not None:
            return "", []
        messages = list(row.messages)
        if messages[-1]["role"] == "user" and len(messages) > 2:
            messages.pop()  # a question without its answer
        if messages[-1]["role"] != "assistant":
            self.report.num_without_answer += 1
            return None
        messages = [self._stripped(message) for message in messages]
        if any(not message["content"].strip() for message in messages if message["role"] == "assistant"):
            self.report.num_empty_answers += 1
            return None
        if not self._is_template_checked:
            check_template(self.tokenizer, self.name)
            self._is_template_checked = True
        try:
            return plan_turns(self.tokenizer, messages)
        except PrefixError as error:
            self._fail(row, error)
            return None

    def _stripped(self, message: Message) -> Message:
        if message["role"] != "assistant":
            return message
        content = message["content"]
        while found := next((suffix for suffix in self._suffixes if suffix and content.endswith(suffix)), None):
            content = content[: -len(found)]
        if content == message["content"]:
            return message
        self.report.num_suffixes_stripped += 1
        return {"role": "assistant", "content": content.rstrip()}

    def _mask(self, whole: Any, prefixes: Sequence[list[int]], turns: Sequence[Turn], is_cut: bool) -> Encoded:
        """The mask of one conversation, after its prefixes have been verified token by token.

        A token counts as an answer's if all its characters are; a byte of a character covers that whole character.
        """
        ids, spans = whole.ids, whole.offsets
        loss_mask = [False] * len(ids)
        for number, (prefix_ids, turn) in enumerate(zip(prefixes, turns, strict=True)):
            index = len(prefix_ids)
            if ids[:index] != prefix_ids:
                raise PrefixError("the tokens before an answer are others once the answer is there")
            while index < len(ids) and spans[index][0] < turn.start:
                index += 1
            while index < len(ids) and spans[index][1] <= turn.end:
                loss_mask[index] = True
                index += 1
            if is_cut and number == len(turns) - 1:
                break
            if index < len(ids) and ids[index] in self._stop_ids and spans[index][0] >= turn.end:
                loss_mask[index] = True
        return Encoded(ids, loss_mask)

    def _chunks_of_text(self, text: str) -> Iterator[Encoded]:
        """Plain text with the special tokens the tokenizer adds by itself; every token but the first is trained on."""
        ids = list(self.tokenizer(text)["input_ids"])
        size = self.max_length or max(1, len(ids))
        for start in range(0, len(ids), size):
            piece = ids[start : start + size]
            yield from self._keep(Encoded(piece, [False] + [True] * (len(piece) - 1)))

    def _keep(self, encoded: Encoded) -> Iterator[Encoded]:
        if self.max_length is not None and len(encoded.token_ids) > self.max_length:
            encoded = Encoded(encoded.token_ids[: self.max_length], encoded.loss_mask[: self.max_length])
            if any(encoded.loss_mask) or self._keep_unanswered:
                self.report.num_cut_at_max_length += 1
        num_trained = sum(encoded.loss_mask)
        if num_trained == 0 and not self._keep_unanswered:
            self.report.num_beyond_max_length += 1
            return
        self.report.num_kept += 1
        self.report.num_tokens += len(encoded.token_ids)
        self.report.num_trained_tokens += num_trained
        yield encoded

    def _fail(self, row: Row, error: PrefixError) -> None:
        self.report.failures[error.reason] = self.report.failures.get(error.reason, 0) + 1
        self.report.first_failure = self.report.first_failure or row.where


def _backend_encode(tokenizer: Any, texts: Sequence[str]) -> Sequence[Any]:
    """Tokenise in one call of the Rust tokenizer; the results have ``ids`` and character ``offsets``."""
    return tokenizer(list(texts), add_special_tokens=False, truncation=False, padding=False).encodings if texts else []


def encode_conversation(tokenizer: Any, messages: Sequence[Message], *, is_cut: bool = False) -> Encoded:
    """Token ids and loss mask of one conversation.

    Raises:
        ValueError: the tokenizer has no chat template; PrefixError when the answers cannot be located.
    """
    check_template(tokenizer, getattr(tokenizer, "name_or_path", ""))
    encoder = ConversationEncoder(tokenizer, strip_special_suffixes=False)
    text, turns = plan_turns(tokenizer, messages)
    whole, *prefixes = _backend_encode(tokenizer, [text, *(turn.prefix for turn in turns)])
    return encoder._mask(whole, [prefix.ids for prefix in prefixes], turns, is_cut)
