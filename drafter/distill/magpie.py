"""Prompts that the target invents (Magpie, arXiv 2406.08464).

An instruction-tuned model that continues its chat template after the opening of the user turn writes a user's question.
So no data set is needed to train a drafter.
"""

import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.data.encode import stop_token_ids
from drafter.data.formats import ChatMessage
from drafter.decoding.params import SamplingParams
from drafter.distill.journal import Journal
from drafter.distill.prompts import derive_seed
from drafter.targets.chat import limited_map, render_chat, what_runs

if TYPE_CHECKING:
    from drafter.engine.engine import Engine

_SENTINEL = "Zebra crossing?"
_MIN_CHARACTERS = 12
_BLOCK = 64  # candidates in one batch
_MAX_BARREN_BLOCKS = 8
_PARAMS = SamplingParams(max_new_tokens=160, temperature=1.0, top_p=0.99)  # of an invented prompt


def user_opening(tokenizer: Any, name: str) -> tuple[list[int], SamplingParams]:
    """The template before the user's words, and how the words are sampled: the parameters know what ends the words.

    A known message is rendered with the template.

    Raises:
        ValueError: no template, a template that does not show the message exactly once, or no end of the user turn.
    """
    if not tokenizer.chat_template:
        raise ValueError(f"target {name!r} has no chat template, so it cannot invent prompts: give --prompts FILE")
    known: list[ChatMessage] = [{"role": "user", "content": _SENTINEL}]
    (text,) = limited_map(
        lambda turns: render_chat(tokenizer, turns, name, has_opening=False), [known], what_runs(name)
    )
    before, _, after = text.partition(_SENTINEL)
    if text.count(_SENTINEL) != 1:
        raise ValueError(
            f"the chat template of target {name!r} does not show a user message exactly once: give --prompts FILE"
        )
    # Tokenizers may join a space with the word after it, so the opening must not end with a space.
    before_ids = tokenizer(before.rstrip(" "), add_special_tokens=False)["input_ids"]
    after_ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    special = stop_token_ids(tokenizer)
    stop_ids = tuple(token for token in after_ids if token in special)[:1]
    stop = () if stop_ids or not after.strip() else (after.strip(),)
    if not before_ids or not (stop_ids or stop):
        raise ValueError(
            f"the chat template of target {name!r} does not open and end a user message: give --prompts FILE"
        )
    return list(before_ids), replace(_PARAMS, stop=stop, stop_token_ids=stop_ids)


def problem_of(text: str, special_tokens: Sequence[str]) -> str | None:
    """The reason to drop an invented prompt, or None: too short, damaged, template tokens, repetition."""
    if len(re.findall(r"\w", text)) < _MIN_CHARACTERS:
        return "too short"
    if "\ufffd" in text:
        return "damaged characters"
    if any(token in text for token in special_tokens):
        return "template tokens"
    data = text.encode()
    return "repeats itself" if len(data) > 200 and len(zlib.compress(data)) < 0.3 * len(data) else None


def invent_prompts(
    path: Path, engine: "Engine", num_prompts: int, *, recorded: Mapping[str, Any], seed: int = 0
) -> Counter[str]:
    """Let the target invent prompts: a file of prompts, which a later call continues.

    The seed of candidate i depends on i, and candidates are judged in order, so an interrupted run ends with the same
    prompts.

    Args:
        path: .jsonl file of the prompts.
        engine: samples the prompts.
        num_prompts: prompts to invent.
        recorded: settings that determine the texts beside the seed, such as the target's fingerprint.
        seed: seed of sampling.

    Returns:
        The number of dropped candidates by reason.

    Raises:
        ValueError: the target invents almost no usable prompt.
    """
    from tqdm import tqdm

    dropped = Counter[str]()
    tokenizer: Any = engine.target.tokenizer
    opening_ids, params = user_opening(tokenizer, engine.target.name)
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    sampling = {"max_tokens": params.max_new_tokens, "temperature": params.temperature, "top_p": params.top_p}
    with Journal(path, {**sampling, "seed": seed, **recorded}, {"candidate": int, "prompt": str}) as journal:
        found = {row["prompt"] for row in journal.rows}
        number = journal.rows[-1]["candidate"] + 1 if journal.rows else 0
        last = number  # the candidate after the last usable one
        with tqdm(total=num_prompts, initial=min(len(found), num_prompts), desc="inventing", unit="prompt") as bar:
            while len(found) < num_prompts:
                block = range(number, number + _BLOCK)
                sampled = [replace(params, seed=derive_seed(seed, "magpie", candidate)) for candidate in block]
                for number, made in zip(block, engine.generate([opening_ids] * _BLOCK, sampled), strict=True):
                    text = made.text.strip()
                    problem = problem_of(text, special) if made.finish_reason == "stop" else "cut"
                    problem = "seen before" if problem is None and text in found else problem
                    if problem is not None:
                        dropped[problem] += 1
                    elif len(found) < num_prompts:
                        found.add(text)
                        last = number + 1
                        journal.append({"id": f"magpie-{number}", "candidate": number, "prompt": text})
                        bar.update()
                number += 1
                if number - last >= _MAX_BARREN_BLOCKS * _BLOCK:
                    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
                    raise ValueError(
                        f"target {engine.target.name!r} invented {len(found)} of {num_prompts} usable prompts and then "
                        f"no more ({counts}): lower --num-prompts or give --prompts FILE"
                    )
    return dropped
