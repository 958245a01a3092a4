"""What the README and the card tell to run, in small, on the real default target."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drafter.cli.main import main
from drafter.models.drafter import RecurrentDrafter
from tests.cli.test_decode import rows_of

ROOT = Path(__file__).resolve().parent.parent
TARGET = "smollm2-135m"
PROMPTS = ROOT / "scripts" / "quickstart-prompts.jsonl"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_reduced_quickstart(tmp_path: Path, home: Path, monkeypatch, capsys) -> None:
    """Fetch, answer, 30 training steps from new weights and from the package's drafter, export, decode, compare."""
    monkeypatch.chdir(tmp_path)
    assert main(["target", "fetch", TARGET]) == 0
    file = Path(capsys.readouterr().out.strip().splitlines()[-1])
    assert file.parent == home / "gguf"

    distill = ["distill", "--target", TARGET, "--out", "answers.jsonl", "--num-prompts", "16", "--max-new-tokens", "48"]
    assert main(distill) == 0
    answers = rows_of(tmp_path / "answers.jsonl")
    assert len(answers) == 16
    assert main(distill) == 0  # nothing is done twice
    assert rows_of(tmp_path / "answers.jsonl") == answers

    config = yaml.safe_load((ROOT / "drafter/configs/train/smollm2-135m-quick.yaml").read_text())
    config["train"] = "answers.jsonl"
    config["data"] |= {"val": 0.1, "batch_tokens": 512, "max_length": 256}
    config["trainer"] |= {"max_steps": 30, "max_epochs": -1, "check_val_every_n_epoch": 100}
    (tmp_path / "quick.yaml").write_text(yaml.safe_dump(config))
    warm = ["--model.init_from", str(ROOT / "drafter/assets" / TARGET), "--model.drafter.draft_vocab_size", "8192"]
    for name, options in (("run", []), ("warm", [*warm, "--model.optim.lr", "3e-4"])):
        train = ["train", "--config", "quick.yaml", "--out", name, "--ckpt-path", "last"]
        assert main([*train, *options]) == 0
        assert main(["export", f"{name}/checkpoints/last.ckpt", "--out", f"{name}/drafter"]) == 0
    assert "weights start from" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "run/drafter").iterdir()}
    assert names == {"config.json", "model.safetensors", "run.json", "README.md", "custom_generate"}

    decode = ["decode", "--target", TARGET, "--prompts", str(PROMPTS), "--max-new-tokens", "24", "--dtype", "float32"]
    capsys.readouterr()
    for name, more in (("warm", []), ("run", ["--max-num-seqs", "4", "--tree-size", "12"])):
        assert main([*decode, "--drafter", f"{name}/drafter", "--compare", *more]) == 0
        table = capsys.readouterr().out.splitlines()
        assert len(table) == 11 and all(line.endswith("yes |") for line in table[2:])

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = readme.partition("```python\n")[2].partition("```")[0]
    exec(example, {})
    assert capsys.readouterr().out.count("tokens per step") == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="the script makes .venv")
def test_shipped_drafter_in_small(tmp_path: Path) -> None:
    """Rounds from new weights: parts one after the other, then side by side; a later call goes on, or does nothing."""
    prompts, work = tmp_path / "evaluation.jsonl", tmp_path / "work"
    prompts.write_text('{"prompt": "What is 2 + 2?"}')  # whose answer is short
    places = {"WORK": str(work), "OUT": str(tmp_path / "drafter"), "EVALUATION": str(prompts)}
    logs, small = [], {"PROMPTS": "4", "EPOCHS": "1", "MAX_NEW_TOKENS": "48"}
    for rounds in ("2", "3", "3"):
        command = ["bash", str(ROOT / "scripts" / "train_shipped.sh"), rounds]
        subprocess.run(command, env=os.environ | places | small, check=True)
        logs.append((work / "log").read_text())
    assert logs[1].startswith(logs[0]) and logs[1] == logs[2]
    assert all(f"part-{part}: " in logs[0] for part in (1, 2, 3, 4)) and "part-5: " in logs[1]
    assert [len(rows_of(work / f"acceptance-{number}.jsonl")) for number in (1, 2, 3)] == [3, 6, 6]
    for number in (1, 2):
        shown = (work / f"round-{number}.out").read_text()
        assert "draft vocabulary: 8,192 tokens cover 100.00% of the answers" in shown
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "rounds 1 to 3, from new weights" in card and "the mean of `fall-2` and `fall-3`" in card
    assert card.count("| 3 | 1 of evaluation.jsonl x 128 |") == 6
    assert RecurrentDrafter.from_pretrained(tmp_path / "drafter").config.head == "tied"
