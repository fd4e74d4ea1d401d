"""The stock router with slime's settings, in front of real engines and injected faults."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
from tests.engine.conftest import FaultyEngine
from tests.support.engines import READY_S, cpu_engine, running
from tests.support.waiting import wait_until

from slime.engine.client import HttpPolicyClient
from slime.engine.router import RouterServer
from slime.engine.server import EngineServer
from slime.errors import DeadlineError, EngineError, NoEngineError
from slime.kit.processes import living_members
from slime.observe.log import log_excerpt
from slime.plugin import Generation, SamplingParams

pytestmark = pytest.mark.engine

PROMPT = [40, 41, 42, 43]


@pytest.fixture(scope="module")
def two_engines(
    tiny_model: Path, fork_server: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[EngineServer]]:
    """Two engines with different weight versions, whose logs list every request."""
    folder = tmp_path_factory.mktemp("engines")
    servers = [
        cpu_engine(
            tiny_model,
            folder,
            extra_args=("--weight-version", str(i), "--log-level-http", "info"),
            fork_server=fork_server,
        )
        for i in range(2)
    ]
    with running(*servers):
        yield servers


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Callable[..., RouterServer]]:
    made: list[RouterServer] = []

    def make(urls: list[str]) -> RouterServer:
        made.append(RouterServer(urls, log_path=tmp_path / f"router-{len(made)}.log"))
        made[-1].start()
        made[-1].wait_ready(READY_S)
        return made[-1]

    yield make
    for server in made:
        server.stop()


def health_checks(engine: EngineServer) -> int:
    """Health checks that an engine has answered."""
    return engine.log_path.read_text(encoding="utf-8", errors="replace").count("GET /health")


def generate(url: str, sessions: list[str | None]) -> list[Generation]:
    async def ask() -> list[Generation]:
        async with HttpPolicyClient(url, timeout_s=30) as client:
            sampling = SamplingParams(max_new_tokens=3)
            return await asyncio.gather(*(client.generate(PROMPT, sampling, session=s) for s in sessions))

    return asyncio.run(ask())


def test_requests_are_spread_and_sessions_stay_on_their_engine(
    two_engines: list[EngineServer], router: Callable[..., RouterServer]
) -> None:
    front = router([e.url for e in two_engines])
    assert {w["url"] for w in front.workers()} == {e.url for e in two_engines}
    spread = Counter(g.weight_versions[0] for g in generate(front.url, [None] * 20))
    assert spread["0"] >= 5 and spread["1"] >= 5
    sessions: list[str | None] = [f"conversation-{i % 4}" for i in range(20)]
    homes: dict[str | None, set[str]] = {}
    for session, generation in zip(sessions, generate(front.url, sessions), strict=True):
        homes.setdefault(session, set()).update(generation.weight_versions)
    assert all(len(engines) == 1 for engines in homes.values())
    assert {next(iter(engines)) for engines in homes.values()} == {"0", "1"}


def test_sampling_fields_arrive_through_the_router(
    two_engines: list[EngineServer], router: Callable[..., RouterServer]
) -> None:
    front = router([two_engines[0].url])

    async def ask() -> Generation:
        async with HttpPolicyClient(front.url, timeout_s=30) as client:
            greedy = SamplingParams(max_new_tokens=5, temperature=0.0)
            whole = await client.generate(PROMPT, greedy)
            again = SamplingParams(max_new_tokens=5, top_k=1, stop_token_ids=(whole.tokens[0],), sampling_seed=3)
            return await client.generate(PROMPT, again)

    generation = asyncio.run(ask())
    assert len(generation.tokens) == 1 and generation.finish_reason == "stop"


def test_a_paused_engine_holds_requests_and_serves_them_later(
    two_engines: list[EngineServer], router: Callable[..., RouterServer]
) -> None:
    paused = two_engines[0]
    front = router([paused.url])

    async def ask() -> Generation:
        async with HttpPolicyClient(front.url, timeout_s=30) as client:
            await asyncio.to_thread(paused.control.pause)
            greedy = SamplingParams(max_new_tokens=3, temperature=0.0)
            request = asyncio.create_task(client.generate(PROMPT, greedy))
            before = health_checks(paused)
            async with asyncio.timeout(60):
                while health_checks(paused) < before + 3:
                    await asyncio.sleep(0.02)
            assert not request.done()
            await asyncio.to_thread(paused.control.resume)
            return await request

    assert asyncio.run(ask()).finish_reason == "length"


def test_a_slow_request_is_not_generated_twice(
    faulty_engine: Callable[..., FaultyEngine], router: Callable[..., RouterServer]
) -> None:
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "1", "output_token_logprobs": [[-1.0, 5, None]]}

    def slow(_: int) -> tuple[int, bytes]:
        stub.wait_for_health_checks(3)
        return 200, orjson.dumps({"text": "", "output_ids": [5], "meta_info": meta})

    stub = faulty_engine(slow)
    front = router([stub.url])
    assert generate(front.url, [None])[0].tokens == [5]
    assert stub.requests == 1


def test_after_the_clients_deadline_the_router_does_not_try_again(
    faulty_engine: Callable[..., FaultyEngine], router: Callable[..., RouterServer]
) -> None:
    over = threading.Event()
    stub = faulty_engine(lambda _: (200, b"{}") if over.wait(60) else None)
    front = router([stub.url])

    async def ask() -> None:
        async with HttpPolicyClient(front.url, timeout_s=3.0) as client:
            await client.generate(PROMPT, SamplingParams(max_new_tokens=3))

    with pytest.raises(DeadlineError):
        asyncio.run(ask())
    stub.wait_for_health_checks(3)  # a repeated request would have arrived, because the router retries within a second
    assert stub.requests == 1
    over.set()


def test_without_living_engines_the_client_soon_gets_an_error(router: Callable[..., RouterServer]) -> None:
    front = router([])
    started = time.monotonic()
    with pytest.raises(EngineError, match="/generate: status 503"):
        generate(front.url, [None])
    assert time.monotonic() - started < 25  # the client itself would give up after 30 s
    assert "\x1b" not in log_excerpt(front.log_path)
    front.stop()
    log = front.log_path.read_text()
    assert "request failed" in log and "\x1b" not in log  # no colours in a file


def test_requests_go_to_the_engines_in_use_and_are_not_repeated_if_the_clients_do_that(
    faulty_engine: Callable[..., FaultyEngine], tmp_path: Path
) -> None:
    stubs = [faulty_engine(lambda _: None) for _ in range(2)]  # accept requests, and close the connection
    first, second = (stub.url for stub in stubs)
    front = RouterServer([first, second], log_path=tmp_path / "router.log", repeats=False)
    with running(front):
        for urls, asked in (([first], (1, 0)), ([first, second], None), ([second], (0, 1))):
            front.use(urls)
            assert {worker["url"] for worker in front.workers()} == set(urls)
            before = [stub.requests for stub in stubs]
            with pytest.raises(EngineError, match="status 500"):
                generate(front.url, [None])
            after = [stub.requests for stub in stubs]
            assert asked is None or (after[0] - before[0], after[1] - before[1]) == asked
            assert sum(after) == sum(before) + 1
        front.use([])
        with pytest.raises(NoEngineError, match="status 503"):
            generate(front.url, [None])


def test_an_engine_that_is_not_ready_yet_is_used_once_it_is(
    faulty_engine: Callable[..., FaultyEngine], closed_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.engine.router._CHANGE_S", 1.0)
    first, late = faulty_engine(lambda _: None).url, f"http://127.0.0.1:{closed_port}"
    front = RouterServer([first], log_path=tmp_path / "router.log")
    with running(front):
        for _ in range(2):  # the second time the router has been told
            front.use([first, late])
        faulty_engine(lambda _: None, port=closed_port)
        wait_until(lambda: {one["url"] for one in front.workers() if one["is_healthy"]} == {first, late}, READY_S)


def test_a_router_in_front_of_a_missing_engine_is_not_ready(closed_port: int, tmp_path: Path) -> None:
    front = RouterServer([f"http://127.0.0.1:{closed_port}"], log_path=tmp_path / "router.log")
    front.start()
    with pytest.raises(DeadlineError, match=r"the router at .* was not ready after 1 s"):
        front.wait_ready(1)
    group = front.pid
    front.stop()
    assert group is not None and living_members(group) == []
