"""Tokens are shown with their text, never before it."""

import random
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from drafter.decoding.params import SamplingParams
from drafter.engine.request import IncrementalText, Request, Update
from drafter.serving.answers import Answer, Model
from drafter.serving.protocol import CompletionRequest
from tests.data.tiny import tiny_tokenizer
from tests.engine.test_requests import encode as ids

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id


def run(
    steps: list[list[int]], *, stop: tuple[str, ...] = (), limit: int = 100
) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Feed an answer step by step; what was released after each."""
    text = IncrementalText(lambda tokens: TOKENIZER.decode(tokens, skip_special_tokens=True), stop)
    params = SamplingParams(stop=stop)
    request = Request(0, [1], params, limit, frozenset([EOS]), text)
    body = CompletionRequest(model="m", prompt="x", stream=True, details=True)
    (choice,) = Answer(Model("m", "f", TOKENIZER), body, [request]).choices
    released = []
    for emitted in steps:
        if request.is_finished:
            break
        tokens = request.extend(emitted)
        entry = choice.take(Update(request, tokens, request.num_accepted[-1], request.finish_reason))
        released.append(("", []) if entry is None else (entry["text"], entry["details"]["tokens"]))
    return released


def test_held_text_holds_its_tokens() -> None:
    first, second = run([ids("abc"), [*ids("d"), EOS]])
    assert first == ("abc", [("a", True), ("b", True), ("c", False)])
    assert second[1] == [("d", True)], "a stop token is no text"
    released = run([[token] for token in ids("xENx")], stop=("END",), limit=4)
    assert [text for text, _ in released] == ["x", "", "", "ENx"]
    assert [len(pieces) for _, pieces in released] == [1, 0, 0, 3]


def test_unfinished_character_at_the_end_shows_as_the_decoder_shows_it() -> None:
    tokens = ids("a\u20ac")[:-1]
    released = run([[token] for token in tokens], limit=3)
    assert "".join(text for text, _ in released) == "a\ufffd"
    assert sum(len(pieces) for _, pieces in released) == 3


@pytest.mark.parametrize("seed", range(10))
def test_text_and_pieces_agree_however_the_steps_are_cut(seed: int) -> None:
    chance = random.Random(seed)
    text = "".join(chance.choices(["a", "the", " and", "\u20ac", "\U0001f600", "E", "EN", "END", "\n"], k=30))
    stop = ((), ("END", "\u20ac\u20ac"), ("he",))[seed % 3]  # the last cuts a token
    tokens, steps = ids(text), []
    while tokens:
        size = chance.randint(1, 5)
        steps.append(tokens[:size])
        tokens = tokens[size:]
    wanted = text[: min((place for place in map(text.find, stop) if place >= 0), default=None)]
    shown_text = shown_pieces = ""
    for fresh, pieces in run([*steps, [EOS]], stop=stop, limit=1000):
        shown_text += fresh
        shown_pieces += "".join(text for text, _ in pieces)
        assert wanted.startswith(shown_text), "nothing of a stop string, no broken character"
        assert shown_text.startswith(shown_pieces), "tokens never run ahead of the text"
    assert shown_text == shown_pieces == wanted


def test_names_of_tokens() -> None:
    names = Model("m", "f", TOKENIZER)
    raw = "naive, \n\x00 the and"
    assert "".join(map(names.name_of, ids(raw))) == raw
    assert names.name_of(TOKENIZER.convert_tokens_to_ids("\u0120the")) == " the"
    assert names.name_of(ids("\u20ac")[0]) == "\ufffd"
    assert names.name_of(EOS) == TOKENIZER.eos_token
    assert names.name_of(10**6) == "", "an id that the tokenizer does not know"
    # The decoder of a SentencePiece tokenizer strips the space of a first word.
    pieces = ["\u2581the", "er", "\u2581", "\u2581a"]
    tokenizer = Mock(return_value={"input_ids": [3]})
    tokenizer.decode = lambda ids, **_: "".join(map(pieces.__getitem__, ids)).replace("\u2581", " ").removeprefix(" ")
    assert list(map(Model("m", "f", tokenizer).name_of, range(3))) == [" the", "er", " "]


@pytest.mark.parametrize("is_byte_level", [True, False])
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(is_byte_level: bool) -> None:
    """Characters in several tokens, of both kinds of tokenizers, and the replacement character itself."""
    text, tokenizer = "naïve 海 🧂\ufffd", TOKENIZER
    if not is_byte_level:
        vocab = {"a": 0, "\ufffd": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
        backend = Tokenizer(BPE(vocab, [], byte_fallback=True))
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    model = Model("m", "fp", tokenizer)
    assert len(token_ids) > len(text)
    assert b"".join(bytes(model.bytes_of(token_id)) for token_id in token_ids).decode() == text
