"""Ray's own errors in slime's words: what was lost, how, and how much memory everything had."""

from __future__ import annotations

import re
from pathlib import Path

from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)

from slime.errors import ClusterError, ProcessDiedError, SlimeError, without_escapes
from slime.run.ray_session import of_several_nodes, ray_failure
from slime.run.supervise.traces import cause_of_death, memory_now

#: a process of Ray's table of memory users: id, GiB, command
_USER = re.compile(r"^(\d+)\t(\d+(?:\.\d+)?)\t(.+)$", re.MULTILINE)
_TOP = 5
#: what Ray says of an actor whose node is gone, after the health check or at once
_NODE_LOST = re.compile(r"marked dead|its node has died|actor's node was terminated")
#: what the rarer errors mean and what to do
_MEANING: dict[type[RayError], str] = {
    OutOfDiskError: "the disk of Ray's temporary folder is full (RAY_TMPDIR sets the folder)",
    ObjectStoreFullError: "Ray's object store is full; a larger /dev/shm makes it larger",
    ObjectLostError: "data on its way between two processes was lost, because the process or node that had it ended",
    NodeDiedError: "a node of the cluster ended or cannot be reached",
    RuntimeEnvSetupError: "Ray could not prepare a process on its node",
    ActorUnschedulableError: "Ray found no node with room for a process",
}


def explain(error: RayError, doing: str, who: str, where: Path) -> SlimeError:
    """The error to raise instead of one of Ray's.

    Args:
        error: What Ray raised for a call.
        doing: What the call does: "training".
        who: The process that was called: "trainer rank 0".
        where: Its log file.
    """
    if (failure := ray_failure()) is not None:
        return ClusterError(f"{doing}: {failure}")
    text = without_escapes(str(error))
    if isinstance(error, OutOfMemoryError):
        return ProcessDiedError(f"{doing}: {_out_of_memory(text, who)}")
    if isinstance(error, RayActorError) and error.actor_init_failed:  # another attempt would end in the same way
        last = text.strip().splitlines()[-1].strip()
        return SlimeError(f"{doing}: {who} failed at its start: {last.removeprefix('slime.errors.SlimeError: ')}")
    if isinstance(error, RayActorError | WorkerCrashedError):
        return ProcessDiedError(
            f"{doing}: {who}{_number(text)} died: {_cause(error, text, where)}. Its log is {where}. {memory_now()}"
        )
    meaning = next((text for kind, text in _MEANING.items() if isinstance(error, kind)), None)
    return ClusterError(f"{doing}: {meaning or _first_line(text)} ({type(error).__name__}; asked: {who}).")


def _number(text: str) -> str:
    found = re.search(r"\bpid: (\d+)", text)
    return f" (pid {found[1]})" if found else ""


def _cause(error: RayError, text: str, log: Path) -> str:
    if _NODE_LOST.search(text):
        return "its node ended or cannot be reached"
    cause = cause_of_death(log)
    if isinstance(error, ActorUnavailableError) and of_several_nodes():
        return f"{cause}; or its node is gone, which Ray may notice only a minute later"
    return cause


def _out_of_memory(text: str, who: str) -> str:
    """Ray ends a process before the kernel does. Its text has numbers of the node and a table of processes."""
    node = re.search(r"was ([\d.]+)GB used / ([\d.]+)GB limit", text)
    used = f": {node[1]} of {node[2]} GiB were in use" if node else ""
    limit = re.search(r"exceeded threshold of \d+B \(([\d.]+%)", text)
    above = f", and Ray ends processes above {limit[1]} (RAY_memory_usage_threshold)" if limit else ""
    killed = re.search(r"pid=(\d+), actual memory used=([\d.]+)GB", text)
    which = f" (pid {killed[1]}, {killed[2]} GiB)" if killed else ""
    users = [f"{command.strip()[:60]} (pid {pid}) {size} GiB" for pid, size, command in _USER.findall(text)[:_TOP]]
    table = f" The largest processes: {'; '.join(users)}." if users else ""
    return (
        f"Ray killed {who}{which}, because its machine ran out of memory{used}{above}.{table} Use less memory (a"
        " smaller model, shorter responses, fewer processes), or end other programs."
    )


def _first_line(text: str) -> str:
    return next((line.strip().rstrip(".") for line in text.splitlines() if line.strip()), "no reason given")
