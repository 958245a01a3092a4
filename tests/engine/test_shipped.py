"""Drafters that come with the package: found by name, and their measured sizes kept outside of the package."""

from pathlib import Path

import pytest

from drafter.engine.loading import shipped_drafter, shipped_drafters, tuned_path


def test_every_name_is_a_folder_with_weights() -> None:
    assert "smollm2-135m" in shipped_drafters()
    for name in shipped_drafters():
        folder = shipped_drafter(name)
        assert folder is not None and (folder / "model.safetensors").is_file()
    assert shipped_drafter("nobody's") is None


def test_measured_sizes_of_a_shipped_drafter_lie_in_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert tuned_path("smollm2-135m") == tmp_path / "home" / "tuned" / "smollm2-135m" / "tuned.json"
    own = tmp_path / "smollm2-135m"
    own.mkdir()  # a folder of that name goes first, as it does for the drafter itself
    assert tuned_path("smollm2-135m") == Path("smollm2-135m") / "tuned.json"
    assert tuned_path(str(own)) == own / "tuned.json"
    shipped = shipped_drafter("smollm2-135m")  # as a drafter remembers the folder it was loaded from
    assert shipped is not None
    assert tuned_path(shipped) == tmp_path / "home" / "tuned" / "smollm2-135m" / "tuned.json"
    assert tuned_path("owner/name") == tmp_path / "home" / "tuned" / "owner--name" / "tuned.json"
