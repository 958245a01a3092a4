#!/usr/bin/env python3
"""The mean of the weights of drafters of one shape, as an exported folder.

    scripts/average.py drafter/assets/smollm2-135m runs/new/checkpoints/last.ckpt --out my-drafter [--answers FILE..]

The mean of the weights before and after a further training keeps most of what the training brought on its own kind of
text, and drafted other text better than both (docs/notebook.md). Source: arXiv 2109.01903.

A drafter keeps the draft tokens that its first answers chose. A tied head has no weights of tokens, so ``--answers``
may choose them anew, from all answers that were learnt since.
"""

import argparse
from pathlib import Path

import torch

from drafter.data.encode import RowEncoder, encode_files, stop_token_ids
from drafter.integrations.export import export
from drafter.models.checkpoint import drafter_of_checkpoint
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.catalog import load_tokenizer
from drafter.training.build import choose_draft_tokens, expect_same_shape
from drafter.utils.io import first_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", help="folders or checkpoints; the last one has the draft vocabulary")
    parser.add_argument("--out", type=Path, required=True, help="folder of the mean")
    parser.add_argument("--answers", nargs="+", metavar="FILE", help="rows whose answers choose the draft tokens")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights: bfloat16, float32 or int8")
    args = parser.parse_args()
    try:
        drafters = [drafter_of_checkpoint(name).float() for name in args.drafters]
        drafter = mean_of(drafters)
        if args.answers:
            if drafter.config.head != "tied":
                raise ValueError("--answers is for a tied head: the weights of another one belong to its draft tokens")
            name = drafter.config.target_name
            tokenizer = load_tokenizer(name)
            rows, _ = encode_files(args.answers, RowEncoder(tokenizer, name, vocab_size=drafter.config.vocab_size))
            ends = stop_token_ids(tokenizer)
            print(choose_draft_tokens(drafter, rows, drafter.config.num_outputs, always=ends))
        export(drafter, args.out, dtype=args.dtype, facts={"mean_of": args.drafters})
    except (OSError, ValueError) as error:
        parser.error(first_line(error))
    print(f"the mean of {len(drafters)} drafters is in {args.out}")


@torch.no_grad()
def mean_of(drafters: list[RecurrentDrafter]) -> RecurrentDrafter:
    """The last drafter with the mean of all weights.

    ValueError: other shapes or constants, or other draft vocabularies where the heads are not tied and so have weights
    of tokens.
    """
    last = drafters[-1]
    is_tied = last.config.head == "tied"
    for other in drafters[:-1]:
        sizes = {"draft_vocab_size": last.config.draft_vocab_size} if is_tied else {}
        expect_same_shape(last.config, other.config.to_dict() | sizes)
        scales = [(each.config.hidden_scale, each.config.embedding_scale) for each in (last, other)]
        if scales[0] != scales[1]:
            raise ValueError("the drafters have different constants")
        if not (is_tied or torch.equal(last.draft_token_ids_R, other.draft_token_ids_R)):
            raise ValueError("the drafters have different draft vocabularies, and their heads are not tied")
    for name, weight in last.named_parameters():
        weight.copy_(torch.stack([each.get_parameter(name) for each in drafters]).mean(dim=0))
    return last


if __name__ == "__main__":
    main()
