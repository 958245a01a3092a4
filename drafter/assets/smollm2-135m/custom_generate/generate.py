"""Decode with this folder's drafter: the tokens of the model alone, in fewer of its forwards.

    model.generate(**inputs, max_new_tokens=128, custom_generate="THIS FOLDER OR HUB NAME", trust_remote_code=True)

Needs the package `drafter`. See drafter.integrations.transformers.generate for what is honoured and what is refused.
"""

import sys


def generate(model, drafter=None, **arguments):
    """Called by transformers with the arguments of model.generate; `drafter` overrides where the drafter is."""
    from drafter.integrations.transformers import generate as generate_with_drafter

    if drafter is None:
        # transformers copies this file away before it runs it, and says nowhere from where; its own call still knows.
        drafter = sys._getframe(1).f_locals.get("custom_generate")
    if not isinstance(drafter, str):
        raise ValueError("say where the drafter is: model.generate(..., drafter='FOLDER OR HUB NAME')")
    return generate_with_drafter(model, drafter=drafter, **arguments)
