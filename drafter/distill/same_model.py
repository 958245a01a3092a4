"""Checks whether a server runs the target, by prompts, greedy tokens and log-probabilities.

Shapes: T tokens of a prompt and its answer · V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from drafter.distill.client import Client, Reply, ServerError

if TYPE_CHECKING:
    from drafter.targets.target import Target

PromptMatch = Literal["same", "special tokens", "chat template", "other length", "unknown"]

# Mean difference of log-probabilities, in nats. SmolLM2-135M against its own float32 weights: 0.03 in bfloat16, 0.04 in
# int8, 0.2 in 5 bits, 0.6 in 4 bits; other models differ by several nats.
ROUNDING = 0.1
OTHER_MODEL = 1.5
_NUM_TOKENS = 16  # of each compared answer
_CLEAR = 0.5  # nats below the likeliest token: a smaller distance may be a near tie


@dataclass
class Comparison:
    """The comparison of a few greedy answers of the server with the target.

    Attributes:
        prompt: difference between the server's prompts and the target's template, token by token if the server gives
            ids; "other length" if only the counts are known and differ.
        prompt_note: the first difference, for messages.
        num_tokens: compared tokens of the server's answers.
        num_other_picks: tokens that the target ranks clearly below its own greedy pick.
        difference: mean difference of the log-probabilities in nats; None if the server gives none.
    """

    prompt: PromptMatch = "unknown"
    prompt_note: str = ""
    num_tokens: int = 0
    num_other_picks: int = 0
    difference: float | None = None

    @property
    def is_other_model(self) -> bool:
        """Whether the log-probabilities belong to another model."""
        return self.difference is not None and self.difference > OTHER_MODEL

    @property
    def is_rounded(self) -> bool:
        """Whether the log-probabilities belong to the target in another number format."""
        return self.difference is not None and ROUNDING < self.difference <= OTHER_MODEL

    @property
    def is_sampled(self) -> bool:
        """Whether the model is the target, but the tokens are not its greedy tokens."""
        return self.num_other_picks > 0 and self.difference is not None and self.difference <= ROUNDING

    def lines(self) -> list[str]:
        """One line for each difference."""
        found = []
        if self.prompt not in ("same", "unknown"):
            name = "chat template or special tokens" if self.prompt == "other length" else self.prompt
            found.append(f"{name}: {self.prompt_note}")
        if self.is_other_model:
            found.append(f"another model: log-probabilities differ by {self.difference:.2g} nats on average")
        if self.is_rounded:
            found.append(
                f"dtype or quantisation: log-probabilities differ by {self.difference:.2g} nats on average, the same "
                f"weights in bfloat16 by less than {ROUNDING:g}"
            )
        if self.is_sampled or (self.difference is None and self.num_other_picks):
            found.append(
                f"sampling parameters: {self.num_other_picks} of {self.num_tokens} greedy tokens are not the target's "
                "likeliest ones"
            )
        return found


def compare_models(
    client: Client,
    model: str,
    target: "Target",
    prompts: Sequence[Sequence[Mapping[str, Any]]],
) -> Comparison:
    """Compare short greedy answers of the server with the target.

    Conversations show how the server renders a prompt. The compared answers follow the target's own prompt ids if the
    server takes ids, so that the chat template does not influence the comparison of the models.

    Raises:
        ValueError: the server refuses a prompt, or gives no answer.
    """
    found = Comparison()
    differences: list[float] = []
    size = target.vocab_size
    for messages in prompts:
        prompt_ids = target.encode_chat(messages)
        greedy = {"model": model, "max_tokens": _NUM_TOKENS, "temperature": 0, "seed": 0}
        chat = _ask(client, "chat/completions", {**greedy, "messages": list(messages), "logprobs": True}, size)
        assert chat is not None
        _note_prompt(found, target, prompt_ids, chat)
        # vLLM, SGLang and this package take token ids as a prompt; from other servers the chat answer is compared.
        reply = _ask(client, "completions", {**greedy, "prompt": prompt_ids, "logprobs": 1}, size, may_lack=True)
        if reply is None and found.prompt in ("same", "unknown"):
            reply = chat
        if reply is not None:
            _note_answer(found, differences, target, prompt_ids, reply)
    if differences:
        found.difference = sum(differences) / len(differences)
    return found


def _ask(client: Client, path: str, body: dict[str, Any], vocab_size: int, *, may_lack: bool = False) -> Reply | None:
    try:
        reply = client.complete(path, body)
        largest = max((*(reply.prompt_ids or ()), *(reply.token_ids or ())), default=0)
        if largest >= vocab_size:
            raise ValueError(f"token id {largest} is outside the vocabulary of {vocab_size}, of the target")
        return reply
    except ServerError as error:
        if may_lack and error.code in (400, 404, 405, 422, 501):
            return None
        raise ValueError(f"{client.address(path)} answers {error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{client.address(path)} gives no answer: {error}") from error


def _note_prompt(found: Comparison, target: "Target", prompt_ids: list[int], reply: Reply) -> None:
    """Record the first difference of a prompt; "same" if no prompt differs."""
    if found.prompt not in ("same", "unknown"):
        return
    theirs = reply.prompt_ids
    if theirs is None:
        if reply.num_prompt_tokens in (0, len(prompt_ids)):
            found.prompt = "same" if reply.num_prompt_tokens else found.prompt
        else:
            found.prompt = "other length"
            found.prompt_note = (
                f"the server counts {reply.num_prompt_tokens} prompt tokens, the target {len(prompt_ids)}"
            )
        return
    if theirs == prompt_ids:
        found.prompt = "same"
        return
    special = set(target.tokenizer.all_special_ids) if target.tokenizer is not None else set()
    plain, their_plain = ([token for token in ids if token not in special] for ids in (prompt_ids, theirs))
    found.prompt = "special tokens" if plain == their_plain else "chat template"
    place = next(
        (i for i, (a, b) in enumerate(zip(prompt_ids, theirs, strict=False)) if a != b),
        min(len(prompt_ids), len(theirs)),
    )
    mine, other = (target.decode(ids[place : place + 8], skip_special_tokens=False) for ids in (prompt_ids, theirs))
    found.prompt_note = f"from prompt token {place} on the server reads {other!r}, the target {mine!r}"


def _note_answer(
    found: Comparison, differences: list[float], target: "Target", prompt_ids: list[int], reply: Reply
) -> None:
    """Count picks and differences of one answer to the target's own prompt."""
    import torch

    given = reply.logprobs
    answer_ids = reply.token_ids if reply.token_ids is not None else _ids_of_text(target, reply)
    if given is not None:
        answer_ids = answer_ids[: len(given)]
    if not answer_ids:
        return
    token_1T = torch.tensor([prompt_ids + answer_ids], device=target.device)
    with torch.no_grad():
        hidden_TD = target.forward(token_1T).hidden_BTD[0, len(prompt_ids) - 1 : -1]
        logprob_TV = target.logits(hidden_TD).float().log_softmax(dim=-1).cpu()
    mine_T = logprob_TV[torch.arange(len(answer_ids)), torch.tensor(answer_ids)]
    found.num_tokens += len(answer_ids)
    found.num_other_picks += int((logprob_TV.max(dim=-1).values - mine_T > _CLEAR).sum())
    if given is not None:
        differences += [abs(mine - theirs) for mine, (_, theirs) in zip(mine_T.tolist(), given, strict=False)]


def _ids_of_text(target: "Target", reply: Reply) -> list[int]:
    """The tokens of an answer that came as text, up to the first token that the server split differently."""
    tokenizer: Any = target.tokenizer
    ids = list(tokenizer(reply.text, add_special_tokens=False)["input_ids"])
    if reply.logprobs is not None:
        texts = [target.decode([token], skip_special_tokens=False) for token in ids]
        # The replacement character stands for any part of a character: later tokens may be shifted.
        same = [mine == theirs != "\ufffd" for mine, (theirs, _) in zip(texts, reply.logprobs, strict=False)]
        ids = ids[: same.index(False)] if False in same else ids[: len(same)]
    return ids
