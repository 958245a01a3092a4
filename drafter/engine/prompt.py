"""Prompts in any of their forms as token ids."""

from collections.abc import Mapping, Sequence
from operator import index

from drafter.targets.target import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


def check_prompts(prompts: object) -> None:
    """Refuse a single prompt where a list of them is due: its characters, tokens or messages are no prompts.

    Raises:
        ValueError: text, token ids, or the messages of one conversation.
    """
    is_single = isinstance(prompts, str)
    if isinstance(prompts, Sequence) and len(prompts) > 0 and not is_single:
        is_single = isinstance(prompts[0], Mapping | int)
    if is_single:
        raise ValueError("prompts must be a list of prompts, even of one: [prompt]")


def encode_prompt(target: Target, prompt: Prompt, *, raw: bool) -> list[int]:
    """Token ids of one user message, a conversation, token ids or, if ``raw``, text as it is.

    Raises:
        ValueError: a list of anything but messages or token ids.
    """
    if isinstance(prompt, str):
        return target.encode(prompt) if raw else target.encode_chat([{"role": "user", "content": prompt}])
    if len(prompt) > 0 and isinstance(prompt[0], Mapping):
        messages = [item for item in prompt if isinstance(item, Mapping)]
        if len(messages) < len(prompt):
            raise ValueError(f"a prompt mixes messages and other things: {prompt!r}")
        return target.encode_chat(messages)
    return [_token_id(token) for token in prompt]


def _token_id(token: object) -> int:
    """A token id as an int, whatever library's integer it is."""
    try:
        return index(token)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"{token!r} is no token id: a prompt is text, messages, or a list of integers") from error
