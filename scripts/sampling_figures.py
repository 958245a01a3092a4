#!/usr/bin/env python3
"""The figures of docs/sampling.md that no benchmark makes, as rows of JSON in docs/results/sampling.jsonl.

What noise and picks cost, what coupling brings on the tests' table target, and how far the published rule is from the
target's distribution. One thread; the rows of an earlier run are replaced.

    python -m scripts.sampling_figures             (from the repository's root: it uses the tests' references)
"""

import json
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafter import SamplingParams
from drafter.decoding.sampling import Noise, gumbel_noise, make_warp, pick_nodes
from drafter.kernels import native
from drafter.reference import draft_tree, path_to
from drafter.runtimes.loading import load_target
from drafter.utils.provenance import run_record
from tests.engine.test_exactness import NUM_TOKENS, V, make_engine, sample
from tests.reference.table_target import exact_distribution
from tests.reference.warpers import softmax

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results" / "sampling.jsonl"
NUM_NODES, NUM_POSITIONS = 20, 5
TEXT = "The quick brown fox jumps over the lazy dog, and then it goes home to write a letter about the weather in May."
FILTERS = {
    "temperature 0": SamplingParams(),
    "temperature 1": SamplingParams(temperature=1.0),
    "top-k 50": SamplingParams(temperature=1.0, top_k=50),
    "top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "top-k 50, top-p 0.9": SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
    "min-p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
    "top-p 0.95, temperature 1.3": SamplingParams(temperature=1.3, top_p=0.95),
}


def main() -> None:
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    if native.library() is not None:
        native.set_num_threads(1)
    record = run_record()
    shared = {key: record[key] for key in ("machine", "versions", "date")}
    rows = [*costs(), *coupling(), *published_rule()]
    RESULTS.write_text("".join(json.dumps(row | shared) + "\n" for row in rows), encoding="utf-8")
    print(*map(json.dumps, rows), sep="\n")


@torch.inference_mode()
def costs() -> list[dict[str, Any]]:
    """CPU milliseconds of five positions' noise, a forward over 20 tokens, and the picks of these tokens with noise."""
    target = load_target("smollm2-135m", is_trainable=True)
    token_BT = torch.tensor([target.encode(TEXT)[:NUM_NODES]])
    assert token_BT.shape[1] == NUM_NODES
    logits_BNV = target.logits(target.forward(token_BT).hidden_BTD)
    seed_B = torch.tensor([7])
    position_BT = torch.arange(NUM_POSITIONS)[None]
    token_V = torch.arange(target.vocab_size)
    depth_BN = torch.arange(NUM_NODES)[None] % NUM_POSITIONS
    timed: dict[str, Callable[[], Any]] = {
        "noise": lambda: gumbel_noise(seed_B, position_BT, token_V),
        "target forward with logits": lambda: target.logits(target.forward(token_BT).hidden_BTD),
    }
    for name, params in FILTERS.items():
        noise = Noise(seed_B, torch.tensor([NUM_NODES])) if params.temperature else None
        timed[f"picks: {name}"] = partial(pick_nodes, logits_BNV, depth_BN, noise, make_warp([params], target.device))
    return [{"figure": "cost", "what": name, "cpu_ms": round(cpu_ms(function), 2)} for name, function in timed.items()]


def cpu_ms(function: Callable[[], Any], num_runs: int = 15) -> float:
    """Median processor time of a call, which other programs hardly change."""
    function()
    seconds = []
    for _ in range(num_runs):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return sorted(seconds)[num_runs // 2] * 1e3


def coupling(num_seeds: int = 4096) -> list[dict[str, Any]]:
    """Tokens per step on the table target at temperature 1."""
    settings = {"temperature 1": SamplingParams(temperature=1.0, max_new_tokens=NUM_TOKENS)}
    rows = []
    for method in ("drafter uncoupled", "drafter", "drafter tau", "draft-model uncoupled", "draft-model"):
        _, tokens_per_step = sample(make_engine(method), num_seeds, settings)
        rows.append({"figure": "coupling", "what": method, "tokens_per_step": round(tokens_per_step, 2)})
    return rows


def beams_of(q: np.ndarray, root: int, width: int, length: int) -> list[list[int]]:
    """The tokens of each beam that a search of a drafter q[token, next] ends with."""
    log_q = torch.from_numpy(q).log()
    nodes = draft_tree(
        lambda *given: (None, log_q[given[2]]), lambda _, logits: logits, width, length, None, None, root
    )
    ends = (i for i, node in enumerate(nodes) if node.depth == length)
    return [[nodes[j].token for j in path_to(nodes, i)[1:]] for i in ends]


def published_step(
    p: np.ndarray, q: np.ndarray, root: int, beams: list[list[int]], generator: np.random.Generator
) -> list[int]:
    """Tokens of one step for a target p[token, next] and a drafter q[token, next], both of order 1."""
    best: list[int] = []
    rejected_at: tuple[int, ...] | None = None
    for beam in beams:
        before, accepted = root, 0
        for token in beam:
            if generator.random() >= p[before, token] / q[before, token]:
                break
            before, accepted = token, accepted + 1
        if rejected_at is None or accepted > len(best):
            best = beam[:accepted]
            rejected_at = tuple(beam[accepted : accepted + 1])
    last = best[-1] if best else root
    weights = np.maximum(0.0, p[last] - q[last]) if rejected_at else p[last]
    return [*best, int(generator.choice(len(weights), p=weights / weights.sum()))]


def published_answers(
    p: np.ndarray, q: np.ndarray, num_tokens: int, num_answers: int, width: int, length: int
) -> np.ndarray:
    """[num_answers, num_tokens] token ids, behind the token 0."""
    generator = np.random.default_rng(0)
    beams = [beams_of(q, token, width, length) for token in range(len(q))]
    answers = np.empty((num_answers, num_tokens), dtype=np.int64)
    for row in answers:
        tokens = [0]
        while len(tokens) <= num_tokens:
            tokens += published_step(p, q, tokens[-1], beams[tokens[-1]], generator)
        row[:] = tokens[1 : num_tokens + 1]
    return answers


def published_rule(num_answers: int = 20_000) -> list[dict[str, Any]]:
    """Total variation between the target and the published acceptance of beams (arXiv 2403.09919, section 4).

    Each token of a beam is accepted with probability min(1, p / q), the beam with the longest accepted prefix wins, and
    the next token is drawn from norm(max(0, p - q)), or from p after a whole beam. A beam-searched token is no sample
    of q.
    """
    rows = []
    for likeness in (0.0, 0.5, 0.9, 1.0):
        for seed in range(3):
            generator = np.random.default_rng(seed)
            target_logits, noise = generator.normal(size=(2, V, V))
            p_VV = np.array([softmax(row) for row in target_logits])
            q_VV = np.array([softmax(row) for row in likeness * target_logits + (1 - likeness) * noise])
            answers = published_answers(p_VV, q_VV, NUM_TOKENS, num_answers, width=3, length=3)
            counts = Counter(map(tuple, answers.tolist()))
            probs = exact_distribution(lambda before, p=p_VV: p[before[-1] if before else 0], V, NUM_TOKENS)
            distance = sum(abs(counts[answer] / num_answers - prob) for answer, prob in probs.items()) / 2
            row = {"figure": "published rule", "likeness": likeness, "target": seed + 1}
            rows.append(row | {"distance": round(distance, 2)})
    return rows


if __name__ == "__main__":
    main()
