"""Finds the answers in conversations that the target's chat template renders: where training starts and stops.

The *prefix* of an answer is the rendered conversation before the answer, with the opening of the assistant's turn. The
text of the whole conversation must begin with the prefix, so that the answer stands where the target would write it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from drafter.utils.io import first_line

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


def render(tokenizer: Any, messages: Sequence[Message], *, opening: bool = False, tools: Tools = ()) -> str:
    """The rendered chat template; ``opening`` adds the opening of the assistant's turn, ``tools`` are offered.

    Raises:
        ValueError: the template refuses the messages or breaks on them.
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
        raise ValueError(f"the chat template of the target refuses the conversation ({first_line(error)})") from error


def find_answers(
    tokenizer: Any, messages: Sequence[Message], tools: Tools = ()
) -> tuple[str, list[tuple[int, int, int]]]:
    """The rendered conversation, and of each answer the end of its prefix, its start and its end in characters.

    Raises:
        ValueError: the text lacks a prefix or an answer.
    """
    text = render(tokenizer, messages, tools=tools)
    spans: list[tuple[int, int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prefix = render(tokenizer, messages[:index], opening=True, tools=tools)
        if not text.startswith(prefix):
            raise ValueError("the text before an answer changes when the answer is added (no usable prefix)")
        content = message["content"]
        start = text.find(content, len(prefix))
        if start != len(prefix):  # templates may trim an answer, or add text between opening and answer
            content = content.strip()
            start = text.find(content, len(prefix))
        if start < 0 or (spans and spans[-1][2] > len(prefix)):
            raise ValueError("the template changes the answer")
        spans.append((len(prefix), start, start + len(content)))
    return text, spans
