"""Prompts that the target invents (Magpie, arXiv 2406.08464).

An instruction-tuned model that continues its chat template after the opening of the user turn writes a user's question.
So no data set is needed to train a drafter. Left alone, a small model invents mostly plans and stories: every other
question, by lot, begins with the first words of one of the package's prompts, which are of ten kinds.
"""

import random
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from drafter.data.encode import stop_token_ids
from drafter.data.formats import ChatMessage
from drafter.data.reading import BUILTIN_PROMPTS
from drafter.decoding.params import SamplingParams
from drafter.distill.journal import open_journal
from drafter.distill.prompts import derive_seed, select_prompts
from drafter.engine.engine import Engine
from drafter.targets.chat import Fork, render_chat, what_runs

_SENTINEL = "Zebra crossing?"
_MIN_CHARACTERS = 12
_BLOCK = 64  # candidates in one batch, at most; fewer where few prompts are missing
_MAX_BARREN_BLOCKS = 8
_MAX_WORDS = 4  # of a package's prompt
_PARAMS = SamplingParams(max_new_tokens=160, temperature=1.0, top_p=0.99)  # of an invented prompt


def user_opening(tokenizer: Any, name: str) -> tuple[list[int], SamplingParams]:
    """The template before the user's words, and parameters that sample the words; ValueError: an unfit template."""
    known: list[ChatMessage] = [{"role": "user", "content": _SENTINEL}]
    with closing(Fork(partial(render_chat, tokenizer, name=name, has_opening=False), what_runs(name))) as fork:
        (text,) = fork.map([known])
    before, _, after = text.partition(_SENTINEL)
    # Tokenizers may join a space with the word after it, so the opening must not end with a space.
    opening_ids, end_ids = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before.rstrip(" "), after)
    )
    special = stop_token_ids(tokenizer)
    stop_ids = tuple(token for token in end_ids if token in special)[:1]
    stop = () if stop_ids or not after.strip() else (after.strip(),)
    if text.count(_SENTINEL) != 1 or not opening_ids or not (stop_ids or stop):
        raise ValueError(
            f"the chat template of target {name!r} does not open, show once and end a user message: give --prompts FILE"
        )
    return list(opening_ids), replace(_PARAMS, stop=stop, stop_token_ids=stop_ids)


def first_words(prompts: Sequence[str], seed: int) -> str:
    """The words that a question begins with: at most half of one of the prompts, and none for half of the seeds."""
    chance = random.Random(seed)
    if chance.random() < 0.5:
        return ""
    words = chance.choice(prompts).split()
    return " ".join(words[: chance.randint(1, min(_MAX_WORDS, len(words) // 2))])


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
    path: Path, engine: Engine, num_prompts: int, *, recorded: Mapping[str, Any], seed: int = 0
) -> Counter[str]:
    """Let the target invent prompts for a .jsonl file, which a later call continues; counts of dropped ones by reason.

    The seed of candidate i depends on i, and candidates are judged in order, so an interrupted run ends with the same
    prompts. ``recorded``: further settings that determine the texts, such as the target's fingerprint. ValueError: the
    target invents almost no usable prompt.
    """
    dropped = Counter[str]()
    tokenizer: Any = engine.target.tokenizer
    opening_ids, params = user_opening(tokenizer, engine.target.name)
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    settings = {
        "max_tokens": params.max_new_tokens, "temperature": params.temperature, "top_p": params.top_p,
        "first_words": _MAX_WORDS, "seed": seed, **recorded,
    }  # fmt: skip
    prompts = [str(row.messages[0]["content"]) for row in select_prompts(BUILTIN_PROMPTS)[0]]
    with (
        open_journal(path, settings, {"candidate": int, "prompt": str}) as journal,
        tqdm(total=num_prompts, initial=min(len(journal.rows), num_prompts), desc="inventing", unit="prompt") as bar,
    ):
        found = {row["prompt"] for row in journal.rows}
        start = after_usable = journal.rows[-1]["candidate"] + 1 if journal.rows else 0
        while len(found) < num_prompts:
            if start - after_usable >= _MAX_BARREN_BLOCKS * _BLOCK:
                counts = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
                raise ValueError(
                    f"target {engine.target.name!r} invented {len(found)} of {num_prompts} usable prompts and then no "
                    f"more ({counts}): lower --num-prompts or give --prompts FILE"
                )
            block = range(start, start + min(_BLOCK, 8 + 2 * (num_prompts - len(found))))
            start = block.stop
            seeds = [replace(params, seed=derive_seed(seed, "magpie", candidate)) for candidate in block]
            words = [first_words(prompts, derive_seed(seed, "words", candidate)) for candidate in block]
            words_ids = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else [] for text in words]
            made_texts = engine.generate([opening_ids + ids for ids in words_ids], seeds)
            for candidate, ids, made in zip(block, words_ids, made_texts, strict=True):
                # Decoded as one text: some tokenizers drop the space before a text's first word.
                made_ids = [token for token in made.token_ids if token not in params.stop_token_ids]
                text = engine.target.decode([*ids, *made_ids])
                for stop in params.stop:
                    text = text.partition(stop)[0]
                text = text.strip()
                problem = problem_of(text, special) if made.finish_reason == "stop" else "cut"
                problem = "seen before" if problem is None and text in found else problem
                if problem is not None:
                    dropped[problem] += 1
                elif len(found) < num_prompts:
                    found.add(text)
                    after_usable = candidate + 1
                    journal.append({"id": f"magpie-{candidate}", "candidate": candidate, "prompt": text})
                    bar.update()
    return dropped
