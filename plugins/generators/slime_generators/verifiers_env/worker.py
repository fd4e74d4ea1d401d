"""Runs episodes of a verifiers environment. Started by `agent`, in the Python in which `verifiers` is installed.

    python -P worker.py CHILD_MODULE DESCRIPTOR

That Python may not have slime, so this file does not import it. CHILD_MODULE is the path of
`slime.kit.processes.child`, which needs only the standard library. DESCRIPTOR is a socket: its first line is the
settings, every further line a request, and every line written to it an answer.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import socket
import sys
import traceback
from typing import Any

#: maximum bytes of one request
_MAX_BYTES = 64 * 2**20


def load(settings: dict[str, Any]) -> Any:
    """The environment that the settings describe (`VerifiersOptions`)."""
    sys.path[:0] = settings["path"]
    import verifiers.v1 as vf

    env = dict(settings["env"])
    env["taskset"] = {**env.get("taskset", {}), "id": settings["taskset"]}
    config_type = type(vf.resolve_env_config(env))
    for name, field in config_type.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            # The default runtime is the vendor's sandbox, which cannot reach the endpoint.
            env[name] = {"runtime": {"type": "subprocess"}, **env.get(name, {})}
    return vf.load_environment(vf.resolve_env_config(env))


def row_of(task: Any) -> dict[str, Any]:
    """A row of a prompt file for a task: its prompt (for people to read) and its identity."""
    data = task.data
    prompt = data.prompt if data.prompt is not None else data.name or f"task {data.idx}"
    messages: list[Any] = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else [message.model_dump(exclude_none=True) for message in prompt]
    )
    if data.system_prompt is not None:
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    return {"prompt": messages, "label": "", "metadata": {"verifiers": {"idx": data.idx, "key": task.key}}}


class EpisodeWorker:
    """Runs episodes of one environment, all requested ones at once."""

    def __init__(self, env: Any, answers: asyncio.StreamWriter) -> None:
        self._env = env
        self._answers = answers
        self._tasks: list[Any] = []
        self._more = iter(env.taskset)
        self._running: dict[int, asyncio.Task[None]] = {}

    def send(self, **answer: Any) -> None:
        """Write one answer."""
        self._answers.write(json.dumps(answer, default=str).encode() + b"\n")

    async def serve(self, requests: asyncio.StreamReader) -> None:
        """Serve requests until the socket is closed."""
        async with self._env.serving():
            self.send(ready=True)
            while line := await requests.readline():
                request = json.loads(line)
                number = request["id"]
                if request["op"] == "cancel":
                    if number in self._running:
                        self._running[number].cancel()
                    continue
                task = asyncio.ensure_future(self._episode(request))
                self._running[number] = task
            for task in list(self._running.values()):
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _episode(self, request: dict[str, Any]) -> None:
        try:
            result = await self._run(request)
        except Exception as error:  # noqa: BLE001 - the boundary around the environment
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        finally:
            self._running.pop(request["id"], None)
        self.send(id=request["id"], **result)

    async def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        import verifiers.v1 as vf

        task = self._task(request["idx"], request["key"])
        # The address identifies the session; the endpoint needs no key.
        client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var="SLIME_ENDPOINT_NEEDS_NO_KEY")
        episode = await self._env.run_episode(task, vf.ModelContext(model=request["model"], client=client))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            return {"error": "; ".join(f"{one.type}: {one.message}" for one in errors) or "the episode is not ok"}
        traces = [trace for trace in episode.traces if trace.agent.trainable] or list(episode.traces)
        return {
            "reward": _mean([named_rewards(trace) for trace in traces]),
            "metrics": _mean([t.metrics for t in traces]),
        }

    def _task(self, idx: int, key: str) -> Any:
        while len(self._tasks) <= idx:
            task = next(self._more, None)
            if task is None:
                raise LookupError(f"the taskset has {len(self._tasks)} tasks, and no number {idx}")
            self._tasks.append(task)
        task = self._tasks[idx]
        if task.key != key:
            raise LookupError(f"task {idx} has changed since the rows were written: write them again")
        return task


def named_rewards(trace: Any) -> dict[str, float]:
    """The rewards of a trace by name, and their total as `score`."""
    named = {name: one.score for name, one in trace.rewards.items() if one is not None and name != "score"}
    return {**named, "score": trace.reward}


def _mean(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The mean of each name's values over the rows that have it."""
    names = {name for row in rows for name in row}
    values = {name: [float(row[name]) for row in rows if row.get(name) is not None] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items() if found}


async def main(descriptor: int) -> None:
    """Load the environment, then serve requests or write rows."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)  # programs that the environment starts do not get it
    requests, answers = await asyncio.open_unix_connection(sock=connection, limit=_MAX_BYTES)
    settings = json.loads(await requests.readline())
    env = load(settings)
    worker = EpisodeWorker(env, answers)
    if settings["rows"] is None:
        await worker.serve(requests)
        return
    for number, task in enumerate(env.taskset):
        if number == settings["rows"]:
            break
        worker.send(row=row_of(task))
        await answers.drain()
    worker.send(complete=True)
    answers.close()
    await answers.wait_closed()


if __name__ == "__main__":
    runpy.run_path(sys.argv[1])["end_with_parent"]()
    asyncio.run(main(int(sys.argv[2])))
