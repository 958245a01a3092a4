"""Checks whether a server runs the target, by prompts, greedy tokens and log-probabilities.

Shapes: T tokens of a prompt and its answer · V vocabulary.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from drafter.data.formats import check_ids
from drafter.distill.endpoint import Endpoint
from drafter.targets.target import Target
from drafter.utils.client import Reply

# Mean difference of log-probabilities, in nats. SmolLM2-135M against its own float32 weights: 0.03 in bfloat16, 0.04 in
# int8, 0.2 in 5 bits, 0.6 in 4 bits; other models differ by several nats.
ROUNDING = 0.1
OTHER_MODEL = 1.5
_NUM_TOKENS = 16  # of each compared answer
_CLEAR = 0.5  # nats below the likeliest token: a smaller distance may be a near tie


def compare_models(server: Endpoint, target: Target, prompts: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Lines for the user about short greedy answers of a server beside the target.

    Conversations show how the server renders a prompt. The compared answers follow the target's own prompt ids, so that
    the chat template does not influence the comparison. ValueError: another model, or the server gives no answer.
    """
    lines: list[str] = []
    distances, differences = [], []  # nats below the target's likeliest token; nats between server and target
    for messages in prompts:
        mine = target.encode_chat(messages)
        greedy = {"model": server.model, "max_tokens": _NUM_TOKENS, "temperature": 0, "seed": 0}
        theirs = _ask(server, "chat/completions", {**greedy, "messages": list(messages)}, target.vocab_size).prompt_ids
        if not theirs:
            break
        if theirs != mine and not lines:
            place = len(os.path.commonprefix([mine, theirs]))
            shown, other = (target.decode(ids[place : place + 8], skip_special_tokens=False) for ids in (mine, theirs))
            lines = [f"chat template: from prompt token {place} on the server reads {other!r}, the target {shown!r}"]
        reply = _ask(server, "completions", {**greedy, "prompt": mine, "logprobs": 1}, target.vocab_size)
        if not reply.token_ids:
            continue
        token_1T = torch.tensor([mine + reply.token_ids], device=target.device)
        with torch.no_grad():
            hidden_TD = target.forward(token_1T).hidden_BTD[0, len(mine) - 1 : -1]
            logprob_TV = target.logits(hidden_TD).float().log_softmax(dim=-1).cpu()
        mine_T = logprob_TV[torch.arange(len(reply.token_ids)), torch.tensor(reply.token_ids)]
        distances += (logprob_TV.max(dim=-1).values - mine_T).tolist()
        differences += [abs(own - other) for own, other in zip(mine_T.tolist(), reply.logprobs, strict=False)]
    if not distances:
        return ["warning: the server gives no token ids, so it is not compared with the target"]
    difference = sum(differences) / max(1, len(differences))
    num_other_picks = sum(distance > _CLEAR for distance in distances)
    by_nats = f"log-probabilities differ by {difference:.2g} nats on average"
    if difference > OTHER_MODEL:
        reason = "; ".join([*lines, f"another model: {by_nats}"])
        raise ValueError(f"--endpoint {server.url} does not serve {target.name!r}; leave --target out ({reason})")
    if difference > ROUNDING:
        lines.append(f"dtype or quantisation: {by_nats}, the same weights in bfloat16 by less than {ROUNDING:g}")
    elif num_other_picks:
        lines.append(f"sampling parameters: {num_other_picks} of {len(distances)} greedy tokens are not the likeliest")
    same = f"the server runs the target: {len(distances)} greedy tokens agree"
    return [f"warning: the server differs from the target: {line}" for line in lines] or [same]


def _ask(server: Endpoint, path: str, body: dict[str, Any], vocab_size: int) -> Reply:
    try:
        reply = server.complete(path, body)
        check_ids([*reply.prompt_ids, *reply.token_ids], vocab_size, "the reply")
        return reply
    except (OSError, ValueError) as error:
        raise ValueError(f"{server.address(path)} gives no answer: {error}") from error
