"""Property tests: beam search, tree packing and acceptance against the readable reference.

Random drafters, over 200 cases in all. A search is compared by its set of paths: two nodes whose scores differ by less
than rounding may come in either order. Cases where rounding could decide what is kept are counted, and must be rare.
"""

import math
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.func import vmap

from drafter import reference
from drafter.decoding.params import SamplingParams
from drafter.decoding.sampling import Noise, gumbel_noise, make_warp
from drafter.decoding.tree import Candidates, accept_picks, ancestors, pack_nodes
from drafter.kernels import native
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers.beam import BeamDrafting, BeamProposer
from drafter.reference import Node
from tests.engine.oracle import rows_of
from tests.reference.nodes import nodes_of, paths_of
from tests.reference.warpers import softmax, warp

NUM_BEAM_CASES = 200
NUM_TREE_CASES = 200
D = 8
EDGE = 1e-5  # scores closer than this may be told apart by rounding alone


@pytest.fixture(params=["native", "torch"])
def form(request, monkeypatch):
    """Both forms of packing and of the walk."""
    if request.param == "torch":
        monkeypatch.setattr("drafter.kernels.native.takes", lambda tensor: False)
    elif native.library() is None:
        pytest.skip("the native step was not built")


class FakeTarget(SimpleNamespace):
    """What a drafter asks of its target, and can be referred to weakly."""


class Case:
    """A random drafter, a random batch of rows, and how to search."""

    def __init__(self, number, extra_depth=0):
        rng = random.Random(number)
        torch.manual_seed(number)
        self.vocab_size = rng.choice([5, 13, 40])
        self.draft_size = rng.choice([self.vocab_size, rng.randint(4, self.vocab_size)])
        self.width = rng.randint(1, 4)
        self.length = rng.randint(1, 4)
        self.tau = rng.choice([1.0, 1.0, 0.5, 2.0])
        self.noise_weight = rng.choice([1.0, 0.8])
        self.is_coupled = rng.random() < 0.5
        self.num_rows = rng.randint(1, 3)
        self.params = [
            SamplingParams(
                temperature=rng.choice([0.0, 0.7, 1.3]),
                top_k=rng.choice([0, 0, 2, 7]),
                top_p=rng.choice([1.0, 1.0, 0.6, 0.95]),
                min_p=rng.choice([0.0, 0.0, 0.05]),
                seed=rng.randint(-(2**63), 2**63 - 1),
            )
            for _ in range(self.num_rows)
        ]
        sizes = {"vocab_size": self.vocab_size, "hidden_size": D}
        config = DrafterConfig(**sizes, num_res_blocks=rng.randint(0, 2), draft_vocab_size=self.draft_size)
        self.drafter = RecurrentDrafter(config).eval().requires_grad_(False)
        for parameter in self.drafter.parameters():
            parameter.normal_(std=0.7)
        self.drafter.set_draft_token_ids(torch.randperm(self.vocab_size)[: self.draft_size].sort().values)
        embedding_VD = torch.randn(self.vocab_size, D)
        self.embed = lambda token: embedding_VD[token]
        runtime = SimpleNamespace(embed=self.embed, embedding_weight_VD=embedding_VD)
        self._target = FakeTarget(name="t", fingerprint="", runtime=runtime, device=torch.device("cpu"), **sizes)
        texts = [[0] * rng.randrange(50) + [rng.randrange(self.vocab_size)] for _ in self.params]
        self.rows = rows_of(texts)._replace(
            context_BC=torch.randn(self.num_rows, D),
            seed_B=torch.tensor([p.signed_seed for p in self.params]),
            warp=make_warp(self.params),
        )
        self.noise = None
        if any(p.temperature > 0 for p in self.params):
            position_BZ = self.rows.length_B[:, None] + torch.arange(1, self.length + extra_depth + 2)
            self.noise_BZV = gumbel_noise(self.rows.seed_B, position_BZ, torch.arange(self.vocab_size))
            self.noise = Noise(self.rows.seed_B, self.rows.length_B)

    def proposer(self, num_nodes=1024, **more):
        """The search, with all nodes unless fewer are asked for."""
        numbers = {"beam_width": self.width, "draft_length": self.length, "tree_size": num_nodes, "copying": False}
        numbers |= {"tau": self.tau, "noise_weight": self.noise_weight, "coupled": self.is_coupled}
        return BeamProposer(self.drafter, self._target, BeamDrafting(**(numbers | more)))

    def token_logits(self, row, path):
        """The drafter's logits [R] after the root and a path of target tokens."""
        tokens = [self.rows.root_B[row].item(), *path]
        context_C = self.rows.context_BC[row]
        state_D = self.drafter.init_state(context_C)
        for token in tokens:
            state_D = self.drafter.step(state_D, self.embed(torch.tensor(token)))
        return self.drafter.logits(context_C, state_D)

    def reference_tree(self, row, copy_of=lambda path: (0.0, 0)):
        """The reference's tree in Python floats; ``copy_of`` gives the share and token that a path copies."""
        p = self.params[row]

        def scores(path):
            warped = warp(self.token_logits(row, path).tolist(), p.temperature, p.top_k, p.top_p, p.min_p)
            share, copied = copy_of(path)
            share_V = [0.0] * self.vocab_size
            for token, own in zip(self.drafter.draft_token_ids_R.tolist(), softmax(warped), strict=True):
                share_V[token] = (1 - share) * own
            share_V[copied] += share
            rank_V = [math.log(each) if each else -math.inf for each in share_V]
            if self.is_coupled and p.temperature > 0:
                noise_V = self.noise_BZV[row, len(path)].tolist()
                rank_V = [rank + self.noise_weight * noise for rank, noise in zip(rank_V, noise_V, strict=True)]
            return [math.log(each) if each else -math.inf for each in softmax([rank / self.tau for rank in rank_V])]

        def expand(_, path, token):
            path = [*path, int(token)]
            return path, torch.tensor(scores(path[1:]), dtype=torch.float64)

        root = self.rows.root_B[row].item()
        return reference.draft_tree(expand, lambda _, score_V: score_V, self.width, self.length, None, [], root)


def is_on_edge(scores, num_kept):
    """Would rounding decide what is among the best `num_kept` of these scores?"""
    ranked = sorted(scores, reverse=True)
    return num_kept < len(ranked) and ranked[num_kept - 1] - ranked[num_kept] < EDGE


def row_of(candidates, row):
    """A row of candidates as nodes; padding has the score -inf, all others 0."""
    columns = [column[row].tolist() for column in candidates[:4]]
    return [Node(*node, 0.0 if is_node else -math.inf) for *node, is_node in zip(*columns, strict=True)]


def check_packed(nodes):
    """What the rest of the house relies on: parents first, depth counts, siblings differ, padding stands alone."""
    for i, node in enumerate(nodes):
        if i == 0 or node.score:
            assert node.parent == i and node.depth == 0
        else:
            parent = nodes[node.parent]
            assert node.parent < i and not parent.score and node.depth == parent.depth + 1
    paths_of(nodes)


@pytest.mark.parametrize("block", range(4))
def test_beam_search_equals_the_reference(block):
    per_block = NUM_BEAM_CASES // 4
    num_compared = num_on_edge = 0
    for number in range(block * per_block, (block + 1) * per_block):
        case = Case(number)
        token_BM, parent_BM, score_BM = case.proposer().draft(case.rows, case.noise)[:3]
        num_nodes = random.Random(-number).randint(2, 1 + case.width * case.length)
        tree = case.proposer(num_nodes).propose(case.rows, case.noise)
        for row in range(case.num_rows):
            nodes = case.reference_tree(row)
            expected = paths_of(nodes)
            depth = torch.arange(1, case.length + 1).repeat_interleave(case.width)
            found = paths_of(nodes_of(nodes[0].token, token_BM[row], parent_BM[row], depth, score_BM[row]))
            if found.keys() != expected.keys():
                # Only where the search itself stood on an edge: the nodes that differ score alike.
                odd = {**found, **expected}
                scores = sorted(odd[path] for path in found.keys() ^ expected.keys())
                assert scores[-1] - scores[0] < EDGE * case.length, (number, row)
                num_on_edge += 1
                continue
            assert found == pytest.approx(expected, abs=1e-4)
            packed = row_of(tree, row)
            check_packed(packed)
            if paths_of(packed).keys() != paths_of(reference.keep_best_nodes(nodes, num_nodes)).keys():
                assert is_on_edge(expected.values(), num_nodes - 1), (number, row)
                num_on_edge += 1
                continue
            num_compared += 1
    assert num_compared >= per_block and num_on_edge <= num_compared * 0.02, (num_compared, num_on_edge)


def paths_in(drafted, proposer, row):
    depth_M = torch.arange(1, proposer.max_depth + 1).repeat_interleave(torch.tensor(proposer.level_sizes))
    return paths_of(nodes_of(0, drafted.token_BM[row], drafted.parent_BM[row], depth_M, drafted.score_BM[row]))


def take_rounded_weights(drafter):
    rounded = drafter.rounded()
    matrices = rounded.cell, rounded.output, *rounded.blocks
    cell, *others = (native.unpack_rows(matrix, torch.arange(matrix.outputs)) for matrix in matrices)
    layers = drafter.cell.w, drafter.cell.u, drafter.head, *(block.linear for block in drafter.blocks)
    for layer, weight_OI in zip(layers, (*cell.split(D, 1), *others), strict=True):
        layer.weight.copy_(weight_OI)
    drafter._rounded = None


@pytest.mark.skipif(native.library() is None, reason="the native step was not built")
@pytest.mark.parametrize("copying", [False, True])
def test_native_search_drafts_the_nodes_of_the_search_in_torch(copying):
    """Of the same weights. Activations of 8 bits move scores by hundredths and may swap near equals."""
    num_nodes, gaps = [0, 0], []
    for number in range(100):
        case = Case(number)
        case.tau = 1.0
        take_rounded_weights(case.drafter)
        plain = case.proposer(copying=copying)
        case.drafter.pack()
        packed = case.proposer(copying=copying)
        assert plain._native is None and packed._native is not None
        found, expected = (each.draft(case.rows, case.noise) for each in (packed, plain))
        for row in range(case.num_rows):
            ours, theirs = (paths_in(nodes, plain, row) for nodes in (found, expected))
            theirs = {path: score for path, score in theirs.items() if len(path) <= 10}  # one swap moves a whole chain
            common = ours.keys() & theirs.keys()
            num_nodes = [num_nodes[0] + len(theirs), num_nodes[1] + len(common)]
            gaps += [abs(ours[path] - theirs[path]) for path in common]
    assert num_nodes[1] > 0.97 * num_nodes[0] and sorted(gaps)[len(gaps) // 2] < 0.05, (num_nodes, sorted(gaps))


@pytest.mark.skipif(native.library() is None, reason="the native step was not built")
def test_a_native_search_ends_where_no_node_is_worth_its_cost_and_only_copies_where_they_are_sure():
    num_nodes, num_sure = [0, 0], [0, 0]
    for number in range(200):
        case = Case(number // 2)
        case.tau, rows = 1.0, case.rows
        periodic_BS = torch.arange(rows.history_BS.shape[1]).expand_as(rows.history_BS) % 3
        rows = rows._replace(history_BS=periodic_BS, root_B=rows.length_B % 3) if number % 2 else rows
        case.drafter.pack()
        proposer = case.proposer(copying=True)
        whole = proposer.draft(rows, None)
        proposer.expect_cost(0.5)
        found = proposer.draft(rows, None)
        for row in range(case.num_rows):
            ours, theirs = (paths_in(nodes, proposer, row) for nodes in (found, whole))
            assert all(ours[path] < score + 1e-4 for path, score in theirs.items() if score > proposer.least_score)
            num_sure[number % 2] += proposer.width > 1 and sum(len(path) == 1 for path in ours) == 1
            num_nodes = [num_nodes[0] + len(theirs), num_nodes[1] + len(ours)]
    assert num_nodes[1] < 0.97 * num_nodes[0] and num_sure[0] < 20 < num_sure[1], (num_nodes, num_sure)


def random_tree(rng, num_nodes, vocab_size, num_padding):
    """A packed tree of random shape; siblings hold different tokens."""
    nodes = [Node(rng.randrange(vocab_size), 0, 0, 0.0)]
    while len(nodes) < num_nodes - num_padding:
        parent, token = rng.randrange(len(nodes)), rng.randrange(vocab_size)
        if (token, parent) not in [node[:2] for node in nodes[1:]]:
            nodes.append(Node(token, parent, nodes[parent].depth + 1, 0.0))
    return nodes + [Node(0, i, 0, -math.inf) for i in range(len(nodes), num_nodes)]


def random_trees(rng, vocab_size=6):
    num_rows, num_nodes = rng.randint(1, 4), rng.randint(1, 14)
    trees = [random_tree(rng, num_nodes, vocab_size, rng.randint(0, num_nodes // 3)) for _ in range(num_rows)]
    *columns, score_BN = (torch.tensor([[node[i] for node in tree] for tree in trees]) for i in range(4))
    return trees, Candidates(*columns, score_BN == 0), int(columns[2].max())


def picks_after(nodes, picks):
    """The target of a walk: the pick after the text of a node."""
    numbers = [j for j, node in enumerate(nodes) if node.score == 0]
    number_of = {tuple(nodes[i].token for i in reference.path_to(nodes, j)): j for j in numbers}
    return lambda text: picks[number_of[tuple(text)]]


def test_ancestors_and_walk_equal_the_reference(form):
    lengths = []
    for number in range(NUM_TREE_CASES):
        rng = random.Random(number)
        trees, candidates, max_depth = random_trees(rng)
        extra = rng.randint(0, 2)  # a proposer's L may exceed the depth that its tree reached
        ancestor_BNN = ancestors(candidates.parent_BN, max_depth + extra)
        # Picks that often agree with a child, so that walks get long.
        picks = []
        for tree in trees:
            picks.append([rng.randrange(6) for _ in tree])
            for node in tree[1:]:
                if node.score == 0 and rng.random() < 0.6:
                    picks[-1][node.parent] = node.token
        pick_BN = torch.tensor(picks)
        accepted = accept_picks(candidates, pick_BN, ancestor_BNN, max_depth + extra)
        emitted_BZ = accepted.emitted(candidates)
        last_B = vmap(partial(reference.accept_tree, max_depth=max_depth))(*candidates[:3], pick_BN)
        assert torch.equal(vmap(partial(reference.ancestors, max_depth=max_depth))(candidates.parent_BN), ancestor_BNN)
        for row, nodes in enumerate(trees):
            path = reference.path_to(nodes, last_B[row].item())
            emitted = reference.walk(nodes, picks_after(nodes, picks[row]), [nodes[0].token])
            assert accepted.num_accepted_B[row].item() == len(path) - 1 == len(emitted) - 1
            assert accepted.path_BZ[row].tolist() == path + [path[-1]] * (max_depth + extra + 1 - len(path))
            assert emitted_BZ[row, : len(path)].tolist() == emitted and accepted.bonus_B[row].item() == emitted[-1]
            lengths.append(len(path))
    assert max(lengths) >= 5 and min(lengths) == 1


def test_ties_keep_the_parent(form):
    """Children of probability 1 score like their parents; what is kept is a tree all the same."""
    token_BM = torch.tensor([[1, 2, 3, 4]])
    parent_BM = torch.tensor([[-1, 0, 1, 2]])
    depth_BM = torch.tensor([[1, 2, 3, 4]])
    for num_nodes in range(1, 6):
        packed = row_of(pack_nodes(torch.tensor([9]), token_BM, parent_BM, depth_BM, torch.zeros(1, 4), num_nodes), 0)
        chain = [Node(9, 0, 0, 0.0), *(Node(depth, depth - 1, depth, 0.0) for depth in range(1, 5))]
        assert packed == chain[:num_nodes]
