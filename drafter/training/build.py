"""The drafter of a run: shape from the options, draft vocabulary and constants from the data and the target.

Shapes: B rows · T tokens · V target vocabulary · R draft vocabulary · D hidden size.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from drafter.data.parts import Parts
from drafter.data.rows import TokenRows
from drafter.models.checkpoint import drafter_of_checkpoint
from drafter.models.config import DrafterConfig, shape_of
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target
from drafter.training.options import DrafterOptions

_NUM_SCALE_PROMPTS = 8


def build_drafter(
    target: Target, parts: Parts, options: DrafterOptions, init_from: str | None
) -> tuple[RecurrentDrafter, list[str]]:
    """A new drafter for ``target``, or the drafter of ``init_from``, and lines for the user about its origin.

    Args:
        target: the frozen model.
        parts: the answers to train on choose the draft tokens, held-out prompts the constants.
        options: shape.
        init_from: exported folder or checkpoint to take weights, constants and draft vocabulary from. A tied head has
            no weights of tokens: where ``options`` ask for another number of draft tokens, the answers choose them.

    Raises:
        ValueError: ``init_from`` has another shape or target, or the draft vocabulary is larger than the target's.
    """
    config = DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_name=target.name,
        target_revision=target.revision,
        target_fingerprint=target.fingerprint,
        **asdict(options),
    )
    notes = []
    if init_from is None:
        drafter = RecurrentDrafter(config)
        drafter.set_scales(*measure_scales(target, parts.val.prompts(_NUM_SCALE_PROMPTS)))
        has_tokens = config.draft_vocab_size is None
    else:
        drafter = drafter_of_checkpoint(init_from).float().train()
        has_tokens = drafter.config.num_outputs == config.num_outputs or config.head != "tied"
        sizes = {} if has_tokens else {"draft_vocab_size": config.draft_vocab_size}
        expect_same_shape(config, drafter.config.to_dict() | sizes)
        drafter.config.draft_length, drafter.config.target_name = config.draft_length, config.target_name
        notes.append(f"weights start from {init_from}")
    if not has_tokens:
        notes.append(choose_draft_tokens(drafter, parts.train, config.num_outputs, target.eos_token_ids))
        drafter.config.draft_vocab_size = config.draft_vocab_size
    return drafter.bind(target), notes


def expect_same_shape(config: DrafterConfig, saved: dict[str, Any]) -> None:
    """ValueError, naming the first field, when weights saved with ``saved`` do not fit ``config``."""
    wanted, found = shape_of(config.to_dict()), shape_of(saved)
    for name in wanted:
        if wanted[name] != found[name]:
            raise ValueError(
                f"the saved drafter has {name} {found[name]!r}, but this run asks for {wanted[name]!r}: "
                "use the options it was trained with, or train from new weights"
            )


def summary_lines(drafter: RecurrentDrafter) -> list[str]:
    """Parameters of each part and the size of the exported weights (bfloat16)."""
    parts = {name: sum(each.numel() for each in part.parameters()) for name, part in drafter.named_children()}
    total = sum(parts.values())
    listed = ", ".join(f"{name} {count:,}" for name, count in parts.items())
    num_bytes = 2 * total + 8 * len(drafter.draft_token_ids_R)
    return [f"drafter: {total:,} parameters ({listed})", f"exported checkpoint: {num_bytes / 1e6:,.1f} MB in bfloat16"]


def choose_draft_tokens(drafter: RecurrentDrafter, rows: TokenRows, size: int, always: Iterable[int]) -> str:
    """Set the drafter's draft vocabulary: the ``size`` most frequent tokens of the answers, and ``always``; a line."""
    count_V = rows.token_counts(drafter.config.vocab_size)
    ids_R = choose_draft_vocabulary(count_V, size, always)
    drafter.set_draft_token_ids(ids_R)
    share = float(count_V[ids_R].sum() / count_V.sum().clamp_min(1))
    return f"draft vocabulary: {size:,} tokens cover {share:.2%} of the answers"


def choose_draft_vocabulary(count_V: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """The ``size`` most frequent tokens, ascending int64 [R]; ties go to the lower id; ``always`` are included."""
    count_V = count_V.clone()
    count_V[list(always)] = count_V.max() + 1
    return count_V.argsort(descending=True, stable=True)[:size].sort().values


@torch.no_grad()
def measure_scales(target: Target, prompts: list[list[int]]) -> tuple[float, float]:
    """1 / rms of the target's final hidden states and of its input embeddings over some token ids, to three digits."""
    squares: list[Tensor] = []
    for prompt in prompts:
        token_BT = torch.tensor([prompt[:256]], device=target.device)
        states = torch.cat([target.forward(token_BT).hidden_BTD, target.runtime.embed(token_BT)]).float()
        squares.append(states.square().mean(dim=-1))
    scales = torch.cat(squares, dim=1).mean(dim=1).clamp_min(1e-12).rsqrt().tolist()
    return float(f"{scales[0]:.3g}"), float(f"{scales[1]:.3g}")  # another machine's arithmetic finds the same
