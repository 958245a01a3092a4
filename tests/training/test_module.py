"""Training itself, on a tiny target's own greedy text; the target as a teacher, or its states as the cache has them."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.runtimes.loading import wrap_model
from drafter.training.losses import count_better
from drafter.training.module import Teacher
from tests.data.tiny import tiny_target, write_jsonl
from tests.engine.oracle import assert_lossless
from tests.targets.zoo import TARGETS, build
from tests.training.fakes import (
    ANSWER,
    batch_of,
    fit,
    greedy_rows,
    loader_of,
    losses_of,
    make_module,
    make_target,
    make_trainer,
)


@pytest.mark.parametrize(("precision", "num_steps", "least"), [("32-true", 100, 2.5), ("bf16-mixed", 60, 2)])
def test_overfits_the_targets_own_text(precision: str, num_steps: int, least: float, tmp_path) -> None:
    """Wrong shifts or masks could not: the text is varied, and the engine makes the drafts."""
    target = make_target()
    rows = greedy_rows(target)
    assert len({token for row in rows for token in row[3:]}) > 30
    module = fit(tmp_path, target, num_steps, precision=precision)
    drafter, tree = copy.deepcopy(module.drafter).eval(), {"beam_width": 2, "draft_length": 3, "tree_size": 7}
    engine = Engine(target, drafter, EngineConfig(**tree, copying=False))
    assert assert_lossless(engine, [(row[:3], ANSWER) for row in rows]) > least, "tokens per step"
    assert all(p.dtype == torch.float32 for p in module.parameters())
    assert module.teacher.weight_RD.dtype == (torch.float32 if precision == "32-true" else torch.bfloat16)


@pytest.mark.parametrize(
    ("drafter", "objective"),
    [
        ({"head": "full", "draft_vocab_size": None}, {"cross_entropy": 1.0, "kl": 0.0}),
        ({"head": "tied", "draft_vocab_size": 100, "block_rank": 4}, {"depth_rates": (1.0, 0.8, 0.5)}),
        ({"context": "fused", "context_layers": (0, 1, 2)}, {"shared_tokens": 16}),
    ],
)
def test_gradient_reaches_the_drafter_and_only_it(drafter: dict, objective: dict, tmp_path) -> None:
    target = make_target()
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    module = make_module(target, drafter=drafter, objective=objective)
    seen: dict[str, bool] = {}

    def look(*_: object) -> None:
        seen.update({name: bool(p.grad.abs().max() > 0) for name, p in module.named_parameters() if p.grad is not None})

    module.on_before_optimizer_step = look
    trainer = make_trainer(tmp_path, max_steps=3, limit_val_batches=1)
    first = {}
    module.on_fit_start = lambda: first.update({n: p.detach().clone() for n, p in module.named_parameters()})
    batch = batch_of(greedy_rows(target))
    trainer.fit(module, loader_of(*[batch] * 3), loader_of(batch))
    assert set(seen) == set(first) and all(seen.values())
    assert all(not torch.equal(p, first[n]) for n, p in module.named_parameters())
    # The target: the same bits, no gradient, evaluation mode, not in the module or its state.
    after = target.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters()) and not target.model.training
    assert all(name.startswith("drafter.") for name in module.state_dict())
    assert math.isfinite(float(trainer.callback_metrics["val/loss"]))


def test_loss_is_that_of_each_pair_by_itself(tmp_path) -> None:
    """The batch's loss against drafter and target called position by position with plain loops."""
    target = make_target()
    rows = [row[: 12 - i % 3] for i, row in enumerate(greedy_rows(target, 4))]
    module = make_module(target, drafter={"draft_vocab_size": 40})
    batch = batch_of(rows)
    make_trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(module, loader_of(batch))
    drafter, ids = module.drafter, module.drafter.draft_token_ids_R.tolist()
    total = num = 0.0
    with torch.no_grad():
        for row in rows:
            hidden = target.forward(torch.tensor([row])).hidden_BTD[0]
            for t in range(len(row)):
                state = drafter.init_state(hidden[t])
                for k in range(1, 4):
                    if t + 1 + k >= len(row):
                        break
                    state = drafter.step(state, target.runtime.embed(torch.tensor(row[t + k])))
                    if t + 2 < 3 or row[t + 1 + k] not in ids:
                        break
                    log_p = target.logits(hidden[t + k])[ids].log_softmax(dim=-1)
                    log_q = drafter.logits(hidden[t], state).log_softmax(dim=-1)
                    total += float((log_p.exp() * (log_p - log_q)).sum())
                    num += 1
        batch, pairs = module.on_before_batch_transfer(batch, 0)
        loss = module.loss(*module.inputs(batch, pairs), pairs, is_exact=True)
    assert float(loss) == pytest.approx(total / num, rel=1e-4)


def test_validation_logs_shares_of_the_whole_set(tmp_path) -> None:
    """Over batches of different sizes: the mean over pairs, not over batches."""
    target = make_target()
    module = make_module(target, objective={"cross_entropy": 1.0}, optim={"lr": 0.02})
    rows = greedy_rows(target)
    batches = [batch_of(part) for part in (rows[:1], rows[1:])]
    trainer = make_trainer(tmp_path, max_steps=4, val_check_interval=4)
    trainer.fit(module, loader_of(*[batch_of(rows)] * 30), loader_of(*batches))
    ranks: list[list[torch.Tensor]] = []
    for batch in batches:
        batch, pairs = module.on_before_batch_transfer(batch, 0)
        feature_PF, _ = module.inputs(batch, pairs)
        rank_P = count_better(feature_PF, module._output_rows(), pairs.label_P, module.objective)
        ranks.append(list(rank_P.split(list(pairs.num_starts))))
    for depth, top in ((0, 1), (2, 8)):
        share = (torch.cat([rank_P[depth] for rank_P in ranks]) < top).float().mean()
        assert trainer.callback_metrics[f"val/top{top}_d{depth + 1}"] == pytest.approx(float(share))


def test_divergence_names_step_and_checkpoint(tmp_path) -> None:
    target = make_target()
    module = make_module(target)
    trainer = make_trainer(tmp_path, max_steps=9, limit_val_batches=0, enable_checkpointing=True)

    def poison(_: object, index: int) -> None:
        if index == 3:
            module.drafter.head.weight.data.fill_(float("nan"))

    module.on_train_batch_start = poison
    with pytest.raises(ValueError, match=r"not finite at step 3; no checkpoint was written yet.*--model.optim.lr"):
        trainer.fit(module, loader_of(*[batch_of(greedy_rows(target))] * 9))
    module._norm = 7, torch.tensor(torch.inf), None  # as CUDA leaves the norm of the last step
    with pytest.raises(ValueError, match="not finite at step 7"):
        trainer.save_checkpoint(tmp_path / "bad.ckpt")
    assert not (tmp_path / "bad.ckpt").exists()


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Cohere", "GPTJ"])
@torch.no_grad()
def test_logits_are_the_targets_own_where_they_are_large(name: str) -> None:
    """Of a part of the vocabulary; plain, soft-capped, scaled, with a bias. Large logits alone show a soft cap."""
    model = build(TARGETS[name]())
    norm = getattr(model.base_model, "norm", None) or model.base_model.ln_f
    norm.weight.fill_(40.0)
    if model.get_output_embeddings().bias is not None:
        model.get_output_embeddings().bias.copy_(torch.arange(96) / 8)
    target = wrap_model(model, name=name)
    ids_R = torch.arange(3, 90, 3)
    hidden_CD = target.forward(torch.arange(1, 21)[None]).hidden_BTD[0]
    wanted_CR = target.model(torch.arange(1, 21)[None]).logits[0, :, ids_R]
    assert name != "Gemma2" or 29 < wanted_CR.abs().max() <= 30
    shape = {"vocab_size": 96, "hidden_size": target.hidden_size, "draft_vocab_size": len(ids_R)}
    drafter = RecurrentDrafter(DrafterConfig(**shape, head="tied")).set_draft_token_ids(ids_R).bind(target)
    teacher = Teacher(target, drafter, torch.float32)
    torch.testing.assert_close(teacher.logits(hidden_CD), wanted_CR, rtol=1e-4, atol=1e-4)


def test_training_from_stored_states_is_training_from_the_target(tmp_path: Path, monkeypatch) -> None:
    """Once the states are there no training asks the target, and a full cache is as good."""
    target = tiny_target()
    answers = [[8 + (i * j) % 50 for j in range(6 + i)] for i in range(20)]
    rows = [{"prompt_token_ids": [5, 6 + i, 7], "token_ids": answer} for i, answer in enumerate(answers)]
    names, fused = [write_jsonl(tmp_path / "train.jsonl", rows)], {"context": "fused", "context_layers": (0, 1)}
    settings: dict[str, Any] = {"val": 0.4, "max_length": 64, "batch_tokens": 200}
    live = losses_of(tmp_path, names, target, fused, **settings)
    monkeypatch.setattr(Teacher, "forward", lambda *_: pytest.fail("the target was run although its states are there"))
    settings["cache_hidden_states"] = str(tmp_path / "cache")
    own, again = (losses_of(tmp_path, names, target, fused, **settings) for _ in range(2))
    assert len(own) > 6 and again == own
    assert own == pytest.approx(live, rel=2e-2), "the cache rounds to bfloat16"
