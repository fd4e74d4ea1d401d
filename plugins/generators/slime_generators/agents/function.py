"""An agent that is a Python function."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from slime.kit.chat import load_function
from slime_generators.agents.task import AgentTask

#: maximum number of abandoned threads; while there are more, no new agent is started
_MAX_ABANDONED = 256


class FunctionAgent:
    """`package.module:function` or `FILE.py:function`, called with those fields of `AgentTask` that it takes.

    An `async def` runs in the event loop of the rollout. A plain function runs in its own thread. A thread cannot be
    killed: one that hangs is abandoned, and its next request is refused because its session has ended.
    """

    def __init__(self, reference: str) -> None:
        """Initialize.

        Raises:
            ValueError: The function does not exist, or has a parameter that is not a field of `AgentTask`.
        """
        try:
            function = load_function(reference)
        except ValueError as error:
            raise ValueError(f"agent {error}") from error
        self._function: Callable[..., Any] = function
        self._names = _names(function, reference)
        called = function if inspect.isfunction(function) or inspect.ismethod(function) else type(function).__call__
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
        self._abandoned: set[threading.Thread] = set()

    async def __call__(self, task: AgentTask) -> object:
        """The function's result. Raises what it raises; cancellation ends an `async def`."""
        given = {name: getattr(task, name) for name in self._names}
        if self._is_async:
            return await _without_exit(self._function, given)
        return await self._in_thread(given)

    async def _in_thread(self, given: dict[str, Any]) -> object:
        self._abandoned = {thread for thread in self._abandoned if thread.is_alive()}
        if len(self._abandoned) >= _MAX_ABANDONED:
            raise RuntimeError(f"{len(self._abandoned)} abandoned agents are still running: no new one is started")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[object] = loop.create_future()

        def settle(result: object, error: BaseException | None) -> None:
            if not done.done():
                if error is None:
                    done.set_result(result)
                else:
                    done.set_exception(error)

        def work() -> None:
            result: object = None
            error: BaseException | None = None
            try:
                result = self._function(**given)
            except SystemExit as exit_:
                error = RuntimeError(f"the agent called sys.exit({exit_.code!r})")
            except BaseException as raised:  # noqa: BLE001 - raised again where the agent is awaited
                error = RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:
                return  # the loop is closed: the result is no longer needed

        thread = threading.Thread(target=work, name="slime-agent", daemon=True)
        thread.start()
        try:
            return await done
        except asyncio.CancelledError:
            self._abandoned.add(thread)
            raise


async def _without_exit(function: Callable[..., Any], given: dict[str, Any]) -> object:
    """Keep an agent's `sys.exit` from ending the event loop."""
    try:
        return await function(**given)
    except SystemExit as exit_:
        raise RuntimeError(f"the agent called sys.exit({exit_.code!r})") from None


def _names(function: Callable[..., Any], reference: str) -> tuple[str, ...]:
    """The fields of `AgentTask` that the function has parameters for."""
    known = tuple(field.name for field in fields(AgentTask))
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return known
    unknown = [
        parameter.name
        for parameter in parameters
        if parameter.name not in known
        and parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_POSITIONAL
    ]
    if unknown:
        raise ValueError(
            f"agent {reference!r} has the parameters {', '.join(unknown)}, expected some of {', '.join(known)}"
        )
    return tuple(parameter.name for parameter in parameters if parameter.name in known)
