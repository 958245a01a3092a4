"""Loss masks by template prefixes: exactly the tokens that the target would have generated."""

import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import processors

from drafter.cli.data import inspect_file
from drafter.data import encode
from drafter.data.encode import EMPTY, NO_ANSWER, TOO_LONG, EncodedRow, RowEncoder, encode_files
from tests.data.tiny import CHAT_TEMPLATE, chat, encode_conversation, encode_rows, tiny_tokenizer, write_jsonl

# Trims answers, and puts an empty reasoning block before the last one.
TRIMMING_TEMPLATE = CHAT_TEMPLATE.replace(
    "'<|bot|>\n' + m['content'] + '<|end|>\n'",
    "'<|bot|>\n' + ('[none]\n' if loop.last else '') + (m['content'] | trim) + '<|end|>\n'",
)
TOKENIZER = tiny_tokenizer()
END_ID = 3


def trained_text(encoded: EncodedRow, tokenizer=TOKENIZER) -> str:
    return tokenizer.decode([token for token, mask in zip(*encoded[:2], strict=True) if mask])


def test_the_end_of_a_cut_answer_is_not_the_targets() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *chat("a", "one", "b", "né🙂é")]
    for is_cut, end in ((False, "<|end|>"), (True, "")):
        assert trained_text(encode_conversation(TOKENIZER, messages, is_cut=is_cut)) == f"one<|end|>né🙂é{end}"


TURNS = "{% for m in messages %}{{ USER if m['role'] == 'user' else ANSWER }}{% endfor %}"
# Forms of turns, and what the target writes of the answers "the" and "A".
FORMS = {
    "mistral": ("'[INST] ' + m['content'] + ' [/INST]'", "' ' + m['content'] + '<|end|>'", " the<|end|> A<|end|>"),
    "llama": ("'[I] ' + m['content'] + ' [/I]'", "' ' + m['content'] + ' ' + '<|end|>'", " the <|end|> A <|end|>"),
    "alpaca": ("'Q:\n' + m['content'] + '\n\nA:'", "'\n' + m['content'] + '\n\n'", "\nthe\nA"),
    "no mark": ("'<|user|>' + m['content'] + '<|bot|>'", "m['content'] + '\n'", "theA"),
    "words": ("m['content'] + '\n'", "'Answer: ' + m['content'] + '<|end|>'", " the<|end|>A<|end|>"),
    "mark": ("m['content'] + '<|bot|>'", "'the<|user|>' + m['content'] + '<|end|>'", "the<|end|>A<|end|>"),
}


@pytest.mark.parametrize("has_trimmed_offsets", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_an_answer_is_trained_on_from_its_first_token_to_its_end_mark(form: str, has_trimmed_offsets: bool) -> None:
    """A space of the template shares the first token; words of the template that look like the answer do not count."""
    user, answer, trained = FORMS[form]
    tokenizer = tiny_tokenizer(TURNS.replace("USER", user).replace("ANSWER", answer))
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=has_trimmed_offsets)
    assert trained_text(encode_conversation(tokenizer, chat("Who?", "the", "Me?", "A")), tokenizer) == trained


def test_a_template_may_trim_answers_and_put_text_before_them() -> None:
    tokenizer = tiny_tokenizer(TRIMMING_TEMPLATE)
    encoded = encode_conversation(tokenizer, chat("a", "  one ", "b", " two\n"))
    assert "[none]" in tokenizer.decode(encoded.token_ids)
    assert trained_text(encoded, tokenizer) == "one<|end|>two<|end|>"
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE.replace("m['content'] + '<|end|>\n'", "m['content'] + '##\n'"))
    encoded = encode_conversation(tokenizer, chat("a", "one", "b", "two"))
    assert trained_text(encoded, tokenizer) == "onetwo", "an end that is no special token is not trained on"


@pytest.mark.parametrize(
    ("template", "answer", "problem"),
    [
        (CHAT_TEMPLATE, "\nHello", "the tokens before an answer change"),  # two line feeds melt into one token
        ("{{ messages | length }}" + CHAT_TEMPLATE, "one", "changes when the answer is added"),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "one", "the template changes the answer"),
        ("{{ raise_exception('no turns today') }}", "one", "refuses these messages: no turns today"),
        (CHAT_TEMPLATE, "one<|end|>", "an answer ends with a special token as text"),
    ],
)
def test_conversations_without_usable_prefixes_are_dropped(template: str, answer: str, problem: str) -> None:
    assert problem in encode_conversation(tiny_tokenizer(template), chat("a", answer, "b", "two")).problem


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(lambda s: s.strip())


@settings(max_examples=25, deadline=None)
@given(st.lists(text, min_size=2, max_size=6).filter(lambda turns: len(turns) % 2 == 0))
def test_the_mask_holds_the_answers_and_nothing_else(turns: list[str]) -> None:
    """Against the definition: split the token ids at the prefixes' lengths, and compare text for text."""
    messages = chat(*turns)
    encoded = encode_conversation(TOKENIZER, messages)
    if encoded.problem:
        assert any(turn.startswith("\n") for turn in turns[1::2])
        return
    assert trained_text(encoded) == "".join(answer + "<|end|>" for answer in turns[1::2])
    for index in range(1, len(messages), 2):
        prompt = TOKENIZER.apply_chat_template(messages[:index], add_generation_prompt=True)["input_ids"]
        assert encoded.token_ids[: len(prompt)] == prompt
        assert encoded.loss_mask[len(prompt)] and not encoded.loss_mask[len(prompt) - 1]


def test_rows_of_token_ids_are_trained_on_as_they_are(tmp_path: Path) -> None:
    """No template, no tokenizer: also ids that no tokenizer would give, and a stop token only where it was written."""
    given = {"prompt_token_ids": [0, 70, 70], "token_ids": [71, 71, END_ID], "text": "x", "finish_reason": "length"}
    reply = {"prompt_token_ids": [5], "choices": [{"token_ids": [6], "text": "x"}], "model": "of vLLM"}
    told = {"prompt_token_ids": [8], "token_ids": [9], "messages": chat("\n", "\nmelts")}
    bare = tiny_tokenizer(None)
    encoded = encode_rows([given, reply, told], bare)
    assert [row.token_ids for row in encoded] == [[0, 70, 70, 71, 71, END_ID], [5, 6], [8, 9]]
    assert [row.loss_mask for row in encoded] == [[False] * 3 + [True] * 3, [False, True], [False, True]]
    rows, report = encode_files([write_jsonl(tmp_path / "a.jsonl", [given, reply, told])], RowEncoder(bare))
    assert report == ["3 of 3 rows kept: 10 tokens, 5 of them trained on (50%)"]
    assert [[part.tolist() for part in rows.row(i)] for i in range(3)] == [list(row[:2]) for row in encoded]
    with pytest.raises(ValueError, match="target 'tiny' has no chat template"):
        encode_conversation(bare, chat("a", "one"))


def test_ids_of_another_model_are_refused() -> None:
    for ids, message in (
        ([5, 2**70], "token id 118.* is outside the target's vocabulary of 267 tokens"),
        ([5, "a"], "prompt_token_ids.1: Input should be a valid integer"),
    ):
        with pytest.raises(ValueError, match=rf"rows.jsonl, line 2: {message}"):
            encode_rows([{"text": "fine"}, {"prompt_token_ids": ids, "token_ids": [7]}])


def test_rows_that_cannot_be_trained_on_are_counted(tmp_path: Path) -> None:
    turns = [("a", "one"), ("a",), ("a", None), ("a", "two", "b"), ("a" * 40, "three"), ("a", "b" * 40)]
    rows = [{"messages": chat(*turn)} for turn in turns] + [{"prompt_token_ids": [5], "token_ids": []}]
    encoded = encode_rows(rows, max_length=30)
    assert [trained_text(item) for item in encoded if not item.problem] == ["one<|end|>", "two<|end|>", "b" * 22]
    kept, report = encode_files([write_jsonl(tmp_path / "a.jsonl", rows)], RowEncoder(TOKENIZER, max_length=30))
    num_trained = sum(sum(item.loss_mask) for item in encoded)
    assert len(kept) == 3 and kept.num_trained_tokens == num_trained
    assert report[0].startswith("3 of 7 rows kept: ") and f"{num_trained} of them trained on" in report[0]
    assert "3 of 3 rows (100%) hold text without the target's token ids" in report[1]
    assert f"1 rows dropped, such as {tmp_path}/a.jsonl, line 2: {NO_ANSWER}" in report
    assert f"2 rows dropped, such as {tmp_path}/a.jsonl, line 3: {EMPTY}" in report
    assert f"1 rows dropped, such as {tmp_path}/a.jsonl, line 5: {TOO_LONG}" in report
    assert report[-1] == "1 rows cut at the maximal length"
    name = write_jsonl(tmp_path / "c.jsonl", [{"messages": chat("a")}, {"messages": chat("a", "\nHello")}])
    reason = r"c.jsonl: nothing to train on: 1 rows dropped, .* line 1: without an answer; .* line 2: the tokens"
    with pytest.raises(ValueError, match=reason):
        encode_files([name], RowEncoder(TOKENIZER))


def test_a_text_that_takes_gigabytes_of_tokens_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text before each answer is read too, so that many turns count as their square."""
    monkeypatch.setattr(encode, "_MOST_CHARACTERS", 5000)
    monkeypatch.setattr(encode, "_MOST_READ", 2000)
    dropped = [{"text": "a" * 5001}, {"messages": chat(*["a", "b"] * 50)}, {"messages": chat("a" * 5001, "b")}]
    for row in encode_rows(dropped):
        assert row.problem.startswith("too much text, or too many turns")
    for row in encode_rows([{"text": "a" * 5000}, {"messages": chat(*["a", "b"] * 40)}]):
        assert not row.problem


def test_plain_text_is_trained_on_from_its_second_token_and_goes_on_in_further_rows() -> None:
    encoded = encode_rows([{"text": "abcdefg"}], max_length=3)
    assert [TOKENIZER.decode(item.token_ids) for item in encoded] == ["abc", "def"]
    assert [item.loss_mask for item in encoded] == [[False, True, True]] * 2


def test_a_file_is_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other settings and another content are other data sets."""
    name = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat(f"{i}", "and " * i + "b")} for i in range(9)])
    rows, report = encode_files([name], RowEncoder(TOKENIZER))
    with monkeypatch.context() as patched:
        patched.setattr(RowEncoder, "encode", lambda *args: pytest.fail("encoded again"))
        again, same = encode_files([name], RowEncoder(TOKENIZER))
        assert again.digest() == rows.digest() and same == report
        with pytest.raises(pytest.fail.Exception):
            encode_files([name], RowEncoder(TOKENIZER, max_length=15))
        with pytest.raises(pytest.fail.Exception):
            encode_files([name], RowEncoder(tiny_tokenizer(TRIMMING_TEMPLATE)))
        TOKENIZER(["a", "bb"], padding=False, truncation=True, max_length=2)  # changes its state, not its tokens
        encode_files([name], RowEncoder(TOKENIZER))
    write_jsonl(tmp_path / "a.jsonl", [{"messages": chat("other", "text")}, {"prompt": "?"}])
    other = write_jsonl(tmp_path / "b.jsonl", [{"messages": chat("more", "text")}])
    rows, report = encode_files([name, other], RowEncoder(TOKENIZER))  # several files are one data set
    assert len(rows) == 2 and report[0].startswith("2 of 3 rows kept") and report[-1].endswith(NO_ANSWER)


# -- the view of the mask ----------------------------------------------------------------------------------------------


def show(name: str, *, colour: bool = False, **options) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=colour, color_system="truecolor" if colour else None)
    inspect_file(name, RowEncoder(TOKENIZER), console, **options)
    return out.getvalue()


def test_trained_tokens_stand_in_brackets_or_in_colour(tmp_path: Path) -> None:
    rows = [{"messages": chat("Hi", "the [bold]end")}, {"messages": chat("a\x1b[2J", "b", "c", "dé🙂")}]
    rows.append({"prompt": "x"})
    name = write_jsonl(tmp_path / "a.jsonl", rows)
    text = show(name)
    assert "<s><|user|>\nHi<|end|>\n<|bot|>\n⟦the [bold]end<|end|>⟧\n" in text
    assert r"<|user|>" in text and r"a\x1b[2J<|end|>" in text and "\x1b" not in text
    assert "⟦b<|end|>⟧" in text and "⟦dé🙂<|end|>⟧" in text
    assert "row 2: 10 of 31 tokens are trained on" in text
    assert "2 of 3 rows kept" in text and "1 rows dropped, such as" in text
    assert "trained tokens in a row: 10 at least, 10 median, 12 at most" in text
    assert "row 2:" not in show(name, num_rows=1) and "row 1:" not in show(name, num_rows=0)
    text = show(name, colour=True)
    assert "\x1b[30;102mdé🙂<|end|>\x1b[0m" in text and "⟦" not in text
