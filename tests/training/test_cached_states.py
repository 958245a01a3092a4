"""Training on hidden states that were stored before: the losses of training from our own forward."""

from pathlib import Path

import datasets
import pytest
import torch

from drafter.data.module import ChatDataModule
from drafter.data.rows import TokenRows
from drafter.runtimes.loading import wrap_model
from drafter.training.module import Teacher
from tests.data.engine_files import write_vllm
from tests.data.tiny import chat, save_tiny_target, tiny_target, write_jsonl
from tests.training.fakes import Losses, make_module, make_trainer


@pytest.mark.filterwarnings("error:Converting a tensor with requires_grad")
def test_training_from_stored_states_is_training_from_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose answers begin far behind the first token. No training asks the target, and a full cache is as good."""
    made, layers, rows = tiny_target(), (0, 1), [chat(f"a rather long question {i}?", "and " * i) for i in range(20)]
    with torch.no_grad():
        made.model.model.norm.weight.copy_(torch.linspace(0.5, 2, made.hidden_size))
    target = wrap_model(made.model.to(torch.bfloat16), made.tokenizer, name="tiny")  # as the cache keeps it
    settings = {
        "train": write_jsonl(tmp_path / "train.jsonl", [{"messages": row} for row in rows]),
        **{"target": save_tiny_target(tmp_path), "val": 0.4, "max_length": 64, "batch_tokens": 200},
    }
    plain = ChatDataModule(**settings)
    plain.setup()
    both = datasets.concatenate_datasets([rows.dataset for rows in plain.rows.values()])
    write_vllm(tmp_path / "vllm", TokenRows(both), target, layers)
    monkeypatch.setattr(Teacher, "forward", lambda *_: pytest.fail("the target was run although its states are there"))
    losses, cache = [], {"cache_hidden_states": str(tmp_path / "cache")}
    for source in (cache, cache, {"hidden_states": str(tmp_path / "vllm")}):
        torch.manual_seed(3)
        data, seen = ChatDataModule(**settings, **source), Losses()
        module = make_module(target, data=data, drafter={"context": "fused", "context_layers": layers})
        trainer = make_trainer(tmp_path, max_steps=6, check_val_every_n_epoch=1, callbacks=[seen])
        trainer.fit(module, datamodule=data)
        losses.append(seen.seen)
    own, again, stored = losses
    assert len(own) > 6 and again == own
    assert stored == pytest.approx(own, rel=2e-4), "a forward over one row rounds a little otherwise than over many"
    with pytest.raises(ValueError, match="--data.hidden_states .* is read and --data.cache_hidden_states .* computed"):
        ChatDataModule(**settings, hidden_states="a", cache_hidden_states="b")
