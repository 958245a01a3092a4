"""The engine against its oracle (autoregressive decoding, and transformers' own generate), rare cases included."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.engine import runner
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig, Plan
from drafter.proposers.options import Method
from drafter.runtimes.loading import wrap_model
from drafter.targets.target import Target
from tests.conftest import size
from tests.engine.drafters import answers_of, prompts_for, shared_target, trained_drafter
from tests.engine.oracle import VOCAB, assert_lossless, ids, plan_of, requests, tiny_target

NO_EOS = SamplingParams(max_new_tokens=30, ignore_eos=True)
# The drafter was trained on the answers to these: it drafts most of them right.
KNOWN = prompts_for(16, seed=100)


def new_engine(**settings: object) -> Engine:
    fields: dict[str, object] = {"beam_width": 4, "draft_length": 4, "tree_size": 10, "max_num_seqs": 4}
    plan = plan_of(**fields | settings)  # type: ignore[arg-type]
    return Engine(shared_target(), trained_drafter(), plan)


def hugging_face_answer(
    target: Target, prompt: list[int], num_tokens: int, eos: Sequence[int] = (), **more: object
) -> list[int]:
    prompt_1T = torch.tensor([prompt])
    options = {"max_new_tokens": num_tokens, "eos_token_id": list(eos) or VOCAB + 1, "pad_token_id": 0} | more
    output = target.model.generate(prompt_1T, attention_mask=torch.ones_like(prompt_1T), do_sample=False, **options)
    return output[0, len(prompt) :].tolist()


def test_hugging_face_generates_the_same() -> None:
    completions = new_engine().generate(KNOWN, NO_EOS)
    for prompt, completion in zip(KNOWN[:4], completions, strict=False):
        assert completion.token_ids == hugging_face_answer(shared_target(), prompt, 30)
        assert completion.finish_reason == "length" and completion.prompt_ids == prompt
        assert len(completion.num_accepted) == completion.num_target_forwards
        assert completion.tokens_per_step == len(completion.token_ids) / completion.num_target_forwards
    penalised = new_engine().generate(KNOWN[:4], replace(NO_EOS, repetition_penalty=1.4))
    for prompt, completion in zip(KNOWN[:4], penalised, strict=True):
        assert completion.token_ids == hugging_face_answer(shared_target(), prompt, 30, repetition_penalty=1.4)
    # Paths of all lengths are accepted; otherwise the tests below would say little.
    assert {accepted for completion in completions for accepted in completion.num_accepted} >= {0, 1, 2, 3, 4}


SHAPES = [(1, 8, 4, 24), (5, 3, 6, 19)]  # rows, W, L, N
GRID = size(((1, 16), (1, 32), (1, 9)), ((1, 5, 16), (1, 3, 32), (1, 4, 9)))  # rows, beam widths, draft lengths
SLOW = [
    pytest.param(rows, width, length, num_nodes, marks=pytest.mark.slow)
    for rows, width, length in product(*GRID)
    for num_nodes in sorted({2, min(33, 1 + width * length), 1 + width * length})
]


@pytest.mark.parametrize(("rows", "width", "length", "size"), [*SHAPES, *SLOW])
def test_any_tree_gives_the_oracles_tokens(rows: int, width: int, length: int, size: int) -> None:
    engine = new_engine(max_num_seqs=rows, prefill_chunk=rows, beam_width=width, draft_length=length, tree_size=size)
    assert_lossless(engine, [*((prompt, NO_EOS) for prompt in KNOWN[:3]), *requests(4, seed=rows)])


@pytest.mark.parametrize(("context", "head"), [("last", "full"), ("fused", "tied")])
def test_any_drafter_gives_the_oracles_tokens(context: str, head: str) -> None:
    config = EngineConfig(beam_width=4, draft_length=3, tree_size=9, max_num_seqs=3)
    engine = Engine(shared_target(), trained_drafter(context, head), config)
    assert assert_lossless(engine, [(prompt, NO_EOS) for prompt in KNOWN[:6]]) > 1.5
    assert_lossless(engine, requests(4, seed=4))


def test_stop_tokens_cut_wherever_they_stand_in_an_accepted_path() -> None:
    """Every token of an answer in turn is the stop token: first, within and last of what a step brings."""
    prompt = KNOWN[0]
    full = answers_of(shared_target(), [prompt], NO_EOS)[0]
    stops = list(dict.fromkeys(full))
    params = [replace(NO_EOS, stop_token_ids=(token,)) for token in stops]
    for token, completion in zip(stops, new_engine().generate([prompt] * len(stops), params), strict=True):
        expected = full[: full.index(token) + 1]
        assert completion.token_ids == expected and completion.finish_reason == "stop"
        assert completion.token_ids == hugging_face_answer(shared_target(), prompt, 30, [token])
        # The step that is cut may end with an accepted draft token instead of the target's own token.
        assert sum(completion.num_accepted) + completion.num_target_forwards - len(expected) in (0, 1)


def test_end_of_sequence_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = KNOWN[:6]
    answers = answers_of(shared_target(), prompts, NO_EOS)
    eos = (answers[0][7], answers[1][3])
    monkeypatch.setattr(shared_target(), "eos_token_ids", eos)
    completions = new_engine().generate(prompts, replace(NO_EOS, ignore_eos=False))
    assert any(completion.finish_reason == "stop" for completion in completions)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == hugging_face_answer(shared_target(), prompt, 30, eos)
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] in eos)
    assert ids(new_engine().generate(prompts, NO_EOS)) == answers


def test_context_limit() -> None:
    target = tiny_target(3, max_length=40)
    engine = Engine(target, trained_drafter(), EngineConfig(beam_width=4, draft_length=4, tree_size=12))
    prompts = [list(range(3, 3 + size)) for size in (1, 30, 36, 38, 39)]
    for prompt, completion in zip(prompts, engine.generate(prompts, replace(NO_EOS, max_new_tokens=60)), strict=True):
        room = 40 - len(prompt)
        assert completion.finish_reason == "length" and len(completion.token_ids) == room
        assert completion.token_ids == hugging_face_answer(target, prompt, room)
    with pytest.raises(ValueError, match="a prompt has 40 tokens but the context is 40: shorten it$"):
        engine.generate([list(range(3, 43))], NO_EOS)
    engine = new_engine(max_model_len=20)
    completion = engine.generate([KNOWN[0]], NO_EOS)[0]
    assert len(completion.token_ids) == 20 - len(KNOWN[0]) and completion.finish_reason == "length"
    with pytest.raises(ValueError, match="raise --max-model-len"):
        engine.generate([[5] * 20], NO_EOS)


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ([[5, 6], []], "a prompt is empty"),
        ([[5, 6], [VOCAB]], f"token id {VOCAB} is not in the vocabulary"),
        ([[5, 6], [5, 6.5]], "6.5 is no token id"),
        (["text"], "no tokenizer"),
        ([5, 6], "list of prompts"),
        ("text", "list of prompts"),
    ],
)
def test_bad_prompts_are_refused_and_leave_nothing_behind(prompts: list, match: str) -> None:
    engine = new_engine()
    with pytest.raises(ValueError, match=match):
        engine.generate(prompts, NO_EOS)
    for params, wrong in (
        (SamplingParams(stop=("x",)), "need a tokenizer"),
        ([NO_EOS], "1 sampling .* 2 prompts"),
        (SamplingParams(logit_bias={VOCAB: 1}), f"token id {VOCAB} is not"),
    ):
        with pytest.raises(ValueError, match=wrong):
            engine.generate(KNOWN[:2], params)
    assert not engine.has_work and engine.generate([], NO_EOS) == []
    assert ids(engine.generate(KNOWN[:2], NO_EOS)) == answers_of(shared_target(), KNOWN[:2], NO_EOS)


def test_one_stream_at_a_time_which_leaves_no_row_behind_when_it_is_left() -> None:
    engine = new_engine(max_num_seqs=2)
    stream = engine.stream(KNOWN[:5], NO_EOS)
    tokens = next(stream).token_ids
    with pytest.raises(ValueError, match="another call"):
        engine.generate(KNOWN[1:2], NO_EOS)
    for event in stream:
        if event.index == 1:
            break
        tokens += event.token_ids
    stream.close()
    wanted = answers_of(shared_target(), KNOWN[:5], NO_EOS)
    assert tokens and tokens == wanted[0][: len(tokens)] and not engine.has_work
    assert ids(engine.generate(KNOWN[:5], NO_EOS)) == wanted


def test_abort_of_waiting_and_running_requests() -> None:
    engine = new_engine(max_num_seqs=2)
    requests = [engine.add(engine.make_request(prompt, NO_EOS)) for prompt in KNOWN[:5]]
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 3)
    for request in (requests[0], requests[3]):
        request.finish("abort")
    assert (engine.num_running, engine.num_waiting) == (1, 2)
    while engine.has_work:
        engine.step()
    requests[1].finish("abort")
    assert [request.finish_reason for request in requests] == ["abort", "length", "length", "abort", "length"]
    for request, wanted in zip(requests, answers_of(shared_target(), KNOWN[:5], NO_EOS), strict=True):
        is_whole = request.finish_reason == "length"
        assert request.token_ids == (wanted if is_whole else wanted[: len(request.token_ids)])


def test_rows_grow_between_calls_but_not_under_running_requests() -> None:
    """A cache that grows forgets the prefixes."""
    engine, prompts = new_engine(enable_prefix_caching=True), prompts_for(2, seed=6, sizes=(40,))
    longer = replace(NO_EOS, max_new_tokens=150)
    engine.add(engine.make_request(prompts[0], NO_EOS))
    with pytest.raises(ValueError, match="set --max-model-len"):
        engine.add(engine.make_request(prompts[1], longer))
    while engine.has_work:
        engine.step()
    assert ids(engine.generate(prompts, longer)) == answers_of(shared_target(), prompts, longer)


BRIEF = SamplingParams(max_new_tokens=20, ignore_eos=True)
LONG = replace(BRIEF, max_new_tokens=60)
FEW = prompts_for(4, seed=100, sizes=(5,))


@pytest.mark.parametrize("method", ["none", "drafter"])
def test_a_token_whose_numbers_overflow_spoils_no_other(method: Method) -> None:
    """Neither where it is drafted in vain nor where an earlier request held it."""
    target = tiny_target()
    bad = 60
    prompt, *_ = FEW
    wanted = answers_of(target, [prompt], BRIEF)
    assert bad not in [*prompt, *wanted[0]]
    target.model.get_input_embeddings().weight.data[bad] = torch.nan
    size = {"beam_width": 61, "draft_length": 2, "tree_size": 62} if method == "drafter" else {}
    engine = Engine(target, trained_drafter(), plan_of(method, max_num_seqs=1, **size))  # type: ignore[arg-type]
    engine.generate([[bad, *prompt]], BRIEF)
    assert ids(engine.generate([prompt], BRIEF)) == wanted


def test_rows_that_were_left_do_not_make_a_greedy_batch_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(shared_target(), trained_drafter(), EngineConfig(max_num_seqs=4, tree_size=8))
    engine.generate(FEW, replace(BRIEF, temperature=1.0, top_p=0.9))
    monkeypatch.delattr(runner, "Noise")
    assert ids(engine.generate(FEW[:3], BRIEF)) == answers_of(shared_target(), FEW[:3], BRIEF)


def test_a_reused_prefix_gives_the_context_that_reading_it_gives() -> None:
    (prompt,) = prompts_for(1, seed=5, sizes=(40,))
    contexts = []
    for reuse in (False, True):
        engine = Engine(shared_target(), trained_drafter(), EngineConfig(max_num_seqs=1, enable_prefix_caching=reuse))
        engine.reserve(90)
        engine.generate([prompt], replace(BRIEF, max_new_tokens=1))
        request = engine.add(engine.make_request(prompt, BRIEF))
        while not request.token_ids:
            engine.step()
        assert (request.num_shared > 0) == reuse
        assert engine._runner is not None
        contexts.append(engine._runner._context_BC[0].clone())
    torch.testing.assert_close(*contexts, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", ["none", "draft-model"])
def test_an_engine_that_cannot_fit_says_so_with_the_numbers(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft_model = tiny_target(), tiny_target(1) if method == "draft-model" else None
    engine = Engine(target, config=EngineConfig(method=method, max_num_seqs=3), draft_model=draft_model)
    models = [target] if draft_model is None else [target, draft_model]
    need = sum(model.runtime.cache_bytes(3, 128) for model in models) + 3 * engine.num_nodes * VOCAB * 4
    monkeypatch.setattr(runner, "available_bytes", lambda device: need - 1)
    with pytest.raises(ValueError, match=r"3 rows of 128 slots need .* GiB .* lower --max-num-seqs"):
        engine.reserve(100)
    monkeypatch.setattr(runner, "available_bytes", lambda device: need)
    engine.reserve(100)


def test_bfloat16_steps_with_trees_round_as_plain_steps_of_as_many_nodes() -> None:
    target = wrap_model(tiny_target().model.to(torch.bfloat16), name="tiny-0")
    prompts = prompts_for(12, seed=4)
    tree = Plan.of("drafter", max_num_seqs=3, beam_width=4, draft_length=3, tree_size=12)
    try:
        drafted = Engine(target, trained_drafter().bind(target), tree).generate(prompts, LONG)
    finally:
        trained_drafter().bind(shared_target())
    padded = Engine(target, None, Plan.of("none", max_num_seqs=3, tree_size=12)).generate(prompts, LONG)
    assert ids(drafted) == ids(padded)
    assert sum(item.tokens_per_step for item in drafted) / len(drafted) > 1.2
