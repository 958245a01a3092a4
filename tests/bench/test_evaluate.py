"""`drafter evaluate`: what is counted here and on a server, and the cause of every way to serve a target wrong."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from drafter.bench.acceptance import Acceptance, acceptance_of, steps_of, total
from drafter.cli.evaluate import EvaluateOptions, evaluate
from drafter.cli.main import main
from drafter.distill.client import read_reply
from tests.data.tiny import write_jsonl
from tests.distill.engine_server import EngineServer, running
from tests.serving.live import Live, live_server
from tests.serving.tiny import save_target, tiny_drafter, tiny_target

TREE = {"beam_width": 64, "draft_length": 2, "tree_size": 96}  # as the live server's engine has it
QUESTIONS = {"short": ["Why 15?", "Why 16?"], "long": ["Why is the sea salty and the sky blue?", "And the end?"]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    save_target(folder / "target")
    drafter = tiny_drafter()
    drafter.save_pretrained(folder / "drafter")
    rows = [{"prompt": text, "category": name} for name, texts in QUESTIONS.items() for text in texts]
    write_jsonl(folder / "prompts.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server() as server:
        yield server


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


def run(files: Path, url: str | None, **changes) -> tuple[int, dict]:
    out = files / "results.json"
    options = {
        "target": str(files / "target"), "drafter": str(files / "drafter"), "prompts": str(files / "prompts.jsonl"),
        "method": "drafter", "max_new_tokens": 24, "device": "cpu", "url": url, "out": out, **TREE, **changes,
    }  # fmt: skip
    return evaluate(EvaluateOptions(**options)), json.loads(out.read_text())


def verdicts(results: dict) -> dict[str, str]:
    return {cause["name"]: cause["verdict"] for cause in results["causes"]}


def found(results: dict) -> list[str]:
    return [name for name, verdict in verdicts(results).items() if verdict == "found"]


def test_counts_of_steps() -> None:
    one, two = Acceptance.of_steps([2, 0, 1]), Acceptance.of_steps([3])
    assert one == Acceptance(1, 3, 3, [2, 1]) and two.reached == [1, 1, 1]
    both = total({"a": one, "b": two})
    assert both == Acceptance(2, 4, 6, [3, 2, 1]) and both.accepted_per_step == 1.5 and both.shares == [0.75, 0.5, 0.25]
    assert total({"a": one, "b": Acceptance(1, 2, 1, None)}).shares is None
    assert steps_of([True, True, False, False, True]) == [2, 0, 1] and steps_of([]) == []


def test_what_an_answer_reports() -> None:
    def of(choice: dict, **more) -> Acceptance | None:
        return acceptance_of(read_reply({"choices": [{"text": "x", **choice}], **more}))

    details = {"tokens": [["a", True], ["b", False], ["c", False]], "num_target_forwards": 3}
    assert of({"details": details}) == Acceptance.of_steps([1, 0, 0])
    stats = {"speculative_decoding": {"acceptance_histogram": [39, 1, 0, 3]}}
    assert of({}, metrics=stats) == Acceptance(1, 43, 10, [4, 3, 3])
    meta = {"spec_verify_ct": 4, "completion_tokens": 10}
    assert of({"meta_info": meta}) == Acceptance(1, 4, 6, None)
    assert of({}) is None and of({"details": None, "meta_info": None}, metrics=None) is None


def test_our_own_server_accepts_what_this_machine_accepts(files: Path, live: Live, capsys) -> None:
    code, results = run(files, live.url)
    assert code == 0 and results["warning"] == [] and results["server"]["source"] == "answers"
    assert set(verdicts(results).values()) == {"fine"}, results["causes"]
    assert list(results["offline"]) == ["short", "long"] == list(results["server"]["by_category"])
    for name, mine in results["offline"].items():
        theirs = results["server"]["by_category"][name]
        assert mine["num_answers"] == theirs["num_answers"] == 2 and mine["num_accepted"] > 0
        assert abs(mine["num_accepted"] - theirs["num_accepted"]) <= 2  # a drafted stop token has no text to report
        assert abs(mine["num_steps"] - theirs["num_steps"]) <= 2
    table = capsys.readouterr().out
    assert "server / offline" in table and "chat template" in table and "speculation off" in table


def other_chats(live: Live, monkeypatch: pytest.MonkeyPatch, change) -> None:
    encode = live.server.encoder.chat

    async def chat(*args):
        return change(await encode(*args))

    monkeypatch.setattr(live.server.encoder, "chat", chat)


def test_a_server_with_another_template(files: Path, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tiny_target().encode("Be brief. ")
    other_chats(live, monkeypatch, lambda ids: [ids[0], *header, *ids[1:]])
    assert found(run(files, live.url)[1]) == ["chat template"]


def test_a_server_that_adds_special_tokens(files: Path, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    other_chats(live, monkeypatch, lambda ids: [0, *ids])
    assert found(run(files, live.url)[1]) == ["special tokens"]


def test_a_server_with_rounded_weights(files: Path, live: Live) -> None:
    model = live.engine.target.model
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    try:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(1)
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * weight.std() * 0.03) if weight.ndim > 1 else None
        _, results = run(files, live.url)
    finally:
        model.load_state_dict(before)
    assert found(results) == ["dtype or quantisation"], results["causes"]


def test_a_server_with_a_short_context(files: Path, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(live.server.model_card, "max_model_len", 40)
    _, results = run(files, live.url)
    assert found(results) == ["context length"]
    assert "the server takes 40 tokens" in next(c for c in results["causes"] if c["name"] == "context length")["seen"]


def changed_jobs(live: Live, monkeypatch: pytest.MonkeyPatch, change) -> None:
    make = live.server._jobs
    monkeypatch.setattr(live.server, "_jobs", lambda body, *rest: make(body.model_copy(update=change), *rest))


def test_a_server_with_sampling_of_its_own(files: Path, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    changed_jobs(live, monkeypatch, {"temperature": 3.0})
    assert found(run(files, live.url)[1]) == ["sampling parameters"]


def test_a_server_that_does_not_draft_is_a_loud_warning(
    files: Path, live: Live, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    changed_jobs(live, monkeypatch, {"speculation": False})
    code, results = run(files, live.url)
    assert code == 1 and found(results) == ["speculation off"]
    shown = capsys.readouterr().err
    assert "!! The server accepts 0.00 drafted tokens per step" in shown and "!! speculation off: 0 drafted" in shown


SELDOM = (0,) * 8 + (1,)


@pytest.mark.parametrize("accepted", [(2, 0, 1), (), SELDOM], ids=["often", "never", "seldom"])
@pytest.mark.parametrize("kind", ["counters", "answers", "sglang"])
def test_vllm_and_sglang(files: Path, kind: str, accepted: tuple[int, ...]) -> None:
    engine = EngineServer(
        tiny_target(), "sglang" if kind == "sglang" else "vllm", accepted=accepted,
        with_request_metrics=kind == "answers", max_length=500,
    )  # fmt: skip
    with running(engine):
        code, results = run(files, engine.url, num_prompts=2)
    served = results["server"]
    if kind == "sglang" and not accepted:
        assert served["source"] == "none" and verdicts(results)["speculation off"] == "unknown" and code == 0
        return
    assert served["source"] == ("answers" if kind != "counters" and accepted else "metrics")
    parts = served["by_category"].values()
    num_steps, num_accepted = (sum(part[name] for part in parts) for name in ("num_steps", "num_accepted"))
    assert num_steps + num_accepted == 48, "two answers of 24 tokens"
    if kind != "sglang" and accepted == (2, 0, 1):
        assert all(part["num_accepted"] == sum(part["reached"]) for part in parts)
    assert (code == 1) == (accepted in ((), SELDOM)) and ("speculation off" in found(results)) == (not accepted)


def test_a_longer_prompt_behind_a_shorter_one(files: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "Why?"}, {"prompt": "Why? " * 40}])
    code, results = run(files, None, prompts=str(tmp_path / "prompts.jsonl"))
    assert code == 0 and sum(part["num_answers"] for part in results["offline"].values()) == 2


def test_offline_alone_and_mistakes(files: Path, tmp_path: Path, capsys) -> None:
    code, results = run(files, None)
    assert code == 0 and results["server"] is None and results["causes"] == []
    words = ["evaluate", "--target", str(files / "target"), "--prompts", str(files / "prompts.jsonl")]
    for more, message in (
        (["--url", "localhost:1"], "--url 'localhost:1' must be an http or https address"),
        (["--url", "http://127.0.0.1:9"], "--url http://127.0.0.1:9: the server does not answer"),
        (["--concurrency", "0"], "--concurrency is 0 but must be an integer of at least 1"),
    ):
        assert main([*words, *more]) == 2
        assert message in capsys.readouterr().err
    with running(EngineServer(tiny_target())) as engine:
        assert main([*words, "--url", engine.url, "--model", "other"]) == 2
    assert "--model other is not served at" in capsys.readouterr().err
