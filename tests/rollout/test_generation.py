"""One sample behind the generator boundary."""

# Faulty components ignore their arguments.
# ruff: noqa: ARG002

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.rollout.stub_engines import NeverAborted
from tests.support.scoring import health
from tests.support.simulated_time import run_simulated

from slime.plugin import Generation, PolicyClient, SamplingParams
from slime.registry.contracts import Snapshot, check_generated
from slime.rollout.batch_in_progress import BatchInProgress, sampling_seed
from slime.rollout.failures import PassiveChecks
from slime.rollout.pipeline import SampleGenerator
from slime.types import Sample, Status

SAMPLING = SamplingParams(max_new_tokens=8)


class EchoPolicy(NeverAborted):
    """A policy that immediately answers with two tokens."""

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
        await asyncio.sleep(0)
        return Generation([7, 8], [-0.5, -0.25], "stop", ["3"])


class HangingPolicy(NeverAborted):
    """A policy that never answers; `asked` is set by the first request."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class OneTurn:
    """A correct generator; `change` may then spoil its sample."""

    def __init__(self, **change: object) -> None:
        self.change = change

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        answer = await policy.generate(sample.tokens, sampling)
        sample.tokens = sample.tokens + answer.tokens
        sample.response_length = len(answer.tokens)
        sample.rollout_log_probs = answer.log_probs
        sample.weight_versions = answer.weight_versions
        sample.status = Status.COMPLETED
        for name, value in self.change.items():
            setattr(sample, name, value)
        return [sample]


def pending(index: int = 5) -> Sample:
    return Sample(group_index=2, index=index, prompt="1+1=", tokens=[1, 2, 3])


def run(generator: object, policy: Any = None, timeout_s: float = 5.0) -> list[Sample]:
    async def main() -> list[Sample]:
        boundary = SampleGenerator(
            generator,  # type: ignore[arg-type]  # several are faulty on purpose
            health("generator faulty", "generator"),
            timeout_s=timeout_s,
            concurrency=4,
        )
        return await boundary.generate(
            pending(), BatchInProgress(EchoPolicy() if policy is None else policy, SAMPLING, 42)
        )

    return run_simulated(main())


def test_a_correct_sample_is_not_changed() -> None:
    [sample] = run(OneTurn())
    assert (sample.status, sample.tokens, sample.failure) == (Status.COMPLETED, [1, 2, 3, 7, 8], None)
    assert sample.rollout_log_probs == [-0.5, -0.25]


@pytest.mark.parametrize(
    "routed", [np.zeros((5, 2, 2), np.uint8), np.zeros((4, 2), np.uint8), np.zeros((4, 2, 2)), [[0], [1], [2], [3]]]
)
def test_routed_experts_must_fit_the_tokens(routed: object) -> None:
    [sample] = run(OneTurn(rollout_routed_experts=routed))
    assert sample.status is Status.FAILED
    assert "expected an array of integers with one entry for each token but the last: [4, " in (sample.failure or "")
    [sample] = run(OneTurn(rollout_routed_experts=np.zeros((4, 2, 2), np.uint8)))
    assert sample.status is Status.COMPLETED


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"tokens": [1, 2, 3, 7, 9]}, "token 9 with log-prob -0.25"),
        ({"rollout_log_probs": [-0.5, -0.75]}, "token 8 with log-prob -0.75"),
        ({"tokens": [1, 2, 3, 7, 9], "loss_mask": [1, 0]}, None),
    ],
)
def test_training_on_other_tokens_is_reported_once(change: dict[str, object], wrong: str | None) -> None:
    async def main() -> list[str]:
        passive = PassiveChecks(1)
        boundary = SampleGenerator(
            OneTurn(**change),
            health("generator g", "generator"),
            timeout_s=5,
            concurrency=4,
            passive=passive,
        )
        for index in range(3):
            [sample] = await boundary.generate(pending(index), BatchInProgress(EchoPolicy(), SAMPLING, 42))
            assert sample.status is Status.COMPLETED
        return passive.rollout_done()

    findings = asyncio.run(main())
    if wrong is None:
        assert findings == []
    else:
        [finding] = findings
        assert finding.startswith(f"generator g trains on response token 1, {wrong}, which the policy did not generate")


def test_a_rollout_gets_its_samples_index_as_rollout_id() -> None:
    [sample] = run(OneTurn())
    assert sample.rollout_id == 5


def test_rollout_ids_of_a_generator_do_not_merge_two_prompts() -> None:
    produced = [
        check_generated(
            [Sample(group_index=group, tokens=[1, 2], response_length=1, status=Status.COMPLETED, rollout_id=0)],
            Snapshot(group_index=group, index=index, prompt="", prompt_tokens=[]),
        )
        for group, index in ((2, 5), (3, 6))
    ]
    assert [sample.rollout_id for samples in produced for sample in samples] == [5, 6]


def test_a_failed_sample_is_a_separate_rollout() -> None:
    class Numbering:
        async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
            sample.rollout_id = 0
            raise ValueError("broken")

    [sample] = run(Numbering())
    assert (sample.status, sample.rollout_id) == (Status.FAILED, 5)


def without_line(sample: Sample) -> str:
    """The sample's failure, with FILE:LINE for a line of this file."""
    return re.sub(rf"{re.escape(__file__)}:\d+", "FILE:LINE", sample.failure or "")


def test_a_generators_exception_fails_that_sample_and_names_the_generator() -> None:
    class Raising:
        async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
            raise KeyError("no\nsuch tool")

    [sample] = run(Raising())
    assert sample.status is Status.FAILED
    assert without_line(sample) == "generator faulty: FILE:LINE: KeyError: 'no\\nsuch tool'"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"metrics": {"turns": float("nan")}}, "expected names with finite numbers"),
        ({"loss_mask": [1]}, "loss_mask of 1 entries, expected response_length = 2"),
        ({"loss_mask": [1, 2]}, "values other than 0 and 1"),
        ({"rollout_log_probs": [-0.5]}, "1 rollout_log_probs, expected response_length = 2"),
        ({"rollout_log_probs": [-0.5, float("nan")]}, "not finite"),
        ({"rollout_log_probs": [-0.5, float("-inf")]}, "not finite"),
        ({"rollout_log_probs": [-0.5, None]}, "not numbers"),
        ({"response_length": 0}, "response_length 0 with 5 tokens"),
        ({"response_length": 5}, "response_length 5 with 5 tokens"),
        ({"tokens": [9, 9, 9, 7, 8]}, "not the 3 tokens of the unchanged"),
        ({"tokens": [2, 3, 7, 8]}, "2 prompt tokens that are not the 3"),
        ({"group_index": 9}, "group_index 9, expected 2"),
        ({"status": Status.PENDING}, "status PENDING"),
        ({"weight_versions": [3]}, "weight_versions [3], expected a list of texts"),
    ],
)
def test_a_sample_that_breaks_the_contract_fails_with_the_reason(change: dict[str, object], words: str) -> None:
    [sample] = run(OneTurn(**change))
    assert sample.status is Status.FAILED
    assert sample.failure is not None and sample.failure.startswith("generator faulty returned")
    assert words in sample.failure


def test_a_generator_may_change_the_prompt_if_it_records_it() -> None:
    [sample] = run(OneTurn(tokens=[9, 9, 7, 8], prompt="another"))
    assert sample.status is Status.COMPLETED


@pytest.mark.parametrize("produced", [None, [], [1], "text"])
def test_anything_but_samples_fails_the_pending_sample(produced: object) -> None:
    class Wrong:
        async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> object:
            return produced

    [sample] = run(Wrong())
    assert sample.status is Status.FAILED
    assert "expected a list of one or more Samples" in (sample.failure or "")


def test_several_samples_of_one_rollout_share_its_id() -> None:
    class Compacting:
        async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
            return [
                Sample(group_index=2, index=5, tokens=[1, 2], response_length=1, status=Status.COMPLETED)
                for _ in range(3)
            ]

    assert [sample.rollout_id for sample in run(Compacting())] == [5, 5, 5]


def test_a_sample_returned_twice_is_refused() -> None:
    class Doubling(OneTurn):
        async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
            return 2 * await super().generate(sample, sampling, policy)

    [sample] = run(Doubling())
    assert sample.failure == ("generator faulty returned one sample twice, expected distinct Samples")


def test_samples_of_one_rollout_with_different_ids_are_refused() -> None:
    class Splitting:
        async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
            return [
                Sample(group_index=2, tokens=[1, 2], response_length=1, status=Status.COMPLETED, rollout_id=i)
                for i in (1, 2)
            ]

    [sample] = run(Splitting())
    assert "rollout_ids 1, 2" in (sample.failure or "")


def test_no_progress_fails_the_sample_in_time() -> None:
    [sample] = run(OneTurnThenHang(), timeout_s=0.1)
    assert sample.status is Status.FAILED
    assert sample.failure == "generator faulty: no progress for 0.1 s (--generator.timeout-s)"


class OneTurnThenHang:
    """Calls the policy once, then waits forever for a tool."""

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        await policy.generate(sample.tokens, sampling)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


def test_many_turns_may_take_longer_than_the_timeout_of_one() -> None:
    class ManyTurns(OneTurn):
        async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
            for _ in range(4):
                await asyncio.sleep(1.5)  # a tool
                await policy.generate(sample.tokens, sampling)
            return await super().generate(sample, sampling, policy)

    [sample] = run(ManyTurns(), timeout_s=2.0)
    assert sample.status is Status.COMPLETED


def test_a_generators_own_timeout_error_is_a_failure_not_an_abort() -> None:
    class ToolTimeout:
        async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
            raise TimeoutError("tool took too long")

    [sample] = run(ToolTimeout())
    assert sample.status is Status.FAILED
    assert without_line(sample) == "generator faulty: FILE:LINE: TimeoutError: tool took too long"


def test_cancellation_from_outside_propagates() -> None:
    async def main() -> None:
        boundary = SampleGenerator(OneTurn(), health("generator g", "generator"), timeout_s=60, concurrency=1)
        policy = HangingPolicy()
        task = asyncio.create_task(boundary.generate(pending(), BatchInProgress(policy, SAMPLING, 42)))
        await policy.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_generator_that_cancels_itself_fails_its_sample() -> None:
    class SelfCancelling:
        async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
            raise asyncio.CancelledError

    [sample] = run(SelfCancelling())
    assert (sample.status, sample.failure) == (Status.FAILED, "generator faulty: cancelled itself")


def test_an_aborted_sample_always_has_a_reason() -> None:
    [sample] = run(OneTurn(status=Status.ABORTED, finish_reason="abort"))
    assert sample.failure == "aborted (finish reason abort)"


def test_siblings_have_different_reproducible_seeds() -> None:
    seeds = [sampling_seed(42, index) for index in range(10_000)]
    assert len(set(seeds)) > 9_990
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds[:3] == [sampling_seed(42, index) for index in range(3)]
    assert sampling_seed(43, 0) != seeds[0]


class Closing(OneTurn):
    """Counts how often it was closed; `problem` makes closing fail."""

    def __init__(self, problem: Exception | None = None, hang: bool = False) -> None:
        super().__init__()
        self.problem, self.hang, self.closed = problem, hang, 0

    async def close(self) -> None:
        self.closed += 1
        if self.hang:
            await asyncio.Event().wait()
        if self.problem is not None:
            raise self.problem


def closed(generator: object) -> None:
    async def main() -> None:
        boundary = SampleGenerator(
            generator,
            health("generator g", "generator"),
            timeout_s=5.0,
            concurrency=1,
        )
        await boundary.close()
        await boundary.for_evaluation().close()

    asyncio.run(main())


def test_a_generator_with_a_close_method_is_closed() -> None:
    generator = Closing()
    closed(generator)
    assert generator.closed == 2, "its evaluations close it as well"
    closed(OneTurn())


def test_a_plain_close_is_called_too() -> None:
    class Plain(OneTurn):
        ended = False

        def close(self) -> None:
            self.ended = True

    generator = Plain()
    closed(generator)
    assert generator.ended


def test_a_generator_that_fails_to_close_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.rollout.pipeline.CLOSING_S", 0.05)
    closed(Closing(problem=OSError("still busy")))
    assert re.search(r"generator g: close\(\): \S+test_generation\.py:\d+: OSError: still busy", caplog.text)
    caplog.clear()
    closed(Closing(hang=True))
    assert "generator g: close() took longer than 0.05 s" in caplog.text
