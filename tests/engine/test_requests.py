"""What servers need of the engine: prefixes reused, trees, failed steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.request import Request, RequestOptions, Update
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
