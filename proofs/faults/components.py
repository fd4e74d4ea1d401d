"""Components that misbehave when they are called: `FAULT` says how, and a file says when it began.

Copied to a folder of its own, so that it stands for a user's code.
"""

# Functions given by path have the parameters that they are called with.
# ruff: noqa: ARG001

import os
import time
from pathlib import Path

import torch

import slime.plugin as sp
from slime.data import RolloutDataSource, Sample


def misbehave(component):
    """Raise, sleep or spin if `FAULT` is `raise`, `sleep` or `spin` and `FAULT_IN` is this component."""
    if os.environ.get("FAULT_IN") != component:
        return
    Path(os.environ["FAULT_NOTE"]).touch()
    fault = os.environ["FAULT"]
    if fault == "raise":
        raise ZeroDivisionError("the fault that was asked for")
    if fault == "sleep":
        time.sleep(3600)
    while fault == "spin":
        pass


def reward_func(args, sample, **kwargs):
    misbehave("reward")
    return float(len(sample.tokens) % 2)


async def custom_generate(args, sample, sampling_params, policy, sampling, tokenizer):
    misbehave("generator")
    answer = await policy.generate(sample.tokens, sampling)
    sample.tokens = sample.tokens + answer.tokens
    sample.response_length = len(answer.tokens)
    sample.response = tokenizer.decode(answer.tokens, skip_special_tokens=True)
    sample.rollout_log_probs = answer.log_probs
    sample.weight_versions = answer.weight_versions
    sample.finish_reason = answer.finish_reason
    return sample


def dynamic_sampling_filter(args, samples, **kwargs):
    misbehave("filter")
    return True


class Source(RolloutDataSource):
    """The data set's prompts."""

    def get_samples(self, num_samples):
        misbehave("source")
        return [Sample(prompt=row.prompt, label=row.label) for row in self.dataset.rows(num_samples)]


class Faulty:
    """An estimator that misbehaves on the second rank only."""

    def __init__(self, options, context):
        pass

    def advantages(self, batch):
        if torch.distributed.get_rank() == 1:
            misbehave("estimator")
        return sp.Advantages([reward * mask for reward, mask in zip(batch.rewards, batch.loss_masks, strict=True)])
