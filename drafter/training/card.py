"""The model card that stands beside exported weights."""

import json
from collections.abc import Mapping
from typing import Any

from drafter.models.drafter import RecurrentDrafter

_TEMPLATE = """---
library_name: drafter
pipeline_tag: text-generation
tags: [speculative-decoding, recurrent-drafter]
---
# Recurrent drafter for {target}

A small recurrent head that drafts tokens for `{target}`{revision}. The target checks every draft, so its answers stay
exactly as they are; they only come in fewer steps.

```
drafter decode --target {target} --drafter THIS_FOLDER --prompt "What is a prime number?"
```

With transformers alone in front (the package `drafter` installed; the folder's own script is run):

```python
model.generate(**inputs, max_new_tokens=128, custom_generate="THIS_FOLDER", trust_remote_code=True)
```

| | |
|---|---|
| parameters | {num_parameters:,} ({parts}) |
| cell, context, head | {cell}, {context}, {head} |
| residual blocks | {num_res_blocks} |
| draft vocabulary | {num_outputs:,} of {vocab_size:,} tokens |
| trained to depth | {draft_length} |
| trained positions | {trained_positions:,} in {steps:,} steps |
{measured}
It works with this target only; another is refused by a fingerprint of the output matrix. `run.json` says how this
folder was made.

## Training
```json
{training}
```
"""


def model_card(drafter: RecurrentDrafter, facts: Mapping[str, Any]) -> str:
    """Markdown; ``facts``: trained_positions, steps, and by name metrics and the settings of training and data."""
    config = drafter.config
    parts = drafter.num_parameters_by_part()
    training = {"model": facts["training"], "data": facts["data"]}
    rate = facts.get("metrics", {}).get("val/tokens_per_step")
    return _TEMPLATE.format(
        target=config.target_name or "an unnamed target",
        revision=f" (revision `{config.target_revision}`)" if config.target_revision else "",
        num_parameters=sum(parts.values()),
        parts=", ".join(f"{name} {count:,}" for name, count in parts.items()),
        cell=config.cell,
        context=config.context,
        head=config.head,
        num_res_blocks=config.num_res_blocks,
        num_outputs=config.num_outputs,
        vocab_size=config.vocab_size,
        draft_length=config.draft_length,
        trained_positions=facts["trained_positions"],
        steps=facts["steps"],
        measured="" if rate is None else f"| tokens per step on held-out prompts, greedy | {rate:.2f} |\n",
        training=json.dumps(training, indent=2, default=str),
    )
