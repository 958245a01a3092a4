"""Loss masks by template prefixes: exactly the tokens that the target would have generated."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.data.formats import Row
from drafter.data.tokenize import (
    ConversationEncoder,
    EncodedRow,
    EncodeReport,
    PrefixError,
    check_template,
    tokenizer_fingerprint,
)
from tests.data.tiny import (
    CHAT_TEMPLATE,
    COUNTING_TEMPLATE,
    FORGETFUL_TEMPLATE,
    OTHER_OPENING_TEMPLATE,
    TRIMMING_TEMPLATE,
    UPPERCASE_TEMPLATE,
    chat,
    encode_conversation,
    tiny_tokenizer,
)

TOKENIZER = tiny_tokenizer()
END_ID = 3


def trained_text(encoded: EncodedRow, tokenizer=TOKENIZER) -> str:
    return tokenizer.decode([token for token, mask in zip(*encoded, strict=True) if mask])


def encode_rows(rows: list[Row], **options) -> tuple[list[EncodedRow], EncodeReport]:
    encoder = ConversationEncoder(TOKENIZER, name="tiny", **options)
    return list(encoder.encode(rows)), encoder.report


def test_one_answer_token_by_token() -> None:
    encoded = encode_conversation(TOKENIZER, chat("Hi", "the\n"))
    shown = [(TOKENIZER.decode([token]), mask) for token, mask in zip(*encoded, strict=True)]
    assert shown == [
        ("<s>", False),
        ("<|user|>", False),
        ("\n", False),
        ("H", False),
        ("i", False),
        ("<|end|>", False),
        ("\n", False),
        ("<|bot|>", False),
        ("\n", False),
        ("the", True),
        ("\n", True),
        ("<|end|>", True),
        ("\n", False),
    ]


def test_every_answer_of_a_long_conversation() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *chat("a", "one", "b", "two", "c", "three")]
    encoded = encode_conversation(TOKENIZER, messages)
    assert trained_text(encoded) == "one<|end|>two<|end|>three<|end|>"


def test_the_end_of_a_cut_answer_is_not_trained_on() -> None:
    encoded = encode_conversation(TOKENIZER, chat("a", "one", "b", "two"), is_cut=True)
    assert trained_text(encoded) == "one<|end|>two"


def test_a_character_of_several_tokens_is_whole() -> None:
    assert trained_text(encode_conversation(TOKENIZER, chat("🙂", "né🙂é"))) == "né🙂é<|end|>"


def test_a_template_may_trim_answers_and_put_text_before_them() -> None:
    tokenizer = tiny_tokenizer(TRIMMING_TEMPLATE)
    encoded = encode_conversation(tokenizer, chat("a", "  one ", "b", " two\n"))
    assert "[none]" in tokenizer.decode(encoded.token_ids)
    assert trained_text(encoded, tokenizer) == "one<|end|>two<|end|>"


def test_an_end_without_special_token_is_not_trained_on() -> None:
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE.replace("m['content'] + '<|end|>\n'", "m['content'] + '##\n'"))
    assert trained_text(encode_conversation(tokenizer, chat("a", "one", "b", "two")), tokenizer) == "onetwo"


def test_an_answer_whose_first_token_melts_into_the_opening_is_refused() -> None:
    with pytest.raises(PrefixError, match="tokens before an answer"):
        encode_conversation(TOKENIZER, chat("a", "\nHello"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (FORGETFUL_TEMPLATE, "changes when the answer is added.*seen with a second turn"),
        (COUNTING_TEMPLATE, "changes when the answer is added.*seen with a single question"),
        (OTHER_OPENING_TEMPLATE, "changes when the answer is added.*seen with a single question"),
        (UPPERCASE_TEMPLATE, "the template changes the answer"),
        ("{{ raise_exception('no turns today') }}", "the chat template refuses the conversation .no turns today."),
        ("{{ messages[0]['content'] ", "the chat template refuses the conversation"),
        (None, "has no chat template"),
    ],
    ids=["forgetful", "counting", "other-opening", "uppercase", "raising", "broken", "none"],
)
def test_templates_without_usable_prefixes_are_refused(template: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=rf"target 'tiny'.*{message}"):
        check_template(tiny_tokenizer(template), "tiny")


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(lambda s: s.strip())


@settings(max_examples=80, deadline=None)
@given(st.lists(text, min_size=2, max_size=6).filter(lambda turns: len(turns) % 2 == 0))
def test_the_mask_holds_the_answers_and_nothing_else(turns: list[str]) -> None:
    """Against the definition: split the token ids at the prefixes' lengths, and compare text for text."""
    messages = chat(*turns)
    try:
        encoded = encode_conversation(TOKENIZER, messages)
    except PrefixError:
        assert any(turn.startswith("\n") for turn in turns[1::2])
        return
    assert trained_text(encoded) == "".join(answer + "<|end|>" for answer in turns[1::2])
    for index in range(1, len(messages), 2):
        prompt = TOKENIZER.apply_chat_template(messages[:index], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        assert encoded.token_ids[: len(prompt)] == prompt
        assert encoded.loss_mask[len(prompt)] and not encoded.loss_mask[len(prompt) - 1]


def test_rows_that_cannot_be_trained_on_are_counted() -> None:
    rows = [
        Row(tuple(chat("a", "one"))),
        Row(tuple(chat("a"))),
        Row(tuple(chat("a", " "))),
        Row(tuple(chat("a", "two", "b"))),
        Row(tuple(chat("a" * 40, "three"))),
        Row(tuple(chat("a", "b" * 40))),
    ]
    encoded, report = encode_rows(rows, max_length=30)
    assert [trained_text(item) for item in encoded] == ["one<|end|>", "two<|end|>", "b" * 22]
    assert (report.num_rows, report.num_kept, report.num_without_answer) == (6, 3, 1)
    assert (report.num_empty_answers, report.num_beyond_max_length, report.num_cut_at_max_length) == (1, 1, 1)
    assert report.num_trained_tokens == sum(sum(item.loss_mask) for item in encoded)
    assert report.num_kept + 3 == report.num_rows
    assert any("1 rows without an answer" in line for line in report.lines())


def test_literal_end_marks_are_taken_off() -> None:
    rows = [Row(tuple(chat("a", "one<|end|>"))), Row(tuple(chat("a", "two </s>"))), Row(tuple(chat("a", "<|end|>")))]
    encoded, report = encode_rows(rows, strip_suffixes=["</s>"])
    assert [trained_text(item) for item in encoded] == ["one<|end|>", "two<|end|>"]
    assert report.num_suffixes_stripped == 3 and report.num_empty_answers == 1
    kept, _ = encode_rows(rows[:2], strip_special_suffixes=False)
    assert [trained_text(item) for item in kept] == ["one<|end|><|end|>", "two </s><|end|>"]
    assert kept[0].token_ids.count(END_ID) == 3


def test_plain_text_is_trained_on_from_its_second_token_and_goes_on_in_further_rows() -> None:
    encoded, report = encode_rows([Row(text="abcdefg")], max_length=3)
    assert [TOKENIZER.decode(item.token_ids) for item in encoded] == ["abc", "def"]
    assert [item.loss_mask for item in encoded] == [[False, True, True]] * 2
    assert report.num_kept == 2


def test_more_than_one_percent_of_failures_stops() -> None:
    good, bad = Row(tuple(chat("a", "one"))), Row(tuple(chat("a", "\nHello")), where="rows.jsonl, line 3")
    _, report = encode_rows([good] * 99 + [bad])
    report.check("rows.jsonl")
    assert report.num_failed == 1 and report.num_kept == 99
    _, report = encode_rows([good] * 98 + [bad] * 2)
    with pytest.raises(
        ValueError, match=r"rows.jsonl: 2 of 100 .* more than 1%: the tokens before.*first: rows.jsonl, line 3"
    ):
        report.check("rows.jsonl")


def test_nothing_to_train_on_says_why() -> None:
    _, report = encode_rows([Row(tuple(chat("a")))])
    with pytest.raises(ValueError, match="nothing to train on: 1 rows without an answer dropped. Make answers with"):
        report.check("rows.jsonl")


def test_reports_add_up() -> None:
    total = EncodeReport(num_rows=1, failures={"x": 1})
    total.add(EncodeReport(num_rows=2, num_kept=1, failures={"x": 2, "y": 1}, first_failure="there"))
    assert (total.num_rows, total.num_kept, total.failures, total.first_failure) == (3, 1, {"x": 3, "y": 1}, "there")


def test_the_fingerprint_follows_vocabulary_and_template_only() -> None:
    tokenizer = tiny_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "bb"], padding=False, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == before
    assert tokenizer_fingerprint(tiny_tokenizer(TRIMMING_TEMPLATE)) != before
