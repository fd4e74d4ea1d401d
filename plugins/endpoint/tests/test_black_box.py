"""The generator `black_box`: what an agent does decides what its samples become."""

from __future__ import annotations

import asyncio
import math
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from plugins.endpoint.tests.talking import run
from pydantic import ValidationError

from slime.errors import EngineError
from slime.plugin import Context, Sample, SamplingParams, Status
from slime.testing import Say, ScriptedPolicy, decode, encode, make_context, make_sample
from slime.testing.scripted_policy import Step
from slime_generators.endpoint import BlackBox
from slime_generators.options import BlackBoxOptions

CONTEXT = make_context()
SAMPLING = SamplingParams(max_new_tokens=96, sampling_seed=7)
Script = Sequence[Step] | Callable[..., Step]


def black_box(agent: str = "", **options: Any) -> BlackBox:
    where = {} if "command" in options else {"agent": f"tests.support.agents:{agent}"}
    return BlackBox(BlackBoxOptions(**where, **options), CONTEXT)


def limited(**rollout: int) -> Context:
    config = CONTEXT.config
    return make_context(config=config.model_copy(update={"rollout": config.rollout.model_copy(update=rollout)}))


def work(generator: BlackBox, script: Script, sample: Sample | None = None, settle_s: float = 0.0) -> list[Sample]:
    """Call the generator once, and close it."""

    async def call() -> list[Sample]:
        try:
            return await generator.generate(sample or make_sample("1+1=", None), SAMPLING, ScriptedPolicy(script))
        finally:
            await asyncio.sleep(settle_s)
            await generator.close()

    produced: list[Sample] = run(call())
    return produced


def failing(generator: BlackBox, script: Script, match: str, kind: type[Exception] = Exception) -> dict[str, float]:
    """The metrics of a sample whose agent fails."""
    sample = make_sample("1+1=", None)
    with pytest.raises(kind, match=match):
        work(generator, script, sample)
    return sample.metrics


# --- agents that work ---


@pytest.mark.slow
def test_an_agent_with_openais_client_trains_on_the_policys_answer() -> None:
    [sample] = work(black_box("ask_once"), [Say.text("2")])
    assert sample.status is Status.COMPLETED
    assert sample.response == "2"
    assert decode(sample.tokens).endswith("assistant\n2")
    assert sample.prompt == [{"role": "user", "content": "1+1="}]
    assert sample.metrics["agent/requests"] == 1.0
    assert sample.metrics["agent/conversations"] == 1.0
    assert sample.metrics["agent/errors"] == sample.metrics["agent/timeouts"] == 0.0


def test_an_agent_in_a_thread_may_set_reward_metrics_and_metadata() -> None:
    [sample] = work(black_box("ask_twice"), [Say.text("3"), Say.text("2")])
    assert sample.response == "2" and sample.reward == 1.0
    assert sample.loss_mask is not None and sum(sample.loss_mask) == 2
    assert sample.metadata["asked"] == 2 and sample.metrics["sure"] == 1.0
    assert isinstance(sample.prompt, list) and sample.prompt[0] == {"role": "system", "content": "short"}


def test_every_conversation_of_an_agent_is_a_sample_of_one_rollout() -> None:
    samples = work(black_box("asks_two_others"), [Say.text("yes"), Say.text("no")])
    assert [sample.response for sample in samples] == ["yes and no"] * 2, "the agent's answer is what is scored"
    assert len({sample.index for sample in samples}) == 1
    assert sorted(sum(sample.loss_mask or []) for sample in samples) == [2, 3]
    assert samples[0].metrics["agent/conversations"] == 2.0
    assert "agent/requests" not in samples[1].metrics, "counted once"


@pytest.mark.slow
def test_many_agents_at_once_are_not_mixed_up() -> None:
    generator = black_box("ask_twice")
    policy = ScriptedPolicy(lambda call: Say.text(decode(call.tokens).split("user\n")[1].split("=")[0]))

    async def all_at_once() -> list[list[Sample]]:
        samples = [make_sample(f"{n}+1=", None, index=n) for n in range(60)]
        try:
            return await asyncio.gather(*(generator.generate(one, SAMPLING, policy) for one in samples))
        finally:
            await generator.close()

    for number, produced in enumerate(run(all_at_once())):
        [sample] = produced
        assert sample.index == number and sample.response == f"{number}+1"


def test_an_agent_may_be_a_program(tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(
        textwrap.dedent(
            """
            import json, os, sys, urllib.request
            task = json.loads(sys.stdin.readline())
            assert sys.argv[1] == "1+1=" and task["metadata"] == {}
            body = json.dumps({"messages": task["messages"]}).encode()
            request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
            answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
            print(json.dumps({"answer": answer, "reward": 0.5}))
            """
        )
    )
    [sample] = work(black_box(command=f"{sys.executable} {program} {{prompt}}"), [Say.text("2")])
    assert (sample.response, sample.reward) == ("2", 0.5)


# --- agents that fail ---


def test_an_agent_that_raises_fails_its_sample_with_its_own_error() -> None:
    metrics = failing(black_box("asks_and_raises"), [Say.text("2")], "a bug of the agent's", KeyError)
    assert metrics["agent/errors"] == 1.0 and metrics["agent/requests"] == 1.0


def test_an_agent_that_makes_no_request_fails_its_sample() -> None:
    metrics = failing(black_box("never_asks"), [Say.text("2")], "ended without any answer from the policy")
    assert metrics["agent/requests"] == 0.0


def test_an_agent_that_exits_fails_its_sample_and_not_the_run() -> None:
    failing(black_box("exits"), [Say.text("2")], r"called sys.exit\(3\)")


def test_the_error_of_a_failed_program_has_its_last_output() -> None:
    command = f"{sys.executable} -c 'raise SystemExit(\"no idea\")'"
    failing(black_box(command=command), [Say.text("2")], "exit code 1: no idea")


@pytest.mark.slow
def test_an_agent_that_hangs_is_stopped_and_its_answers_are_kept_as_truncated() -> None:
    started = time.monotonic()
    [sample] = work(black_box("asks_and_hangs", agent_timeout_s=3.0), [Say.text("2")])
    assert time.monotonic() - started < 60  # it would sleep for an hour
    assert sample.status is Status.TRUNCATED and sample.response == "2"
    assert sample.metrics["agent/timeouts"] == 1.0


def test_an_agent_that_hangs_in_its_first_request_fails_its_sample() -> None:
    metrics = failing(
        black_box("ask_once", agent_timeout_s=0.3),
        [Say.text("2", delay_s=math.inf)],
        "without any answer",
        RuntimeError,
    )
    assert metrics["agent/timeouts"] == 1.0


def test_a_program_has_ended_even_if_it_left_processes_running() -> None:
    command = """sh -c 'setsid sleep 60 & sleep 60 & echo done'"""
    generator = black_box(command=command, agent_timeout_s=50.0)
    metrics = failing(generator, [Say.text("2")], "ended without any answer")
    assert metrics["agent/timeouts"] == 0.0 and metrics["agent/seconds"] < 40


@pytest.mark.slow
def test_a_program_that_hangs_is_killed(tmp_path: Path) -> None:
    command = f"sh -c 'echo $$ > {tmp_path}/pid; exec sleep 99'"
    failing(black_box(command=command, agent_timeout_s=2.0), [Say.text("2")], "without any answer")
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.mark.slow
def test_a_request_after_the_deadline_is_refused_and_counted_with_a_later_sample() -> None:
    late = black_box("hangs_in_a_thread", agent_timeout_s=2.5)

    async def refused() -> None:
        server = await late._servers.running()
        while not server._strays:
            await asyncio.sleep(0.05)

    async def two() -> list[Sample]:
        policy = ScriptedPolicy([Say.text("2")])
        try:
            [first] = await late.generate(make_sample("1+1=", None), SAMPLING, policy)
            await refused()
            [second] = await late.generate(make_sample("1+1=", None), SAMPLING, policy)
            await refused()
            return [first, second]
        finally:
            await late.close()

    first, second = run(two())
    assert [one.status for one in (first, second)] == [Status.TRUNCATED] * 2
    assert first.metrics["agent/late_requests"] == 0.0 and second.metrics["agent/late_requests"] == 1.0
    assert sum(second.loss_mask or []) == 1


def test_an_agent_that_fills_its_context_is_truncated_and_not_failed() -> None:
    [sample] = work(black_box("talks_on"), [Say.text("well")])
    assert sample.status is Status.TRUNCATED
    assert sample.response_length <= SAMPLING.max_new_tokens
    assert sample.metrics["agent/refused"] == 1.0 and sample.metrics["agent/errors"] == 0.0


def test_an_agent_without_requests_left_keeps_its_conversations() -> None:
    agent = BlackBox(BlackBoxOptions(agent="tests.support.agents:begins_anew"), limited(max_turns=2))
    first, second = work(agent, [Say.text("well")])
    assert (first.status, second.status) == (Status.COMPLETED, Status.TRUNCATED)
    assert first.metrics["agent/refused"] == 1.0 and first.metrics["agent/errors"] == 0.0


def test_an_agent_whose_first_request_does_not_fit_fails_its_sample() -> None:
    agent = BlackBox(BlackBoxOptions(agent="tests.support.agents:begins_anew"), limited(rollout_max_context_len=4))
    failing(agent, [Say.text("well")], "context_length_exceeded")


@pytest.mark.slow
def test_a_request_that_its_client_cancels_is_not_trained_on() -> None:
    def slow_then_quick(call: Any) -> Step:
        return Say.text("ok") if "quick" in decode(call.tokens) else Say.text("never", delay_s=math.inf)

    [sample] = work(black_box("gives_up_in_time"), slow_then_quick)
    assert sample.response == "ok" and sample.metrics["agent/disconnects"] == 1.0
    assert encode("ok") == sample.tokens[-2:]


def test_what_an_agent_returns_is_checked() -> None:
    failing(black_box("returns_garbage"), [Say.text("2")], r"returned the keys \['score'\]", ValueError)


def test_an_engine_error_is_raised_even_if_the_agent_hides_it() -> None:
    error = EngineError("engine 0 died")
    with pytest.raises(EngineError) as caught:
        work(black_box("ask_once"), [error])
    assert caught.value is error


def test_an_answer_that_the_engine_aborted_makes_the_sample_aborted() -> None:
    [sample] = work(black_box("ask_once"), [Say.text("2", finish_reason="abort")])
    assert sample.status is Status.ABORTED and "aborted" in (sample.failure or "")


# --- options ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected either agent"),
        ({"agent": "a:b", "command": "c"}, "expected either agent"),
        ({"agent": "nowhere.py:agent"}, "there is no file .*nowhere.py"),
    ],
)
def test_options_that_name_no_agent_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        BlackBoxOptions(**options)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(): ...", "has no function 'agent'"),
        ("def agent(base_url, task): ...", "has the parameters task, expected some of base_url, api_key"),
        ("import nothing_of_that_name", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_file_without_a_usable_agent_is_refused(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=message):
        BlackBox(BlackBoxOptions(agent=f"{path}:agent"), CONTEXT)


def test_a_command_without_its_program_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no program"):
        BlackBox(BlackBoxOptions(command="no-such-program --now"), CONTEXT)
