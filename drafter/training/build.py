"""Make the drafter of a run: shape from the options, draft vocabulary and constants from the data and the target."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target
from drafter.training.checkpoint import load_drafter
from drafter.training.options import DrafterOptions
from drafter.training.teacher import measure_scales
from drafter.training.vocabulary import choose_draft_vocabulary, coverage, read_token_counts

_NUM_SCALE_PROMPTS = 8
# What two configs must share for one's weights to fit the other.
_SHAPE = (
    "vocab_size",
    "hidden_size",
    "cell",
    "context",
    "context_layers",
    "head",
    "head_rank",
    "num_res_blocks",
    "block_rank",
    "draft_vocab_size",
)


class Built(NamedTuple):
    """A drafter and what there is to say about how it came to be."""

    drafter: RecurrentDrafter
    notes: list[str]


def build_drafter(target: Target, data: Any, options: DrafterOptions, init_from: str | None) -> Built:
    """A new drafter for ``target``, or the one of ``init_from``.

    Args:
        target: the frozen model.
        data: a ChatDataModule (``token_counts`` and ``val_prompts`` are used).
        options: shape.
        init_from: exported folder or checkpoint to take weights, constants and draft vocabulary from. A tied head,
            which has no weights of its own for any token, may ask for a draft vocabulary of another size: it is chosen
            anew.

    Raises:
        ValueError: ``init_from`` has another shape or target, or the draft vocabulary is larger than the target's.
    """
    size = options.draft_vocab_size
    if size is not None and size > target.vocab_size:
        raise ValueError(
            f"--model.drafter.draft_vocab_size {size} exceeds the {target.vocab_size} tokens of {target.name!r}: "
            "lower it"
        )
    config = drafter_config(
        options,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_name=target.name,
        target_revision=target.revision,
        target_fingerprint=target.fingerprint,
    )
    if init_from is not None:
        return _continued(target, data, options, config, init_from)
    drafter = RecurrentDrafter(config)
    notes = _choose_vocabulary(drafter, target, data, options)
    drafter.set_scales(*measure_scales(target, data.val_prompts(_NUM_SCALE_PROMPTS)))
    return Built(drafter.bind(target), notes)


def _choose_vocabulary(drafter: RecurrentDrafter, target: Target, data: Any, options: DrafterOptions) -> list[str]:
    """Set the draft vocabulary by the counts of the options or of the answers; what to say about it."""
    if drafter.config.draft_vocab_size is None:
        return []
    if options.token_counts is not None:
        count_V = read_token_counts(options.token_counts, target.vocab_size)
    else:
        count_V = data.token_counts(target.vocab_size)
    ids_R = choose_draft_vocabulary(count_V, drafter.config.num_outputs, always=target.eos_token_ids)
    drafter.set_draft_token_ids(ids_R)
    return [f"draft vocabulary: {len(ids_R):,} tokens cover {coverage(count_V, ids_R):.2%} of the answers"]


def drafter_config(options: DrafterOptions, *, vocab_size: int, hidden_size: int, **target: Any) -> DrafterConfig:
    """The config of a drafter of this shape; ``target``: the fields that name it."""
    shape = asdict(options)
    del shape["token_counts"]
    if options.draft_vocab_size == vocab_size:
        shape["draft_vocab_size"] = None
    return DrafterConfig(vocab_size=vocab_size, hidden_size=hidden_size, **shape, **target)


def expect_same_shape(config: DrafterConfig, saved: dict[str, Any]) -> None:
    """ValueError, naming the first field, when weights saved with ``saved`` do not fit ``config``."""
    for name in _SHAPE:
        mine, theirs = getattr(config, name), saved.get(name)
        if name == "context_layers":
            mine, theirs = list(mine), list(theirs or ())
        if mine != theirs:
            raise ValueError(
                f"the saved drafter has {name} {theirs!r}, but this run asks for {mine!r}: "
                "use the options it was trained with, or train from new weights"
            )


def describe(drafter: RecurrentDrafter) -> Iterator[str]:
    """Parameters of each part and the size of the exported weights (bfloat16)."""
    parts = drafter.num_parameters_by_part()
    total = sum(parts.values())
    listed = ", ".join(f"{name} {count:,}" for name, count in parts.items())
    yield f"drafter: {total:,} parameters ({listed})"
    num_bytes = 2 * total + 8 * len(drafter.draft_token_ids_R)
    yield f"exported checkpoint: {num_bytes / 1e6:,.1f} MB in bfloat16"
    config = drafter.config
    yield f"input scales: hidden {config.hidden_scale:g}, embedding {config.embedding_scale:g}"


def _continued(target: Target, data: Any, options: DrafterOptions, config: DrafterConfig, init_from: str) -> Built:
    drafter, notes = load_drafter(init_from).float(), []
    if config.head == drafter.config.head == "tied" and config.num_outputs != drafter.config.num_outputs:
        smaller, drafter = drafter, RecurrentDrafter(config)
        drafter.set_scales(smaller.config.hidden_scale, smaller.config.embedding_scale)
        expect_same_shape(config, smaller.config.to_dict() | {"draft_vocab_size": config.draft_vocab_size})
        weights = {name: tensor for name, tensor in smaller.state_dict().items() if name != "draft_token_ids_R"}
        drafter.load_state_dict(weights, strict=False)
        notes = _choose_vocabulary(drafter, target, data, options)
    expect_same_shape(config, drafter.config.to_dict())
    drafter.bind(target)
    drafter.config.draft_length = config.draft_length
    drafter.config.target_name = config.target_name
    drafter.train()
    return Built(drafter, [f"weights start from {init_from}", *notes])
