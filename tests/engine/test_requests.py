"""Requests: prefixes reused, trees, failed steps; text while tokens come, and in the end exactly the decoder's."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.request import IncrementalText, Request, RequestOptions, Update, encode_prompts
from tests.data.tiny import tiny_tokenizer
from tests.engine.oracle import ids
from tests.serving.tiny import failing_once, tiny_engine, tiny_target

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SYSTEM = "You are a careful assistant who answers in few words."


def run(engine: Engine) -> list[Update]:
    updates = []
    while engine.has_work:
        updates += engine.step()
    return updates


def assert_plain(requests: Sequence[Request]) -> None:
    """The answers are those of plain decoding."""
    prompts, params = [each.prompt_ids for each in requests], [each.params for each in requests]
    assert ids(requests) == ids(tiny_engine(method="none", tree_size=1).generate(prompts, params))


def chat(text: str) -> list[int]:
    return tiny_target().encode_chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}])


def test_next_turn_of_a_chat_reuses_the_answer_too() -> None:
    engine = tiny_engine()
    first = engine.add(engine.make_request(chat("Name a colour."), GREEDY))
    run(engine)
    # Other requests come in between, on its row too: what it left must survive them.
    river = chat("Name a river, please, and a mountain.")
    neighbours = [engine.add(engine.make_request(river, GREEDY)) for _ in range(3)]
    run(engine)
    prompt = [*first.prompt_ids, *first.token_ids, *tiny_target().encode("<|end|>\n<|user|>\nMore.<|bot|>\n")]
    second = engine.add(engine.make_request(prompt, GREEDY))
    run(engine)
    assert second.num_shared >= len(first.prompt_ids) - 2
    assert_plain([*neighbours, second])


def test_prefixes_survive_rows_that_come_go_and_move() -> None:
    engine = tiny_engine(max_num_seqs=3)
    requests = []
    for turn in range(12):
        params = replace(GREEDY, max_new_tokens=3 + 5 * (turn % 4), temperature=0.9 * (turn % 2), seed=turn)
        requests.append(engine.add(engine.make_request(chat(f"Question {turn % 5}, please?"), params)))
        for _ in range(turn % 3):
            engine.step()
        if turn % 5 == 4:
            requests[-2].finish("abort")
    run(engine)
    assert sum(request.num_shared > 0 for request in requests) >= 8
    assert_plain([request for request in requests if request.finish_reason != "abort"])


def test_trees_tell_what_was_accepted() -> None:
    engine = tiny_engine()
    request = engine.add(engine.make_request(chat("Name a colour."), GREEDY, RequestOptions(want_tree=True)))
    root = request.prompt_ids[-1]
    for update in run(engine):
        tree = update.tree
        assert tree is not None
        assert len(tree.token_ids) == len(tree.parents) == 96
        assert all(parent < node for node, parent in enumerate(tree.parents) if node)
        assert tree.token_ids[0] == root and tree.path[0] == 0
        assert all(tree.parents[child] == parent for parent, child in zip(tree.path, tree.path[1:], strict=False))
        emitted = [*(tree.token_ids[node] for node in tree.path[1:]), tree.bonus_id]
        assert emitted[: len(update.token_ids)] == update.token_ids
        root = tree.bonus_id


def test_rows_that_are_kept_after_a_failed_step_are_unharmed() -> None:
    engine = tiny_engine()
    requests = [engine.add(engine.make_request(chat(f"Question {i}?"), GREEDY)) for i in range(4)]
    runner: Any = engine._runner
    # When the work of a step is half done.
    runner._commit = failing_once(runner._commit, torch.OutOfMemoryError("no memory"), after=2)
    with pytest.raises(torch.OutOfMemoryError):
        run(engine)
    assert engine.drop(keep=2) == requests[2:]
    late = [engine.add(engine.make_request(chat(f"Late {i}?"), GREEDY)) for i in range(3)]
    run(engine)
    assert_plain([*requests[:2], *late])


TOKENIZER = tiny_tokenizer()


def decode(token_ids: list[int]) -> str:
    return str(TOKENIZER.decode(list(token_ids), skip_special_tokens=True))


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def push_all(text: IncrementalText, token_ids: list[int]) -> list[str]:
    """What each token brings, and last what finishing brings."""
    pieces = []
    for token in token_ids:
        text.push(token)
        pieces.append(text.take())
        if text.is_stopped:
            break
    text.finish()
    pieces.append(text.take())
    return pieces


def test_characters_of_several_tokens_come_whole() -> None:
    """The bytes of the emoji are four tokens, those of the letter two; nothing half is ever shown."""
    token_ids = encode("aé😀b")
    assert len(token_ids) == 8
    assert push_all(IncrementalText(decode), token_ids) == ["a", "", "é", "", "", "", "😀", "b", ""]


# Letters of one to four bytes, merges of the tokenizer, and a stop string's own letters, so that all of it happens.
_TEXTS = st.text(alphabet=st.sampled_from("ab the\nné€😀#"), max_size=40)
_TOKENS = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40)


@settings(max_examples=150, deadline=None)
@given(_TOKENS)
@example([200, 201, 202])
def test_any_tokens_give_the_decoders_text_in_the_end(token_ids: list[int]) -> None:
    text = IncrementalText(decode)
    assert "".join(push_all(text, token_ids)) == text.text == decode(token_ids)
    assert len(text.ends) == len(token_ids) and text.ends == sorted(text.ends)


def test_a_token_is_decoded_about_once() -> None:
    sizes: list[int] = []
    push_all(IncrementalText(lambda ids: (sizes.append(len(ids)), decode(ids))[1]), encode("the sea is salty. " * 20))
    assert len(sizes) < 1.2 * len(encode("the sea is salty. " * 20)) and max(sizes) <= 9


@settings(max_examples=200, deadline=None)
@given(_TEXTS, st.lists(st.text(alphabet=st.sampled_from("ab the#é"), min_size=1, max_size=4), max_size=3))
@example("ababac", ["abac"])
@example("x\U0001f600y", ["\U0001f600"])
@example("say the end", ["the", " the e"])
def test_any_stop_strings_cut_where_the_first_is_complete(text: str, stops: list[str]) -> None:
    token_ids = encode(text)
    wanted = decode(token_ids)
    for end in range(len(token_ids) + 1):  # the first prefix of tokens whose text holds a stop string
        seen = decode(token_ids[:end])
        found = [seen.find(stop) for stop in stops if stop in seen]
        if found:
            wanted = seen[: min(found)]
            break
    incremental = IncrementalText(decode, stops)
    pieces = push_all(incremental, token_ids)
    assert "".join(pieces) == incremental.text == wanted


NO_EOS = SamplingParams(max_new_tokens=40, ignore_eos=True)
CHATS = [[{"role": "user", "content": text}] for text in ("Name a colour.", "Why?", "One two three")]


def test_prompts_of_every_form_are_the_same_prompt() -> None:
    engine = tiny_engine()
    ids, raw_ids = (encode_prompts(engine.target, ["Why?"], raw=raw)[0] for raw in (False, True))
    forms = ["Why?", [{"role": "user", "content": "Why?"}], ids, torch.tensor(ids)]
    first, *others = [completion.token_ids for completion in engine.generate(forms, NO_EOS)]
    assert others == [first] * 3
    assert raw_ids == tiny_target().encode("Why?") != ids
    with pytest.raises(ValueError, match="mixes messages"):
        engine.generate([[{"role": "user", "content": "Why?"}, 5]], NO_EOS)


def test_streamed_text_is_whole_and_ends_at_a_stop_string_with_and_without_drafts() -> None:
    plain_engine = tiny_engine(method="none", tree_size=1)
    for index, full in enumerate(plain_engine.generate(CHATS, NO_EOS)):
        assert full.text == tiny_target().decode(full.token_ids)
        # Printable stop strings taken from the middle of the answer, across tokens.
        stops = {full.text[place : place + 3] for place in (4, 9, 15)} - {""}
        for stop in sorted(item for item in stops if "\ufffd" not in item):
            params = SamplingParams(max_new_tokens=40, ignore_eos=True, stop=(stop,))
            plain = plain_engine.generate(CHATS[index : index + 1], params)[0]
            *_, last = events = list(tiny_engine().stream(CHATS[index : index + 1], params))
            assert last.completion is not None and last.completion.finish_reason == plain.finish_reason == "stop"
            assert last.completion.token_ids == plain.token_ids == full.token_ids[: len(plain.token_ids)]
            text = "".join(event.text for event in events)
            assert text == last.completion.text == plain.text == full.text[: full.text.find(stop)]


def test_an_ended_text_can_be_pickled_without_its_decoder() -> None:
    text = IncrementalText(lambda token_ids: "a" * len(token_ids))
    text.push(1)
    text.finish()
    assert pickle.loads(pickle.dumps(text)).text == "a"
