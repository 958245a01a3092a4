"""Prompts that the target invents (Magpie, arXiv 2406.08464).

An instruction-tuned model that continues its chat template after the opening of the user turn writes a user's question.
So no data set is needed to train a drafter.
"""

import re
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.data.encode import stop_token_ids
from drafter.data.formats import ChatMessage
from drafter.data.template import render
from drafter.decoding.params import SamplingParams
from drafter.distill.journal import Journal
from drafter.distill.prompts import Exclusion, derive_seed
from drafter.targets.chat import what_runs
from drafter.utils.limits import limited_map

if TYPE_CHECKING:
    from drafter.distill.local import EngineAnswerer

_SENTINEL = "Zebra crossing?"
_MIN_CHARACTERS = 12
_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 512  # candidates in one batch
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
    (text,) = limited_map(lambda messages: render(tokenizer, messages), [known], what_runs(name))
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
    if len(data) > 200 and len(zlib.compress(data)) < 0.3 * len(data):
        return "repeats itself"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 3 and len(set(lines)) < 0.7 * len(lines):
        return "repeats itself"
    return None


def invent_prompts(
    path: Path,
    answerer: "EngineAnswerer",
    num_prompts: int,
    *,
    recorded: Mapping[str, Any],
    seed: int = 0,
    exclude: Exclusion | None = None,
    progress: bool = True,
) -> Counter[str]:
    """Let the target invent prompts: a file of prompts, which a later call continues.

    The seed of candidate i depends on i, and candidates are judged in order, so an interrupted run ends with the same
    prompts.

    Args:
        path: .jsonl file of the prompts.
        answerer: the engine that samples the prompts.
        num_prompts: prompts to invent.
        recorded: settings that determine the texts beside the seed, such as the target's fingerprint.
        seed: seed of sampling.
        exclude: texts that no prompt may contain.
        progress: show a bar.

    Returns:
        The number of dropped candidates by reason.

    Raises:
        ValueError: the target invents almost no usable prompt.
    """
    from tqdm import tqdm

    exclude = exclude or Exclusion()
    tokenizer: Any = answerer.target.tokenizer
    target_name = answerer.target.name
    opening_ids, params = user_opening(tokenizer, target_name)
    sampling = {"max_tokens": params.max_new_tokens, "temperature": params.temperature, "top_p": params.top_p}
    sampling["seed"] = seed
    dropped: Counter[str] = Counter()
    with Journal(path, {**sampling, **recorded}, {"candidate": int, "prompt": str}) as journal:
        rows = list(journal.rows)
        seen = {_normal(row["prompt"]) for row in rows}
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        number, num_barren = rows[-1]["candidate"] + 1 if rows else 0, 0
        bar = tqdm(
            total=num_prompts,
            initial=min(len(rows), num_prompts),
            desc="inventing prompts",
            unit="prompt",
            disable=not progress,
            file=sys.stderr,
        )
        with bar:
            while len(rows) < num_prompts:
                before = len(rows)
                size = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, 5 * (num_prompts - before) // 4))
                numbers = range(number, number + size)
                number += size
                texts = answerer.sample(
                    opening_ids, [replace(params, seed=derive_seed(seed, "magpie", n)) for n in numbers]
                )
                for candidate, (text, is_whole) in zip(numbers, texts, strict=True):
                    if len(rows) == num_prompts:
                        break
                    text = text.strip()
                    problem = problem_of(text, special) if is_whole else "cut"
                    if problem is None and (_normal(text) in seen or exclude.matches(text)):
                        problem = "seen before" if _normal(text) in seen else "excluded"
                    if problem is not None:
                        dropped[problem] += 1
                        continue
                    seen.add(_normal(text))
                    row = {"id": f"magpie-{candidate}", "source": "magpie", "candidate": candidate, "prompt": text}
                    journal.append(row)
                    rows.append(row)
                bar.update(len(rows) - before)
                num_barren = 0 if len(rows) > before else num_barren + 1
                if num_barren == _MAX_BARREN_BLOCKS:
                    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
                    raise ValueError(
                        f"target {target_name!r} invented {before} of {num_prompts} usable prompts and then no more "
                        f"({counts}): lower --num-prompts or give --prompts FILE"
                    )
    return dropped


def _normal(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))
