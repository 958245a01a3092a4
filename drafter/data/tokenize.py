"""Token ids of conversations, with a loss mask over the tokens that the target would generate.

The text comes from the tokenizer's own chat template. The *prefix* of an answer is the rendered conversation before the
answer, with the opening of the assistant's turn. Text and token ids of the whole conversation must begin with the
prefix, so that the answer has the tokens that the target would generate after the prefix. The mask covers the answer's
tokens, and the special token that closes the turn if the template has one.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from drafter.data.formats import ChatMessage, Row
from drafter.targets.chat import what_runs
from drafter.utils.io import first_line
from drafter.utils.limits import limited_map

_CHUNK_ROWS = 256
MAX_FAILED_SHARE = 0.01
# Part of the cache's key: raise the number when a change of this file changes tokens or masks.
ENCODING_VERSION = 2


class EncodedRow(NamedTuple):
    """Token ids of a row and their loss mask: True where the token is trained on."""

    token_ids: list[int]
    loss_mask: list[bool]


class PrefixError(ValueError):
    """The answers of a conversation cannot be found by template prefixes; reports count the rows by ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class EncodeReport:
    """Counts of rows: kept, changed, and dropped by reason."""

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
    num_other_prompts: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    first_failure: str = ""

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    def add(self, other: "EncodeReport") -> None:
        """Add the counts of another report."""
        for name, value in asdict(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        for reason, count in other.failures.items():
            self.failures[reason] = self.failures.get(reason, 0) + count
        self.first_failure = self.first_failure or other.first_failure

    def lines(self) -> list[str]:
        """The report as text: one line of totals, and one for each reason to drop or change rows."""
        share = self.num_trained_tokens / max(1, self.num_tokens)
        lines = [
            f"{self.num_kept:,} of {self.num_rows:,} rows kept: {self.num_tokens:,} tokens, "
            f"{self.num_trained_tokens:,} of them trained on ({share:.0%})"
        ]
        for count, what in (
            (self.num_without_answer, "rows without an answer dropped"),
            (self.num_empty_answers, "rows with an empty answer dropped"),
            (self.num_beyond_max_length, "rows dropped: the answer begins after the maximal length"),
            (self.num_cut_at_max_length, "rows cut at the maximal length"),
            (self.num_suffixes_stripped, "answers with a literal end mark, which was removed"),
            (self.num_invalid, "invalid rows skipped"),
            (self.num_other_prompts, "rows whose prompt has other tokens than the target's chat template gives"),
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


Tools = Sequence[Mapping[str, Any]]


def render(tokenizer: Any, messages: Sequence[ChatMessage], *, opening: bool = False, tools: Tools = ()) -> str:
    """The rendered chat template; ``opening`` adds the opening of the assistant's turn, ``tools`` are offered.

    Raises:
        PrefixError: the template refuses the messages or breaks on them.
        MemoryError: the template takes more memory than this process may have.
    """
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=opening
            )
        )
    except MemoryError:
        raise
    except Exception as error:
        # A template is a program of the model's author: its errors are of any type.
        raise PrefixError(f"the chat template refuses the conversation ({first_line(error)})") from error


_PROBE = [
    {"role": "user", "content": "Zebra crossing?"},
    {"role": "assistant", "content": "Quiet violet."},
    {"role": "user", "content": "Maple engine?"},
    {"role": "assistant", "content": "Under seven hills."},
]


def check_template(tokenizer: Any, name: str) -> None:
    """ValueError, with the reason, if the tokenizer's chat template gives no usable prefixes.

    Raises:
        ValueError: no chat template; a template that fails, drops or rewrites earlier turns, or precedes an answer with
            another text than the opening of the assistant's turn.
    """
    _backend(tokenizer)
    if not tokenizer.chat_template:
        raise ValueError(
            f"target {name!r} has no chat template, so conversations cannot be rendered: give plain `text` rows, "
            "or choose an instruction-tuned target"
        )
    probes = [Question(_PROBE[:2]), Question(_PROBE)]
    for probe, found in zip(probes, find_all_answers(tokenizer, probes, name), strict=True):
        if isinstance(found, PrefixError):
            turns = "a single question and answer" if len(probe.messages) == 2 else "a second turn"
            raise ValueError(
                f"the chat template of target {name!r} cannot be used for a loss mask: "
                f"{found.reason}, seen with {turns}"
            ) from found


class AnswerSpan(NamedTuple):
    """An answer in the rendered text: its prefix, and the start and end of its characters."""

    prefix: str
    start: int
    end: int


def find_answers(tokenizer: Any, messages: Sequence[ChatMessage], tools: Tools = ()) -> tuple[str, list[AnswerSpan]]:
    """The rendered conversation and its answers; PrefixError when the text lacks a prefix or an answer."""
    text = render(tokenizer, messages, tools=tools)
    turns = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prefix = render(tokenizer, messages[:index], opening=True, tools=tools)
        if not text.startswith(prefix):
            raise PrefixError("the text before an answer changes when the answer is added (no usable prefix)")
        if _has_parts(message):
            if index < len(messages) - 1:
                raise PrefixError("an earlier turn has reasoning or tool calls, which templates render otherwise later")
            turns.append(AnswerSpan(prefix, len(prefix), _end_of_parts(tokenizer, messages, tools, text, len(prefix))))
            continue
        content = message["content"]
        start = text.find(content, len(prefix))
        if start != len(prefix):  # templates may trim an answer, or add text between opening and answer
            content = content.strip()
            start = text.find(content, len(prefix))
        if start < 0:
            raise PrefixError("the template changes the answer")
        turns.append(AnswerSpan(prefix, start, start + len(content)))
    for turn, following in zip(turns, turns[1:], strict=False):
        if turn.end > len(following.prefix):
            raise PrefixError("the template changes the answer")
    return text, turns


def _has_parts(message: ChatMessage) -> bool:
    """Whether an answer has reasoning or tool calls, whose form the template decides."""
    return bool(message.get("reasoning_content") or message.get("tool_calls"))


def _end_of_parts(tokenizer: Any, messages: Sequence[ChatMessage], tools: Tools, text: str, start: int) -> int:
    """End of the last answer. The closing of the turn is the text that the template writes after a plain answer."""
    message, plain = messages[-1], "Quiet violet."
    other = render(tokenizer, [*messages[:-1], {"role": "assistant", "content": plain}], tools=tools)
    closing = other.rpartition(plain)[2]
    parts = [message["content"], message.get("reasoning_content") or ""]
    parts += [str((call.get("function") or call).get("name", "")) for call in message.get("tool_calls") or ()]
    answer = text[start : len(text) - len(closing)]
    if not text.endswith(closing) or not all(part.strip() in answer for part in parts):
        raise PrefixError(
            "the template drops reasoning or tool calls, or closes such a turn otherwise than a plain one"
        )
    return start + len(answer)


class Question(NamedTuple):
    """A conversation whose answers are searched; with ``is_prompt`` only the text before the answer is rendered."""

    messages: Sequence[ChatMessage]
    tools: Tools = ()
    is_prompt: bool = False


Found = tuple[str, list[AnswerSpan]] | PrefixError


def find_all_answers(tokenizer: Any, questions: Sequence[Question], name: str) -> list[Found]:
    """:func:`find_answers` or its error for every question; the template runs with limits of time and memory.

    Raises:
        ValueError: a limit was reached; names the target ``name``.
    """

    def find(asked: Question) -> dict[str, Any]:
        try:
            if asked.is_prompt:
                prefix = render(tokenizer, asked.messages, opening=True, tools=asked.tools)
                return {"text": "", "turns": [(prefix, 0, 0)]}
            text, turns = find_answers(tokenizer, asked.messages, asked.tools)
        except PrefixError as error:
            return {"reason": error.reason}
        return {"text": text, "turns": turns}

    return [
        PrefixError(item["reason"])
        if "reason" in item
        else (item["text"], [AnswerSpan(*turn) for turn in item["turns"]])
        for item in limited_map(find, questions, what_runs(name))
    ]


class ConversationEncoder:
    """Encodes rows as token ids and loss masks, and counts them in ``report``."""

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
            tokenizer: the target's tokenizer.
            name: the target's name, for messages.
            max_length: longest row in tokens; longer rows are cut, and plain text continues in a further row.
            strip_suffixes: texts to remove from the end of every answer.
            strip_special_suffixes: remove special tokens that an answer ends with as text. Collectors of answers leave
                such end marks; training on them would teach a second end of turn.
            keep_unanswered: keep conversations without a trained token, for training on whole texts.
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

    def encode(self, rows: Iterable[Row]) -> Iterator[EncodedRow]:
        """The rows that can be trained on, in order."""
        iterator = iter(rows)
        while chunk := list(islice(iterator, _CHUNK_ROWS)):
            yield from self._encode_chunk(chunk)

    def _encode_chunk(self, rows: Sequence[Row]) -> Iterator[EncodedRow]:
        plans = self._plans(rows)
        texts = [piece for _, text, turns in plans for piece in (text, *(turn.prefix for turn in turns))]
        encodings = iter(_backend_encode(self.tokenizer, texts))
        for row, _, turns in plans:
            whole = next(encodings)
            prefixes = [next(encodings).ids for _ in turns]
            if row.text is not None:
                yield from self._chunks_of_text(row.text)
                continue
            if row.token_ids is not None:
                self.report.num_other_prompts += any(ids != list(row.prompt_ids) for ids in prefixes)
                num_prompt, num_answer = len(row.prompt_ids), len(row.token_ids)
                mask = [False] * num_prompt + [True] * num_answer
                yield from self._keep(EncodedRow([*row.prompt_ids, *row.token_ids], mask))
                continue
            try:
                encoded = self._mask(whole, prefixes, turns, row.is_cut)
            except PrefixError as error:
                self._fail(row, error)
                continue
            yield from self._keep(encoded)

    def _plans(self, rows: Sequence[Row]) -> list[tuple[Row, str, list[AnswerSpan]]]:
        """The rows with something to train on, each with its text and answers; the others are counted."""
        asked = [(row, question) for row in rows if (question := self._question(row)) is not None]
        questions = [question for _, question in asked if question.messages]
        if not self._is_template_checked and not all(question.is_prompt for question in questions):
            check_template(self.tokenizer, self.name)
            self._is_template_checked = True
        answers = iter(find_all_answers(self.tokenizer, questions, self.name))
        plans: list[tuple[Row, str, list[AnswerSpan]]] = []
        for row, question in asked:
            found = next(answers) if question.messages else ("", [])
            if not isinstance(found, PrefixError):
                plans.append((row, *found))
            elif question.is_prompt:
                self.report.num_other_prompts += 1
                plans.append((row, "", []))
            else:
                self._fail(row, found)
        return plans

    def _question(self, row: Row) -> Question | None:
        """The question to the template, empty if none is needed; None, and a count, for an untrainable row."""
        self.report.num_rows += 1
        if row.text is not None:
            return Question([])
        if row.token_ids is not None:
            return self._question_of_tokens(row)
        messages = list(row.messages)
        if messages[-1]["role"] == "user" and len(messages) > 2:
            messages.pop()  # a question without its answer
        if messages[-1]["role"] != "assistant":
            self.report.num_without_answer += 1
            return None
        messages = [self._stripped(message) for message in messages]
        answers = [message for message in messages if message["role"] == "assistant"]
        if any(not message["content"].strip() and not _has_parts(message) for message in answers):
            self.report.num_empty_answers += 1
            return None
        return Question(messages, row.tools)

    def _question_of_tokens(self, row: Row) -> Question | None:
        """The question of a row of token ids: its prompt, only to compare the tokens, if the row has messages."""
        if not row.token_ids:
            self.report.num_empty_answers += 1
            return None
        size = len(self.tokenizer)
        if max((*row.prompt_ids, *row.token_ids)) >= size:
            self._fail(row, PrefixError(f"token ids that the target's tokenizer of {size} tokens lacks"))
            return None
        if not row.messages or not self.tokenizer.chat_template:
            return Question([])
        return Question(row.prompt, row.tools, is_prompt=True)

    def _stripped(self, message: ChatMessage) -> ChatMessage:
        if message["role"] != "assistant":
            return message
        content = message["content"]
        while found := next((suffix for suffix in self._suffixes if suffix and content.endswith(suffix)), None):
            content = content[: -len(found)]
        if content == message["content"]:
            return message
        self.report.num_suffixes_stripped += 1
        return {**message, "content": content.rstrip()}

    def _mask(self, whole: Any, prefixes: Sequence[list[int]], turns: Sequence[AnswerSpan], is_cut: bool) -> EncodedRow:
        """Token ids and mask of one conversation, whose prefixes are compared token by token.

        A token belongs to an answer if all its characters do. A token of one byte covers the byte's whole character.
        """
        ids, spans = whole.ids, whole.offsets
        loss_mask = [False] * len(ids)
        for number, (prefix_ids, turn) in enumerate(zip(prefixes, turns, strict=True)):
            index = len(prefix_ids)
            if ids[:index] != prefix_ids:
                raise PrefixError("the tokens before an answer change when the answer is added")
            while index < len(ids) and spans[index][0] < turn.start:
                index += 1
            while index < len(ids) and spans[index][1] <= turn.end:
                loss_mask[index] = True
                index += 1
            if is_cut and number == len(turns) - 1:
                break
            if index < len(ids) and ids[index] in self._stop_ids and spans[index][0] >= turn.end:
                loss_mask[index] = True
        return EncodedRow(ids, loss_mask)

    def _chunks_of_text(self, text: str) -> Iterator[EncodedRow]:
        """Plain text with the special tokens that the tokenizer adds; all tokens but the first are trained on."""
        ids = list(self.tokenizer(text)["input_ids"])
        size = self.max_length or max(1, len(ids))
        for start in range(0, len(ids), size):
            piece = ids[start : start + size]
            yield from self._keep(EncodedRow(piece, [False] + [True] * (len(piece) - 1)))

    def _keep(self, encoded: EncodedRow) -> Iterator[EncodedRow]:
        if self.max_length is not None and len(encoded.token_ids) > self.max_length:
            encoded = EncodedRow(encoded.token_ids[: self.max_length], encoded.loss_mask[: self.max_length])
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
    """Encodings with ``ids`` and character ``offsets``, from one call of the Rust tokenizer."""
    return tokenizer(list(texts), add_special_tokens=False, truncation=False, padding=False).encodings if texts else []
