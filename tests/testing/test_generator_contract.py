"""The contract of generators names each broken rule."""

# ruff: noqa: ARG002 - generators keep the contract's signature
from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest

from slime.errors import EngineError
from slime.plugin import Generation, GeneratorSpec, PolicyClient, Sample, SamplingParams, Status
from slime.testing import assert_generator_contract, decode, encode

NO_ENGINE = GeneratorSpec(name="x", factory="a:B", needs_engine=False)


class Single:
    """Asks once."""

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        return [self.filled(sample, await policy.generate(sample.tokens, sampling))]

    def filled(self, sample: Sample, answer: Generation) -> Sample:
        sample.tokens = sample.tokens + answer.tokens
        sample.response, sample.response_length = decode(answer.tokens), len(answer.tokens)
        sample.loss_mask, sample.rollout_log_probs = [1] * len(answer.tokens), answer.log_probs
        sample.weight_versions = answer.weight_versions
        sample.status = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}.get(answer.finish_reason, Status.ABORTED)
        return sample


class TwoTurns(Single):
    """Calls the policy, adds tokens that are not trained on, and calls it again."""

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        first = await policy.generate(sample.tokens, sampling)
        added = encode(" really? ")
        second = await policy.generate([*sample.tokens, *first.tokens, *added], sampling)
        tokens = [*first.tokens, *added, *second.tokens]
        whole = Generation(tokens, [], second.finish_reason, second.weight_versions)
        sample = self.filled(sample, whole)
        sample.loss_mask = [1] * len(first.tokens) + [0] * len(added) + [1] * len(second.tokens)
        sample.rollout_log_probs = [*first.log_probs, *[0.0] * len(added), *second.log_probs]
        return [sample]


class Retokenizes(Single):
    def filled(self, sample: Sample, answer: Generation) -> Sample:
        tokens = encode(decode(answer.tokens).upper())
        return super().filled(sample, Generation(tokens, [-1.0] * len(tokens), answer.finish_reason, ["1"]))


class TrainsOnTools(TwoTurns):
    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        [sample] = await super().generate(sample, sampling, policy)
        sample.loss_mask = None
        return [sample]


class NoVersions(Single):
    def filled(self, sample: Sample, answer: Generation) -> Sample:
        sample = super().filled(sample, answer)
        sample.weight_versions = []
        return sample


class Greedy(Single):
    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        return await super().generate(sample, SamplingParams(max_new_tokens=4096), policy)


class ShortColumn(Single):
    def filled(self, sample: Sample, answer: Generation) -> Sample:
        sample = super().filled(sample, answer)
        sample.columns = {"doubt": np.zeros(len(answer.tokens) - 1, dtype=np.float32)}
        return sample


class AlwaysCompleted(Single):
    def filled(self, sample: Sample, answer: Generation) -> Sample:
        sample = super().filled(sample, answer)
        sample.status = Status.COMPLETED
        return sample


class Swallows(Single):
    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        try:
            return await super().generate(sample, sampling, policy)
        except EngineError:
            sample.status, sample.failure = Status.FAILED, "no answer"
            return [sample]


class Wraps(Single):
    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        try:
            return await super().generate(sample, sampling, policy)
        except EngineError as error:
            raise RuntimeError("turn 1 failed") from error


class Leaks(Single):
    def __init__(self) -> None:
        self.tasks: list[Any] = []

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        self.tasks.append(asyncio.ensure_future(policy.generate(sample.tokens, sampling)))
        return [self.filled(sample, await asyncio.shield(self.tasks[-1]))]


class Stubborn(Single):
    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        with contextlib.suppress(asyncio.CancelledError):
            return await super().generate(sample, sampling, policy)
        sample.status, sample.failure = Status.FAILED, "cancelled"
        return [sample]


class MixesUp(Single):
    sample: Sample

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        self.sample = sample
        answer = await policy.generate(sample.tokens, sampling)
        return [self.filled(self.sample, answer)]


class NotAList(Single):
    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> Any:
        return (await super().generate(sample, sampling, policy))[0]


class Unpicklable(Single):
    def filled(self, sample: Sample, answer: Generation) -> Sample:
        sample.metadata["tool"] = lambda: None
        return super().filled(sample, answer)


@pytest.mark.parametrize("generator", [Single(), TwoTurns(), Wraps()])
def test_a_generator_that_keeps_the_contract_passes(generator: Single) -> None:
    assert_generator_contract(generator)


@pytest.mark.parametrize(
    ("generator", "rule", "detail"),
    [
        (NotAList(), "finished samples for a pending one", "returned a Sample, expected a list"),
        (MixesUp(), "several samples at once", "expected"),
        (Unpicklable(), "sent to another process", "pickl"),
        (Retokenizes(), "policy's own tokens", "which the policy did not generate"),
        (TrainsOnTools(), "policy's own tokens", "loss_mask 0 on every other token"),
        (NoVersions(), "policy's own tokens", "how stale the sample is"),
        (Greedy(), "no more tokens than allowed", "asked for 4096 tokens"),
        (ShortColumn(), "finished samples for a pending one", "expected one for each of its 12 response tokens"),
        (AlwaysCompleted(), "cut at its limit as TRUNCATED", "returned status COMPLETED"),
        (AlwaysCompleted(), "that the engine aborted", "expected ABORTED"),
        (Swallows(), "passes on errors of the engines", "swallowed EngineError"),
        (Leaks(), "leaves nothing running", "left tasks running"),
        (Stubborn(), "stops when it is cancelled", "swallowed its cancellation"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Single) else "",
)
def test_a_broken_rule_is_named(generator: Single, rule: str, detail: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_generator_contract(generator)
    assert any(rule in line and detail in line for line in str(caught.value).splitlines()), caught.value


RESUMES = GeneratorSpec(name="x", factory="a:B", resumes=True)


class GoesOn(Single):
    """Continues a sample's response."""

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        begun, log_probs = sample.tokens[sample.prompt_length :], sample.rollout_log_probs or []
        left = dataclasses.replace(sampling, max_new_tokens=self.left(sampling.max_new_tokens, len(begun)))
        answer = await policy.generate(sample.tokens, left)
        sample.tokens = sample.tokens[: sample.prompt_length]
        whole = dataclasses.replace(
            answer, tokens=[*begun, *answer.tokens], log_probs=[*self.kept(log_probs), *answer.log_probs]
        )
        return [self.filled(sample, whole)]

    def left(self, limit: int, begun: int) -> int:
        return limit - begun

    def kept(self, log_probs: list[float]) -> list[float]:
        return log_probs


class AsksForAll(GoesOn):
    def left(self, limit: int, begun: int) -> int:
        return limit


class LosesLogProbs(GoesOn):
    def kept(self, log_probs: list[float]) -> list[float]:
        return [0.0] * len(log_probs)


def test_a_generator_must_resume_if_its_spec_says_so() -> None:
    assert_generator_contract(GoesOn(), spec=RESUMES)
    for generator, detail in (
        (Single(), "returned 6 prompt tokens that are not the 4 tokens of the unchanged"),
        (AsksForAll(), "asked its policy for 16 tokens after .* expected 14 after"),
        (LosesLogProbs(), "does not begin with the 2 tokens and log-probs that it continues"),
    ):
        with pytest.raises(AssertionError, match=f"continues a response that was cut short.*{detail}"):
            assert_generator_contract(generator, spec=RESUMES)


def test_a_generator_without_engines_must_not_ask() -> None:
    with pytest.raises(AssertionError, match="needs_engine=False"):
        assert_generator_contract(Single(), spec=NO_ENGINE)


class Serves(Single):
    """Starts a task with its first sample, and ends it in `close`."""

    def __init__(self, *, ends: bool) -> None:
        self.ends = ends
        self.task: asyncio.Task[bool] | None = None

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        if self.task is None:
            self.task = asyncio.ensure_future(asyncio.Event().wait())
            await asyncio.sleep(0)
        return await super().generate(sample, sampling, policy)

    def close(self) -> None:
        if self.task is not None and self.ends:
            self.task.cancel()


def test_a_generator_that_closes_its_tasks_passes() -> None:
    assert_generator_contract(Serves(ends=True))


def test_a_generator_that_leaves_tasks_running_is_named() -> None:
    with pytest.raises(AssertionError, match=r"(?s)ends what it started.*Serves.close left tasks running"):
        assert_generator_contract(Serves(ends=False))
