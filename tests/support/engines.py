"""Real engines for tests: half a second each, with the `fork_server` that all tests share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.engine.client import HttpPolicyClient
from slime.engine.control import call
from slime.engine.server import EngineServer, EngineSpec
from slime.plugin import SamplingParams
from slime.rollout.train_batch import TrainBatch
from slime.types import Group, Sample, Status

#: generous, since the machine may be busy
READY_S = 120.0


def cpu_engine(
    model: Path,
    log_folder: Path,
    *,
    extra_args: tuple[str, ...] = (),
    fork_server: Path | None = None,
    **spec: Any,
) -> EngineServer:
    """An engine that is not started yet; a small cache makes it start faster."""
    number = len(list(log_folder.glob("engine-*.log")))
    log_path = log_folder / f"engine-{number}.log"
    log_path.touch()
    return EngineServer(
        EngineSpec(
            model_path=str(model),
            device="cpu",
            log_path=log_path,
            extra_args=("--max-total-tokens", "16384", "--max-running-requests", "256", *extra_args),
            fork_server=fork_server,
            **spec,
        )
    )


@contextlib.contextmanager
def running(*servers: EngineServer, ready_s: float = READY_S) -> Iterator[None]:
    """Start `servers` together, and stop them at the end. If the body fails, the ends of their logs are printed."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready(ready_s)
        yield
    except BaseException:
        for server in servers:
            with contextlib.suppress(OSError):  # it has not started
                print(f"{server.log_path}:\n{server.log_path.read_text(errors='replace')[-20_000:]}")
        raise
    finally:
        for server in servers:
            server.stop()


def wait_until_running(server: EngineServer, requests: int = 1) -> None:
    """Return once the engine generates for at least this many requests."""
    deadline = time.monotonic() + READY_S
    while True:
        loads = call("GET", server.url, "/v1/loads?include=core", timeout_s=10)["loads"]
        if sum(load["num_running_reqs"] for load in loads) >= requests:
            return
        assert time.monotonic() < deadline, f"the engine did not begin to run {requests} requests"
        time.sleep(0.01)


def generated_batch(engine_url: str, prompts: Sequence[list[int]], *, temperature: float) -> TrainBatch:
    """Two answers of the engine for each prompt, with log-probs and rewards 0 and 1."""

    async def ask() -> list[Any]:
        async with HttpPolicyClient(engine_url, timeout_s=60) as client:
            sampling = SamplingParams(max_new_tokens=24, temperature=temperature)
            return await asyncio.gather(*(client.generate(p, sampling) for p in prompts for _ in range(2)))

    samples = [
        Sample(
            group_index=i // 2, index=i, rollout_id=i, tokens=prompts[i // 2] + answer.tokens,
            response_length=len(answer.tokens), rollout_log_probs=answer.log_probs, reward=float(i % 2),
            status=Status.COMPLETED, weight_versions=answer.weight_versions,
        )
        for i, answer in enumerate(asyncio.run(ask()))
    ]  # fmt: skip
    groups = [Group(g, samples[2 * g : 2 * g + 2]) for g in range(len(prompts))]
    return TrainBatch.from_groups(groups, rollout=0, num_steps=1)
