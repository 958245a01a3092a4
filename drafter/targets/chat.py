"""Text and conversations to token ids, by a tokenizer and its chat template, without the model."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from drafter.utils.io import first_line


def encode_text(tokenizer: Any, text: str, *, escape_special_tokens: bool = False) -> list[int]:
    """Token ids of raw text, with the special tokens that the tokenizer adds by itself; ``escape``: as below."""
    return list(tokenizer(escaped(tokenizer, text) if escape_special_tokens else text)["input_ids"])


class Chat(NamedTuple):
    """A conversation, and the functions that the target may call, in OpenAI's form."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


def what_runs(name: str) -> str:
    """What a message about a limit names."""
    return f"the chat template of {name!r}"


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    name: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    has_opening: bool = True,
) -> str:
    """The text of a conversation by the tokenizer's own template, which runs in this process, without limits.

    Args:
        tokenizer: with a chat template.
        messages: turns with ``role`` and ``content``.
        name: of the target, for messages.
        tools: functions that the target may call, in OpenAI's form.
        has_opening: the text ends with the opening of the assistant's turn.

    Raises:
        ValueError: there is no template, or the template refuses the messages or breaks on them.
        MemoryError: the template takes more memory than this process may have.
    """
    if not tokenizer.chat_template:
        raise ValueError(f"target {name!r} has no chat template: use raw text (--raw)")
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, add_generation_prompt=has_opening, tokenize=False
            )
        )
    except MemoryError:
        raise
    except Exception as error:
        # A template is a program of the model's author: its errors are of any type.
        kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
        raise ValueError(f"{what_runs(name)} refuses these messages: {kind}{first_line(error)}") from error


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    name: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    escape_special_tokens: bool = False,
) -> list[int]:
    """Token ids of a conversation up to the opening of the assistant's turn, as :func:`render_chat` renders it.

    ``escape_special_tokens``: special tokens that stand in a content as text are :func:`escaped`.
    """
    turns = [dict(message) for message in messages]
    if escape_special_tokens:
        turns = [{**turn, "content": escaped(tokenizer, turn["content"])} for turn in turns]
    return list(tokenizer(render_chat(tokenizer, turns, name, tools=tools), add_special_tokens=False)["input_ids"])


def escaped(tokenizer: Any, text: str) -> str:
    """The text with a space behind the first character of every special token, which so is read as plain text.

    ``a<|end|>b`` becomes ``a< |end|>b``.

    Raises:
        ValueError: a special token remains, as a tokenizer that ignores case may read one.
    """
    special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    for token in sorted((token for token in special.values() if len(token.strip()) > 1), key=len, reverse=True):
        text = text.replace(token, f"{token[0]} {token[1:]}")
    if special.keys() & set(tokenizer(text, add_special_tokens=False)["input_ids"]):
        raise ValueError("the text holds a special token of the model, which this server does not take from clients")
    return text
