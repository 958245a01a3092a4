#!/usr/bin/env python3
"""The mean of the weights of drafters of one shape, as an exported folder.

    scripts/average.py drafter/assets/smollm2-135m runs/new/checkpoints/last.ckpt --out my-drafter

The mean of the weights before and after a further training keeps most of what the training brought on its own kind of
text, and drafted other text better than both (docs/notebook.md). Source: arXiv 2109.01903.
"""

import argparse
from pathlib import Path

import torch

from drafter.integrations.export import export
from drafter.models.checkpoint import drafter_of_checkpoint
from drafter.models.drafter import RecurrentDrafter
from drafter.training.build import expect_same_shape
from drafter.utils.io import first_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", help="exported folders or checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="folder of the mean")
    args = parser.parse_args()
    try:
        drafters = [drafter_of_checkpoint(name).float() for name in args.drafters]
        export(mean_of(drafters), args.out, facts={"mean_of": args.drafters})
    except (OSError, ValueError) as error:
        parser.error(first_line(error))
    print(f"the mean of {len(drafters)} drafters is in {args.out}")


@torch.no_grad()
def mean_of(drafters: list[RecurrentDrafter]) -> RecurrentDrafter:
    """The first drafter with the mean of all weights; ValueError for other shapes, constants or draft vocabularies."""
    first = drafters[0]
    for other in drafters[1:]:
        expect_same_shape(first.config, other.config.to_dict())
        scales = [(each.config.hidden_scale, each.config.embedding_scale) for each in (first, other)]
        if scales[0] != scales[1] or not torch.equal(first.draft_token_ids_R, other.draft_token_ids_R):
            raise ValueError("the drafters have different constants or draft vocabularies")
    for name, weight in first.named_parameters():
        weight.copy_(torch.stack([each.get_parameter(name) for each in drafters]).mean(dim=0))
    return first


if __name__ == "__main__":
    main()
