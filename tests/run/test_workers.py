"""The handle on remote processes: errors, deaths and timeouts say what the processes were doing."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayActorError

from slime.config import RunConfig
from slime.config.options import ClusterOptions
from slime.errors import ClusterError, DeadlineError, DiskFullError, SlimeError, TrainerError, UnexpectedError
from slime.run.ray_session import ray_session
from slime.run.supervise.losses import is_curable
from slime.run.workers import Workers

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("session")]

CONFIG = RunConfig(cluster=ClusterOptions(device="cpu"))


class Part:
    """The object in each process of these tests."""

    def __init__(self, index: int, fails: bool = False) -> None:
        if fails:
            raise TrainerError(f"part {index} does not fit")
        print(f"part {index} is built", flush=True)
        self.index = index
        self.knew_torch = "torch" in sys.modules
        self.collected_while_built = gc.isenabled()
        self.closed: Path | None = None

    def add(self, value: int) -> int:
        return self.index + value

    def exempt_from_collection(self) -> int:
        return gc.get_freeze_count()

    def collects(self) -> tuple[bool, bool]:
        return self.collected_while_built, gc.isenabled()

    def fail(self, error: BaseException) -> None:
        raise error

    def fail_unpicklable(self) -> None:
        raise Unpicklable

    def fail_or_sleep(self, seconds: float) -> None:
        if self.index == 0:
            raise TrainerError("no")
        time.sleep(seconds)

    def lose_or_raise(self) -> None:
        if self.index == 0:
            raise ConnectionResetError("Connection closed by peer")
        time.sleep(0.5)
        raise TrainerError("the loss is nan")

    def lose_or_die(self) -> None:
        if self.index == 0:
            raise ConnectionResetError("Connection closed by peer")
        time.sleep(0.5)
        os._exit(3)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def store(self) -> list[ray.ObjectRef]:
        return [ray.put(bytes(2**20))]

    def fetch(self, stored: list[ray.ObjectRef]) -> int:
        return sum(map(len, ray.get(stored)))

    def environment_of_child(self) -> str:
        return subprocess.run(["env"], stdout=subprocess.PIPE, text=True, check=True).stdout

    def knew_torch_when_built(self) -> bool:
        return self.knew_torch

    def die(self) -> None:
        os._exit(3)

    def close_into(self, folder: Path) -> None:
        self.closed = folder / str(self.index)

    def close(self) -> None:
        if self.closed is not None:
            self.closed.touch()


class Meeting:
    """An object whose two calls wait for each other."""

    def __init__(self) -> None:
        self._both = asyncio.Barrier(2)

    async def wait(self) -> str:
        await self._both.wait()
        return "met"

    async def close(self) -> None:
        pass


async def build_meeting() -> Meeting:
    return Meeting()


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with ray_session(CONFIG):
        yield


@contextmanager
def two_parts(folder: Path) -> Iterator[Workers]:
    """Two processes with a `Part` each."""
    workers = Workers(CONFIG, "parts", folder / "part-{index}.log")
    workers.start([{"num_cpus": 0}] * 2)
    workers.build(Part, [(0,), (10,)])
    workers.wait_built()
    yield workers
    workers.stop(grace_s=5, orderly=False)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    """Two processes that a test may kill or leave busy."""
    with two_parts(tmp_path) as workers:
        yield workers


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes that tests share write."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def shared(logs: Path, session: None) -> Iterator[Workers]:  # noqa: ARG001 - which they run in
    """Two processes that every test leaves as it found them."""
    with two_parts(logs) as workers:
        yield workers


def test_results_come_in_the_order_of_the_processes(shared: Workers) -> None:
    assert shared.begin("add", 3, doing="adding").wait() == [3, 13]


def test_what_a_process_has_loaded_is_no_longer_looked_for_garbage(shared: Workers) -> None:
    assert min(shared.begin("exempt_from_collection", doing="counting").wait()) > 50_000


def test_garbage_is_looked_for_again_once_a_process_is_built(shared: Workers) -> None:
    assert shared.begin("collects", doing="asking").wait() == [(False, True), (False, True)]


def test_each_process_writes_its_own_log(shared: Workers, logs: Path) -> None:
    shared.begin("add", 3, doing="adding").wait()
    assert "part 0 is built" in (logs / "part-0.log").read_text()
    assert "part 10 is built" in (logs / "part-1.log").read_text()


def test_programs_that_the_processes_start_do_not_get_the_token_of_ray(shared: Workers) -> None:
    for environment in shared.begin("environment_of_child", doing="looking").wait():
        assert "PATH=" in environment and "RAY_AUTH_TOKEN" not in environment


def test_idle_threads_of_torch_are_told_to_sleep_before_it_is_loaded(shared: Workers) -> None:
    assert shared.begin("knew_torch_when_built", doing="looking").wait() == [False, False]
    for environment in shared.begin("environment_of_child", doing="looking").wait():
        assert "GOMP_SPINCOUNT=2000\n" in environment


def test_ray_keeps_no_record_of_the_calls(shared: Workers) -> None:
    shared.begin("add", 3, doing="adding").wait()
    time.sleep(2)  # it would be sent to Ray's control service every second, and grow there with each step of a run
    assert ray.timeline() == []


def test_errors_of_slime_arrive_unchanged(shared: Workers) -> None:
    with pytest.raises(TrainerError, match=r"^the loss is nan$"):
        shared.begin("fail", TrainerError("the loss is nan"), doing="training").wait()


def test_other_errors_arrive_with_their_type_and_traceback(shared: Workers) -> None:
    with pytest.raises(SlimeError) as caught:
        shared.begin("fail", AssertionError("wrong shape"), doing="building the model").wait()
    line = Part.fail.__code__.co_firstlineno + 1
    first, *rest = str(caught.value).splitlines()
    assert first == f"building the model: {__file__}:{line}: AssertionError: wrong shape"
    assert "        raise error" in rest and "ray" not in str(caught.value)


class Unpicklable(BaseException):
    """Neither an `Exception` nor able to leave its process."""

    def __reduce__(self) -> str:
        raise TypeError("not to be sent")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_code_that_exits_a_process_is_named_and_the_process_lives_on(shared: Workers, error: BaseException) -> None:
    with pytest.raises(UnexpectedError, match=rf"^training: {__file__}:\d+: {type(error).__name__}"):
        shared.begin("fail", error, doing="training").wait()
    assert shared.begin("add", 1, doing="training").wait()


def test_an_exception_that_does_not_pickle_is_named(shared: Workers) -> None:
    with pytest.raises(UnexpectedError, match=rf"^training: {__file__}:\d+: Unpicklable"):
        shared.begin("fail_unpicklable", doing="training").wait()


def test_the_error_of_a_full_disk_is_one_line_with_file_and_free_bytes(shared: Workers) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/tmp/run/x")
    with pytest.raises(DiskFullError, match=r"^the disk is full: /tmp/run/x cannot be written; [\d,]+ bytes are free"):
        shared.begin("fail", full, doing="training").wait()


def test_an_error_does_not_wait_for_the_other_processes(workers: Workers) -> None:
    started = time.monotonic()
    with pytest.raises(TrainerError):
        workers.begin("fail_or_sleep", 60.0, doing="training").wait()
    assert time.monotonic() - started < 30


def test_a_failure_is_found_without_waiting(workers: Workers) -> None:
    pending = workers.begin("fail_or_sleep", 60.0, doing="training")
    deadline = time.monotonic() + 30
    while not pending.returned() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not pending.finished
    with pytest.raises(TrainerError):
        pending.check()


def test_the_death_of_a_process_is_reported_with_what_it_was_doing(workers: Workers) -> None:
    with pytest.raises(SlimeError, match=r"^training: parts [01] \(pid \d+\) died: .* or ended itself"):
        workers.begin("die", doing="training").wait()


def test_data_that_ended_with_its_process_is_named_and_another_attempt_may_have_it(workers: Workers) -> None:
    [stored] = workers.begin("store", doing="generating", only=0).wait()
    with pytest.raises(SlimeError, match=" died"):
        workers.begin("die", doing="generating", only=0).wait()
    deadline = time.monotonic() + 60
    with pytest.raises(ClusterError, match="was lost, because the process or node that had it ended") as caught:
        while time.monotonic() < deadline:  # until Ray has noticed
            assert workers.begin("fetch", stored, doing="training", only=1).wait() == [2**20]
            time.sleep(0.2)
    assert is_curable(caught.value, first=True)


@pytest.mark.parametrize(("method", "cause"), [("lose_or_raise", "the loss is nan"), ("lose_or_die", " died")])
def test_a_lost_connection_is_not_blamed_if_its_other_end_failed(workers: Workers, method: str, cause: str) -> None:
    with pytest.raises(SlimeError, match=cause):
        workers.begin(method, doing="training").wait()


def test_a_wait_ends_at_its_deadline(workers: Workers) -> None:
    with pytest.raises(DeadlineError, match=r"^training: 2 of 2 processes had not answered after 2 s"):
        workers.begin("sleep", 60.0, doing="training", timeout_s=2).wait()


def test_an_error_in_the_watch_ends_the_wait(workers: Workers) -> None:
    def watch() -> None:
        raise TrainerError("an engine is gone")

    with pytest.raises(TrainerError, match="an engine is gone"):
        workers.begin("sleep", 60.0, doing="training", watch=watch).wait()


def test_an_error_while_building_arrives(tmp_path: Path) -> None:
    workers = Workers(CONFIG, "parts", tmp_path / "part.log")
    workers.start([{"num_cpus": 0}])
    workers.build(Part, [(7, True)])
    with pytest.raises(TrainerError, match="part 7 does not fit"):
        workers.wait_built()
    workers.stop(grace_s=5)


def test_an_orderly_stop_closes_the_objects(workers: Workers, tmp_path: Path) -> None:
    workers.begin("close_into", tmp_path, doing="preparing").wait()
    workers.stop(grace_s=30)
    assert (tmp_path / "0").exists() and (tmp_path / "10").exists()


def test_calls_of_asynchronous_workers_run_side_by_side(tmp_path: Path) -> None:
    workers = Workers(CONFIG, "meeting", tmp_path / "meeting.log", asynchronous=True)
    workers.start([{"num_cpus": 0}])
    workers.build(build_meeting, [()])
    workers.wait_built()
    first = workers.begin("wait", doing="meeting", timeout_s=30)
    assert workers.begin("wait", doing="meeting", timeout_s=30).wait() + first.wait() == ["met", "met"]
    workers.stop(grace_s=5)


def test_a_node_that_lacks_the_drivers_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_cluster = RunConfig(cluster=ClusterOptions(device="cpu", ray_address="auto"))
    workers = Workers(of_cluster, "trainer", tmp_path / "trainer-{index}.log")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "getcwd", lambda: "/not/shared")
        workers.start([{"num_cpus": 0}])
    workers.build(Part, [(0,)])
    said = r"^starting the trainer: trainer rank 0 failed at its start: node 127\.0\.0\.1 cannot enter /not/shared, .*"
    with pytest.raises(SlimeError, match=said) as caught:
        workers.wait_built()
    assert not is_curable(caught.value, first=False)
    workers.stop(grace_s=1, orderly=False)


def test_each_index_has_a_free_port_on_the_node_of_its_first_process(tmp_path: Path) -> None:
    workers = Workers(CONFIG, "engines", tmp_path / "engine-{index}.log")
    workers.start([{"num_cpus": 0}] * 4, nodes=2)
    (host, first), (_, second) = workers.free_addresses(2)
    assert host == "127.0.0.1" and first != second
    killed = workers._actors[2]
    ray.kill(killed)
    with pytest.raises(RayActorError):  # ray.kill does not wait for the process to end
        while True:
            ray.get(killed.__ray_ready__.remote(), timeout=60)
    with pytest.raises(SlimeError, match=r"the supervisor of engine 1 "):
        workers.free_addresses(2)
    workers.stop(grace_s=1, orderly=False)


def test_a_role_without_processes_does_nothing(tmp_path: Path) -> None:
    workers = Workers(CONFIG, "parts", tmp_path / "part.log")
    workers.wait_built()
    assert workers.begin("add", 1, doing="adding").wait() == []
    workers.stop(grace_s=5)
