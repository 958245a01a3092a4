"""Hidden states of other engines: the same numbers as a forward, found by tokens, refused with a reason."""

import fcntl
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.data.hidden_states import crop_to_answers
from drafter.data.rows import TokenRows
from drafter.data.stored_states import StoredFiles, StoredStates, open_stored_states
from drafter.targets.target import Target
from tests.data.engine_files import states_before_norm, write_file, write_speculators, write_vllm
from tests.data.test_hidden_states import MARGIN, rows_of
from tests.data.tiny import tiny_target, token_rows
from tests.targets.zoo import TARGETS, build

WRITERS = {"speculators": write_speculators, "vllm": write_vllm}


@pytest.fixture(scope="module")
def target() -> Target:
    made = tiny_target()
    with torch.no_grad():  # a norm that changes something
        made.model.model.norm.weight.copy_(torch.linspace(0.5, 2, made.hidden_size))
    return Target.from_model(made.model, made.tokenizer, name="tiny")


def read(folder: Path, rows: TokenRows, target: Target, **options) -> StoredStates:
    files = StoredFiles(folder, longest=int(rows.length_R.max()), progress=False)
    return open_stored_states(files, rows, target, **{"margin": MARGIN, **options})


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("layers", [(), (0, 1)])
def test_states_are_those_of_a_forward(name: str, layers: tuple[int, ...], target: Target, tmp_path: Path) -> None:
    rows = rows_of()
    WRITERS[name](tmp_path / "states", rows, target, layers)
    states = read(tmp_path / "states", rows, target, context_layers=layers)
    crop = crop_to_answers(rows, MARGIN)
    for row in range(len(rows)):
        token_T, loss_mask_T = rows.row(row)
        output = target.forward(token_T.long()[None], context_layers=layers)
        found = states.row(row)
        used = slice(int(crop.start_R[row]), int(loss_mask_T.nonzero()[-1]))  # what stands behind predicts nothing
        num_used = used.stop - used.start
        assert len(found.hidden_TD) == len(crop.row(row)[0])
        torch.testing.assert_close(found.hidden_TD[:num_used], output.hidden_BTD[0, used])
        assert (found.context_TC is None) == (not layers)
        if layers:
            torch.testing.assert_close(found.context_TC[:num_used], output.context_BTC[0, used])
    plain = read(tmp_path / "states", rows, target).row(2)  # the layers are not asked for
    assert plain.context_TC is None
    torch.testing.assert_close(plain.hidden_TD, states.row(2).hidden_TD)


def test_float8_states_come_back_by_their_scales(target: Target, tmp_path: Path) -> None:
    rows = rows_of()
    write_speculators(tmp_path / "exact", rows, target)
    write_speculators(tmp_path / "float8", rows, target, is_float8=True)
    exact, rounded = read(tmp_path / "exact", rows, target), read(tmp_path / "float8", rows, target)
    for row in range(len(rows)):
        one, two = exact.row(row).hidden_TD, rounded.row(row).hidden_TD
        assert 0 < (one - two).norm() / one.norm() < 0.05


def test_a_row_that_training_cut_is_the_beginning_of_its_file(target: Target, tmp_path: Path) -> None:
    rows = rows_of()
    write_speculators(tmp_path, rows, target)
    cut = token_rows([(t[:8].tolist(), m[:8].tolist()) for t, m in map(rows.row, range(len(rows)))])
    states = read(tmp_path, cut, target)
    whole = read(tmp_path, rows, target)
    for row in range(len(rows)):
        torch.testing.assert_close(states.row(row).hidden_TD, whole.row(row).hidden_TD[: len(states.rows.row(row)[0])])


@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "GPTNeoX", "OPT", "Cohere2"])
def test_the_final_norm_is_found(name: str) -> None:
    target = Target.from_model(build(TARGETS[name]()), name=name)
    seen = []
    norm = target.final_norm()
    last = [module for module in target.model.modules() if type(module) is type(norm)][-1]
    hook = last.register_forward_hook(lambda module, given, output: seen.append((given[0], output)))
    target.forward(torch.tensor([[5, 6, 7, 8]]))
    hook.remove()
    torch.testing.assert_close(norm(seen[-1][0]), seen[-1][1])


def damage(path: Path, **changes) -> None:
    save_file({**load_file(path), **changes}, path)


def test_wrong_folders_and_files(target: Target, tmp_path: Path) -> None:
    rows, folder = rows_of(), tmp_path / "states"
    with pytest.raises(FileNotFoundError, match="--data.hidden_states .*: there is no such folder"):
        read(folder, rows, target)
    folder.mkdir()
    with pytest.raises(ValueError, match="holds no .safetensors file"):
        read(folder, rows, target)
    write_speculators(folder, rows, target)
    path = folder / "hs_3.safetensors"
    good = load_file(path)

    (folder / "x.safetensors").write_bytes(b"no such format")
    with pytest.raises(ValueError, match="x.safetensors cannot be read"):
        read(folder, rows, target)
    save_file({"hidden": good["hidden_states"]}, folder / "x.safetensors")
    with pytest.raises(ValueError, match="lacks the tensor hidden_states, token_ids"):
        read(folder, rows, target)
    save_file(good | {"token_ids": good["token_ids"][1:].clone()}, folder / "x.safetensors")
    with pytest.raises(
        ValueError, match=r"hidden_states \[9, 1, 16\] must be tokens x layers x hidden size, for the 8"
    ):
        read(folder, rows, target)
    save_file(good | {"hidden_states": good["hidden_states"].to(torch.float8_e4m3fn)}, folder / "x.safetensors")
    with pytest.raises(ValueError, match="float8 need the tensor hidden_states_scales"):
        read(folder, rows, target)
    (folder / "x.safetensors").unlink()

    os.mkfifo(folder / "y.safetensors")  # to open one would wait for a writer
    with pytest.raises(ValueError, match="y.safetensors is no regular file"):
        read(folder, rows, target)
    (folder / "y.safetensors").unlink()
    damage(path, hidden_states=good["hidden_states"].repeat(1, 1, 2))
    with pytest.raises(ValueError, match="hs_3.safetensors holds states of 32 values, the target's have 16"):
        read(folder, rows, target)
    damage(path, hidden_states=good["hidden_states"] * float("nan"))
    with pytest.raises(ValueError, match="hs_3.safetensors: the hidden states hold numbers that are not finite"):
        read(folder, rows, target).row(3)
    damage(path, hidden_states=good["hidden_states"])
    with pytest.raises(ValueError, match="holds 1 layers, expected are the 2 of --model.drafter.context_layers"):
        read(folder, rows, target, context_layers=(0, 1))


def test_every_row_is_checked_token_by_token(target: Target, tmp_path: Path) -> None:
    rows = rows_of()
    write_speculators(tmp_path, rows, target)
    token_T = rows.row(4)[0].clone()
    token_T[6] = 5
    write_file(tmp_path / "hs_4.safetensors", states_before_norm(target, token_T, ()), token_T)
    message = r"1 of 7 rows have no stored states, such as row 4 .10 tokens.: another chat template"
    with pytest.raises(ValueError, match=message):
        read(tmp_path, rows, target)
    write_file(tmp_path / "hs_4.safetensors", states_before_norm(target, rows.row(4)[0], ()), rows.row(4)[0])
    states = read(tmp_path, rows, target)
    write_file(tmp_path / "hs_4.safetensors", states_before_norm(target, token_T, ()), token_T)
    with pytest.raises(ValueError, match="changed while it was in use: its tokens are no longer those of row 4"):
        states.row(4)


def test_states_of_another_model_or_behind_the_norm_are_refused(target: Target, tmp_path: Path) -> None:
    rows = rows_of()
    other = tiny_target()
    with torch.no_grad():
        for weight in other.model.parameters():
            weight.add_(torch.randn_like(weight) * weight.std())
    write_speculators(tmp_path / "other", rows, other)
    with pytest.raises(ValueError, match="the final states differ from those of target 'tiny' by .*: another model"):
        read(tmp_path / "other", rows, target)
    for row in range(len(rows)):
        (tmp_path / "normed").mkdir(exist_ok=True)
        token_T = rows.row(row)[0]
        write_file(
            tmp_path / f"normed/{row}.safetensors", target.forward(token_T.long()[None]).hidden_BTD[0, :, None], token_T
        )
    with pytest.raises(ValueError, match="already behind the final norm"):
        read(tmp_path / "normed", rows, target)


def test_a_file_under_its_writers_lock_is_refused(target: Target, tmp_path: Path) -> None:
    rows = rows_of()
    write_vllm(tmp_path, rows, target)
    with next(tmp_path.glob("*.lock")).open("w") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is still being written .its lock is held.: wait for the engine"):
            read(tmp_path, rows, target)
    assert read(tmp_path, rows, target).row(0) is not None
