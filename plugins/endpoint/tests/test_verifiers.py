"""An environment for the verifiers package, written as a third party would, runs unchanged."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from plugins.endpoint.tests.talking import run
from tests.support.waiting import wait_until

from slime.kit.processes import living_members
from slime.kit.readers.prompt_file import PromptFile
from slime.plugin import Sample, SamplingParams, Status
from slime.testing import Say, ScriptedPolicy, assert_generator_contract, decode, make_context, make_sample
from slime_generators.endpoint import VerifiersEnv
from slime_generators.options import VerifiersOptions

#: what a third party ships: a taskset with rewards, and its harness
ENVIRONMENT = '''
"""Sums of one and a number, asked twice."""

import os
import sys

import verifiers.v1 as vf

PROGRAM = """
import json, sys, urllib.request

base, key, prompt = sys.argv[1:]

def ask(messages):
    body = json.dumps({"model": "m", "messages": messages, "temperature": 0.1}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(base.rstrip("/") + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

messages = [{"role": "user", "content": prompt}]
messages += [ask(messages), {"role": "user", "content": "sure?"}]
if "hang" in prompt:
    import time
    time.sleep(600)
ask(messages)
"""


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if "broken" in self.data.prompt:
            raise RuntimeError("a bug of the rubric's")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 3)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask]):
    def load(self):
        print("environments like to print")
        for prompt, answer in [("0+1=", "1"), ("1+1=", "2"), ("broken", "x"), ("hang", "x")]:
            yield SumTask(SumData(prompt=prompt, answer=answer), self.config.task)
            if "SUMS_FAIL" in os.environ:
                raise LookupError("the second task is missing")


class TwoQuestions(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        return await runtime.run_program([sys.executable, "-c", PROGRAM, endpoint, secret, data.prompt_text], {})


__all__ = ["Sums", "TwoQuestions"]
'''
#: each test imports the environment again
DEADLINE_S = 150.0
SAMPLING = SamplingParams(max_new_tokens=96, sampling_seed=7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environment, and its rows as a prompt file."""
    folder = tmp_path_factory.mktemp("environment")
    (folder / "sums_v1.py").write_text(ENVIRONMENT)
    done = rows_command(folder, "prompts.jsonl")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder}/prompts.jsonl: 4 rows\n"
    return folder


def rows_command(folder: Path, out: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slime_generators.verifiers_env.rows", "sums_v1", "--path", str(folder)]
    return subprocess.run(
        [*command, "--out", str(folder / out)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
def test_a_taskset_that_fails_midway_writes_no_rows(folder: Path) -> None:
    done = rows_command(folder, "none.jsonl", SUMS_FAIL="1")
    assert done.returncode == 1 and not (folder / "none.jsonl").exists()
    assert "LookupError: the second task is missing" in done.stderr
    reason = "the process of the verifiers environment ended with exit code 1; its output is above"
    assert done.stderr.endswith(f"error: taskset sums_v1 could not be read: {reason}\n")


def tasks(folder: Path) -> list[Sample]:
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    samples = []
    for number, row in enumerate(rows):
        sample = make_sample("-", None, index=number, metadata=row["metadata"])
        sample.prompt = row["prompt"]
        samples.append(sample)
    return samples


@asynccontextmanager
async def environment(folder: Path, **options: Any) -> AsyncIterator[VerifiersEnv]:
    generator = VerifiersEnv(VerifiersOptions(taskset="sums_v1", path=(folder,), **options), make_context())
    try:
        yield generator
    finally:
        await generator.close()


def answering(call: Any) -> Say:
    """Answers `unsure` first, and then the right answer to the first task."""
    return Say.text("1" if "sure?" in decode(call.tokens) else "let me think")


@pytest.mark.slow
def test_rows_of_a_taskset_are_prompts_for_slime(folder: Path) -> None:
    rows = list(PromptFile(str(folder / "prompts.jsonl"), input_key="prompt", label_key="label"))
    assert [row.prompt for row in rows][:2] == [
        [{"role": "user", "content": "0+1="}],
        [{"role": "user", "content": "1+1="}],
    ]
    assert [row.metadata["verifiers"]["idx"] for row in rows] == [0, 1, 2, 3]


@dataclass
class Played:
    """What became of an episode whose worker was killed, and of those of the worker that took its place."""

    killed: BaseException
    episodes: list[Any]
    policy: ScriptedPolicy


@pytest.fixture(scope="module")
def played(folder: Path) -> Played:
    """The four tasks, a sample of no task, and one of another version of the first."""

    async def work() -> Played:
        other = make_sample("-", None)
        stale = make_sample("-", None, metadata={"verifiers": {"idx": 0, "key": "of another version"}})
        first, policy = ScriptedPolicy(answering), ScriptedPolicy(answering)
        async with environment(folder, agent_timeout_s=15.0) as generator:
            playing = asyncio.ensure_future(generator.generate(tasks(folder)[3], SAMPLING, first))
            await first.asked.wait()
            worker = generator._environment._worker
            assert worker is not None
            os.killpg(worker.pid, signal.SIGKILL)
            [killed] = await asyncio.gather(playing, return_exceptions=True)
            calls = (generator.generate(one, SAMPLING, policy) for one in (*tasks(folder), other, stale))
            return Played(killed, await asyncio.gather(*calls, return_exceptions=True), policy)

    result: Played = run(work(), DEADLINE_S)
    return result


@pytest.mark.slow
def test_a_dead_worker_fails_its_samples_and_is_restarted(played: Played) -> None:
    assert isinstance(played.killed, RuntimeError) and "was killed by SIGKILL" in str(played.killed)
    assert len(played.episodes[0]) == 1


@pytest.mark.slow
def test_rewards_metrics_and_turns_of_the_environment_are_on_the_samples(played: Played) -> None:
    [right], [wrong], *_ = played.episodes
    assert right.reward == {"score": 1.5, "right": 1.0, "short": 1.0}
    assert wrong.reward == {"score": 0.5, "right": 0.0, "short": 1.0}
    assert right.metrics["verifiers/letters"] == 1.0 and right.metrics["agent/requests"] == 2.0
    assert right.status is Status.COMPLETED and right.response == "1"
    assert sum(right.loss_mask or []) == len("let me think") + len("1"), "both turns, in one sequence"
    assert {call.sampling.temperature for call in played.policy.calls} == {1.0}, "the run's, not the harness's"


@pytest.mark.slow
def test_an_error_in_the_environment_fails_only_its_sample(played: Played) -> None:
    _, _, broken, [hanging], other, stale = played.episodes
    assert isinstance(broken, RuntimeError) and "a bug of the rubric's" in str(broken)
    assert hanging.status is Status.TRUNCATED and hanging.metrics["agent/timeouts"] == 1.0
    assert isinstance(other, ValueError) and "slime_generators.verifiers_env.rows" in str(other)
    assert isinstance(stale, RuntimeError) and "task 0 has changed since the rows were written" in str(stale)


@pytest.mark.slow
def test_the_environment_keeps_the_contract_of_generators(folder: Path) -> None:
    generator = VerifiersEnv(VerifiersOptions(taskset="sums_v1", path=(folder,)), make_context())
    assert_generator_contract(generator, samples=tasks(folder)[:2])


#: used as `python`: a worker that starts, and answers the first episode with something other than JSON
BABBLING = """#!{python}
import socket, sys, time
channel = socket.socket(fileno=int(sys.argv[4]))
lines = channel.makefile("rb")
lines.readline()
channel.sendall(b'{{"ready": true}}\\n')
lines.readline()
channel.sendall(b"babble\\n")
time.sleep(600)
"""


@pytest.mark.slow
def test_an_unreadable_answer_fails_the_open_episodes_at_once(folder: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(BABBLING.format(python=sys.executable))
    python.chmod(0o755)

    async def work() -> tuple[list[Any], float]:
        started = time.monotonic()
        async with environment(folder, python=str(python), agent_timeout_s=60.0) as generator:
            calls = (generator.generate(one, SAMPLING, ScriptedPolicy(answering)) for one in tasks(folder)[:2])
            found = await asyncio.gather(*calls, return_exceptions=True)
        return found, time.monotonic() - started

    found, seconds = run(work(), DEADLINE_S)
    assert seconds < 30
    for error in found:
        assert isinstance(error, RuntimeError) and "an answer could not be read (Expecting value" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"python": "/no/such/python"}, "cannot be started"),
        ({"env": {"taskset": {"no_such_setting": 1}}}, "ended with exit code 1"),
    ],
)
def test_an_environment_that_cannot_be_loaded_says_so(folder: Path, options: dict[str, Any], message: str) -> None:
    async def work() -> None:
        async with environment(folder, **options) as generator:
            with pytest.raises(RuntimeError, match=message):
                await generator.generate(tasks(folder)[0], SAMPLING, ScriptedPolicy(answering))

    run(work(), DEADLINE_S)


def test_a_worker_that_blocks_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").write_text("import time; time.sleep(600)")
    program = """
        import asyncio, sys
        from slime_generators.options import VerifiersOptions
        from slime_generators.verifiers_env.agent import VerifiersWorker

        async def main():
            worker = await VerifiersWorker.start(VerifiersOptions(taskset="any", path=sys.argv[1]))
            print(worker.pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert living_members(worker)
        parent.kill()
    wait_until(lambda: not living_members(worker))
