"""The run's own functions: a generator that waits for the schedule, and a reward that runs in worker processes."""

# Functions given by path have the parameters that they are called with.
# ruff: noqa: ARG001

import asyncio
import os
from pathlib import Path

GATE = Path(os.environ["CHAOS"], "gate")
SAMPLES = int(os.environ["CHAOS_SAMPLES"])
_ONE_ASKS = asyncio.Lock()


async def custom_generate(args, sample, sampling_params, policy, sampling, tokenizer):
    """One response, once the schedule lets the sample's rollout begin."""
    if not sampling.evaluation:
        async with _ONE_ASKS:
            while sample.index // SAMPLES >= int(GATE.read_text()):
                await asyncio.sleep(0.02)
    answer = await policy.generate(sample.tokens, sampling)
    sample.tokens = sample.tokens + answer.tokens
    sample.response_length = len(answer.tokens)
    sample.response = tokenizer.decode(answer.tokens, skip_special_tokens=True)
    sample.rollout_log_probs = answer.log_probs
    sample.weight_versions = answer.weight_versions
    sample.finish_reason = answer.finish_reason
    return sample


def reward_func(args, sample, **kwargs):
    """As the reward `exact_match`."""
    return float(sample.response.strip() == sample.label)
