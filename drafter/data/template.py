"""Finds the answers in conversations that the target's chat template renders: where training starts and stops.

The *prefix* of an answer is the rendered conversation before the answer, with the opening of the assistant's turn. The
text of the whole conversation must begin with the prefix, so that the answer stands where the target would write it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from drafter.targets.chat import Chat, what_runs
from drafter.utils.io import first_line
from drafter.utils.limits import limited_map


class PrefixError(ValueError):
    """The answers of a conversation cannot be found by template prefixes; the text is the reason."""


Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


def render(tokenizer: Any, messages: Sequence[Message], *, opening: bool = False, tools: Tools = ()) -> str:
    """The rendered chat template; ``opening`` adds the opening of the assistant's turn, ``tools`` are offered.

    Raises:
        PrefixError: the template refuses the messages or breaks on them.
        MemoryError: the template takes more memory than this process may have.
    """
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=opening
            )
        )
    except MemoryError:
        raise
    except Exception as error:
        # A template is a program of the model's author: its errors are of any type.
        raise PrefixError(f"the chat template of the target refuses the conversation ({first_line(error)})") from error


class AnswerSpan(NamedTuple):
    """An answer in the rendered text: its prefix, and the start and end of its characters."""

    prefix: str
    start: int
    end: int


class Rendered(NamedTuple):
    """A rendered conversation and its answers."""

    text: str
    answers: list[AnswerSpan]


def find_answers(tokenizer: Any, chat: Chat) -> Rendered:
    """The rendered conversation and its answers; PrefixError when the text lacks a prefix or an answer."""
    messages, tools = chat
    text = render(tokenizer, messages, tools=tools)
    turns = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prefix = render(tokenizer, messages[:index], opening=True, tools=tools)
        if not text.startswith(prefix):
            raise PrefixError("the text before an answer changes when the answer is added (no usable prefix)")
        content = message["content"]
        start = text.find(content, len(prefix))
        if start != len(prefix):  # templates may trim an answer, or add text between opening and answer
            content = content.strip()
            start = text.find(content, len(prefix))
        if start < 0:
            raise PrefixError("the template changes the answer")
        turns.append(AnswerSpan(prefix, start, start + len(content)))
    for turn, following in zip(turns, turns[1:], strict=False):
        if turn.end > len(following.prefix):
            raise PrefixError("the template changes the answer")
    return Rendered(text, turns)


def find_all_answers(tokenizer: Any, chats: Sequence[Chat | str], name: str) -> list[Rendered | str]:
    """:func:`find_answers` or why it fails, for every conversation; the template runs with limits of time and memory.

    A text in place of a conversation is the reason why nobody has to look for answers.

    Raises:
        ValueError: a limit was reached; names the target ``name``.
    """

    def find(chat: Chat | str) -> Rendered | str:
        try:
            return chat if isinstance(chat, str) else find_answers(tokenizer, chat)
        except PrefixError as error:
            return str(error)

    found = limited_map(find, chats, what_runs(name))  # as JSON
    return [
        item if isinstance(item, str) else Rendered(item[0], [AnswerSpan(*answer) for answer in item[1]])
        for item in found
    ]
