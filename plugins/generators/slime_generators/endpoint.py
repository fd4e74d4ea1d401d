"""Generators that run an agent and serve it the policy through an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime.kit.context_length import context_tokens
from slime.kit.sessions import Session, SessionLimits, parser_factory
from slime.plugin import Context, PolicyClient, Sample, SamplingParams, Status
from slime_endpoint import SessionServer
from slime_generators.agents.function import FunctionAgent
from slime_generators.agents.program import ProgramAgent
from slime_generators.agents.task import AgentResult, AgentTask, result_of
from slime_generators.options import AgentOptions, BlackBoxOptions, VerifiersOptions
from slime_generators.verifiers_env.agent import VerifiersAgent

#: seconds until a cancelled agent must have ended
_ENDING_S = 5.0
_MODEL = "policy"


class Agent(Protocol):
    """Works on one task. The value it returns is converted by `result_of`."""

    def __call__(self, task: AgentTask) -> Awaitable[object]:
        """Return an answer, a reward, both, or nothing."""
        ...


class EndpointGenerator:
    """Runs an agent for each sample, with a separate endpoint for each.

    Each conversation of the agent with the policy, and each branch of one, becomes a sample; all of them share a
    rollout id. See `slime.kit.sessions` for how they stay token for token identical to what the engine saw.

    - If the agent raises, its sample fails. But if it had reached the limit of its context or of its requests, or if it
      exceeds `agent_timeout_s`, its conversations so far are kept as TRUNCATED.
    - If the agent ends without any answer from the policy, its sample fails.
    - If the engine aborted an answer, the sample is ABORTED. Errors of the engines are raised.
    """

    def __init__(self, options: AgentOptions, context: Context, agent: Agent) -> None:
        """Initialize.

        Args:
            options: Deadline and parser.
            context: The run's context.
            agent: Called once for each sample.

        Raises:
            ValueError: The tokenizer has no chat template, or SGLang has no such parser.
        """
        config = context.config
        self._agent = agent
        self._timeout_s = options.agent_timeout_s
        self._limits = SessionLimits(config.rollout.rollout_max_context_len, config.rollout.max_turns)
        parser = parser_factory(options.parser, context.tokenizer)
        variables = config.data.apply_chat_template_kwargs
        self._servers = _Servers(
            lambda: SessionServer(
                context.tokenizer,
                template_variables=variables,
                parser=parser,
                max_context=context_tokens(config),
            )
        )

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        """Run the agent and return its conversations. Raises the error of the agent or the policy."""
        server = await self._servers.running()
        session = server.open(policy, sampling, limits=self._limits)
        run = _Run()
        try:
            await self._work(run, session, _task(server, session, sample, sampling))
        finally:
            await server.end(session)
            run.seconds = time.monotonic() - run.started
        return _finished(sample, session, run, late=server.take_strays())

    async def close(self) -> None:
        """Stop listening."""
        await self._servers.close()

    async def _work(self, run: _Run, session: Session, task: AgentTask) -> None:
        """Run the agent until it ends, its deadline passes, or the policy fails."""
        working = asyncio.ensure_future(self._agent(task))
        broken = asyncio.ensure_future(session.broken.wait())
        try:
            await asyncio.wait({working, broken}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                run.timed_out = not broken.done()
                return
            if working.cancelled():
                run.error = RuntimeError("the agent cancelled itself")
                return
            run.error = working.exception()
            if run.error is None:
                run.result = result_of(working.result())
        except ValueError as error:
            run.error = error
        finally:
            for one in (working, broken):
                one.cancel()
            await asyncio.wait({working, broken}, timeout=_ENDING_S)
            if working.done() and not working.cancelled():
                working.exception()  # retrieve it, so that asyncio does not log it as never retrieved


class BlackBox(EndpointGenerator):
    """Runs the user's agent, a Python function or a program, unmodified; see `EndpointGenerator`."""

    def __init__(self, options: BlackBoxOptions, context: Context) -> None:
        """Initialize.

        Raises:
            ValueError: The agent cannot be loaded or called, or see `EndpointGenerator`.
        """
        agent = FunctionAgent(options.agent) if options.agent else ProgramAgent(options.command)
        super().__init__(options, context, agent)


class VerifiersEnv(EndpointGenerator):
    """Runs an episode of the verifiers environment for the task that a sample's metadata names.

    Its harness talks to the policy (see `EndpointGenerator`), and its reward becomes the sample's (`--reward given`);
    its metrics are `verifiers/NAME`. If an episode has several agents, the conversations of all of them are trained on,
    with the mean reward of the trainable agents.
    """

    def __init__(self, options: VerifiersOptions, context: Context) -> None:
        self._environment = VerifiersAgent(options)
        super().__init__(options, context, self._environment)

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        """Run an episode and return its conversations. Raises the error of the environment or the policy."""
        await self._environment.start()  # first, so that loading does not count towards the agent's deadline
        return await super().generate(sample, sampling, policy)

    async def close(self) -> None:
        """End the environment's process and the endpoint."""
        await self._environment.close()
        await super().close()


@dataclass(slots=True)
class _Run:
    """The outcome of one agent."""

    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    result: AgentResult = field(default_factory=AgentResult)
    error: BaseException | None = None
    timed_out: bool = False


def _task(server: SessionServer, session: Session, sample: Sample, sampling: SamplingParams) -> AgentTask:
    prompt = sample.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
    return AgentTask(
        base_url=server.base_url(session),
        api_key=session.key,
        model=_MODEL,
        prompt=prompt if isinstance(prompt, str) else [dict(one) for one in prompt],
        messages=messages,
        metadata=dict(sample.metadata),
        label=sample.label,
        evaluation=sampling.evaluation,
    )


def _finished(sample: Sample, session: Session, run: _Run, *, late: int) -> list[Sample]:
    """The samples of a session that has ended; raises if there are none."""
    counts = session.counts
    sample.metrics |= {
        "agent/requests": float(counts.answered),
        "agent/refused": float(counts.refused),
        "agent/disconnects": float(counts.disconnected),
        "agent/late_requests": float(late),
        "agent/tool_calls": float(counts.tool_calls),
        "agent/timeouts": float(run.timed_out),
        "agent/errors": float(run.error is not None and not session.full),
        "agent/seconds": run.seconds,
    }
    sample.non_generation_time += max(0.0, run.seconds - session.engine_seconds)
    if session.error is not None:
        raise session.error
    if session.aborted is not None:
        sample.status, sample.failure = Status.ABORTED, session.aborted
        return [sample]
    if run.error is not None and not session.full:
        raise run.error
    if run.timed_out or run.error is not None:
        session.cut()
    samples = session.samples(sample)
    if not samples and run.error is not None:
        raise run.error
    if not samples:
        problem = f"took {run.seconds:.0f} s (agent_timeout_s) without" if run.timed_out else "ended without"
        raise RuntimeError(f"the agent {problem} any answer from the policy ({counts.refused} requests were refused)")
    _add_result(samples, run.result)
    first = samples[0]
    first.metrics = {
        **sample.metrics,
        "agent/conversations": float(len(samples)),
        **first.metrics,
        **run.result.metrics,
    }
    for other in samples[1:]:
        other.non_generation_time = 0.0
    return samples


def _add_result(samples: list[Sample], result: AgentResult) -> None:
    for sample in samples:
        if result.answer is not None:
            sample.response = result.answer
        if result.reward is not None:
            sample.reward = result.reward
        sample.metadata |= result.metadata


class _Servers:
    """The server of the running event loop, started on first use."""

    def __init__(self, make: Callable[[], SessionServer]) -> None:
        self._make = make
        # Created early, so that a tokenizer without chat template is refused before the first sample.
        self._next: SessionServer | None = make()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[SessionServer] | None = None

    async def running(self) -> SessionServer:
        """A server that accepts requests."""
        loop = asyncio.get_running_loop()
        if self._starting is None or self._loop is not loop or _failed(self._starting):
            self._loop, self._starting = loop, loop.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def close(self) -> None:
        """Close the server, if there is one."""
        starting, self._starting = self._starting, None
        if starting is not None and self._loop is asyncio.get_running_loop():
            with contextlib.suppress(OSError):
                await (await starting).close()

    async def _start(self) -> SessionServer:
        server, self._next = self._next or self._make(), None
        await server.start()
        return server


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
