"""Drafters for tiny targets: one that has learnt its target a little, so that paths of every length are accepted."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target
from tests.engine.oracle import VOCAB, ids, tiny_target

_UNROLL = 4
_ANSWER = SamplingParams(max_new_tokens=48, ignore_eos=True)


@cache
def shared_target() -> Target:
    """One target for tests that change nothing about it."""
    return tiny_target()


def prompts_for(num_prompts: int, *, seed: int, sizes: tuple[int, ...] = (1, 2, 5, 12)) -> list[list[int]]:
    """Random prompts of the given sizes in turn."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (sizes[i % len(sizes)],), generator=generator).tolist() for i in range(num_prompts)]


def answers_of(target: Target, prompts: list[list[int]], params: SamplingParams = _ANSWER) -> list[list[int]]:
    """The oracle: autoregressive decoding."""
    return ids(Engine(target, config=EngineConfig(method="none", max_num_seqs=8)).generate(prompts, params))


@cache
def trained_drafter(context: str = "last", head: str = "full", num_steps: int = 40) -> RecurrentDrafter:
    """A drafter trained for a second on the target's own answers, for :func:`shared_target`."""
    target = shared_target()
    torch.manual_seed(0)
    layers, num_outputs = (1, 2) if context == "fused" else (), VOCAB - 7 if head == "tied" else None
    shape = {"context": context, "context_layers": layers, "head": head, "draft_vocab_size": num_outputs}
    sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
    config = DrafterConfig(**sizes, **shape, num_res_blocks=1)
    drafter = RecurrentDrafter(config)
    drafter.set_draft_token_ids(torch.arange(VOCAB - config.num_outputs, VOCAB)).bind(target)
    prompts = prompts_for(16, seed=100)
    texts = [(prompt + answer)[:49] for prompt, answer in zip(prompts, answers_of(target, prompts), strict=True)]
    return train_on_texts(drafter, target, torch.tensor(texts), num_steps)


def train_on_texts(drafter: RecurrentDrafter, target: Target, text_BT: Tensor, num_steps: int) -> RecurrentDrafter:
    """Overfit a drafter to a few texts of the same length: cross-entropy at every position and depth."""
    num_positions = text_BT.shape[1] - _UNROLL - 1
    with torch.no_grad():
        context_BTC = target.forward(text_BT, context_layers=drafter.config.context_layers).context_BTC
        window_BPLD = target.runtime.embed(text_BT)[:, 1:-1].unfold(1, _UNROLL, 1).transpose(2, 3)
    place_V = torch.full((drafter.config.vocab_size,), -100)
    place_V[drafter.draft_token_ids_R] = torch.arange(len(drafter.draft_token_ids_R))
    label_BPL = place_V[text_BT[:, 2:].unfold(1, _UNROLL, 1)]
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for _ in range(num_steps):
        optimizer.zero_grad()
        logits_BPLR = drafter(context_BTC[:, :num_positions], window_BPLD)
        F.cross_entropy(logits_BPLR.flatten(0, 2), label_BPL.flatten()).backward()
        optimizer.step()
    return drafter.eval()
