"""Distillation through the real engine over a tiny random target: resumable, the same whatever the batch."""

import itertools
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from drafter.data.encode import RowEncoder, encode_files
from drafter.data.formats import read_rows
from drafter.data.hidden_states import StatesOfAnswers, cache_states
from drafter.decoding.params import SamplingParams
from drafter.distill.journal import Journal
from drafter.distill.prompts import AnswerSettings, row_of
from drafter.distill.run import NO_ANSWER, DistillReport, EngineAnswerer, distill
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig, resolve
from drafter.kernels import native
from drafter.runtimes.loading import load_target, wrap_model
from tests.data.tiny import chat, save_target, tiny_target, write_jsonl

QUESTIONS = ["Why?", "What is the and the?", "Tell me more and more and more of it.", "a", "the end"]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "prompts.jsonl", [{"id": f"q{i}", "prompt": q} for i, q in enumerate(QUESTIONS)])


def rows_of(path: Path) -> dict[tuple[str, int], dict]:
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    keyed = {(row["id"], row["answer"]): row for row in rows}
    assert len(keyed) == len(rows)
    return keyed


def run(target, prompts: str, out: Path, **options) -> DistillReport:
    """`distill` by an engine. Options are fields of AnswerSettings, rows of the engine, and arguments of `distill`."""
    config = EngineConfig(max_num_seqs=options.pop("max_num_seqs", 64))
    names = [item.name for item in fields(AnswerSettings) if item.name in options]
    settings = AnswerSettings(**{"max_new_tokens": 8, **{name: options.pop(name) for name in names}})
    return distill(EngineAnswerer(Engine(target, None, config)), prompts, out, settings, **options)


def test_a_base_model_is_refused_before_anything_is_asked(prompts: str, tmp_path: Path) -> None:
    base = tiny_target()
    base.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="target 'tiny' has no chat template: use an instruction-tuned one"):
        run(base, prompts, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_another_fine_tuning_does_not_continue_a_file(target, prompts: str, tmp_path: Path) -> None:
    """The output matrix is the same; the journal's fingerprint covers the layers too."""
    run(target, prompts, tmp_path / "out.jsonl")
    tuned = tiny_target()
    with torch.no_grad():
        tuned.model.model.layers[0].self_attn.q_proj.weight *= 1.1
    tuned = wrap_model(tuned.model, tuned.tokenizer, name="tuned")
    with pytest.raises(ValueError, match="was written with target_fingerprint = "):
        run(tuned, prompts, tmp_path / "out.jsonl")
    assert run(tiny_target(), prompts, tmp_path / "out.jsonl").num_new == 0


def test_answers_to_chats_and_plain_text_are_those_of_the_engine(target, prompts: str, tmp_path: Path) -> None:
    both = [*map(json.loads, Path(prompts).read_text().splitlines()), {"id": "t4", "text": QUESTIONS[4]}]
    report = run(target, write_jsonl(tmp_path / "both.jsonl", both), tmp_path / "out.jsonl", max_num_seqs=2)
    rows = rows_of(tmp_path / "out.jsonl")
    engine = Engine(target, None, EngineConfig(method="none"))
    for (number, _), row in rows.items():
        question = QUESTIONS[int(number[1:])]
        (alone,) = engine.generate([question], SamplingParams(max_new_tokens=8), raw=number == "t4")
        words = {"text": question + alone.text} if number == "t4" else {"messages": chat(question, alone.text)}
        assert words == {name: row[name] for name in ("messages", "text") if name in row}
        assert row["prompt_token_ids"] == alone.prompt_ids and row["token_ids"] == alone.token_ids
        assert row["finish_reason"] == alone.finish_reason and row["num_tokens"] == len(alone.token_ids)
        assert row["temperature"] == 0.0
    assert len(rows) == report.num_new == report.num_answers == 6
    assert report.num_tokens == sum(row["num_tokens"] for row in rows.values())
    assert "6 of 6 answers to 6 prompts; new: 6 with" in report.lines()[0]
    conversations = list(read_rows(tmp_path / "out.jsonl"))
    assert [row.is_cut for row in conversations] == [row["finish_reason"] == "length" for row in rows.values()]


def test_neither_batches_nor_interruptions_change_sampled_answers(target, prompts: str, tmp_path: Path) -> None:
    options = {"temperature": (0.5, 1.0), "num_answers": 2, "seed": 3, "top_k": 50}
    run(target, prompts, tmp_path / "a.jsonl", max_num_seqs=1, **options)
    run(target, prompts, tmp_path / "b.jsonl", max_num_seqs=64, **options)
    first, second = rows_of(tmp_path / "a.jsonl"), rows_of(tmp_path / "b.jsonl")
    assert first == second and len(first) == 10
    assert first["q0", 0]["messages"] != first["q0", 1]["messages"]
    whole = (tmp_path / "b.jsonl").read_bytes()
    (tmp_path / "b.jsonl").write_bytes(whole[: len(whole) // 2])  # what a kill leaves
    report = run(target, prompts, tmp_path / "b.jsonl", max_num_seqs=3, **options)
    assert rows_of(tmp_path / "b.jsonl") == first and 0 < report.num_done_before < 10
    run(target, prompts, tmp_path / "c.jsonl", **{**options, "seed": 4})
    assert rows_of(tmp_path / "c.jsonl") != first


@pytest.mark.skipif(native.library() is None, reason="the native step was not built")
@pytest.mark.parametrize("layers", [(), (0, 1)])
def test_kept_states_are_those_of_a_forward(layers, prompts: str, tmp_path: Path, monkeypatch) -> None:
    """Of prompts that share prefixes and answers that take drafts. Training computes a missing file and no other."""
    target = load_target(save_target(tiny_target(initializer_range=0.3), tmp_path / "target"), device="cpu")
    config = EngineConfig(method="lookup", tree_size=4, enable_prefix_caching=True, max_num_seqs=3)
    plan = replace(resolve(config, target), kept_layers=layers)
    answerer = EngineAnswerer(Engine(target, None, plan), StatesOfAnswers(tmp_path / "kept", target, layers))
    accepted = []
    monkeypatch.setattr("drafter.distill.run.row_of", lambda *a: accepted.append(sum(a[1].num_accepted)) or row_of(*a))
    settings = AnswerSettings(max_new_tokens=40, temperature=(0.0, 1.0), num_answers=2)
    distill(answerer, prompts, tmp_path / "out.jsonl", settings)
    assert sum(accepted) > 9
    rows, _ = encode_files([str(tmp_path / "out.jsonl")], RowEncoder(target.tokenizer, vocab_size=target.vocab_size))
    states = {}
    for name, margin in (("fresh", 9), ("kept", 9), ("kept", 4)):
        states[name, margin] = cache_states(tmp_path / name, rows, target, margin=margin, context_layers=layers)
        monkeypatch.setattr(target, "forward", None)
    for row, margin in itertools.product(range(len(rows)), (9, 4)):
        mine, kept = states["fresh", 9], states["kept", margin]
        first = int(kept.start_X[row] - mine.start_X[row])
        both = zip(mine.states(row), kept.states(row), strict=True)
        for mine_TX, kept_TX in itertools.islice(both, 1 + bool(layers)):
            # The last token's state was not computed, and predicts nothing.
            assert torch.equal(mine_TX[first:-1], kept_TX[:-1]) and mine_TX[-2].any()
    states["kept", 9].files[3].unlink()
    with pytest.raises(TypeError, match="not callable"):
        cache_states(tmp_path / "kept", rows, target, margin=9, context_layers=layers)


def test_the_first_answers_come_soon_and_what_is_lost_is_told(target, tmp_path: Path, monkeypatch, capsys) -> None:
    name = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"a{number}"} for number in range(20)])
    monkeypatch.setattr(Journal, "append", lambda journal, row: journal.rows.append(row) or stop(len(journal.rows)))

    def stop(num_rows: int) -> None:
        if num_rows == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(target, name, tmp_path / "out.jsonl", max_num_seqs=64, temperature=(1.0,), max_new_tokens=40)
    assert "unfinished answers with" in (shown := capsys.readouterr().err)
    assert int(re.search(r"(\d+) unfinished", shown)[1]) <= 8 - 3


def test_prompts_without_room_are_counted(target, tmp_path: Path) -> None:
    name = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "x" * 200}, {"prompt": "short"}])
    report = run(target, name, tmp_path / "out.jsonl")
    assert report.notes[NO_ANSWER] == 1 and report.num_new == 1
    assert any("too long for the context" in line for line in report.lines())


def test_bad_options(target, prompts: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--prompts magpie needs --num-prompts"):
        run(target, "magpie", tmp_path / "out.jsonl")
    for name in ("out.json", "out.jsonl.gz", "pipe"):
        with pytest.raises(ValueError, match=rf"--out .*{name}: .* ends with \.jsonl"):
            run(target, prompts, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]
    run(target, prompts, tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="written with prompts"):
        run(target, prompts, tmp_path / "out.jsonl", num_prompts=2)


def test_magpie_asks_invented_prompts(target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.distill.magpie.problem_of", lambda text, special: None if 5 < len(text) < 40 else "x")
    out, options = tmp_path / "out.jsonl", {"num_prompts": 3, "max_new_tokens": 4}
    assert run(target, "magpie", out, **options).num_new == 3
    invented = [json.loads(line) for line in (tmp_path / "out.prompts.jsonl").read_text().splitlines()]
    asked = [row["messages"][0]["content"] for row in rows_of(out).values()]
    assert sorted(asked) == sorted(row["prompt"] for row in invented) and len(set(asked)) == 3
    assert run(target, "magpie", out, **options).num_new == 0
    exclude = write_jsonl(tmp_path / "x.jsonl", [{"prompt": asked[0]}])
    assert run(target, "magpie", tmp_path / "fewer.jsonl", exclude=exclude, **options).num_new == 2
    with pytest.raises(ValueError, match="written with exclude = None, now it is .*x.jsonl'"):
        run(target, "magpie", out, exclude=exclude, **options)
