"""The norm behind the last layer, for hidden states that another engine stored before the norm.

Shapes: T tokens · D hidden size.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from drafter.targets.checks import decoder_of
from drafter.targets.target import Target


@torch.no_grad()
def final_norm(target: Target) -> nn.Module:
    """A copy, on the CPU, of the module that makes the target's final hidden states: states [..., D] in and out.

    The module is found by a forward over three tokens: the last one whose output is the final hidden state.

    Raises:
        ValueError: the weights are spread over processes, or no module of the target makes the final hidden states.
    """
    if target.is_sharded:
        raise ValueError(
            "--data.hidden_states applies the target's final norm, whose weights lie on several processes: train "
            "without --model.shard_target"
        )
    made: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, given: Any, output: Any) -> None:
        if len(given) == 1 and isinstance(output, Tensor) and output.shape == given[0].shape:
            made.append((module, output))

    decoder = decoder_of(target.model)
    hooks = [module.register_forward_hook(note) for module in decoder.modules() if not list(module.children())]
    try:
        hidden_BTD = target.forward(torch.arange(1, 4, device=target.device)[None] % target.vocab_size).hidden_BTD
    finally:
        for hook in hooks:
            hook.remove()
    found = [module for module, output in made if output.shape == hidden_BTD.shape and torch.equal(output, hidden_BTD)]
    if not found:
        raise ValueError(
            f"--data.hidden_states: target {target.name!r} has no norm behind its last layer that could be applied to "
            "stored states: use --data.cache_hidden_states"
        )
    return copy.deepcopy(found[-1]).cpu()
