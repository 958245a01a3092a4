"""The public names, an engine by names, and the drafters that come with the package."""

import subprocess
import sys
from pathlib import Path

import pytest

import drafter
from drafter import Engine, SamplingParams
from drafter.engine.loading import shipped_drafter
from drafter.engine.settings import tuned_path

PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


def test_an_engine_is_loaded_by_names(target: str, drafter: str) -> None:
    plain = Engine.load(target, dtype="float32", runtime="torch", max_num_seqs=2, method="none")
    drafted = Engine.load(target, drafter, dtype="float32", runtime="torch", draft_length=2)
    without = Engine.load(target, "none")
    assert (plain.plan.max_num_seqs, plain.plan.method) == (2, "none")
    assert (drafted.plan.method, drafted.plan.record()["draft_length"]) == ("drafter", 2)
    assert without.target.device.type == "cpu" and without.proposer.num_nodes > 1
    first, second = (engine.generate(["hello"], PARAMS)[0] for engine in (plain, drafted))
    assert first.token_ids == second.token_ids and len(first.token_ids) == 12
    with pytest.raises(TypeError, match="max_row"):
        Engine.load(target, max_row=1)


def test_public_names_are_loaded_on_first_use() -> None:
    assert all(getattr(drafter, name) is not None for name in drafter.__all__)
    assert set(drafter.__all__) == {*drafter._HOME_OF, "__version__"}
    code = "import sys, drafter; assert 'torch' not in sys.modules; drafter.Engine; assert 'torch' in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_measured_sizes_of_a_shipped_drafter_lie_in_the_users_folder(tmp_path: Path, home: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tuned_path("smollm2-135m") == home / "tuned" / "smollm2-135m" / "tuned.json"
    assert shipped_drafter("nobody's") is None
    own = tmp_path / "smollm2-135m"
    own.mkdir()  # a folder of that name goes first, as it does for the drafter itself
    assert tuned_path("smollm2-135m") == Path("smollm2-135m") / "tuned.json"
    assert tuned_path(str(own)) == own / "tuned.json"
    shipped = shipped_drafter("smollm2-135m")  # as a drafter remembers the folder it was loaded from
    assert shipped is not None and (shipped / "model.safetensors").is_file()
    assert tuned_path(shipped) == home / "tuned" / "smollm2-135m" / "tuned.json"
    assert tuned_path("owner/name") == home / "tuned" / "owner--name" / "tuned.json"
