"""Training on cached hidden states: the drafter is given what decoding will give it."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from drafter.data.module import ChatDataModule
from drafter.data.rows import TokenRows
from drafter.targets.target import Target
from tests.data.engine_files import write_speculators, write_vllm
from tests.data.tiny import chat, save_tiny_target, tiny_target, write_jsonl
from tests.training.fakes import Losses, make_module, make_trainer


def make_data(folder: Path, cache: Path | None, **options: Any) -> ChatDataModule:
    """Rows whose answers begin far behind the first token."""
    rows = [{"messages": chat(f"a rather long question {i}?", "the answer " + "and " * i)} for i in range(20)]
    return ChatDataModule(
        train=write_jsonl(folder / "train.jsonl", rows),
        target=save_tiny_target(folder),
        val=0.4,
        max_length=64,
        batch_tokens=200,
        cache_hidden_states=None if cache is None else str(cache),
        **options,
    )


@pytest.mark.parametrize("layers", [(), (0, 1)])
def test_training_from_stored_states_is_training_from_our_own(tmp_path: Path, layers: tuple[int, ...]) -> None:
    made = tiny_target()
    with torch.no_grad():
        made.model.model.norm.weight.copy_(torch.linspace(0.5, 2, made.hidden_size))
    target = Target.from_model(made.model.to(torch.bfloat16), made.tokenizer, name="tiny")  # as the cache keeps it
    plain = make_data(tmp_path, None)
    rows = TokenRows(datasets.concatenate_datasets([plain.train_rows.dataset, plain.val_rows.dataset]))
    write_speculators(tmp_path / "speculators", rows, target, layers)
    write_vllm(tmp_path / "vllm", rows, target, layers)
    drafter = {"context": "fused", "context_layers": layers} if layers else {"context": "last"}
    losses = {}
    for name in ("own", "speculators", "vllm"):
        stored = None if name == "own" else str(tmp_path / name)
        data = make_data(tmp_path, tmp_path / "cache" if name == "own" else None, hidden_states=stored)
        torch.manual_seed(3)
        module, seen = make_module(target, drafter=drafter), Losses()
        make_trainer(tmp_path, max_steps=6, check_val_every_n_epoch=1, callbacks=[seen]).fit(module, datamodule=data)
        losses[name] = seen.seen
    assert len(losses["own"]) > 6
    for name in ("speculators", "vllm"):  # a forward over one row rounds a little otherwise than a forward over many
        assert losses[name] == pytest.approx(losses["own"], rel=2e-4), name


def test_one_source_of_states(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--data.hidden_states .* is read and --data.cache_hidden_states .* computed"):
        make_data(tmp_path, tmp_path / "cache", hidden_states=str(tmp_path))
