"""`drafter evaluate`: what is counted here and on a server, and the cause of every way to serve a target wrong."""

import json
from collections import Counter
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from drafter.bench.acceptance import Acceptance, _growth, accepted_of, read_counters, steps_along
from drafter.cli.evaluate import EvaluateOptions, evaluate
from drafter.cli.main import main
from drafter.data.traffic import TrafficRow
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig, Plan
from drafter.utils.client import Client, Reply
from tests.data.tiny import save_target, write_jsonl
from tests.distill.loopback import send, serving
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.serving.conftest import live
from tests.serving.live import Live
from tests.serving.tiny import tiny_drafter, tiny_target

__all__ = ["live"]  # a fixture
METHOD = "drafter:W64:L2:N96"  # as the live server's engine has it
QUESTIONS = {"short": ["Why 15?", "Why 16?"], "long": ["Why is the sea salty and the sky blue?", "And the end?"]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    save_target(tiny_target(), folder / "target")
    tiny_drafter().save_pretrained(folder / "drafter")
    rows = [{"prompt": text, "category": name} for name, texts in QUESTIONS.items() for text in texts]
    write_jsonl(folder / "prompts.jsonl", rows)
    return folder


def run(files: Path, url: str | None, **changes) -> tuple[int, dict]:
    out = files / "results.json"
    options = {
        "target": str(files / "target"), "drafter": str(files / "drafter"), "prompts": str(files / "prompts.jsonl"),
        "method": METHOD, "max_new_tokens": 24, "device": "cpu", "url": url, "out": out, **changes,
    }  # fmt: skip
    return evaluate(EvaluateOptions(**options)), json.loads(out.read_text())


def test_counts_of_steps() -> None:
    one, other = Acceptance(), Acceptance()
    one.add([2, 0, 1])
    other.add([3])
    both = one + other
    assert one.as_json() == {"num_answers": 1, "num_steps": 3, "num_accepted": 3, "reached": [2, 1]}
    other.add([2, 0, 1])
    assert both == other and both.reached == [3, 2, 1]
    assert both.accepted_per_step == 1.5


def test_what_an_answer_reports() -> None:
    def of(details: object) -> list[int]:
        return accepted_of(Reply.model_validate({"choices": [{"text": "x", "details": details}]}))

    tokens = [["a", True], ["b", True], ["c", False], ["d", False], ["e", True]]
    assert of({"tokens": tokens, "num_target_forwards": 3}) == [2, 0, 1]
    assert of({"tokens": [["a", True], ["b", False]], "num_target_forwards": 3}) == [1, 0, 0]
    for wrong in (None, {"tokens": [["a"]]}, {"tokens": [], "num_target_forwards": "x"}):
        with pytest.raises(ValueError, match="another shape"):
            of(wrong)


def test_our_own_server_accepts_what_this_machine_accepts(files: Path, live: Live, capsys) -> None:
    code, results = run(files, live.url)
    assert code == 0 and results["differences"] == [] and results["server"]["source"] == "answers"
    assert list(results["here"]) == ["short", "long"] == list(results["server"]["by_category"])
    for name, mine in results["here"].items():
        theirs = results["server"]["by_category"][name]
        assert mine["num_answers"] == theirs["num_answers"] == 2 and mine["num_accepted"] > 0
        assert abs(mine["num_accepted"] - theirs["num_accepted"]) <= 2  # a drafted stop token has no text to report
        assert abs(mine["num_steps"] - theirs["num_steps"]) <= 2
    table = capsys.readouterr().out
    assert "Share of the steps" in table and "server" in table and "short" in table


def test_a_server_that_does_not_draft_is_a_loud_warning(
    files: Path, live: Live, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(live.server, "_check", lambda body, num_prompts: vars(body).update(speculation=False))
    assert run(files, live.url)[0] == 1
    shown = capsys.readouterr().err
    assert "The server accepts 0.00 drafted tokens per step" in shown and "speculation off: the server" in shown


# What an answer of 24 tokens adds, whose steps accept 2, 0 and 1 drafted tokens in turn.
DRAFTS = {
    **{"spec_decode_num_drafts_total": 12, "spec_decode_num_accepted_tokens_total": 12},
    'spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 8,
    'spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 4,
}


@pytest.mark.parametrize("drafts", [DRAFTS, {}], ids=["often", "never"])
def test_a_vllm_is_counted_by_its_metrics(files: Path, drafts: dict[str, int]) -> None:
    asked = []

    def respond(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        reply: dict = {"data": [{"id": "tiny", "owned_by": "vllm"}]}
        if handler.command == "POST":
            asked.append(body)
            reply = {"choices": [{"message": {"content": "x"}}], "usage": {"completion_tokens": 24}}
        counters = {"generation_tokens_total": 24, **drafts}.items()
        metrics = "".join(f"vllm:{name} {value * len(asked)}.0\n" for name, value in counters)
        send(handler, 200, (metrics if handler.path == "/metrics" else json.dumps(reply)).encode())

    with serving(respond) as url:
        code, results = run(files, url, num_prompts=2)
    served = results["server"]
    assert served["source"] == "metrics"
    counts = served["by_category"].values()
    num_steps, num_accepted = (sum(each[name] for each in counts) for name in ("num_steps", "num_accepted"))
    assert num_steps + num_accepted == 48, "two answers of 24 tokens"
    assert all(each["num_accepted"] == sum(each["reached"]) for each in counts)
    assert (code == 1) == (not drafts)


def test_odd_counters_of_a_server() -> None:
    metrics = (
        b'vllm:a_total NaN\nvllm:b_total 1e999\nvllm:c_total -1\nvllm:d_total{x="\xff"} 9%d\nvllm:e_total 2.5\n'
        % 10**40
    )
    with serving(lambda handler, _: send(handler, 200, metrics)) as url:
        assert read_counters(Client(url)) == {"vllm:e_total": 2.5}
    tokens, requests = "vllm:generation_tokens_total", "vllm:num_requests_running"
    assert _growth({tokens: 5, requests: 9}, {tokens: 7, requests: 1}, 1) == Acceptance(1, Counter({0: 2}))
    assert _growth({tokens: 5}, {tokens: 1}, 1) is None, "another process"


def test_recorded_answers_are_counted_without_the_target_and_their_prompts_asked(
    files: Path, live: Live, tmp_path: Path, capsys
) -> None:
    target = tiny_target()
    prompts = [target.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS["short"]]
    answers = Engine(target, config=EngineConfig(method="none")).generate(prompts, SamplingParams(max_new_tokens=24))
    rows = [{"prompt_token_ids": done.prompt_ids, "token_ids": done.token_ids} for done in answers]
    write_jsonl(tmp_path / "traffic-1.jsonl", rows)
    _, asked = run(files, None)
    code, again = run(files, live.url, prompts=str(tmp_path))
    assert code == 0 and again["here"][""] == asked["here"]["short"] and asked["server"] is None
    assert again["server"]["by_category"][""]["num_answers"] == 2
    write_jsonl(tmp_path / "traffic-2.jsonl", [{"prompt_token_ids": [1] * target.max_length, "token_ids": [1]}])
    code, recorded = run(files, None, traffic=tmp_path)
    assert code == 0 and recorded["here"][""] == asked["here"]["short"] and recorded["traffic"] == str(tmp_path)
    shown = capsys.readouterr()
    assert "tokens per step along 2" in shown.out and "1 answers exceed the target's context" in shown.err
    for changes in ({"url": "http://x"}, {"method": "lookup"}):
        with pytest.raises(ValueError, match="leave --(url http://x|method lookup) out"):
            run(files, **{"url": None, "traffic": tmp_path} | changes)


@pytest.mark.parametrize("context", ["last", "fused"])
@pytest.mark.parametrize("num_prompts", [3, 12])
def test_steps_are_those_of_the_engine(context: str, num_prompts: int) -> None:
    target, drafter = shared_target(), trained_drafter(context=context)
    config = Plan(method="drafter", max_num_seqs=4, beam_width=4, draft_length=3, tree_size=8)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    engine = Engine(target, drafter, config)
    completions = engine.generate(prompts_for(num_prompts, seed=5), params)
    answers = [TrafficRow(each.prompt_ids, each.token_ids) for each in completions]
    finished: list[int] = []
    accepted = steps_along(engine, answers, lambda: finished.append(1))
    assert [len(steps) for steps in accepted] == [each.num_target_forwards for each in completions]
    # The last step of an answer may be cut: it accepts no token behind the answer.
    assert all(sum(steps) + len(steps) in (30, 31) for steps in accepted)
    assert sum(map(len, accepted)) < 30 * num_prompts and len(finished) == num_prompts


def test_the_longest_prompt_alone_is_walked_too() -> None:
    plan = Plan(method="drafter", beam_width=2, draft_length=2, tree_size=4)
    engine = Engine(shared_target(), trained_drafter(), plan)
    assert steps_along(engine, [TrafficRow([1], [2])]) == [[0]]
    assert steps_along(engine, []) == []


def test_mistakes_are_one_line(files: Path, capsys) -> None:
    words = ["evaluate", "--target", str(files / "target"), "--prompts", str(files / "prompts.jsonl")]
    words += ["--drafter", str(files / "drafter")]
    for more, message in (
        (["--url", "http://127.0.0.1:9"], "--url http://127.0.0.1:9: the server does not answer"),
        (["--method", "vllm"], "--method vllm: evaluate measures none, drafter or lookup"),
    ):
        assert main([*words, *more]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="drafter needs a drafter: give --drafter DIR"):
        EvaluateOptions(target="owner/other")
    assert EvaluateOptions(target="smollm2-135m").drafter is None, "the package's own"
