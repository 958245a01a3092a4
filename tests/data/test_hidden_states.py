"""The cache of hidden states: the same numbers as a forward, and nobody else's."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch

from drafter.data import hidden_states
from drafter.data.batch import collate
from drafter.data.hidden_states import CachedStates, cache_states, crop_to_answers
from drafter.data.module import ChatDataModule
from drafter.data.rows import TokenRows
from tests.data.tiny import chat, save_tiny_target, tiny_target, token_rows, write_jsonl

MARGIN = 3


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def rows_of(num_rows: int = 7) -> TokenRows:
    rows = []
    for row in range(num_rows):
        length = 6 + row
        first = 2 + row // 2
        tokens = [(7 * row + 3 * place) % 200 + 4 for place in range(length)]
        rows.append((tokens, [place >= first for place in range(length)]))
    return token_rows(rows)


def build(folder: Path, rows: TokenRows, target, **options) -> CachedStates:
    return cache_states(folder, rows, target, **{"margin": MARGIN, "progress": False, "batch_tokens": 20, **options})


def test_rows_are_cut_before_their_answers() -> None:
    rows = token_rows([([1, 2, 3, 4, 5, 6], [False] * 4 + [True] * 2), ([7, 8], [False, True]), ([9], [False])])
    crop = crop_to_answers(rows, 2)
    assert [crop.row(row).token_T.tolist() for row in range(3)] == [[3, 4, 5, 6], [7, 8], [9]]
    assert crop.row(0).loss_mask_T.tolist() == [False, False, True, True] and crop.start_R.tolist() == [2, 0, 0]


@pytest.mark.parametrize("context_layers", [(), (1, 2)])
@pytest.mark.parametrize("file_bytes", [1, 1 << 29])
def test_states_are_those_of_a_forward(
    target, tmp_path: Path, context_layers: tuple[int, ...], file_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "_FILE_BYTES", file_bytes)
    rows = rows_of()
    states = build(tmp_path / "cache", rows, target, context_layers=context_layers)
    crop = crop_to_answers(rows, MARGIN)
    for row in range(len(rows)):
        whole_T = rows.row(row)[0].long()
        output = target.forward(whole_T[None], context_layers=context_layers)
        found = states.row(row)
        kept = slice(int(crop.start_R[row]), None)
        assert found.hidden_TD.dtype == torch.float32
        assert torch.allclose(found.hidden_TD, output.hidden_BTD[0, kept], rtol=1e-2, atol=1e-2)
        if context_layers:
            assert torch.allclose(found.context_TC, output.context_BTC[0, kept], rtol=1e-2, atol=1e-2)
        else:
            assert found.context_TC is None
    num_files = len(list((tmp_path / "cache").glob("states-*")))
    assert num_files == (7 if file_bytes == 1 else 1)


def test_only_missing_states_are_computed(target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an interrupted cache and of added rows; the same tokens with another mask are other rows."""
    monkeypatch.setattr(hidden_states, "_FILE_BYTES", 1)
    rows, folder = rows_of(), tmp_path / "cache"
    forward, calls = target.forward, []
    monkeypatch.setattr(target, "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))
    build(folder, rows_of(5), target)
    first = build(folder, rows, target)
    assert len(calls) == 7 and len(first.row(6).hidden_TD) == len(first.rows.row(6).token_T)
    sorted(folder.glob("states-*"))[4].unlink()
    again = build(folder, rows, target)
    assert len(calls) == 8
    assert all(torch.equal(first.row(row).hidden_TD, again.row(row).hidden_TD) for row in range(7))
    build(folder, rows, target)
    assert len(calls) == 8
    build(folder, rows.trained_on_everything(), target)
    assert len(calls) == 15


def test_the_size_is_told_and_a_full_disk_refused_before_anything_is_written(
    target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    crop = crop_to_answers(rows_of(), MARGIN)
    num_positions = int(crop.length_R.sum())
    needed = num_positions * 2 * 16
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(OSError, match="make room, name a folder on another disk, or train without"):
        build(tmp_path / "cache", rows_of(), target)
    assert f"hidden states of {num_positions} positions" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed * 2))
    build(tmp_path / "cache", rows_of(), target)
    written = sum(path.stat().st_size for path in (tmp_path / "cache").glob("states-*"))
    assert needed <= written < needed + 2000


def test_other_targets_layers_and_margins_have_files_of_their_own(
    target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them share a folder; nothing is read that belongs to another."""
    folder = tmp_path / "cache"
    plain = build(folder, rows_of(), target)
    for number, options in enumerate(({"margin": 4}, {"context_layers": (1,)}, {"context_layers": (1, 2)}), start=2):
        build(folder, rows_of(), target, **options)
        assert len(list(folder.glob("states-*"))) == number
    monkeypatch.setattr(target, "fingerprint", "00")
    build(folder, rows_of(), target)
    assert len(list(folder.glob("states-*"))) == 5
    monkeypatch.undo()
    monkeypatch.setattr(target, "forward", None)
    again = build(folder, rows_of(), target)
    assert all(torch.equal(again.row(row).hidden_TD, plain.row(row).hidden_TD) for row in range(7))


def test_damaged_files_are_refused(target, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    build(folder, rows_of(), target)
    (file,) = folder.glob("states-*")
    others = []
    for columns in ({"hidden": [b""]}, {"hidden": [b""] * 6, "context": [b""] * 6}):
        kinds = datasets.Features({name: datasets.Value("large_binary") for name in columns})
        with datasets.arrow_writer.ArrowWriter(path=str(tmp_path / "other"), features=kinds) as writer:
            writer.write_batch(columns)
            writer.finalize()
        others.append((tmp_path / "other").read_bytes())
    for damaged in (file.read_bytes()[:100], file.read_bytes()[:-300], b"", b"nothing of the kind", *others):
        file.unlink()
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"states-.* is damaged .*delete it, and it is made again"):
            build(folder, rows_of(), target)


@pytest.mark.parametrize("train_on", ["answers", "everything"])
def test_batches_of_the_data_module_carry_states(
    target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_on: str
) -> None:
    monkeypatch.setenv("DRAFTER_HOME", str(tmp_path / "home"))
    (tmp_path / "target").mkdir()
    rows = [{"messages": chat(f"a rather long question {i}?", "the answer " + "and " * i)} for i in range(12)]
    data = ChatDataModule(
        train=write_jsonl(tmp_path / "train.jsonl", rows),
        target=save_tiny_target(tmp_path / "target"),
        val=0.2,
        max_length=64,
        batch_tokens=200,
        train_on=train_on,
        cache_hidden_states=str(tmp_path / "states"),
        progress=False,
    )
    with pytest.raises(ValueError, match="the cache is not made yet"):
        data.train_dataloader()
    data.cache_states(target, draft_length=4, context_layers=(1,))
    num_rows = 0
    for loader, part in ((data.train_dataloader(), "train"), (data.val_dataloader(), "val")):
        for batch in loader:
            assert batch.hidden_BTD.shape == (*batch.token_BT.shape, 16) == batch.context_BTC.shape
            first_B = batch.loss_mask_BT.int().argmax(dim=1)
            assert int(first_B.max()) == (1 if part == "train" and train_on == "everything" else 5)
            assert not batch.hidden_BTD[batch.length_B[:, None] <= torch.arange(batch.token_BT.shape[1])].any()
            num_rows += len(batch.length_B)
    assert num_rows == 12
    whole = collate([data.val_rows.row(0)])
    expected_TD = target.forward(whole.token_BT).hidden_BTD[0]
    found_TD = data._states["val"].row(0).hidden_TD
    assert torch.allclose(found_TD, expected_TD[-len(found_TD) :], rtol=1e-2, atol=1e-2)
