"""A run with engines that it did not start: equal to one with engines of its own, and it goes on without a lost one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.conftest import SlimeRun
from tests.support.engines import cpu_engine, running

from slime.engine.control import EngineKeys
from slime.engine.server import EngineServer

pytestmark = [pytest.mark.nightly, pytest.mark.row("N9")]

Start = Callable[..., SlimeRun]
KEYS = EngineKeys("key-of-the-engines", "key-of-their-administrator")
RUN = ("--num-rollout", "3", "--deterministic", "--check-weight-update-equal")


@pytest.fixture
def engines(model: Path, fork_server: Path, tmp_path: Path) -> Iterator[list[EngineServer]]:
    """Two servers, with keys, of the kind that a run of one engine starts itself."""
    common = {"fork_server": fork_server, "keys": KEYS, "deterministic": True, "compared": True, "random_seed": 42}
    servers = [cpu_engine(model, tmp_path, **common) for _ in range(2)]
    with running(*servers):
        yield servers


@pytest.fixture
def external(tmp_path: Path) -> Callable[..., list[str]]:
    """The flags that make a run use these engines."""
    path = tmp_path / "keys"
    path.write_text(f"{KEYS.api}\n{KEYS.admin}\n")

    def flags(*servers: EngineServer) -> list[str]:
        addresses = [server.url.removeprefix("http://") for server in servers]
        return ["--rollout-external-engine-keys", str(path), "--rollout-external-engine-addrs", *addresses]

    return flags


def numbers(run: SlimeRun) -> list[list[float]]:
    names = ("train/loss", "train/grad_norm", "train/logprob_gap_max", "rollout/response_length_mean", "weight_version")
    return [[row[name] for name in names if name in row] for row in run.steps()]


def samples(run: SlimeRun) -> list[tuple[list[str], str, int]]:
    rows = map(json.loads, (run.run_dir / "rollouts" / "000002.jsonl").read_text(encoding="utf-8").splitlines())
    return [(row["weight_versions"], row["response"], row["response_tokens"]) for row in rows]


def test_a_run_equals_one_with_an_engine_of_its_own_over_disk_and_broadcast(
    slime_train: Start, engines: list[EngineServer], external: Callable[..., list[str]]
) -> None:
    own = slime_train(*RUN, name="own")
    assert own.wait() == 0, own.output
    runs = [own]
    for transport, engine in zip(("disk", "distributed"), engines, strict=True):
        flags = ("--update-weight-transport", transport, *external(engine))
        run = slime_train(*RUN, *flags, name=transport)
        assert run.wait() == 0, run.output
        assert engine.is_ready(), "the run ended an engine that is not its own"
        assert engine.control.weight_version() == "4"
        assert numbers(run) == numbers(own)
        assert all(len(row) >= 4 for row in numbers(run))
        runs.append(run)
    answers = [samples(run) for run in runs]
    assert answers[0] == answers[1] == answers[2]
    assert {version for versions, _, _ in answers[0] for version in versions} == {"3"}


def test_a_run_goes_on_without_an_engine_that_its_owner_ends_and_ends_when_none_is_left(
    slime_train: Start, engines: list[EngineServer], external: Callable[..., list[str]]
) -> None:
    run = slime_train("--num-rollout", "400", "--check-weight-update-equal", *external(*engines))
    run.wait_until(lambda: (run.run_dir / "metrics.jsonl").is_file() and run.steps(), what="a step")
    engines[0].stop()
    run.wait_for_output(rf"going on without .*engine 0: .*{engines[0].url}")
    steps = len(run.steps())
    run.wait_until(lambda: len(run.steps()) > steps + 1, what="two more steps")
    assert all(row["train/logprob_gap_max"] < 1e-4 for row in run.steps())
    engines[1].stop()
    assert run.wait() == 1
    assert engines[1].url in run.output and "none is left" in run.output
    assert run.left_over() == []
