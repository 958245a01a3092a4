"""Checks whether a server runs the target, by prompts, greedy tokens and log-probabilities.

Shapes: T tokens of a prompt and its answer · V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drafter.distill.client import Client, Reply, ServerError

if TYPE_CHECKING:
    from drafter.targets.target import Target

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
        prompt_note: the first difference of a prompt from the target's; empty if no prompt differs.
        num_tokens: compared tokens of the server's answers; 0 if the server gives no token ids.
        num_other_picks: tokens that the target ranks clearly below its own greedy pick.
        differences: differences of the log-probabilities of the tokens, in nats; empty if the server gives none.
    """

    prompt_note: str = ""
    num_tokens: int = 0
    num_other_picks: int = 0
    differences: list[float] = field(default_factory=list)

    @property
    def difference(self) -> float:
        """Mean difference of the log-probabilities in nats; 0 if the server gives none."""
        return sum(self.differences) / max(1, len(self.differences))

    @property
    def is_other_model(self) -> bool:
        """Whether the log-probabilities belong to another model."""
        return self.difference > OTHER_MODEL

    def lines(self) -> list[str]:
        """One line for each difference."""
        found = [self.prompt_note] if self.prompt_note else []
        if self.is_other_model:
            found.append(f"another model: log-probabilities differ by {self.difference:.2g} nats on average")
        elif self.difference > ROUNDING:
            found.append(
                f"dtype or quantisation: log-probabilities differ by {self.difference:.2g} nats on average, the same "
                f"weights in bfloat16 by less than {ROUNDING:g}"
            )
        elif self.num_other_picks:
            found.append(
                f"sampling parameters: {self.num_other_picks} of {self.num_tokens} greedy tokens are not the target's "
                "likeliest ones"
            )
        return found


def compare_models(
    client: Client, model: str, target: "Target", prompts: Sequence[Sequence[Mapping[str, Any]]]
) -> Comparison:
    """Compare short greedy answers of a server that gives token ids with the target.

    Conversations show how the server renders a prompt. The compared answers follow the target's own prompt ids, so that
    the chat template does not influence the comparison of the models.

    Raises:
        ValueError: the server refuses a prompt, or gives no answer.
    """
    found = Comparison()
    for messages in prompts:
        prompt_ids = target.encode_chat(messages)
        greedy = {"model": model, "max_tokens": _NUM_TOKENS, "temperature": 0, "seed": 0}
        chat = _ask(client, "chat/completions", {**greedy, "messages": list(messages)}, target.vocab_size)
        if chat.prompt_ids is None:
            break
        found.prompt_note = found.prompt_note or _prompt_note(target, prompt_ids, chat.prompt_ids)
        body = {**greedy, "prompt": prompt_ids, "logprobs": 1}
        _note_answer(found, target, prompt_ids, _ask(client, "completions", body, target.vocab_size))
    return found


def _ask(client: Client, path: str, body: dict[str, Any], vocab_size: int) -> Reply:
    try:
        reply = client.complete(path, body)
        largest = max((*(reply.prompt_ids or ()), *(reply.token_ids or ())), default=0)
        if largest >= vocab_size:
            raise ValueError(f"token id {largest} is outside the vocabulary of {vocab_size}, of the target")
        return reply
    except ServerError as error:
        raise ValueError(f"{client.address(path)} answers {error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{client.address(path)} gives no answer: {error}") from error


def _prompt_note(target: "Target", mine: list[int], theirs: list[int]) -> str:
    """The first difference of two prompts; empty if they are the same."""
    if mine == theirs:
        return ""
    special = set(target.tokenizer.all_special_ids) if target.tokenizer is not None else set()
    plain, their_plain = ([token for token in ids if token not in special] for ids in (mine, theirs))
    name = "special tokens" if plain == their_plain else "chat template"
    pairs = enumerate(zip(mine, theirs, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
    shown, other = (target.decode(ids[place : place + 8], skip_special_tokens=False) for ids in (mine, theirs))
    return f"{name}: from prompt token {place} on the server reads {other!r}, the target {shown!r}"


def _note_answer(found: Comparison, target: "Target", prompt_ids: list[int], reply: Reply) -> None:
    """Count picks and differences of one answer to the target's own prompt."""
    import torch

    answer_ids = reply.token_ids or []
    if not answer_ids:
        return
    token_1T = torch.tensor([prompt_ids + answer_ids], device=target.device)
    with torch.no_grad():
        hidden_TD = target.forward(token_1T).hidden_BTD[0, len(prompt_ids) - 1 : -1]
        logprob_TV = target.logits(hidden_TD).float().log_softmax(dim=-1).cpu()
    mine_T = logprob_TV[torch.arange(len(answer_ids)), torch.tensor(answer_ids)]
    found.num_tokens += len(answer_ids)
    found.num_other_picks += int((logprob_TV.max(dim=-1).values - mine_T > _CLEAR).sum())
    found.differences += [abs(mine - theirs) for mine, theirs in zip(mine_T.tolist(), reply.logprobs, strict=False)]
