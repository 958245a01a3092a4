"""Hidden states on disk, of the cache and of other engines: the same numbers as a forward, and nobody else's."""

import fcntl
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.data.hidden_states import RowsWithStates, cache_states, first_kept, open_stored_states
from drafter.data.rows import TokenRows
from drafter.runtimes.loading import wrap_model
from drafter.targets.target import Target
from tests.data.tiny import states_before_norm, tiny_target, token_rows, write_file, write_speculators, write_vllm
from tests.targets.zoo import TARGETS, build

MARGIN = 3


@pytest.fixture(scope="module")
def target() -> Target:
    made = tiny_target()
    with torch.no_grad():  # a norm that changes something
        made.model.model.norm.weight.copy_(torch.linspace(0.5, 2, made.hidden_size))
    return wrap_model(made.model, made.tokenizer, name="tiny")


def rows_of(num_rows: int = 7) -> TokenRows:
    rows = []
    for row in range(num_rows):
        tokens = [(7 * row + 3 * place) % 200 + 4 for place in range(6 + row)]
        rows.append((tokens, [place >= 2 + row // 2 for place in range(6 + row)]))
    return token_rows(rows)


def cached(folder: Path, rows: TokenRows, target: Target, **options) -> RowsWithStates:
    return cache_states(folder, rows, target, **{"margin": MARGIN, "batch_tokens": 20, **options})


def stored(folder: Path, rows: TokenRows, target: Target, context_layers=()) -> RowsWithStates:
    return open_stored_states(folder, {"train": rows}, target, margin=MARGIN, context_layers=context_layers)["train"]


@pytest.mark.parametrize(
    ("write", "tolerance"),
    [(None, 1e-2), (write_speculators, 1e-5), (partial(write_speculators, is_float8=True), 0.1), (write_vllm, 1e-5)],
)
@pytest.mark.parametrize("layers", [(), (0, 1)])
def test_states_are_those_of_a_forward(
    write, tolerance: float, layers: tuple[int, ...], target: Target, tmp_path: Path
) -> None:
    rows = rows_of()
    if write is not None:
        write(tmp_path, rows, target, layers)
    states = (stored if write else cached)(tmp_path, rows, target, context_layers=layers)
    for row in range(len(rows)):
        token_T, loss_mask_T = rows.row(row)
        output = target.forward(token_T[None], context_layers=layers)
        hidden_TD, context_TC = states.states(row)
        used = slice(int(states.start_X[row]), int(loss_mask_T.nonzero()[-1]))  # what stands behind predicts nothing
        num_used = used.stop - used.start
        assert len(hidden_TD) == int(states.length_X[row]) and hidden_TD.dtype == torch.float32
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(hidden_TD[:num_used], output.hidden_BTD[0, used], **close)
        assert (context_TC is None) == (not layers)
        if layers:
            torch.testing.assert_close(context_TC[:num_used], output.context_BTC[0, used], **close)


def test_only_missing_states_are_computed(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an interrupted cache and of added rows. Other targets, layers and longer margins have files of their own."""
    rows, folder = rows_of(), tmp_path / "cache"
    forward, calls = target.forward, []
    monkeypatch.setattr(target, "forward", lambda *args, **more: calls.append(len(args[0])) or forward(*args, **more))
    cached(folder, rows_of(5), target)
    first = cached(folder, rows, target)
    assert sum(calls) == 7
    first.files[4].write_bytes(first.files[4].read_bytes()[:20])
    with pytest.raises(ValueError, match=r"\.safetensors cannot be read .*: delete it, and make it again"):
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
    num_positions = int((rows_of().length_X - first_kept(rows_of(), MARGIN)).sum())
    needed = num_positions * 2 * 16 + 7 * 4096
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(OSError, match="make room, name a folder on another disk, or train without"):
        cached(tmp_path / "cache", rows_of(), target)
    assert f"hidden states of {num_positions} positions" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    files = cached(tmp_path / "cache", rows_of(), target).files
    assert num_positions * 2 * 16 <= sum(path.stat().st_size for path in files) < needed


def test_a_row_that_training_cut_is_the_beginning_of_its_file(target: Target, tmp_path: Path) -> None:
    rows = rows_of()
    write_speculators(tmp_path, rows, target)
    whole = stored(tmp_path, rows, target)
    cut = token_rows([(t[:8].tolist(), m[:8].tolist()) for t, m in rows.take(range(len(rows)))])
    states = stored(tmp_path, cut, target)
    for row in range(len(rows)):
        found_TD = states.states(row)[0]
        torch.testing.assert_close(found_TD, whole.states(row)[0][: len(found_TD)])


@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "GPTNeoX", "OPT", "Cohere2"])
def test_the_final_norm_is_found(name: str) -> None:
    target = wrap_model(build(TARGETS[name]()), name=name)
    seen = []
    norm = target.runtime.final_norm()
    last = [module for module in target.model.modules() if type(module) is type(norm)][-1]
    hook = last.register_forward_hook(lambda module, given, output: seen.append((given[0], output)))
    target.forward(torch.tensor([[5, 6, 7, 8]]))
    hook.remove()
    torch.testing.assert_close(norm(seen[-1][0]), seen[-1][1])


def test_wrong_folders_and_files(target: Target, tmp_path: Path) -> None:
    rows, folder = rows_of(), tmp_path / "states"
    with pytest.raises(FileNotFoundError, match="--data.hidden_states .*: there is no such folder"):
        stored(folder, rows, target)
    folder.mkdir()
    with pytest.raises(ValueError, match="holds no .safetensors file"):
        stored(folder, rows, target)
    write_speculators(folder, rows, target)
    good, odd = load_file(folder / "hs_3.safetensors"), folder / "x.safetensors"
    states = good["hidden_states"]
    for tensors, message in (
        ({"hidden": states}, "lacks the tensor hidden_states, token_ids"),
        (good | {"hidden_states": states.repeat(1, 1, 2)}, r"hidden_states \[9, 1, 32\] .* last one\) x 16"),
        (good | {"hidden_states": states.flatten()}, r"hidden_states \[144\] .* but must be tokens x layers"),
    ):
        save_file(tensors, odd)
        with pytest.raises(ValueError, match=f"x.safetensors.* {message}"):
            stored(folder, rows, target)
    odd.unlink()
    os.mkfifo(odd)  # to open one would wait for a writer
    with pytest.raises(ValueError, match="x.safetensors is no regular file"):
        stored(folder, rows, target)
    odd.unlink()
    with pytest.raises(ValueError, match="but must be tokens x layers .the 2 of --model.drafter.context_layers"):
        stored(folder, rows, target, context_layers=(0, 1))
    save_file(good | {"hidden_states": states * float("nan")}, folder / "hs_3.safetensors")
    with pytest.raises(ValueError, match="hs_3.safetensors: the hidden states hold numbers that are not finite"):
        stored(folder, rows, target).states(3)


def test_every_row_is_checked_token_by_token(target: Target, tmp_path: Path) -> None:
    rows = rows_of()
    write_speculators(tmp_path, rows, target)
    states = stored(tmp_path, rows, target)
    token_T = rows.row(4).token_T.clone()
    token_T[6] = 5
    write_file(tmp_path / "hs_4.safetensors", states_before_norm(target, token_T, ()), token_T)
    with pytest.raises(ValueError, match="changed while it was in use: its tokens are no longer those of row 4"):
        states.states(4)
    message = r"1 of 7 rows have no stored states, such as row 4 .10 tokens.: another chat template"
    with pytest.raises(ValueError, match=message):
        stored(tmp_path, rows, target)


def test_states_of_another_model_or_behind_the_norm_are_refused(target: Target, tmp_path: Path) -> None:
    rows, other = rows_of(), tiny_target()
    with torch.no_grad():
        for weight in other.model.parameters():
            weight.add_(torch.randn_like(weight) * weight.std())
    write_speculators(tmp_path / "other", rows, other)
    with pytest.raises(ValueError, match="the final states differ from those of target 'tiny' by .*: another model"):
        stored(tmp_path / "other", rows, target)
    for row, (token_T, _) in enumerate(rows.take(range(len(rows)))):
        state_TAD = target.forward(token_T[None]).hidden_BTD[0, :, None]
        write_file(tmp_path / f"normed/{row}.safetensors", state_TAD, token_T)
    with pytest.raises(ValueError, match="already behind the final norm"):
        stored(tmp_path / "normed", rows, target)


def test_a_file_under_its_writers_lock_is_refused(target: Target, tmp_path: Path) -> None:
    write_vllm(tmp_path, rows_of(), target)
    with next(tmp_path.glob("*.lock")).open("w") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is still being written .its lock is held.: wait for the engine"):
            stored(tmp_path, rows_of(), target)
    assert len(stored(tmp_path, rows_of(), target).files) == 7
