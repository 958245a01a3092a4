"""Drafts that fail or never help end no answer and cost little."""

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.decoding.proposer import Proposer, RowState
from drafter.decoding.sampling import Noise
from drafter.decoding.tree import NodeList
from drafter.engine import engine as engine_module
from drafter.engine.engine import Engine
from drafter.engine.settings import Plan
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers.draft_model import DraftModelProposer
from drafter.proposers.options import Drafting
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.engine.oracle import tiny_target
from tests.engine.test_replace import untrained

PROMPTS = prompts_for(4, seed=5)
PARAMS = [SamplingParams(max_new_tokens=20, temperature=0.9 * (n % 2), seed=n, ignore_eos=True) for n in range(4)]


@dataclass(frozen=True, kw_only=True)
class FailingChain(Drafting):
    method: ClassVar = "failing"
    tree_size: int = 4
    failure: str

    def build(self, *_: object) -> Proposer:
        return Chain(self.failure)


class Chain(Proposer):
    """A chain of three tokens, of which every other step fails in one of two ways."""

    def __init__(self, failure: str) -> None:
        super().__init__((1, 1, 1))
        self._failure, self._step = failure, 0

    def draft(self, rows: RowState, noise: Noise | None) -> NodeList:
        token_BM = torch.ones(len(rows.root_B), 3, dtype=torch.int64)
        score_BM = torch.tensor([-0.1, -0.2, -0.3]).expand(len(token_BM), -1)
        self._step += 1
        if self._step % 2 and self._failure == "raises":
            raise RuntimeError("a product refuses NaN")
        if self._step % 2:
            score_BM = torch.full_like(score_BM, torch.nan)
        return NodeList(token_BM, torch.tensor([-1, 0, 1]).expand(len(token_BM), -1), score_BM)


@pytest.mark.parametrize("failure", ["raises", "is not finite"])
def test_failing_drafts_end_no_answer(failure: str, caplog: pytest.LogCaptureFixture) -> None:
    target = shared_target()
    wanted = Engine(target, config=Plan.of("none")).generate(PROMPTS, PARAMS)
    engine = Engine(target, config=Plan(drafting=FailingChain(failure=failure), max_num_seqs=2))
    with caplog.at_level(logging.WARNING):
        found = engine.generate(PROMPTS, PARAMS)
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert engine.num_failed_drafts > 5 and caplog.text.count("goes on without drafts") == 1


def test_a_failing_draft_model_ends_no_answer_by_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a product refuses NaN")

    monkeypatch.setattr(DraftModelProposer, "propose", fail)
    plan = Plan.of("draft-model", verify="rejection", num_speculative_tokens=3)
    engine = Engine(tiny_target(), config=plan, draft_model=tiny_target(1))
    (found,) = engine.generate([[3, 1, 4]], SamplingParams(max_new_tokens=10, ignore_eos=True))
    (wanted,) = Engine(tiny_target(), config=Plan.of("none")).generate([[3, 1, 4]], PARAMS[0])
    assert found.token_ids == wanted.token_ids[:10] and engine.num_failed_drafts == 10


def test_a_drafter_of_extreme_weights_is_refused_at_loading_and_at_reload() -> None:
    extreme: RecurrentDrafter = untrained()
    with torch.no_grad():
        for weight in extreme.parameters():
            weight.uniform_(-1e20, 1e20)
    plan = Plan.of("drafter", beam_width=4, draft_length=3, tree_size=8)
    with pytest.raises(ValueError, match="not finite"):
        Engine(shared_target(), extreme, plan)
    engine, good = Engine(shared_target(), trained_drafter(), plan), trained_drafter()
    with pytest.raises(ValueError, match="not finite"):
        engine.replace_drafter(extreme)
    assert engine.drafter is good


def test_drafting_in_vain_ends_until_another_drafter_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The forwards get smaller, and one line says why."""
    monkeypatch.setattr(engine_module, "_MOST_VAIN_STEPS", 8)
    useless = untrained()
    plan = Plan.of("drafter", beam_width=1, draft_length=2, tree_size=3, copying=False)
    engine = Engine(shared_target(), useless, plan)
    with torch.no_grad():
        useless.head.weight.zero_()  # drafts the first token, whatever the text
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    with caplog.at_level(logging.WARNING):
        engine.generate(PROMPTS, params)
    assert caplog.text.count("decoding goes on without drafts; `drafter tune`") == 1
    engine.replace_drafter(trained_drafter())
    assert sum(engine.generate(PROMPTS[:1], params)[0].num_accepted) > 0
