"""Copies from the text: the copies of every beam, the mixture, and the copies behind the beams, against loops."""

import math
import random
from functools import partial
from itertools import pairwise

import pytest
import torch

from drafter.proposers.copying import SHARES, Copies, mix
from tests.proposers.test_beam_reference import Case


def share_of_copy(tokens: list[int], path: list[int]) -> tuple[float, int]:
    """The loop twin: share and token that the longest match of ``tokens + path`` before the root names; 0 for none."""
    text, longest, copied, followers = tokens + path, 0, 0, []
    for end in range(len(tokens) - 1):
        size = 0
        while size < min(len(SHARES), end + 1) and tokens[end - size] == text[len(text) - 1 - size]:
            size += 1
        if size:
            followers.append(tokens[end + 1])
            if size >= longest:
                longest, copied = size, tokens[end + 1]
    if not longest:
        return 0.0, 0
    odds = SHARES[longest - 1] / (1 - SHARES[longest - 1]) * followers.count(copied) ** 2 / len(followers)
    return odds / (1 + odds), copied


def test_the_longest_match_names_the_token_behind_it() -> None:
    """The first example of the module's text, with a, b, c, x = 0, 1, 2, 3; an undefined entry is behind the root."""
    token_BS, length_X = torch.tensor([[0, 1, 2, 3, 0, 1, 3]]), torch.arange(9.0)
    copies = Copies.of(token_BS, torch.tensor([5]), length_X)
    assert [found.tolist() for found in copies.best()] == [[[2]], [[2]]]
    copies = copies.follow(torch.tensor([[0, 0]]), torch.tensor([[2, 0]]))
    token_BW, odds_BW = copies.best()
    assert token_BW.tolist() == [[3, 1]]
    assert odds_BW[0].tolist() == pytest.approx([3, 1 + math.log(2)])  # a stands before b twice
    copies = copies.follow(torch.tensor([[1, 0]]), torch.tensor([[1, 3]]))
    assert [found.tolist() for found in copies.best()] == [[[2, 0]], [[2, 4]]]


def test_all_occurrences_of_the_last_token_vote() -> None:
    """The second example of the module's text: of two occurrences of b, the named d follows one. e occurs nowhere."""
    copies = Copies.of(torch.tensor([[1, 2, 1, 3, 1]]), torch.tensor([4]), torch.tensor([-math.inf, *range(1, 9)]))
    token_BW, odds_BW = copies.best()
    assert token_BW.tolist() == [[3]] and odds_BW.tolist() == [[pytest.approx(1 - math.log(2))]]
    assert copies.follow(torch.tensor([[0]]), torch.tensor([[7]])).best()[1].tolist() == [[-math.inf]]


def test_a_copy_is_never_likelier_than_certain() -> None:
    """Rounding would put the copy above its parent, and the tree would lose the parent."""
    generator = torch.Generator().manual_seed(0)
    logits_BWR = 7 + 3 * torch.randn(1, 1000, 50, generator=generator)
    index_BW = logits_BWR.argmax(dim=2)
    logits_BWR.scatter_add_(2, index_BW[:, :, None], torch.full((1, 1000, 1), 15.0))
    _, copied_BW1, total_BW1 = mix(logits_BWR, index_BW, torch.full((1, 1000), 6.0))
    assert (copied_BW1 <= total_BW1).all()


def copying_rows(case: Case, number: int) -> None:
    """Give the rows of a case a text of few tokens, so that matches of every length occur."""
    rng = random.Random(number)
    few = [*rng.sample(case.drafter.draft_token_ids_R.tolist(), rng.randint(2, 3)), rng.randrange(case.vocab_size)]
    history_BS = torch.tensor([rng.choices(few, [4, 2, *[1] * (len(few) - 2)], k=64) for _ in range(case.num_rows)])
    root_B = history_BS.gather(1, case.rows.length_B[:, None])[:, 0]
    case.rows = case.rows._replace(history_BS=history_BS, root_B=root_B)


def tail_scores(case: Case, row: int, tokens: list[int], path: list[int], depth: int) -> list[float]:
    """Probabilities of the copies behind a path, as logarithms, one after the other down to ``depth``."""
    scores = list[float]()
    while len(path) < depth:
        share, copied = share_of_copy(tokens, path)
        if not share:
            break
        if case.is_coupled and case.noise is not None and case.params[row].temperature > 0:
            noise = case.noise_weight * case.noise_BZV[row, len(path), copied].item()
            scores.append(-math.exp(math.log((1 - share) / share) - noise))
        else:
            scores.append(math.log(share))
        path = [*path, copied]
    return scores


@pytest.mark.parametrize("block", range(3))
def test_search_equals_the_loop_twin(block: int) -> None:
    num_edges = num_changed = num_tails = 0
    for number in range(1000 + 20 * block, 1020 + 20 * block):
        case = Case(number, extra_depth=3)
        copying_rows(case, number)
        proposer = case.proposer(1 + case.length + 3, copying=True)
        num_beams = case.width * case.length
        nodes = proposer.draft(case.rows, case.noise)
        plain_BM = case.proposer(copying=False).draft(case.rows, case.noise).score_BM
        num_changed += not torch.allclose(nodes.score_BM[:, :num_beams], plain_BM, atol=1e-3)
        for row in range(case.num_rows):
            tokens = case.rows.history_BS[row, : int(case.rows.length_B[row]) + 1].tolist()
            _, *twin = case.reference_tree(row, partial(share_of_copy, tokens))
            scores = nodes.score_BM[row].tolist()
            found = sorted(score for score in scores[:num_beams] if score > -torch.inf)
            if found != pytest.approx(sorted(node.score for node in twin), abs=1e-4):
                num_edges += 1
                continue
            last = nodes.parent_BM[row, num_beams].item()
            best = max(scores[num_beams - case.width : num_beams])
            assert scores[last] == best
            listed = list(zip(nodes.token_BM[row].tolist(), nodes.parent_BM[row].tolist(), strict=True))
            path: list[int] = []
            while last >= 0:
                path.insert(0, listed[last][0])
                last = listed[last][1]
            wanted = tail_scores(case, row, tokens, path, case.length + 3)
            chain = pairwise([best, *scores[num_beams:]])
            assert [child - parent for parent, child in chain if child > -torch.inf] == pytest.approx(wanted, abs=1e-4)
            num_tails += len(wanted)
    assert num_changed > 12 and num_edges <= 1 and num_tails > 40  # rounding may decide between two beams
