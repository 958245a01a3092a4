"""The runtime of docs/architecture.md, "Add a runtime", run exactly as the page has it."""

import doctest
from pathlib import Path
from typing import Any

import pytest

from drafter import Engine, SamplingParams
from drafter.runtimes import loading
from tests.tiny_files import make_target

PAGE = Path(__file__).resolve().parents[2] / "docs/architecture.md"


def test_a_runtime_is_one_file_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "RUNTIMES", dict(loading.RUNTIMES))
    section = PAGE.read_text().partition("\n## Add a runtime\n")[2].partition("`load_target(name,")[0]
    names: dict[str, Any] = {}
    for example in doctest.DocTestParser().get_examples(section):
        exec(compile(example.source, str(PAGE), "exec"), names)
    name, params = make_target(tmp_path), SamplingParams(max_new_tokens=24, ignore_eos=True)
    texts = {}
    for runtime in ("torch", "counting"):
        target = loading.load_target(name, runtime=runtime, device="cpu")
        assert target.runtime.name == runtime
        engine = Engine(target)  # without a drafter: drafts by lookup
        texts[runtime] = [answer.token_ids for answer in engine.generate([[5, 6, 7], [9, 8]], params)]
    assert texts["counting"] == texts["torch"]
    assert 0 < target.runtime.num_forwards <= 48
