"""The whole algorithm for one prompt and one sequence: slow, plain, and the truth that the fast code is tested against.

There is no batch and no beam dimension in here. `torch.func.vmap` adds them from outside::

    chain = partial(sample_sequence, step, length, state_size)     # [d], []        -> [l + 1]
    beams = vmap(chain, in_dims=(None, 0))                         # [d], [w]       -> [w, l + 1]
    batch = vmap(beams, in_dims=(0, 0))                            # [b, d], [b, w] -> [b, w, l + 1]

docs/architecture.md leads from these functions to the batched engine.

Shapes: [] one number · d target's hidden size · h size of the drafter's state · l draft length · w beams · b rows ·
v vocabulary · n tree nodes.
Sources: Recurrent Drafter, arXiv 2403.09919 (drafter, beam search); Leviathan et al., arXiv 2211.17192 (accept_chain,
max_fn). The walk along picks whose noise is known is this project's own (docs/sampling.md).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # llm_state, rnn_state, token -> next of the last two
Expand = Callable[[Any, Any, Tensor], tuple[Any, Tensor]]  # the same, but logits instead of a token
Pick = Callable[[list[int]], int]  # text -> the target's next token

# ------------------------------------------------------------------------------------------------------ the drafter


class Weights(NamedTuple):
    """A recurrent drafter without residual blocks: embedding [v, d], w [h, d], u [h, h], b [h], head [v, d + h]."""

    embedding: Tensor
    w: Tensor
    u: Tensor
    b: Tensor
    head: Tensor


def rnn_logits(weights: Weights, llm_state: Tensor, rnn_state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """[d], [h], [] -> [h], [v]: s' = SiLU(W e(token) + U s + b), and the logits of the next token, head([llm; s'])."""
    before = weights.w @ F.embedding(token, weights.embedding) + weights.u @ rnn_state + weights.b
    return F.silu(before), weights.head @ torch.cat([llm_state, F.silu(before)])


def rnn_step(weights: Weights, llm_state: Tensor, rnn_state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """[d], [h], [] -> [h], []: feed one token; the next state and the likeliest next token."""
    state, logits = rnn_logits(weights, llm_state, rnn_state, token)
    return state, logits.argmax()


def unroll(step: Step, length: int, llm_state: Tensor, rnn_state: Tensor, token: Tensor) -> list[Tensor]:
    """[d], [h], [] -> l + 1 times []: the token, then what follows from it."""
    if length == 0:
        return [token]
    return [token, *unroll(step, length - 1, llm_state, *step(llm_state, rnn_state, token))]


def sample_sequence(step: Step, length: int, state_size: int, llm_state: Tensor, token: Tensor) -> Tensor:
    """[d], [] -> [l + 1]: draft `length` tokens after `token`, from the state 0. This is the ten-line drafter."""
    return torch.stack(unroll(step, length, llm_state, llm_state.new_zeros(state_size), token))


# ---------------------------------------------------------------------- one chain, drafted by a second language model


def max_fn(difference: Tensor) -> Tensor:
    """[v] -> [v]: norm(max(0, p - q)), the distribution after a rejection."""
    weight = difference.clamp(min=0)
    return weight / weight.sum()


def prob_of(prob: Tensor, token: Tensor) -> Tensor:
    """[l, v], [l] -> [l]: each row's probability of its token."""
    return prob.gather(1, token[:, None])[:, 0]


def accept_chain(p: Tensor, q: Tensor, draft: Tensor, coin: Tensor) -> Tensor:
    """[l + 1, v], [l, v], [l], [l] -> []: how many of the drafted tokens stay; each with probability min(1, p / q).

    Exact only when the draft is a sample of q. Row i of p and q is the distribution of draft token i; the last row
    of p is that of the token behind the draft.
    """
    is_kept = coin * prob_of(q, draft) < prob_of(p[:-1], draft)
    return is_kept.long().cumprod(0).sum()


def bonus_distribution(p: Tensor, q: Tensor, num_accepted: Tensor) -> Tensor:
    """[l + 1, v], [l, v], [] -> [v]: distribution of the token after the accepted ones.

    Behind a chain that was accepted whole there is nothing to subtract: q is 0 there and the residual is p.
    """
    return max_fn((p - F.pad(q, (0, 0, 0, 1))).index_select(0, num_accepted[None])[0])


def draw(prob: Tensor, noise: Tensor) -> int:
    """[v], [v] -> a sample of prob, by Gumbel-max."""
    return int((prob.log() + noise).argmax())


# -------------------------------------------------------------------------------------------------------- one tree


class Node(NamedTuple):
    """A drafted token; `parent` is the number of the node before it. The root has number 0 and is its own parent."""

    token: int
    parent: int
    depth: int
    score: float


def draft_tree(
    expand: Expand,
    rank: Callable[[int, Tensor], Tensor],
    width: int,
    length: int,
    llm_state: Any,
    rnn_state: Any,
    token: int,
) -> list[Node]:
    """[d], [h], [] -> 1 + l * w nodes: everything that a beam search of `length` steps kept.

    Each step picks the best of all (beam, token) pairs by the sum of the log scores, rank(depth, logits). A pair names
    its parent, so every pick is a new node of a tree.
    """
    nodes, beams = [Node(token, 0, 0, 0.0)], {0: rnn_state}  # beams: last node -> state before the node's token is fed
    for depth in range(length):
        pairs = []
        for parent, before in beams.items():
            state, logits = expand(llm_state, before, torch.tensor(nodes[parent].token))
            for child, score in enumerate(rank(depth, logits).tolist()):
                if score > -math.inf:
                    pairs.append((Node(child, parent, depth + 1, nodes[parent].score + score), state))
        best = sorted(pairs, key=lambda pair: -pair[0].score)[:width]
        beams = {len(nodes) + place: state for place, (_, state) in enumerate(best)}
        nodes += [node for node, _ in best]
    return nodes


def renumber(nodes: list[Node], kept: list[int]) -> list[Node]:
    """The kept nodes (numbers in rising order, every kept node's parent among them), counted anew."""
    return [nodes[i]._replace(parent=kept.index(nodes[i].parent)) for i in kept]


def keep_best_nodes(nodes: list[Node], num_nodes: int) -> list[Node]:
    """The root and the best others. No child scores above its parent, so what stays is a tree."""
    return renumber(nodes, sorted(sorted(range(len(nodes)), key=lambda i: -nodes[i].score)[:num_nodes]))


def path_to(nodes: list[Node], i: int) -> list[int]:
    """Numbers of the nodes from the root to node i."""
    return [0] if i == 0 else [*path_to(nodes, nodes[i].parent), i]


def keep_final_beams(nodes: list[Node], length: int) -> list[Node]:
    """The published choice: the beams alive at the end, their shared prefixes merged."""
    return renumber(
        nodes, sorted({i for end, node in enumerate(nodes) if node.depth == length for i in path_to(nodes, end)})
    )


def walk(nodes: list[Node], pick: Pick, text: list[int], i: int = 0) -> list[int]:
    """The emitted tokens from node i on: while the target's own pick is a child, go there.

    The last token is a pick that is no child. `text` ends with node i's token.
    """
    token = pick(text)
    child = next((j for j, node in enumerate(nodes) if j > 0 and (node.parent, node.token) == (i, token)), None)
    return [token] if child is None else [token, *walk(nodes, pick, [*text, token], child)]


# ------------------------------------------------------------------------------------- the same tree as three tensors


def ancestors(parent: Tensor, max_depth: int) -> Tensor:
    """[n] -> [n, n]: True at (i, j) where j is i or an ancestor of i; the root is its own parent."""
    node = climber = torch.arange(parent.shape[0])
    is_met = climber[:, None] == node
    for _ in range(max_depth):
        climber = parent.gather(0, climber)
        is_met = is_met | (climber[:, None] == node)
    return is_met


def accept_tree(token: Tensor, parent: Tensor, depth: Tensor, pick: Tensor, max_depth: int) -> Tensor:
    """[n], [n], [n], [n] -> []: number of the last accepted node. The walk without a branch, so that vmap batches it.

    A node agrees if it holds what the target picked at its parent. The last accepted node is the deepest one that
    agrees, and whose ancestors all agree.
    """
    agrees = (token == pick.gather(0, parent)) | (torch.arange(token.shape[0]) == 0)
    return torch.where((agrees | ~ancestors(parent, max_depth)).all(1), depth, -1).argmax()


# ---------------------------------------------------------------------------------------------------- whole answers


def autoregressive(pick: Pick, text: list[int], num_tokens: int) -> list[int]:
    """The answer of plain decoding: the target's picks, one after the other."""
    answer: list[int] = []
    while len(answer) < num_tokens:
        answer.append(pick([*text, *answer]))
    return answer


def speculative(pick: Pick, propose: Callable[[list[int]], list[Node]], text: list[int], num_tokens: int) -> list[int]:
    """The answer of `autoregressive` for any proposals: every token of `walk` is pick(the text before the token)."""
    answer: list[int] = []
    while len(answer) < num_tokens:
        before = [*text, *answer]
        answer += walk(propose(before), pick, before)
    return answer[:num_tokens]
