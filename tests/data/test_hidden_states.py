"""The cache of hidden states: the same numbers as a forward, and nobody else's."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drafter.data.hidden_states import CachedStates, cache_states, crop_to_answers
from drafter.data.rows import TokenRows
from tests.data.tiny import tiny_target, token_rows

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
def test_states_are_those_of_a_forward(target, tmp_path: Path, context_layers: tuple[int, ...]) -> None:
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


def test_only_missing_states_are_computed(target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an interrupted cache and of added rows. Other targets, layers and margins have files of their own."""
    rows, folder = rows_of(), tmp_path / "cache"
    forward, calls = target.forward, []
    monkeypatch.setattr(
        target, "forward", lambda *args, **kwargs: calls.append(len(args[0])) or forward(*args, **kwargs)
    )
    build(folder, rows_of(5), target)
    first = build(folder, rows, target)
    assert sum(calls) == 7 and len(first.row(6).hidden_TD) == len(first.rows.row(6).token_T)
    first.files[4].unlink()
    again = build(folder, rows, target)
    assert sum(calls) == 8
    assert all(torch.equal(first.row(row).hidden_TD, again.row(row).hidden_TD) for row in range(7))
    build(folder, rows, target)
    assert sum(calls) == 8
    for number, options in enumerate(({"margin": 1}, {"context_layers": (1,)}, {"context_layers": (1, 2)}), start=1):
        build(folder, rows, target, **options)
        assert sum(calls) == 8 + 7 * number
    monkeypatch.setattr(target, "fingerprint", "00")
    build(folder, rows, target)
    assert sum(calls) == 8 + 7 * 4


def test_the_size_is_told_and_a_full_disk_refused_before_anything_is_written(
    target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    num_positions = int(crop_to_answers(rows_of(), MARGIN).length_R.sum())
    needed = num_positions * 2 * 16 + 7 * 4096
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(OSError, match="make room, name a folder on another disk, or train without"):
        build(tmp_path / "cache", rows_of(), target)
    assert f"hidden states of {num_positions} positions" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    files = build(tmp_path / "cache", rows_of(), target).files
    assert num_positions * 2 * 16 <= sum(path.stat().st_size for path in files) < needed


def test_damaged_files_are_refused(target, tmp_path: Path) -> None:
    states = build(tmp_path / "cache", rows_of(), target)
    data = states.files[0].read_bytes()
    for damaged in (
        data[:20],
        data[:-3],
        b"",
        b"nothing of the kind",
        data.replace(b"hidden_states", b"hidden_STATES"),
    ):
        states.files[0].write_bytes(damaged)
        with pytest.raises(ValueError, match=r"\.safetensors is damaged .*delete it, and it is made again"):
            states.row(0)
