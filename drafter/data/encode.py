"""Rows of data sets become token ids with a loss mask over the tokens that the target writes.

Rows of token ids are used as they are: the mask covers exactly the answer's ids. Text that came without ids is
rendered by the target's chat template and tokenised; the mask covers the tokens of the answers, found by their
characters, and the special token that closes a turn.
"""

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from drafter.data.formats import ChatMessage, Row, check_ids, parse_row
from drafter.data.reading import RawRow, digest_of_rows, read_records
from drafter.data.rows import TokenRows
from drafter.targets.chat import Fork, render_chat, what_runs

_MOST_CHARACTERS = 4 << 20  # of a row of text: its tokens take a hundred times as many bytes
_MOST_READ = 64 << 20  # characters before all answers of a conversation together, which are rendered and encoded, too
# Part of the cache's key: raise the number when a change of this file changes tokens or masks.
_VERSION = 6
NO_ANSWER, EMPTY = "without an answer", "an empty answer"
_MARK = "an answer ends with a special token as text: remove the token from the file"
_TOO_MUCH = "too much text, or too many turns with much text before them: split the row"
TOO_LONG = "the answer begins after the maximal length"
_PARTS = "an answer has reasoning or tool calls and no token ids: let the target answer (`drafter distill`)"


class EncodedRow(NamedTuple):
    """One row of the encoded data set.

    Attributes:
        token_ids, loss_mask: the mask is True where a token is trained on; both are empty for a dropped row.
        is_foreign: the tokens were made from text here, so the target may not have written them.
        problem: the reason of a dropped row, or empty.
        is_cut: the row was longer than the maximal length.
        where: file and line.
    """

    token_ids: Sequence[int] = ()
    loss_mask: Sequence[bool] = ()
    is_foreign: bool = False
    problem: str = ""
    is_cut: bool = False
    where: str = ""

    def columns(self) -> dict[str, Any]:
        """The row of the data set, with the numbers of all tokens and of the trained ones."""
        return self._asdict() | {"length": len(self.token_ids), "num_trained": sum(self.loss_mask)}


def row_features() -> Any:
    """Types of the columns of the encoded data set, as ``datasets.Features``."""
    from datasets import Features, List, Value

    kinds = {"is_foreign": "bool", "problem": "string", "is_cut": "bool", "where": "string"}
    values = {name: Value(kind) for name, kind in (kinds | {"length": "int32", "num_trained": "int32"}).items()}
    return Features({"token_ids": List(Value("int32")), "loss_mask": List(Value("bool")), **values})


def encode_files(names: Sequence[str], encoder: "RowEncoder") -> tuple[TokenRows, list[str]]:
    """The token rows of files and hub data sets, from the cache of `datasets` where possible, and a report in lines.

    Raises:
        FileNotFoundError, ValueError: see :func:`read_records` and :func:`parse_row`, and a file without a usable row.
    """
    from datasets import Dataset, concatenate_datasets
    from datasets.exceptions import DatasetGenerationError

    def rows(name: str) -> Iterator[dict[str, Any]]:
        return (row.columns() for record in read_records(name) for row in encoder.encode(record))

    parts = []
    tokenizer = encoder.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no character offsets of tokens, so answers cannot be found: "
            "a tokenizer with a tokenizer.json file is needed"
        )
    # Everything that determines token ids: vocabulary, merges, added tokens, chat template.
    state = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    settings = [state, tokenizer.chat_template, sorted(stop_token_ids(tokenizer)), encoder.max_length, encoder.columns]
    for name in names:
        key = json.dumps([digest_of_rows(name), name, *settings, encoder.vocab_size, _VERSION], sort_keys=True)
        fingerprint = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        try:
            parts.append(Dataset.from_generator(partial(rows, name), features=row_features(), fingerprint=fingerprint))
        except DatasetGenerationError as error:
            raise (error.__cause__ or error) from None
        if all(parts[-1]["problem"]):
            details = "; ".join(_report(parts[-1])[1:])
            raise ValueError(f"{name}: nothing to train on: {details}. Make answers with `drafter distill`")
    whole = concatenate_datasets(parts)
    kept = [index for index, problem in enumerate(whole["problem"][:]) if not problem]
    return TokenRows(whole if len(kept) == len(whole) else whole.select(kept)), _report(whole)


def _report(dataset: Any) -> list[str]:
    """Counts of an encoded data set as text: a line of totals, and one for each reason to drop or change rows."""
    found = dataset.select_columns(["problem", "is_foreign", "is_cut", "where", "length", "num_trained"])[:]
    problems, num_foreign, num_cut = found["problem"], sum(found["is_foreign"]), sum(found["is_cut"])
    num_kept, num_tokens, num_trained = problems.count(""), sum(found["length"]), sum(found["num_trained"])
    lines = [
        f"{num_kept:,} of {len(problems):,} rows kept: {num_tokens:,} tokens, {num_trained:,} of them trained on "
        f"({num_trained / max(1, num_tokens):.0%})"
    ]
    if num_foreign:
        lines.append(
            f"{num_foreign:,} of {num_kept:,} rows ({num_foreign / num_kept:.0%}) hold text without the target's token "
            "ids; a drafter learns less from text that the target did not write (`drafter distill` writes rows with "
            "token ids)"
        )
    for reason, count in Counter(filter(None, problems)).most_common():
        lines.append(f"{count:,} rows dropped, such as {found['where'][problems.index(reason)]}: {reason}")
    return [*lines, f"{num_cut:,} rows cut at the maximal length"] if num_cut else lines


@dataclass(frozen=True)
class RowEncoder:
    """Encodes rows with one tokenizer and its chat template.

    Attributes:
        tokenizer, name: the target's, the name for messages.
        max_length: longest row in tokens; longer rows are cut, and plain text continues in a further row.
        columns: see :func:`drafter.data.formats.read_rows`.
        vocab_size: number of the target's tokens, whose output matrix may have rows to spare; None: the tokenizer's.
    """

    tokenizer: Any
    name: str = ""
    max_length: int | None = None
    columns: Mapping[str, str] | None = None
    vocab_size: int | None = None

    def encode(self, record: RawRow) -> list[EncodedRow]:
        """The encoded row, or several of a long plain text; a dropped one has a ``problem``. ValueError: invalid."""
        row = parse_row(record, columns=self.columns)
        if row.text is None and row.token_ids is None:
            found = [self._conversation(row)]
        elif row.text is not None and len(row.text) > _MOST_CHARACTERS:
            found = [EncodedRow(problem=_TOO_MUCH)]
        elif row.text is not None:  # with the special tokens that the tokenizer adds
            ids = list(self.tokenizer(row.text)["input_ids"])
            size = self.max_length or max(1, len(ids))
            # A last token alone would train nothing.
            pieces = [ids[start : start + size] for start in range(0, max(1, len(ids) - 1), size)]
            found = [EncodedRow(piece, [place > 0 for place in range(len(piece))], is_foreign=True) for piece in pieces]
        else:
            answer_ids = row.token_ids or ()
            mask = [False] * len(row.prompt_ids) + [True] * len(answer_ids)
            found = [EncodedRow([*row.prompt_ids, *answer_ids], mask)]
        for encoded in found:
            check_ids(encoded.token_ids, self.vocab_size or len(self.tokenizer), row.where)
        return [self._cut(encoded)._replace(where=row.where) for encoded in found]

    def _conversation(self, row: Row) -> EncodedRow:
        """A conversation by the target's chat template."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"target {self.name!r} has no chat template, so conversations cannot be rendered: give plain `text` "
                "rows, or choose an instruction-tuned target"
            )
        messages = row.messages
        if messages[-1]["role"] == "user" and len(messages) > 2:  # a last question that has no answer is left out
            messages = messages[:-1]
        answers = [message["content"].rstrip() for message in messages if message["role"] == "assistant"]
        before = itertools.accumulate(len(message["content"]) for message in messages)
        reasons = {
            NO_ANSWER: messages[-1]["role"] != "assistant",
            _PARTS: row.has_parts,
            EMPTY: not all(answers),
            _MARK: any(answer.endswith(tuple(self._special.values())) for answer in answers),
            _TOO_MUCH: sum(itertools.islice(before, len(messages) % 2, None, 2)) > _MOST_READ,
        }
        if problem := next((reason for reason, is_met in reasons.items() if is_met), ""):
            return EncodedRow(problem=problem)
        (found,) = self._template.map([[messages, row.tools]])
        return EncodedRow(problem=found) if isinstance(found, str) else self._masked(*found, is_cut=row.is_cut)

    @cached_property
    def _special(self) -> dict[int, str]:
        """The tokens that can end a turn, each with its text."""
        return {index: self.tokenizer.convert_ids_to_tokens(index) for index in stop_token_ids(self.tokenizer)}

    @cached_property
    def _template(self) -> Fork:
        """The template in a process with limits of time and memory: answers, or the reason to drop the row."""
        find_answers = replace(self)._find_answers  # of a copy, in no circle: the process ends with this encoder

        def find(conversation: Any) -> Any:
            try:
                return find_answers(*conversation)
            except ValueError as error:
                return str(error)

        return Fork(find, what_runs(self.name))

    def _find_answers(self, messages: Sequence[ChatMessage], tools: Any) -> tuple[str, list[tuple[int, int, int, int]]]:
        """The rendered conversation, and of each answer four places in characters: prefix, start, end, end of the turn.

        The prefix is the rendered conversation before the answer, with the opening of the assistant's turn; the whole
        text must begin with it, so that the answer stands where the target would write it. A second rendering, with a
        mark behind each answer, shows where the answers end; a third, up to the answer, what ends the assistant's turn.
        ValueError where the text lacks a prefix or an answer.
        """

        def render(turns: Sequence[ChatMessage], *, has_opening: bool = False) -> str:
            return render_chat(self.tokenizer, turns, self.name, tools=tools, has_opening=has_opening)

        def marked(turn: ChatMessage) -> ChatMessage:
            return {**turn, "content": turn["content"] + mark} if turn["role"] == "assistant" else turn

        text = render(messages)
        mark = next(mark for mark in map("drafter{}ends".format, itertools.count()) if mark not in text)
        stripped = [{**turn, "content": turn["content"].rstrip()} for turn in messages]
        for turns in (messages, stripped):  # templates may trim an answer
            parts = render([*map(marked, turns)]).split(mark)
            if "".join(parts) == text:
                break
        else:
            raise ValueError("the template changes the answer")
        places = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
        if len(parts) != len(places) + 1:
            raise ValueError("the template changes the answer")
        spans: list[tuple[int, int, int, int]] = []
        for index, end in zip(places, itertools.accumulate(map(len, parts)), strict=False):
            prefix, content = render(messages[:index], has_opening=True), turns[index]["content"]
            if not text.startswith(prefix):
                raise ValueError("the text before an answer changes when the answer is added (no usable prefix)")
            content = content if text.endswith(content, 0, end) else content.lstrip()
            if not text.endswith(content, len(prefix), end):
                raise ValueError("the template changes the answer")
            closing = render([*turns[:index], marked(turns[index])]).rpartition(mark)[2]
            turn_end = end + len(os.path.commonprefix([closing, text[end:]]))
            spans.append((len(prefix), end - len(content), end, turn_end))
        return text, spans

    def _masked(self, text: str, spans: Sequence[Sequence[int]], *, is_cut: bool) -> EncodedRow:
        """Token ids and mask of a rendered conversation, whose prefixes are compared token by token.

        The mask begins with the first token behind the prefix. Text of the template between prefix and answer is left
        out, but for spaces, which the target writes: they may share a token with the first word. The mask ends with the
        special token that ends the turn, or with the last token inside the answer where only text of the template
        follows, or the answer ended at a length limit. A token of one byte covers the byte's whole character.
        """
        if len(text) > _MOST_CHARACTERS:
            return EncodedRow(problem=_TOO_MUCH)

        def encoding(text: str) -> Any:  # one at a time: the prefixes of many turns are long together
            return self.tokenizer([text], add_special_tokens=False, truncation=False, padding=False).encodings[0]

        whole = encoding(text)
        ids, offsets, stop_ids = whole.ids, whole.offsets, self._special.keys()
        loss_mask = [False] * len(ids)
        for number, (prefix_end, start, end, turn_end) in enumerate(spans, start=1):
            prefix_ids = encoding(text[:prefix_end]).ids
            first = len(prefix_ids)
            if ids[:first] != prefix_ids:
                return EncodedRow(problem="the tokens before an answer change when the answer is added")
            if text[prefix_end:start].strip():
                while first < len(ids) and (offsets[first][1] <= start or text[offsets[first][0] : start].strip()):
                    first += 1
            behind = first
            while behind < len(ids) and offsets[behind][1] <= end:
                behind += 1
            closing = behind
            while closing < len(ids) and ids[closing] not in stop_ids and not text[end : offsets[closing][1]].strip():
                closing += 1
            has_end = closing < len(ids) and ids[closing] in stop_ids and offsets[closing][0] < turn_end
            if has_end and not text[end : offsets[closing][0]].strip() and not (is_cut and number == len(spans)):
                behind = closing + 1
            loss_mask[first:behind] = [True] * (behind - first)
        return EncodedRow(ids, loss_mask, is_foreign=True)

    def _cut(self, row: EncodedRow) -> EncodedRow:
        """The row, cut at the maximal length; dropped if nothing is trained on."""
        size = self.max_length
        if size is not None and len(row.token_ids) > size:
            row = row._replace(token_ids=row.token_ids[:size], loss_mask=row.loss_mask[:size], is_cut=True)
        if row.problem or any(row.loss_mask):
            return row
        return EncodedRow(problem=TOO_LONG if row.is_cut else EMPTY)


def stop_token_ids(tokenizer: Any) -> set[int]:
    """The tokens that can end a turn: the tokenizer's special tokens."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special | set(tokenizer.all_special_ids)
