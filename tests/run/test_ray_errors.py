"""Ray's own errors say in plain words which process was lost and why."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayError,
    RaySystemError,
    WorkerCrashedError,
)

from slime.errors import ClusterError, ProcessDiedError
from slime.observe.log import last_log_line, log_excerpt, start_log
from slime.observe.memory import processes_killed_for_memory
from slime.run.supervise import ray_errors, traces
from slime.run.supervise.losses import is_curable
from slime.run.supervise.ray_errors import explain

#: as Ray 2.60 words it, shortened in the middle
OUT_OF_MEMORY = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 127.0.0.1, ID: 5a0cd3) was"
    " 22.86GB used / 23.54GB limit (0.970)\nOOM kill reason: Memory usage 24545802752B exceeded threshold of"
    " 24012516B (95.0% of 25276514304B limit)\nSelected to kill: (Actor(78a9): job ID=01, task name=A.__init__,"
    " required resources={}, pid=1540, actual memory used=9.06GB, worker ID=b84c)\nTop 10 memory users: PID\tMEM(GB)"
    "\tCOMMAND\n1540\t9.06\tray::trainer.train\n31104\t7.21\tsglang::scheduler\n"
    "Refer to the documentation: https://docs.ray.io/en/latest/debug-memory.html."
)
DIED = (
    "\x1b[36mThe actor died unexpectedly before finishing this task.\n\tclass_name: Worker\n\tpid: 9269\n\tip:"
    " 127.0.0.1\x1b[0m\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker"
    " exit detail: Worker unexpectedly exits with a connection error code 2."
)


def explained(error: RayError, log: Path = Path("logs/trainer-1.log")) -> str:
    message = explain(error, "training", "trainer rank 1", log)
    assert isinstance(message, ClusterError | ProcessDiedError)
    return str(message)


def test_a_process_that_ray_killed_is_named_with_the_memory_of_the_largest_ones() -> None:
    assert explained(OutOfMemoryError(OUT_OF_MEMORY)) == (
        "training: Ray killed trainer rank 1 (pid 1540, 9.06 GiB), because its machine ran out of memory: 22.86 of"
        " 23.54 GiB were in use, and Ray ends processes above 95.0% (RAY_memory_usage_threshold). The largest"
        " processes: ray::trainer.train (pid 1540) 9.06 GiB; sglang::scheduler (pid 31104) 7.21 GiB. Use less memory"
        " (a smaller model, shorter responses, fewer processes), or end other programs."
    )


def died(text: str) -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg = text
    return error


def test_a_process_that_died_is_named_with_its_log_and_what_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_TOP", 1000)  # other tests may have left larger processes running
    with subprocess.Popen(["sleep", "100"]) as survivor:
        message = explained(died(DIED))
        survivor.kill()
    assert message.startswith(
        "training: trainer rank 1 (pid 9269) died: it was killed by SIGKILL (by a person or a batch system), or ended"
        " itself. Its log is logs/trainer-1.log. "
    )
    assert re.search(r"[\d.]+ of [\d.]+ GiB are in use on this machine; the run's largest processes: ", message)
    assert f"sleep (pid {survivor.pid}) 0.0 GiB" in message


def test_a_crash_is_found_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "trainer-1.log"
    log.write_text("step 1\nFatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n")
    assert f"died: it crashed: Segmentation fault. Its log is {log}." in explained(died(DIED), log)


def test_a_crash_of_an_earlier_run_in_the_same_folder_is_not_taken_for_this_one(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "trainer-1.log"
    log.parent.mkdir()
    log.write_text("Fatal Python error: Segmentation fault\nfrom yesterday\n")
    start_log(tmp_path, verbose=False).close()
    assert "died: it was killed by SIGKILL" in explained(died(DIED), log)
    assert "yesterday" not in log_excerpt(log) and last_log_line(log.parent) == ""
    with log.open("a") as file:
        file.write("Fatal Python error: Bus error\n")
    assert "died: it crashed: Bus error." in explained(died(DIED), log)


def test_lack_of_memory_is_named_if_the_kernel_has_killed_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = processes_killed_for_memory()
    monkeypatch.setattr(traces, "processes_killed_for_memory", lambda: before + 1)
    assert "died: the kernel has killed a process of this machine for lack of memory" in explained(died(DIED))


def test_a_process_that_failed_at_its_start_says_why() -> None:
    raised = died(
        "\x1b[36mray::Worker.__init__()\x1b[39m\n  File x\nOSError: [Errno 28] No space left on device: 'logs'"
    )
    raised._actor_init_failed = True  # by what its __init__ raised
    error = explain(raised, "training", "trainer rank 1", Path("logs/trainer-1.log"))
    assert str(error) == (
        "training: trainer rank 1 failed at its start: OSError: [Errno 28] No space left on device: 'logs'"
    )
    assert not is_curable(error, first=False)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (WorkerCrashedError(), "trainer rank 1 died"),
        (ActorUnavailableError("RpcError: RPC error: Socket closed rpc_code: 14", None), "trainer rank 1 died"),
        (NodeDiedError("node 1a2b"), "a node of the cluster ended or cannot be reached"),
        (ObjectLostError("00ff", None, ""), "data on its way between two processes was lost"),
        (ObjectStoreFullError("full"), "Ray's object store is full"),
        (OutOfDiskError("full"), "the disk of Ray's temporary folder is full"),
        (RaySystemError("Broken \x1b[31mpipe\x1b[0m"), "System error: Broken pipe (RaySystemError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, RayError) else "",
)
def test_every_other_error_has_its_meaning(error: RayError, expected: str) -> None:
    message = explained(error)
    assert message.startswith("training: ")
    assert expected in message
    assert "trainer rank 1" in message
    assert "\x1b" not in message and "\n" not in message


def test_a_part_of_ray_that_ended_is_the_cause_of_every_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ray_errors, "ray_failure", lambda: "Ray's control service (gcs_server) (pid 5) was killed by SIGKILL"
    )
    assert explained(died(DIED)).startswith(
        "training: Ray's control service (gcs_server) (pid 5) was killed by SIGKILL"
    )
