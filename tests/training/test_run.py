"""``drafter train`` and ``drafter export``, as functions, on a target in a folder."""

import csv
import fcntl
import os
import pickle
import re
import signal
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch
from lightning.pytorch.callbacks import timer
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file

from drafter.integrations.export import export, model_card
from drafter.models.checkpoint import drafter_of_checkpoint, read_trained
from drafter.models.drafter import RecurrentDrafter
from drafter.runtimes.loading import load_target
from drafter.training import module as training_module
from drafter.training import run as run_module
from drafter.training.module import DrafterModule
from drafter.training.options import TrainOptions
from drafter.training.run import make_trainer
from drafter.utils.options import read_options
from tests.conftest import Refused
from tests.data.tiny import chat, save_target, tiny_target, write_jsonl
from tests.targets.tiny_gguf import write_gguf

NUM_STEPS = 8
TOKENS_PER_STEP = ("--decode-prompts", "8", "--decode-tokens", "6")
TWO_EPOCHS = (
    *("--trainer.max_steps", "-1", "--trainer.max_epochs", "2", "--trainer.val_check_interval", "1.0"),
    *("--trainer.check_val_every_n_epoch", "1", "--model.optim.optimizer", "muon"),
)


def make_place(folder: Path, num_rows: int = 60) -> Path:
    """A folder with a target and conversations of many lengths."""
    save_target(tiny_target(), folder / "target")
    turns = [(f"Count on from {i}", " ".join(str(i + j) for j in range(2 + i % 9))) for i in range(num_rows)]
    write_jsonl(folder / "data.jsonl", [{"messages": chat(*turn)} for turn in turns])
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("train"))


def words(place: Path, run: Path, *more: str) -> list[str]:
    return [
        *("--target", str(place / "target"), "--train", str(place / "data.jsonl"), "--data.val", "0.1"),
        *("--data.max_length", "64", "--data.batch_tokens", "256"),
        *("--model.drafter.draft_vocab_size", "50", "--model.drafter.draft_length", "3"),
        *("--model.objective.depth_rates", "[1.0, 0.7, 0.5]", "--model.objective.shared_tokens", "16"),
        *("--model.optim.warmup_steps", "2", "--trainer.max_steps", str(NUM_STEPS), "--trainer.devices", "1"),
        *("--trainer.accelerator", "cpu", "--out", str(run), "--trainer.log_every_n_steps", "2"),
        *("--trainer.val_check_interval", "4", "--trainer.check_val_every_n_epoch", "null"),
        *("--trainer.num_sanity_val_steps", "0", "--trainer.enable_progress_bar", "false", *more),
    ]


def options_of(words: list[str]) -> TrainOptions:
    options = read_options(TrainOptions, words, "drafter train")
    assert options is not None
    return options


def train(words: list[str]) -> None:
    run_module.train(options_of(words))


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """A finished run."""
    run = place / "whole"
    train(words(place, run))
    return run


@pytest.fixture(scope="module")
def trained_epochs(place: Path) -> Path:
    """A finished run of two epochs."""
    run = place / "whole-epochs"
    train(words(place, run, *TWO_EPOCHS))
    return run


def assert_same_end(whole: Path, resumed: Path) -> None:
    """Weights, the optimizer's state, and what was measured of them, bit for bit."""
    one, other = (read_trained(folder / "checkpoints" / "last.ckpt") for folder in (whole, resumed))
    for name in ("num_positions", "global_step", "metrics"):
        assert one[name] == other[name], name
    assert all(torch.equal(other["state_dict"][name], value) for name, value in one["state_dict"].items())
    states = [checkpoint["optimizer_states"][0]["state"] for checkpoint in (other, one)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert read_trained(resumed / "checkpoints" / "best.ckpt")["metrics"]["val/loss"] == one["metrics"]["val/loss"]


def logged(run: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of a figure in the CSV files of all starts of a run."""
    files = sorted((run / "logs").glob("version_*/metrics.csv"))
    rows = [row for file in files for row in csv.DictReader(file.read_text().splitlines())]
    return [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]


def test_a_run_leaves_checkpoints_curves_and_its_config(trained: Path) -> None:
    checkpoint = read_trained(trained / "checkpoints" / "last.ckpt")
    assert checkpoint["global_step"] == NUM_STEPS and checkpoint["num_positions"] > 0
    assert checkpoint["hyper_parameters"]["optim"]["warmup_steps"] == 2
    assert (trained / "checkpoints" / "best.ckpt").is_file()
    again = ["--config", str(trained / "config.yaml")]
    assert options_of(again) == options_of(words(trained.parent, trained))
    for name in ("train/loss", "train/grad_norm", "train/positions_per_s", "train/lr", "val/loss", "val/top8_d2"):
        assert logged(trained, name), name


def test_what_a_run_takes_is_told(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the first step and after the first ones; the bar moves with every step of a CPU."""
    more = words(place, tmp_path / "run", "--trainer.enable_progress_bar", "true")
    bar: Any = make_trainer(options_of(more)).progress_bar_callback
    assert bar.refresh_rate == 1
    train(words(place, tmp_path / "run"))
    shown = capsys.readouterr().out
    assert re.search(rf"[0-9]+ positions a pass, {NUM_STEPS} steps in all; memory: [0-9.]+ GB so far and about", shown)
    assert re.search(r"[0-9]+ positions are too few for new weights to gain anything: make more answers", shown)
    assert re.search(r"[0-9]+ positions/s: 0.00 hours to go, .* peak memory [0-9.]+ GB", shown)


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "32-true"), ("bfloat16", "bf16-mixed")])
def test_a_run_takes_the_fastest_precision(dtype: str, precision: str, place: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_module, "training_dtype", lambda device: dtype)
    assert make_trainer(options_of(words(place, place / "fast"))).precision == precision
    own = words(place, place / "fast", "--trainer.precision", "32-true")
    assert make_trainer(options_of(own)).precision == "32-true"


def test_a_file_of_integers_teaches_as_it_is_decoded(place: Path, home: Path, tmp_path, monkeypatch) -> None:
    """By the native step, which computes the cached states and the decoded texts; nothing is converted on the disk."""
    file, seen = str(write_gguf(tmp_path / "tiny.gguf", matrices="Q8_0")), []
    rows = [{"prompt_token_ids": [5, 6, 7 + i], "token_ids": [8 + i % 5, 9, 10, 2]} for i in range(60)]
    write_jsonl(tmp_path / "ids.jsonl", rows)
    target = load_target(file, device="cpu")
    monkeypatch.setattr(training_module.Teacher, "forward", lambda *_: pytest.fail("the states are cached"))
    monkeypatch.setattr(DrafterModule, "on_train_start", lambda module: seen.append(module.teacher.target))
    more = ("--data.cache_hidden_states", str(tmp_path / "states"), "--train", str(tmp_path / "ids.jsonl"))
    train(words(place, tmp_path / "run", *TOKENS_PER_STEP, "--target", file, *more))
    assert [(each.runtime.name, each.fingerprint) for each in seen] == [("native", target.fingerprint)]
    assert "output_weight_VD" not in vars(seen[0].runtime), "rows beyond the draft vocabulary are not held"
    assert not list(home.rglob("*.safetensors"))
    stored = load_file(next((tmp_path / "states").glob("*.safetensors")))
    hidden_TD = target.forward(stored["token_ids"][None]).hidden_BTD[0]
    assert torch.equal(stored["hidden_states"][:, 0], hidden_TD.bfloat16())


def test_a_run_that_ends_before_max_steps_says_why(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--trainer.max_steps", "99", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2")
    train(words(place, place / "short", *more))
    assert "done: 2 steps, as --trainer.max_epochs 1 allows (-1: no limit); best" in capsys.readouterr().out
    train(words(place, place / "whole-too", "--trainer.max_steps", "2"))
    assert "done: 2 steps; best" in capsys.readouterr().out


def test_the_best_checkpoint_may_be_the_one_of_most_tokens_per_step(place: Path) -> None:
    by_tokens = ("--checkpoint.monitor", "val/tokens_per_step")
    with pytest.raises(ValueError, match="val/tokens_per_step is measured by decoding: add --decode-prompts 8"):
        train(words(place, place / "by-tokens", *by_tokens))
    with pytest.raises(ValueError, match=r"could not find the monitored key .*val/los"):
        train(words(place, place / "by-nothing", "--checkpoint.monitor", "val/los"))
    train(words(place, place / "by-tokens", *by_tokens, *TOKENS_PER_STEP))
    content = torch.load(place / "by-tokens" / "checkpoints" / "best.ckpt", weights_only=True)
    (state,) = (value for name, value in content["callbacks"].items() if name.startswith("ModelCheckpoint"))
    most = max(value for _, value in logged(place / "by-tokens", "val/tokens_per_step"))
    assert float(state["best_model_score"]) == pytest.approx(most)


@pytest.mark.parametrize(
    ("stop", "hook", "limit"),
    [
        (signal.SIGINT, "on_train_batch_start", "steps"),  # in the middle of an epoch, between two validations
        (signal.SIGTERM, "validation_step", "steps"),
        (signal.SIGTERM, "validation_step", "epochs"),
    ],
)
def test_interrupted_and_resumed_gives_the_same_weights(
    stop: signal.Signals, hook: str, limit: str, place: Path, request: pytest.FixtureRequest, monkeypatch
) -> None:
    """A step or a validation comes to its end. All tensors are equal, the optimizer's too; no validation runs twice."""
    whole = request.getfixturevalue("trained" if limit == "steps" else "trained_epochs")
    more = () if limit == "steps" else TWO_EPOCHS
    half = read_trained(whole / "checkpoints" / "last.ckpt")["global_step"] // 2
    step, saved = (half, half) if hook == "validation_step" else (half - 2, half - 1)
    run, work = place / f"stopped-{hook}-{limit}", getattr(DrafterModule, hook)

    def stop_here(module: DrafterModule, *batch: Any) -> None:
        if module.trainer.global_step == step:
            os.kill(os.getpid(), stop)
        work(module, *batch)

    monkeypatch.setattr(DrafterModule, hook, stop_here)
    with pytest.raises(KeyboardInterrupt if stop == signal.SIGINT else SystemExit) as error:
        train(words(place, run, *more))
    assert getattr(error.value, "code", 143) == 143
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert read_trained(run / "checkpoints" / "last.ckpt")["global_step"] == saved
    assert len(logged(run, "val/loss")) == (saved == half)
    monkeypatch.undo()
    train(words(place, run, *more, "--ckpt-path", "last"))
    assert_same_end(whole, run)
    assert logged(run, "val/loss") == logged(whole, "val/loss")


def test_a_folder_holds_one_training(place: Path, trained: Path, tmp_path: Path, refused: Refused) -> None:
    before = (trained / "checkpoints" / "last.ckpt").read_bytes()
    refused(["train", *words(place, trained, "--model.optim.lr", "0.5")], "holds an earlier training: go on with")
    assert (trained / "checkpoints" / "last.ckpt").read_bytes() == before
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    with (tmp_path / "run" / ".lock").open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        refused(["train", *words(place, tmp_path / "run")], "another training runs in")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_minutes_end_a_run_and_its_schedule(place: Path, tmp_path: Path, monkeypatch) -> None:
    """Steps of six seconds, one minute: the time of both starts counts, and the rate has fallen when the time ends."""
    rates: list[float] = []
    clock = SimpleNamespace(now=0.0)

    def tick(module: DrafterModule, *_: object) -> None:
        rates.append(module.trainer.optimizers[0].param_groups[0]["lr"])
        clock.now += 6

    monkeypatch.setattr(DrafterModule, "on_train_batch_start", tick)
    fake = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=time.perf_counter)
    monkeypatch.setattr(training_module, "time", fake)
    more = ("--model.optim.minutes", "1", "--model.optim.decay_share", "1", "--model.optim.lr", "1.0e-3")
    train(words(place, tmp_path / "run", *more, "--trainer.max_steps", "4"))
    num_first = len(rates)
    train(words(place, tmp_path / "run", *more, "--trainer.max_steps", "1000", "--ckpt-path", "last"))
    assert num_first == 4 and len(rates) == 10
    assert rates[1] == 1e-3 and rates[-1] < 0.2e-3 and rates[5:] == sorted(rates[5:], reverse=True)


def test_max_time_is_for_each_start(place: Path, trained_epochs: Path, monkeypatch) -> None:
    """Steps of ten seconds, fifty seconds a start, in epochs of more steps than that."""
    run, clock, starts = place / "timed", SimpleNamespace(now=0.0), 0

    def tick(module: DrafterModule, *_: object) -> None:
        clock.now += 10

    monkeypatch.setattr(DrafterModule, "on_train_batch_start", tick)
    monkeypatch.setattr(timer, "time", SimpleNamespace(monotonic=lambda: clock.now))
    last, step = read_trained(trained_epochs / "checkpoints" / "last.ckpt")["global_step"], 0
    while step < last:
        more = ("--trainer.max_time", "00:00:00:50", "--ckpt-path", "last")
        train(words(place, run, *TWO_EPOCHS, *more))
        step, starts = read_trained(run / "checkpoints" / "last.ckpt")["global_step"], starts + 1
        assert step == min(5 * starts, last)
    assert starts > 3
    assert_same_end(trained_epochs, run)


def test_the_steps_behind_the_last_validation_are_saved_too(place: Path, tmp_path: Path, monkeypatch) -> None:
    """Of a run that names no folder, in one with a stranger's link. A start with nothing left removes killed files."""
    monkeypatch.chdir(tmp_path)
    Path("thesis.txt").write_text("years of work")
    best = Path("runs", "drafter", "checkpoints", "best.ckpt")
    best.parent.mkdir(parents=True)
    best.symlink_to(tmp_path / "thesis.txt")
    given = words(place, tmp_path, "--trainer.max_steps", "6")  # validated after step 4
    flag = given.index("--out")
    given = given[:flag] + given[flag + 2 :]
    train(given)
    assert Path("thesis.txt").read_text() == "years of work" and read_trained(best)["global_step"] == 4
    assert read_trained(best.with_name("last.ckpt"))["global_step"] == 6
    for name in ("best", "last"):
        (best.parent / f".{name}.ckpt.killed.tmp").mkdir()
        (best.parent / f".{name}.ckpt.killed.tmp" / "new").touch()
    train([*given, "--ckpt-path", "last"])
    assert sorted(path.name for path in best.parent.iterdir()) == ["best.ckpt", "last.ckpt"]


def test_full_disk_at_a_checkpoint_leaves_the_last_one(place: Path, tmp_path, monkeypatch, refused: Refused) -> None:
    """Which is that of the last validation, without a new best."""
    save, folder = torch.save, tmp_path / "run" / "checkpoints"

    def until_full(content: dict, stream: BinaryIO) -> None:
        if content["global_step"] > 8:
            stream.write(b"half a checkpoint")
            raise OSError(28, "No space left on device")
        save(content, stream)

    monkeypatch.setattr(torch, "save", until_full)
    more = ("--model.optim.lr", "1e-30", "--trainer.max_steps", "12")
    refused(["train", *words(place, tmp_path / "run", *more)], "No space left", "the one before it is intact")
    assert [read_trained(folder / f"{name}.ckpt")["global_step"] for name in ("best", "last")] == [4, 8]
    assert {file.name for file in folder.iterdir()} == {"best.ckpt", "last.ckpt"}


def test_weights_can_start_from_another_run(place: Path, trained: Path) -> None:
    exported = export(trained / "checkpoints" / "last.ckpt", place / "start", dtype="float32")
    run = place / "continued"
    train(words(place, run, "--model.init_from", str(exported), "--model.optim.lr", "1e-30"))
    before, after = drafter_of_checkpoint(exported), drafter_of_checkpoint(run / "checkpoints" / "last.ckpt")
    for (name, old), new in zip(before.state_dict().items(), after.state_dict().values(), strict=True):
        torch.testing.assert_close(old, new, msg=name)
    assert before.config.embedding_scale == after.config.embedding_scale != 1
    with pytest.raises(ValueError, match="head 'tied'.*'full'"):
        train(words(place, place / "full", "--model.init_from", str(exported), "--model.drafter.head", "full"))
    # A tied head takes another number of draft tokens, and an interrupted run of such a start goes on.
    for size, num in (("40", 40), ("null", before.config.vocab_size)):
        fewer = words(place, place / f"tokens-{size}", "--model.init_from", str(exported), "--model.optim.lr", "1e-30")
        fewer += ["--model.drafter.draft_vocab_size", size]
        train(fewer)
        after = drafter_of_checkpoint(place / f"tokens-{size}" / "checkpoints" / "last.ckpt")
        assert len(after.draft_token_ids_R) == after.config.num_outputs == num
        torch.testing.assert_close(before.head.weight, after.head.weight)
        train([*fewer, "--ckpt-path", "last", "--trainer.max_steps", str(NUM_STEPS + 1)])
    more = ("--ckpt-path", str(trained / "checkpoints" / "last.ckpt"), "--model.drafter.num_res_blocks", "1")
    with pytest.raises(ValueError, match="num_res_blocks 2.*asks for 1"):
        train(words(place, place / "other", *more))


def test_checkpoints_that_cannot_be_resumed_are_one_line(place: Path, trained: Path, tmp_path, refused) -> None:
    whole = (trained / "checkpoints" / "last.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "parts.ckpt").write_bytes(whole.replace(b"PK\x01\x02", b"PK\x01\x00"))  # the list of its parts
    (tmp_path / "pickle.ckpt").write_bytes(pickle.dumps(Path("/")))
    # Values that only Lightning or torch reads, the last one at the first step.
    sound = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)
    torch.save(sound | {"loops": {"validate_loop": {}}}, tmp_path / "other.ckpt")
    torch.save({name: sound[name] for name in sound if name != "num_processes"}, tmp_path / "former.ckpt")
    torch.save(sound | {"optimizer_states": ["x"]}, tmp_path / "optimizer.ckpt")
    sound["optimizer_states"][0]["state"][0]["exp_avg"] = 0.5
    torch.save(sound, tmp_path / "step.ckpt")
    for file in sorted(tmp_path.glob("*.ckpt")):
        more = ("--trainer.max_steps", str(NUM_STEPS + 1), "--ckpt-path", str(file))
        refused(["train", *words(place, tmp_path / "run", *more)], file.name)
    more = ("--ckpt-path", str(trained / "checkpoints" / "last.ckpt"), "--model.optim.optimizer", "muon")
    refused(["train", *words(place, tmp_path / "run", *more)], "adam", "--model.optim.optimizer is muon")


@pytest.mark.parametrize(
    ("more", "fragments"),
    [
        (["--trainer.max_steps", "-5"], ["max_steps", "-5"]),
        (["--trainer.precision", "16-mixed"], ["--trainer.precision 16-mixed", "use bf16-mixed or 32-true"]),
        (["--trainer.acelerator", "cpu"], ["--trainer.acelerator", "did you mean accelerator"]),
        (["--trainer.default_root_dir", "x"], ["--trainer.default_root_dir", "give --out"]),
        (["--data.val", "2"], ["--data.val 2", "must be a share"]),
        (["--data.max_length", "300"], ["--data.batch_tokens 256 must be at least --data.max_length 300"]),
        (["--model.drafter", "[" * 5000], ["model.drafter"]),
        (["--model.drafter.draft_vocab_size", "5000"], ["draft_vocab_size", "5000"]),
        (["--ckpt-path", "nowhere.ckpt"], ["checkpoint", "nowhere.ckpt"]),
        (["--model.init_from", "nowhere"], ["nowhere"]),
    ],
)
def test_mistakes_are_one_line(more: list[str], fragments: list[str], place: Path, refused, tmp_path) -> None:
    refused(["train", *words(place, tmp_path / "run", *more)], *fragments)


def test_export_holds_everything_and_decodes(place: Path, trained: Path, tmp_path) -> None:
    out = export(trained / "checkpoints" / "best.ckpt", tmp_path / "drafter")
    assert {"config.json", "model.safetensors", "README.md", "run.json"} <= {file.name for file in out.iterdir()}
    drafter = RecurrentDrafter.from_pretrained(out)
    target = load_target(str(place / "target"), device="cpu")
    assert drafter.bind(target).dtype == torch.bfloat16 and drafter.config.target_fingerprint == target.fingerprint
    assert set(target.eos_token_ids) <= set(drafter.draft_token_ids_R.tolist())
    card = (out / "README.md").read_text()
    assert f"{drafter.config.num_outputs:,} of {target.vocab_size:,} tokens" in card and "depth_rates" in card
    drafter.config.target_name = "<img src=x onerror=alert(1)>`\n# Title"
    hostile = model_card(drafter, {"training": {}, "data": {}, "trained_positions": 1, "steps": 1})
    assert "# Recurrent drafter for  img src=x onerror=alert(1) # Title\n" in hostile
    exact = export(trained / "checkpoints" / "best.ckpt", out, dtype="float32")
    assert exact == out and RecurrentDrafter.from_pretrained(out).dtype == torch.float32


def test_export_refuses_what_it_cannot_read_and_files_of_others(trained: Path, tmp_path) -> None:
    checkpoint, damaged = trained / "checkpoints" / "last.ckpt", tmp_path / "damaged.ckpt"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="exists and is no exported drafter"):
        export(checkpoint, tmp_path / "mine")
    sound = torch.load(checkpoint, weights_only=True)
    state, bias = sound["state_dict"], "drafter.cell.u.bias"
    for content, fragment in (
        ({"drafter_config": {}, "state_dict": {}, "extra": Path("/")}, "cannot be read: .* numbers and text alone"),
        ({"drafter_config": {}, "state_dict": {}, "hyper_parameters": {"optim": {(1, 2): 3}}}, "settings are no JSON"),
        ({"state_dict": {}}, "drafter_config: Field required"),
        (sound | {"state_dict": {}}, "missing"),
        (sound | {"state_dict": state | {"drafter.head.weight": torch.zeros(2)}}, "head.weight"),
        (sound | {"drafter_config": {**sound["drafter_config"], "hidden_size": "x"}}, "hidden_size"),
        (sound | {"metrics": {"val/loss": "x"}}, "val/loss"),
        (sound | {"num_positions": []}, "num_positions"),
        (sound | {"state_dict": state | {bias: torch.zeros(16).to_sparse()}}, "cell.u.bias' is sparse"),
        (sound | {"state_dict": state | {bias: torch.zeros(16, device="meta")}}, "has no numbers"),
    ):
        torch.save(content, damaged)
        with pytest.raises(ValueError, match=fragment):
            export(damaged, tmp_path / "out")
    with zipfile.ZipFile(checkpoint) as plain, zipfile.ZipFile(damaged, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(ValueError, match="parts are packed"):
        export(damaged, tmp_path / "out")
    exported = export(checkpoint, tmp_path / "exported")
    (exported / "notes.txt").write_text("years of work")
    with pytest.raises(ValueError, match="notes.txt"):  # it would be removed with the old version
        export(checkpoint, exported)
    assert drafter_of_checkpoint(exported).config.vocab_size
    assert sorted(file.name for file in tmp_path.iterdir()) == ["damaged.ckpt", "exported", "mine"]


# -- Weights & Biases, without a key: the run's file, read back --------------------------------------------------------


@pytest.fixture(scope="module")
def no_key(place: Path) -> Iterator[None]:
    """A user who never heard of Weights & Biases."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(place / "netrc"))
        patch.setenv("WANDB_DATA_DIR", str(place / "staging"))
        yield


def assert_holds(file: Path, *texts: str) -> None:
    """A run's file holds texts; wandb's own process may still be writing when ``finish`` returns."""
    deadline = time.monotonic() + 60
    while missing := [text for text in texts if text.encode() not in file.read_bytes()]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.1)


def run_files(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))


@pytest.fixture(scope="module")
def wandb_run(place: Path, no_key: None) -> Path:
    """A run of eight steps, logged offline, then continued for four more."""
    folder = place / "wandb-run"
    train(words(place, folder, *TOKENS_PER_STEP, "--wandb", "tests"))
    more = ("--trainer.max_steps", "12", "--ckpt-path", "last")
    train(words(place, folder, *TOKENS_PER_STEP, "--wandb", "tests", *more))
    return folder


def test_metrics_and_config_are_in_the_file(wandb_run: Path) -> None:
    names = ("train/loss", "train/lr", "train/positions_per_s", "val/loss", "val/top8_d2", "val/tokens_per_step")
    assert_holds(run_files(wandb_run)[0], *names, "val/accepted_d3", "max_length", "versions")
    tokens = logged(wandb_run, "val/tokens_per_step")
    accepted = [logged(wandb_run, f"val/accepted_d{depth}") for depth in (1, 2, 3)]
    assert [step for step, _ in tokens] == [3, 7, 11]
    # An answer's last step may end with an accepted draft token, so the target's own token is not always there.
    for (_, rate), *shares in zip(tokens, *accepted, strict=True):
        assert 1 <= rate <= 1 + sum(share for _, share in shares)


def test_a_resumed_training_goes_on_in_the_last_run(wandb_run: Path) -> None:
    first, second = run_files(wandb_run)
    assert first.name == second.name
    assert [step for step, _ in logged(wandb_run, "train/loss")] == [1, 3, 5, 7, 9, 11], "as in a run without a stop"


@pytest.mark.usefixtures("no_key")
def test_a_key_or_a_mode_of_the_users_leaves_the_mode_to_wandb(place: Path, tmp_path: Path, monkeypatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(run_module, "WandbLogger", lambda **options: made.append(options) or CSVLogger(tmp_path))
    given = words(place, tmp_path / "run", "--wandb")
    for has_key, mode in ((True, ""), (False, "disabled"), (False, "")):
        monkeypatch.setenv("WANDB_MODE", mode)
        monkeypatch.setattr("wandb.login", lambda has_key=has_key, **_: has_key)
        make_trainer(options_of([*given, "tests"]))
    assert [options["mode"] for options in made] == [None, "disabled", "offline"]
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ValueError, match="WANDB_MODE=online, but no Weights & Biases key is configured"):
        make_trainer(options_of([*given, "tests"]))
    with pytest.raises(ValueError, match="--wandb 'me/mine' is no project name"):
        make_trainer(options_of([*given, "me/mine"]))
