"""The readable reference: the toy drafter by its numbers, vmap for beams and batch, acceptance rules, whole answers."""

import itertools
from functools import partial

import pytest
import torch
from torch.func import vmap

from drafter import reference
from drafter.reference import Node, sample_sequence


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def toy_step(llm_state, rnn_state, token):
    """[d], [h], [] -> [h], []: rnn_state' = rnn_state + token, token' = token + sum(rnn_state')."""
    return rnn_state + token, token + (rnn_state + token).sum()


def test_toy_drafter_with_beams_and_a_batch():
    """[b, d], [b, w] -> [b, w, l + 1]; docs/architecture.md has the beams alone."""
    chains = [[0, 0, 0, 0], [100, 500, 2900, 16900], [200, 1000, 5800, 33800]]
    beams = vmap(partial(sample_sequence, toy_step, 3, 4), in_dims=(None, 0))
    tokens = torch.tensor([0.0, 100.0, 200.0])
    assert vmap(beams, in_dims=(0, 0))(torch.zeros(2, 8), tokens.repeat(2, 1)).tolist() == [chains, chains]


def random_weights(v=11, d=5, h=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(v, d), (h, d), (h, h), (h,), (v, d + h)]
    return reference.Weights(*(torch.randn(*shape, generator=generator) for shape in shapes))


def test_rnn_step_is_the_formula():
    weights, llm_state, rnn_state = random_weights(), torch.randn(5), torch.randn(6)
    state, token = reference.rnn_step(weights, llm_state, rnn_state, torch.tensor(3))
    before = weights.w @ weights.embedding[3] + weights.u @ rnn_state + weights.b
    torch.testing.assert_close(state, before / (1 + (-before).exp()))
    logits = weights.head[:, :5] @ llm_state + weights.head[:, 5:] @ state
    assert token.item() == logits.argmax().item()


def rank_by_log_prob(depth, logits):
    return logits.double().log_softmax(-1)


def test_draft_tree_by_hand():
    """A drafter that knows only its last token: P(next | token) from a table; width 2, two steps."""
    table = torch.tensor([[0.1, 0.6, 0.3], [0.8, 0.1, 0.1], [0.25, 0.25, 0.5]]).log()

    def expand(llm_state, rnn_state, token):
        return rnn_state, table[token]

    nodes = reference.draft_tree(expand, rank_by_log_prob, 2, 2, torch.zeros(1), torch.zeros(1), 0)
    assert [(n.token, n.parent, n.depth) for n in nodes] == [(0, 0, 0), (1, 0, 1), (2, 0, 1), (0, 1, 2), (2, 2, 2)]
    assert [round(2.718281828**n.score, 4) for n in nodes] == [1.0, 0.6, 0.3, 0.48, 0.15]
    assert [n.token for n in reference.keep_best_nodes(nodes, 3)] == [0, 1, 0]
    assert [(n.token, n.parent) for n in reference.keep_best_nodes(nodes, 4)] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    assert reference.keep_final_beams(nodes, 2) == nodes


def test_the_rule_of_two_models_draws_its_tokens_from_p():
    """Over all drafts of two tokens and a fine grid of coins; q has a token that p lacks."""
    p, q = (torch.randn(rows, 3).softmax(-1) for rows in (3, 2))
    p[0] = torch.tensor([0.0, 0.3, 0.7])
    coins, first, both = (torch.arange(200) + 0.5) / 200, torch.zeros(3), torch.zeros(())
    for one, two in itertools.product(range(3), repeat=2):
        draft, weight = torch.tensor([one, two]), q[0, one] * q[1, two]
        kept = vmap(partial(reference.accept_chain, p, q, draft))(torch.cartesian_prod(coins, coins))
        share = [float((kept == number).float().mean()) for number in range(3)]
        first[one] += weight * (share[1] + share[2])
        first += weight * share[0] * reference.bonus_distribution(p, q, torch.tensor(0))
        both += weight * share[2]
    torch.testing.assert_close(first, p[0], atol=5e-3, rtol=0)
    kept_of = [torch.minimum(p[row], q[row]).sum() for row in (0, 1)]
    torch.testing.assert_close(both, kept_of[0] * kept_of[1], atol=5e-3, rtol=0)
    torch.testing.assert_close(reference.bonus_distribution(p, q, torch.tensor(2)), p[2])


@pytest.mark.parametrize("keep", [reference.keep_best_nodes, reference.keep_final_beams])
def test_any_drafter_gives_the_autoregressive_tokens(keep):
    """A target that hashes its text: no drafter can know it, and none can change it."""
    weights = random_weights(v=4, seed=3)
    expand = partial(reference.rnn_logits, weights)

    def pick(text):
        return (text[-1] * 7 + len(text) ** 2 + sum(text)) % 4

    def propose(text):
        nodes = reference.draft_tree(expand, rank_by_log_prob, 3, 3, torch.randn(5), torch.zeros(6), text[-1])
        return keep(nodes, 3)

    prompt = [1, 2, 3]
    expected = reference.autoregressive(pick, prompt, 40)
    assert len(expected) == 40
    assert reference.speculative(pick, propose, prompt, 40) == expected
    assert reference.speculative(pick, lambda text: [Node(text[-1], 0, 0, 0.0)], prompt, 40) == expected
