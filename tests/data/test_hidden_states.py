"""Hidden states on disk: the same numbers as a forward, and nobody else's."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.data.hidden_states import RowsWithStates, cache_states, first_kept
from drafter.data.rows import TokenRows
from drafter.targets.target import Target
from tests.data.tiny import tiny_target, token_rows

MARGIN = 3


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def rows_of(num_rows: int = 7) -> TokenRows:
    rows = []
    for row in range(num_rows):
        tokens = [(7 * row + 3 * place) % 200 + 4 for place in range(6 + row)]
        rows.append((tokens, [place >= 2 + row // 2 for place in range(6 + row)]))
    return token_rows(rows)


def cached(folder: Path, rows: TokenRows, target: Target, **options) -> RowsWithStates:
    return cache_states(folder, rows, target, **{"margin": MARGIN, "batch_tokens": 20, **options})


@pytest.mark.parametrize("layers", [(), (0, 1)])
def test_states_are_those_of_a_forward(layers: tuple[int, ...], target: Target, tmp_path: Path) -> None:
    rows = rows_of()
    states = cached(tmp_path, rows, target, context_layers=layers)
    for row in range(len(rows)):
        token_T, loss_mask_T = rows.row(row)
        output = target.forward(token_T[None], context_layers=layers)
        hidden_TD, context_TC = states.states(row)
        used = slice(int(states.start_X[row]), int(loss_mask_T.nonzero()[-1]))  # what stands behind predicts nothing
        num_used = used.stop - used.start
        assert len(hidden_TD) == int(states.length_X[row]) and hidden_TD.dtype == torch.float32
        torch.testing.assert_close(hidden_TD[:num_used], output.hidden_BTD[0, used], rtol=1e-2, atol=1e-2)
        assert (context_TC is None) == (not layers)
        if layers:
            torch.testing.assert_close(context_TC[:num_used], output.context_BTC[0, used], rtol=1e-2, atol=1e-2)


def test_only_missing_states_are_computed(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an interrupted cache and of added rows. Other targets, layers and longer margins have files of their own."""
    rows, folder = rows_of(), tmp_path / "cache"
    forward, calls = target.forward, []
    monkeypatch.setattr(target, "forward", lambda *args, **more: calls.append(len(args[0])) or forward(*args, **more))
    cached(folder, rows_of(5), target)
    first = cached(folder, rows, target)
    assert sum(calls) == 7
    tokens, states = (load_file(first.files[4])[name] for name in ("token_ids", "hidden_states"))
    first.files[4].write_bytes(first.files[4].read_bytes()[:20])
    with pytest.raises(ValueError, match=r"\.safetensors cannot be read .*: delete it, and make it again"):
        first.states(4)
    for state_TAD, token_T in ((states, tokens + 1), (states / 0, tokens), (states[:-2], tokens[:-2])):
        save_file({"hidden_states": state_TAD, "token_ids": token_T}, first.files[4])
        with pytest.raises(ValueError, match="holds other tokens, or numbers that are not finite"):
            first.states(4)
    first.files[4].unlink()
    again = cached(folder, rows, target)
    assert sum(calls) == 8
    assert all(torch.equal(first.states(row)[0], again.states(row)[0]) for row in range(7))
    early = cached(folder, rows, target, margin=1)  # the files hold these positions, and two more
    assert sum(calls) == 8 and all(torch.equal(first.states(row)[0][2:], early.states(row)[0]) for row in (5, 6))
    for number, options in enumerate(({"context_layers": (1,)}, {"context_layers": (1, 2)}), start=1):
        cached(folder, rows, target, **options)
        assert sum(calls) == 8 + 7 * number
    monkeypatch.setattr(target, "fingerprint", "00")
    cached(folder, rows, target)
    assert sum(calls) == 8 + 7 * 3


def test_the_size_is_told_and_a_full_disk_refused_before_anything_is_written(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    num_positions = int((rows_of().length_X - first_kept(rows_of(), 17)).sum())
    needed = num_positions * 2 * 16 + 7 * 4096
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(OSError, match="make room, name a folder on another disk, or train without"):
        cached(tmp_path / "cache", rows_of(), target)
    assert f"hidden states of {num_positions} positions" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    files = cached(tmp_path / "cache", rows_of(), target).files
    assert num_positions * 2 * 16 <= sum(path.stat().st_size for path in files) < needed
