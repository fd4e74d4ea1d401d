"""The processes of a run: Ray actors that build one object each and call its methods.

The driver reaches other processes only through `Workers`. Every wait has a deadline, and every error says what the
processes were doing.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, TypeVarTuple, overload

import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from slime.config import RunConfig
from slime.engine.ports import ReservedPort
from slime.errors import (
    ClusterError,
    DeadlineError,
    DiskFullError,
    SlimeError,
    UnexpectedError,
    disk_full,
    is_disk_full,
)
from slime.errors.raised import LOG_FORMAT, Raised, log_of_this_process
from slime.kit.processes import SHORT_SPINS, keep_out_of_collections
from slime.kit.processes.pulse import PULSE
from slime.run.ray_session import ray_failure
from slime.run.supervise.ray_errors import explain

#: called about every `TICK_S` seconds during a wait; raises to end it, for example if an engine has died
Watch = Callable[[], None]

#: called with a process's index, its log file, and the reference to the answer of its `Worker.identify`
Enlist = Callable[[int, Path, Any], None]

#: what a process's object is built from, or a method of it takes after `self`; what the method returns
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

TICK_S = 0.25
#: seconds that the other processes have to fail too when one fails with an error that may come from losing them
OTHERS_S = 2.0

#: how messages call one process of a role
_NAMES = {"trainer": "trainer rank", "engines": "the supervisor of engine"}


@contextmanager
def _built() -> Iterator[None]:
    """The body builds a worker's object. Garbage is looked for only after it, and what is left then is exempt.

    Most of the time goes into imports, whose objects all stay. Looking for garbage among them takes a tenth of it.
    """
    gc.disable()
    try:
        with _explained():
            yield
    finally:
        gc.enable()
    keep_out_of_collections()


class Worker:
    """One process: redirects its output to a log file, builds an object and calls its methods."""

    def __init__(self, log_path: Path, hang_s: float, own_ray: bool, folder: str) -> None:
        """Begin to log and to beat.

        Args:
            log_path: Where the process writes its output.
            hang_s: Seconds that one call of a component may take.
            own_ray: Whether Ray belongs to the run.
            folder: The driver's working folder, to which paths of the run are relative.
        """
        if own_ray:
            # Ray has read it. An agent's program, or another child, could print its environment into a sample.
            os.environ.pop("RAY_AUTH_TOKEN", None)
        else:
            try:
                os.chdir(folder)  # processes of a cluster start where `ray start` was called
            except OSError as error:
                raise SlimeError(
                    f"node {node_address()} cannot enter {folder}, where the command was called ({error.strerror}): it"
                    " must be on a disk that all nodes share"
                ) from None
        for name, value in SHORT_SPINS.items():
            os.environ.setdefault(name, value)  # torch reads it when it is loaded, which is later
        redirect_output(log_path)
        self._page = PULSE.start(hang_s)
        self._object: Any = None

    def identify(self) -> tuple[int, int, str]:
        """This process's id, the descriptor of its pulse's page, and Ray's id of its node."""
        return os.getpid(), self._page, ray.get_runtime_context().get_node_id()

    def free_address(self) -> tuple[str, int]:
        """This node's address, and a port on it that is reserved while this process lives."""
        host = node_address()
        self._meeting_port = ReservedPort(host)
        return host, self._meeting_port.number

    def devices(self) -> list[str]:
        """The GPUs that Ray gives this process."""
        return [str(device) for device in ray.get_gpu_ids()]

    def build(self, factory: Callable[..., Any], *args: Any) -> Any:
        """Build the object."""
        with _built():
            self._object = factory(*args)

    def close(self) -> Any:
        """Close the object."""
        if self._object is not None:
            self._object.close()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object."""
        with _explained():
            return getattr(self._object, method)(*args)


class AsyncWorker(Worker):
    """A worker whose calls share one event loop; `build` and `call` take coroutine functions."""

    async def build(self, factory: Callable[..., Any], *args: Any) -> Any:
        """Build the object."""
        with _built():
            self._object = await factory(*args)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a coroutine method of the object."""
        with _explained():
            return await getattr(self._object, method)(*args)

    async def close(self) -> Any:
        """Close the object."""
        if self._object is not None:
            await self._object.close()


@contextmanager
def _explained() -> Iterator[None]:
    """What the body raises reaches the driver as a `SlimeError` with a message, and its traceback goes to the log.

    Other exceptions may not pickle, or end the process before it has answered, as `SystemExit` does.
    """
    try:
        yield
    except asyncio.CancelledError:
        raise
    except SlimeError as error:
        if type(error).__module__ == SlimeError.__module__:
            raise
        raise SlimeError(str(error)) from None  # a plugin's own class, which the driver may not know
    except ObjectLostError as error:  # what another process had stored for this one
        raise explain(error, "fetching data", f"process {os.getpid()}", Path()) from None
    except BaseException as error:  # noqa: BLE001 - the boundary around this process, sys.exit() included
        if is_disk_full(error):
            raise DiskFullError(disk_full(error)) from None
        raised = Raised.of(error)
        raised.log("this process")
        log = log_of_this_process()
        full = "" if log is None else f"\n  The full traceback is in {log}."
        raise UnexpectedError(f"{raised}\n{raised.tail()}{full}") from None


@dataclass(frozen=True)
class PendingCall(Generic[Result]):
    """A call that workers are executing; each answers with a `Result`."""

    refs: Sequence[Any]
    #: for messages: "training"
    doing: str
    timeout_s: float
    watch: Watch | None = None
    #: for messages, per worker: its name and its log file
    parts: Sequence[tuple[str, Path]] = ()

    @property
    def finished(self) -> bool:
        """Whether every worker has returned or raised; never blocks."""
        return len(self.returned()) == len(self.refs)

    def check(self) -> None:
        """Raise the error of a worker that has already failed."""
        returned = self.returned()
        if errors := self._errors(returned):
            raise self._first_cause(errors, [ref for ref in self.refs if ref not in returned])

    def returned(self) -> list[Any]:
        """References to the results so far; never blocks."""
        if not self.refs:
            return []
        returned, _ = ray.wait(list(self.refs), num_returns=len(self.refs), timeout=0)
        return list(returned)

    def wait(self) -> list[Result]:
        """Wait for every worker and return their results, in order.

        Raises:
            SlimeError: What a worker raised on purpose, unchanged; any other error, or the death of a worker, with
                what it was doing.
            DeadlineError: After `timeout_s` seconds.
        """
        deadline = time.monotonic() + self.timeout_s
        pending = list(self.refs)
        while pending:
            returned, pending = ray.wait(pending, num_returns=len(pending), timeout=TICK_S if self.watch else 1.0)
            if errors := self._errors(returned):
                raise self._first_cause(errors, pending)
            if pending and (failure := ray_failure()) is not None:
                # Without its control store Ray would go on for a minute, and then end this process without a word.
                raise ClusterError(f"{self.doing}: {failure}")
            if pending and self.watch is not None:
                self.watch()
            if pending and time.monotonic() > deadline:
                late = [self.parts[index] for index, ref in enumerate(self.refs) if ref in pending]
                raise DeadlineError(
                    f"{self.doing}: {len(pending)} of {len(self.refs)} processes had not answered after "
                    f"{self.timeout_s:.0f} s: {', '.join(f'{name} (log: {log})' for name, log in late)}."
                )
        return [self._result(ref) for ref in self.refs]

    def _errors(self, returned: Sequence[Any]) -> list[SlimeError]:
        errors = []
        for ref in returned:
            try:
                self._result(ref)
            except SlimeError as error:
                errors.append(error)
        return errors

    def _first_cause(self, errors: list[SlimeError], pending: list[Any]) -> SlimeError:
        """The error that caused the others.

        A process that fails or dies breaks its neighbours' connections, and their errors may arrive first: bare
        exceptions of the communication library. What a process raised on purpose, and a death, come before those.
        """
        deadline = time.monotonic() + OTHERS_S
        while all(type(error) is UnexpectedError for error in errors) and pending and time.monotonic() < deadline:
            returned, pending = ray.wait(pending, num_returns=len(pending), timeout=TICK_S)
            errors += self._errors(returned)
            if self.watch is not None:
                self.watch()
        return next((error for error in errors if type(error) is not UnexpectedError), errors[0])

    def _result(self, ref: Any) -> Result:
        try:
            result: Result = ray.get(ref)
            return result
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, UnexpectedError):
                raise UnexpectedError(f"{self.doing}: {cause}") from None
            if isinstance(cause, SlimeError):
                raise cause from None
            raise UnexpectedError(f"{self.doing}: {type(cause).__name__}: {cause}\n{error}") from None
        except RayError as error:
            who, log = self.parts[list(self.refs).index(ref)]
            raise explain(error, self.doing, who, log) from None


class Workers:
    """Handle on all processes of one role: the trainer's ranks, the engines or the rollout process."""

    def __init__(
        self,
        config: RunConfig,
        role: str,
        log_path: Path,
        *,
        watch: Watch | None = None,
        enlist: Enlist | None = None,
        asynchronous: bool = False,
    ) -> None:
        """Describe the processes, which `start` starts. If it is not called, there are none, and calls do nothing.

        Args:
            config: The run's configuration, for deadlines.
            role: How messages name the processes.
            log_path: Where they write their output; `{index}` in the name stands for the process's index.
            watch: Called regularly during a wait.
            enlist: Called for each process that is started, so that it is watched.
            asynchronous: Calls run side by side in an event loop, instead of one after the other.
        """
        self._config = config
        self._role = role
        self._log_path = log_path
        self._watch = watch
        self._enlist = enlist
        self._actor_class = AsyncWorker if asynchronous else Worker
        self._actors: list[Any] = []
        self._building: PendingCall[None] = PendingCall([], "", 0.0)
        self._parts: list[tuple[str, Path]] = []
        self._nodes = 1

    def start(self, placement: Sequence[dict[str, Any]], *, nodes: int = 1) -> None:
        """Start one process per entry of `placement`, Ray's options for it; returns at once.

        Of a part of the run that spans several `nodes`, that many processes have the same index, one after another.
        """
        self._nodes = nodes
        for number, options in enumerate(placement):
            index, node = divmod(number, nodes)
            label = f"{index}-node-{node}" if node else str(index)
            log_path = self._log_path.with_name(self._log_path.name.format(index=label))
            self._actors.append(self._launch(index, options, log_path))
            name = f"{_NAMES.get(self._role, self._role)} {index}" if "{index}" in self._log_path.name else self._role
            self._parts.append((name, log_path))

    def _of(self, index: int) -> slice:
        """The processes that have this index."""
        return slice(index * self._nodes, (index + 1) * self._nodes)

    def _launch(self, index: int, options: dict[str, Any], log_path: Path) -> Any:
        hang_s, own_ray = self._config.cluster.hang_timeout_s, self._config.cluster.ray_address is None
        actor = ray.remote(self._actor_class).options(**options).remote(log_path, hang_s, own_ray, os.getcwd())
        if self._enlist is not None:
            self._enlist(index, log_path, actor.identify.remote())
        return actor

    def free_addresses(self, count: int = 1, watch: Watch | None = None) -> list[tuple[str, int]]:
        """For each of the first indexes, the node of the first process that has it, and a free port there."""
        firsts = slice(0, count * self._nodes, self._nodes)
        asked = self._starting([actor.free_address.remote() for actor in self._actors[firsts]])
        return replace(asked, parts=self._parts[firsts], watch=watch or self._watch).wait()

    def devices(self) -> list[str]:
        """The GPU of each process."""
        return [device for [device] in self._starting([actor.devices.remote() for actor in self._actors]).wait()]

    def build(
        self,
        factory: Callable[[*Arguments], Any],
        arguments: Sequence[tuple[*Arguments]],
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Begin building every process's object; `wait_built` waits for them.

        Args:
            factory: A class, or a coroutine function if the workers are asynchronous.
            arguments: The factory's arguments, for each process.
            timeout_s: Deadline instead of `--startup-timeout-s`.
        """
        refs = [actor.build.remote(factory, *args) for actor, args in zip(self._actors, arguments, strict=True)]
        self._building = self._starting(refs, timeout_s)

    def _starting(self, refs: list[Any], timeout_s: float | None = None) -> PendingCall[Any]:
        timeout_s = self._config.cluster.startup_timeout_s if timeout_s is None else timeout_s
        return PendingCall(refs, f"starting the {self._role}", timeout_s, self._watch, self._parts)

    def begin_close(self, index: int) -> PendingCall[None]:
        """Begin to close the objects with this index, whose processes may be in trouble and not answer."""
        parts = self._parts[self._of(index)]
        closing = [actor.close.remote() for actor in self._actors[self._of(index)]]
        return PendingCall(closing, f"ending {parts[0][0]}", 0.0, parts=parts)

    def renew(
        self,
        index: int,
        placement: Sequence[dict[str, Any]],
        factory: Callable[[*Arguments], Any],
        arguments: Sequence[tuple[*Arguments]],
        *,
        timeout_s: float,
    ) -> PendingCall[None]:
        """Kill the processes with this index, start others in their place, and begin to build their objects.

        See `start` and `build`.
        """
        own = self._of(index)
        for actor in self._actors[own]:
            ray.kill(actor)
        parts = self._parts[own]
        self._actors[own] = [
            self._launch(index, options, log) for options, (_, log) in zip(placement, parts, strict=True)
        ]
        building = [
            actor.build.remote(factory, *args) for actor, args in zip(self._actors[own], arguments, strict=True)
        ]
        refs = list(self._building.refs)
        refs[own] = building
        self._building = replace(self._building, refs=refs)
        return PendingCall(building, f"starting {parts[0][0]}", timeout_s, parts=parts)

    def check_building(self) -> None:
        """Raise the error of a process whose object could not be built; never blocks."""
        self._building.check()

    def wait_built(self, watch: Watch | None = None) -> None:
        """Wait until every process has its object; `watch` is called instead of the workers' own."""
        replace(self._building, watch=watch or self._watch).wait()

    @overload
    def begin(
        self,
        method: Callable[[Any, *Arguments], Coroutine[Any, Any, Result]],
        *args: *Arguments,
        doing: str,
        timeout_s: float | None = None,
        watch: Watch | None = None,
        only: int | None = None,
    ) -> PendingCall[Result]: ...

    @overload
    def begin(
        self,
        method: Callable[[Any, *Arguments], Result],
        *args: *Arguments,
        doing: str,
        timeout_s: float | None = None,
        watch: Watch | None = None,
        only: int | None = None,
    ) -> PendingCall[Result]: ...

    def begin(  # type: ignore[misc]  # mypy compares no `*args: *Arguments` with the parameters of the implementation
        self,
        method: Callable[..., Any],
        *args: Any,
        doing: str,
        timeout_s: float | None = None,
        watch: Watch | None = None,
        only: int | None = None,
    ) -> PendingCall[Any]:
        """Call `method` of every process's object; `PendingCall.wait` waits for the results.

        Args:
            method: A method of the object's class.
            *args: Its arguments; a Ray object reference arrives as the object.
            doing: What the call does, for messages.
            timeout_s: Deadline, counted from `PendingCall.wait`; default: `--step-timeout-s`.
            watch: Called while waiting, instead of the workers' own.
            only: The index of the processes that are called.
        """
        # The methods of `remote_trainer.TrainerProcess` are their names, whatever mypy sees.
        method_name = method if isinstance(method, str) else method.__name__
        title = f"{self._role}.{method_name}"  # in `ps` and in Ray's dashboard
        chosen = slice(None) if only is None else self._of(only)
        refs = [actor.call.options(name=title).remote(method_name, *args) for actor in self._actors[chosen]]
        timeout_s = self._config.cluster.step_timeout_s if timeout_s is None else timeout_s
        return PendingCall(refs, doing, timeout_s, watch or self._watch, self._parts[chosen])

    def actors(self, index: int) -> tuple[list[Any], list[tuple[str, Path]]]:
        """Ray's handles of the processes with this index, for another process, and their names and log files."""
        return self._actors[self._of(index)], self._parts[self._of(index)]

    def stop(self, *, grace_s: float, orderly: bool = True) -> None:
        """End the processes.

        Args:
            grace_s: How long closing their objects may take.
            orderly: Whether to close their objects first.
        """
        if orderly:
            # A process that is still building its object does not answer.
            built = self._building.returned()
            refs = [
                actor.close.remote()
                for actor, ref in zip(self._actors, self._building.refs, strict=False)
                if ref in built
            ]
            if refs:
                ray.wait(refs, num_returns=len(refs), timeout=grace_s)
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._parts = [], []


def redirect_output(log_path: Path) -> None:
    """Send this process's stdout and stderr, C libraries included, to `log_path`."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    faulthandler.enable()
    # Ray may have set up logging before; slime's processes write the same lines.
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, force=True)


def node_address() -> str:
    """This node's address as the other nodes of the Ray cluster reach it."""
    return str(ray.util.get_node_ip_address())
