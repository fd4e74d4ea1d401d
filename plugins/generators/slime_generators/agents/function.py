"""An agent that is a Python function."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from slime.chat import load_function
from slime_generators.agents.task import AgentTask

#: threads of agents that were given up; with more of them alive no further agent is started
_LEFT_BEHIND = 256


class FunctionAgent:
    """`package.module:function` or `FILE.py:function`, called with those fields of `AgentTask` that it names.

    `async def` runs in the event loop of the rollout.  A plain function runs in a thread of its own, which nobody can
    end: one that hangs is left behind, and its next request is refused, because its session is over.
    """

    def __init__(self, reference: str) -> None:
        """Raises `ValueError` where the reference names no function that can be called so."""
        try:
            function = load_function(reference)
        except ValueError as error:
            raise ValueError(f"agent {error}") from error
        self._function: Callable[..., Any] = function
        self._names = _names(function, reference)
        called = function if inspect.isfunction(function) or inspect.ismethod(function) else type(function).__call__
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
        self._left: set[threading.Thread] = set()

    async def __call__(self, task: AgentTask) -> object:
        """What the function returns.  Raises what it raises; cancelling it ends an `async def`."""
        given = {name: getattr(task, name) for name in self._names}
        if self._is_async:
            return await _without_exit(self._function, given)
        return await self._in_thread(given)

    async def _in_thread(self, given: dict[str, Any]) -> object:
        self._left = {thread for thread in self._left if thread.is_alive()}
        if len(self._left) >= _LEFT_BEHIND:
            raise RuntimeError(f"{len(self._left)} agents that were given up still run; no further one is started")
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
            except BaseException as raised:  # noqa: BLE001 - handed to whoever waits for the agent
                error = RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more

        thread = threading.Thread(target=work, name="slime-agent", daemon=True)
        thread.start()
        try:
            return await done
        except asyncio.CancelledError:
            self._left.add(thread)
            raise


async def _without_exit(function: Callable[..., Any], given: dict[str, Any]) -> object:
    """Keep `sys.exit` of an agent from ending the event loop."""
    try:
        return await function(**given)
    except SystemExit as exit_:
        raise RuntimeError(f"the agent called sys.exit({exit_.code!r})") from None


def _names(function: Callable[..., Any], reference: str) -> tuple[str, ...]:
    """The parameters that are given to the function."""
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
        raise ValueError(f"agent {reference!r} wants {', '.join(unknown)}; it can be given {', '.join(known)}")
    return tuple(parameter.name for parameter in parameters if parameter.name in known)
