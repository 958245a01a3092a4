"""A trial of a drafter over real texts, before it drafts: finite weights may still give numbers that are not.

Shapes: T tokens of a text · C context size · D hidden size · R draft vocabulary · V target vocabulary.
"""

from typing import Any

import torch

from drafter.models.drafter import RecurrentDrafter
from drafter.targets.slots import Slots
from drafter.targets.target import Target

_TEXTS = ("Why is the sea salty?", "def add(a, b):\n    return a + b\n", "1 2 3 4 5 6 7 8 9 10")
_MOST_TOKENS = 16  # a text is cut here


@torch.inference_mode()
def check_drafts(drafter: RecurrentDrafter, target: Target, num_steps: int) -> None:
    """Draft after every token of some texts.

    Args:
        drafter: bound to the target, which is ready to decode and has the layers that the drafter reads.
        target: its target.
        num_steps: tokens that the drafter reads after each token of the text.

    Raises:
        ValueError: a logit is not finite, or a product refuses a number that is not.
    """
    encode: Any = target.tokenizer
    texts = [encode(text, add_special_tokens=False)["input_ids"] for text in _TEXTS] if encode is not None else []
    spread = torch.arange(_MOST_TOKENS) * (target.vocab_size // _MOST_TOKENS)
    for ids in (*texts, spread.tolist()):
        token_T = torch.tensor(ids[: min(_MOST_TOKENS, target.max_length)], device=target.device)
        if not len(token_T):
            continue
        place_1T = torch.arange(len(token_T), device=target.device)[None]
        slots, cache = Slots(place_1T, place_1T, None, 0, len(token_T)), target.new_cache(1, len(token_T) + 1)
        output = target.forward(token_T[None], slots, cache, tuple(drafter.config.context_layers))
        context_TC = output.context_BTC[0].to(drafter.dtype)
        try:
            state_TD = drafter.init_state(context_TC)
            for _ in range(num_steps):
                state_TD = drafter.step(state_TD, target.embed(token_T).to(drafter.dtype))
                is_finite = bool(drafter.logits(context_TC, state_TD).isfinite().all())
                if not is_finite:
                    break
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            is_finite = False
        if not is_finite:
            raise ValueError(
                "the drafter's numbers are not finite after real text: its weights are too large; train it again"
            )
