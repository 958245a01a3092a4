"""Exactness by statistics: whole answers of the engine against the exact distribution of a target that is a table.

One answer of 3 tokens for each seed, five settings mixed in every batch; for each setting, chi-square over all V^3
answers. A test rejects at ALPHA = 1e-8 and there are fewer than 100 of them, so that the file raises a false alarm with
a probability below 1e-6. The tests have teeth: noise that is the same at every position fails them.

`pytest -m slow` runs 20,000 seeds for every method, 200,000 with DRAFTER_FULL_TESTS=1.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from drafter.decoding import sampling
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import Plan
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from tests.conftest import size
from tests.reference.table_target import TableTarget, exact_distribution
from tests.reference.warpers import rule, softmax, warp

ALPHA = 1e-8
NUM_SEEDS = size(20_000, 200_000)
FEW_SEEDS = 1024
NUM_TOKENS = 3
V = 5
PROMPT = [1, 2, 3, 1, 2, 3, 1]  # repeats itself, so that lookup has something to propose

TREE: dict[str, Any] = {"beam_width": 3, "draft_length": 3, "tree_size": 8}
CHAIN: dict[str, Any] = {"num_speculative_tokens": 3}
METHODS = {
    label: Plan.of(label.split()[0], max_num_seqs=256, **numbers)
    for label, numbers in {
        "none": {},
        "drafter": TREE,
        "drafter uncoupled": TREE | {"coupled": False},
        "drafter tau": TREE | {"tau": 2.0},
        "lookup": {"tree_size": 8, "num_matches": 3},
        "draft-model": CHAIN,
        "draft-model uncoupled": CHAIN | {"coupled": False},
    }.items()
}
RULES: dict[str, Any] = {"presence_penalty": -0.7, "frequency_penalty": 1.2, "repetition_penalty": 1.3}
SETTINGS = {
    "temperature 0.7": SamplingParams(temperature=0.7, max_new_tokens=NUM_TOKENS),
    "temperature 1.3": SamplingParams(temperature=1.3, max_new_tokens=NUM_TOKENS),
    "top-k": SamplingParams(temperature=1.3, top_k=3, max_new_tokens=NUM_TOKENS),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8, max_new_tokens=NUM_TOKENS),
    "rules": SamplingParams(temperature=1.0, logit_bias={0: 0.8, 3: -0.5}, max_new_tokens=NUM_TOKENS, **RULES),
}


def make_engine(method):
    """An engine for a table target, with a random drafter and a draft model that is like the target, but not quite."""
    torch.manual_seed(0)
    target = TableTarget(V, len(PROMPT), seed=1)
    drafter = RecurrentDrafter(DrafterConfig(vocab_size=V, hidden_size=target.hidden_size, num_res_blocks=1)).eval()
    for parameter in drafter.parameters():
        parameter.requires_grad_(False).normal_(std=0.5)
    draft_model = TableTarget(V, len(PROMPT), seed=1)
    draft_model.table = target.table + 0.7 * torch.randn(target.table.shape)
    return Engine(target, drafter, METHODS[method], draft_model=draft_model)


def sample(engine, num_seeds, settings=SETTINGS):
    """Answers by setting, one for each seed, and tokens per step; the settings take turns in every batch."""
    answers = {name: [] for name in settings}
    names = list(settings) * engine.plan.max_num_seqs
    num_forwards = 0
    for start in range(0, num_seeds, engine.plan.max_num_seqs):
        seeds = range(start, min(start + engine.plan.max_num_seqs, num_seeds))
        params = [replace(settings[name], seed=seed) for name, seed in zip(names, seeds, strict=False)]
        for name, completion in zip(names, engine.generate([PROMPT] * len(seeds), params), strict=False):
            answers[name].append(tuple(completion.token_ids))
            num_forwards += completion.num_target_forwards
    return answers, num_seeds * NUM_TOKENS / num_forwards


def distribution_of(target, params):
    """Probability of every answer."""

    def step(before):
        logits = rule(target.logits_after(before).tolist(), PROMPT, before, params)
        return softmax(warp(logits, params.temperature, params.top_k, params.top_p, params.min_p))

    return exact_distribution(step, V, NUM_TOKENS)


def p_value(answers, probs):
    """Chi-square; answers expected less than 5 times are pooled, an impossible answer gives 0."""
    counts = Counter(answers)
    num_answers = counts.total()
    if any(probs[answer] == 0 for answer in counts):
        return 0.0
    expected, observed = [0.0], [0]
    for prob, count in sorted((prob, counts[answer]) for answer, prob in probs.items() if prob > 0):
        if expected[-1] >= 5:
            expected.append(0.0)
            observed.append(0)
        expected[-1] += prob * num_answers
        observed[-1] += count
    return stats.chisquare(observed, np.array(expected) * (num_answers / sum(expected))).pvalue


def p_values(engine, answers):
    return {name: p_value(answers[name], distribution_of(engine.target, params)) for name, params in SETTINGS.items()}


@pytest.fixture(scope="module")
def autoregressive_answers():
    return sample(make_engine("none"), FEW_SEEDS)[0]


MANY = pytest.param(NUM_SEEDS, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])


@pytest.mark.parametrize("num_seeds", [FEW_SEEDS, MANY])
@pytest.mark.parametrize("method", METHODS)
def test_answers_have_the_exact_distribution(method, num_seeds, autoregressive_answers):
    """Also: drafts are kept, and a seed means the same to all methods."""
    engine = make_engine(method)
    answers, tokens_per_step = sample(engine, num_seeds)
    values = p_values(engine, answers)
    assert min(values.values()) > ALPHA, values
    first = {name: answers[name][: len(wanted)] for name, wanted in autoregressive_answers.items()}
    assert first == autoregressive_answers
    assert tokens_per_step == 1.0 if method == "none" else tokens_per_step > 1.1, tokens_per_step


def test_teeth_noise_without_position(monkeypatch):
    """Noise that is the same at every position gives every token its right distribution, but not the answers."""
    keyed = sampling.gumbel_noise

    def unkeyed(seed_B, position_BT, token_ids, **stream):
        return keyed(seed_B, torch.zeros_like(position_BT), token_ids, **stream)

    monkeypatch.setattr(sampling, "gumbel_noise", unkeyed)
    monkeypatch.setattr(sampling.native, "takes", lambda *_: False)  # the native pick makes its own noise
    engine = make_engine("drafter")
    values = p_values(engine, sample(engine, FEW_SEEDS)[0])
    assert max(values.values()) < ALPHA, values
