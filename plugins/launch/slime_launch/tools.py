"""The tools of clusters, which take jobs, and say and do what is asked about them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from slime.errors import ClusterError, ConfigError, SlimeError, did_you_mean
from slime_launch.job import Job, Submitted, ray_token, submitted, write_secrets

_TIMEOUT_S = 120
#: a cloud starts machines meanwhile
_CLOUD_TIMEOUT_S = 3600
_GONE = "not there any more"
#: states of Slurm in which a job is over; all others go on
_SLURM_ENDS = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("TIMEOUT", _GONE),
)
#: what `--logs` shows of one file, its end
_SHOWN_BYTES, _SHOWN_LINES = 256 * 1024, 2000
#: what a tool complains of -> the line of the script that says it
_LINES = (
    (r"partition (name|specified)|invalid partition", r"--partition="),
    (r"account", r"--account="),
    (r"node count|node configuration|more nodes|nodes required", r"--nodes="),
    (r"generic resource|gres", r"--gres="),
    (r"time limit", r"--time="),
    (r"job name", r"--job-name="),
    (r"namespace", r"namespace:"),
    (r"accelerator", r"accelerators:"),
)


class ClusterTool(Protocol):
    """How one kind of cluster is asked."""

    def submit(self, job: Job, script: Path, remember: Callable[[Submitted], None]) -> Submitted:
        """Hand the job over. Raises `ConfigError` with the tool's own words.

        Args:
            job: The job.
            script: Its script or manifest.
            remember: Is called as soon as the job has an id, so that none goes on that nobody knows of.
        """

    def state(self, job: Submitted) -> str:
        """What the tool says of it."""

    def is_active(self, state: str) -> bool:
        """Whether that state is one of a job that waits or runs."""

    def logs(self, job: Submitted) -> str:
        """What the run has printed."""

    def stop(self, job: Submitted) -> str:
        """End it; what happens now."""


def call(
    words: Sequence[str],
    script: Path | None = None,
    *,
    stdin: str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = _TIMEOUT_S,
    shown: bool = False,
) -> str:
    """What a tool prints.

    Args:
        words: The command.
        script: What it was given, whose line is named when it refuses.
        stdin: What it reads.
        environment: Variables besides those of this process.
        timeout_s: Seconds that it may take.
        shown: Whether it prints to the terminal, because it takes long.

    Raises:
        ConfigError: There is no such tool, or it refuses: its words, and the line of the script that they are about.
        ClusterError: It does not answer.
    """
    try:
        done = subprocess.run(
            [*words],
            input=stdin,
            stdin=None if stdin is not None else subprocess.DEVNULL,
            stdout=None if shown else subprocess.PIPE,
            stderr=None if shown else subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(f"`{words[0]}` is not installed here: `slime launch` runs where jobs are submitted") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`{words[0]}` has not answered for {timeout_s:g} s: {' '.join(words)}") from None
    if done.returncode == 0:
        return (done.stdout or "").strip()
    said = ((done.stderr or "").strip() or (done.stdout or "").strip() or f"exit code {done.returncode}").rstrip(".")
    raise ConfigError(f"`{words[0]}` refuses: {said}{'' if script is None else _line(script, said)}")


def _line(script: Path, said: str) -> str:
    lines = script.read_text(encoding="utf-8").splitlines()
    for complaint, pattern in _LINES:
        if not re.search(complaint, said, re.IGNORECASE):
            continue
        for number, line in enumerate(lines, 1):
            if re.search(pattern, line):
                return f"\n{script}, line {number}: {line.strip()}"
    return f"\nIt was given {script}"


def _unless_gone(gone: str, words: Sequence[str]) -> str:
    """What a tool says of a job, or that it does not know of it, of which it complains in the words `gone`."""
    try:
        return call(words) or _GONE
    except ConfigError as error:
        if not re.search(gone, str(error), re.IGNORECASE):
            raise
        return _GONE


class Slurm:
    """`sbatch`, `squeue` and `scancel`."""

    def submit(self, job: Job, script: Path, remember: Callable[[Submitted], None]) -> Submitted:
        write_secrets(job)
        number = call(["sbatch", "--parsable", str(script)], script).partition(";")[0].splitlines()[-1]
        remember(made := Submitted.of(job, number))
        return made

    def state(self, job: Submitted) -> str:
        # Its name too: another cluster, or this one made anew, has other jobs under the same numbers.
        place = [f"--jobs={job.id}", f"--name={job.job_name}"]
        # Slurm forgets a job minutes after its end.
        return _unless_gone("Invalid job id", ["squeue", "--noheader", *place, "--states=all", "--format=%T %r %N"])

    def is_active(self, state: str) -> bool:
        return not state.startswith(_SLURM_ENDS)

    def logs(self, job: Submitted) -> str:
        launch = Path(job.launch)
        attempts = sorted(launch.glob(f"attempt_{job.id}_*"), key=lambda path: int(path.name.rpartition("_")[2]))
        files = [launch / f"slurm-{job.id}.log", *(sorted(attempts[-1].glob("*.log")) if attempts else [])]
        said = [f"==> {path} <==\n{_end_of(path)}" for path in files if path.is_file()]
        return "\n".join(said) or f"job {job.id} has printed nothing yet: {self.state(job)}"

    def stop(self, job: Submitted) -> str:
        state = self.state(job)
        if not self.is_active(state):
            return f"it has ended already: {state}"
        if state.startswith("COMPLETING"):
            return "it is ending"
        if state.startswith(("SUSPENDED", "STOPPED")):
            raise ConfigError(
                f"job {job.id} is {state.split()[0].lower()}, and cannot save. Let it go on (scontrol resume {job.id}),"
                f" and stop it then; or end it without saving: scancel {job.id}"
            )
        if not state.startswith(("RUNNING", "SIGNALING")):
            call(["scancel", f"--name={job.job_name}", job.id])
            return "it was waiting, and was removed from the queue"
        call(["scancel", "--signal=USR1", "--batch", f"--name={job.job_name}", job.id])
        return f"it saves after its step, and ends. `scancel {job.id}` ends it at once"


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _SHOWN_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-_SHOWN_LINES:])


class Kubernetes:
    """`kubectl`, for a RayJob or a JobSet."""

    def __init__(self, kind: str, *states: str) -> None:
        """Describe the kind of object.

        Args:
            kind: As kubectl knows it.
            states: Where in the object its state is, as jsonpath has it.
        """
        self._kind, self._states = kind, "--output=jsonpath=" + " ".join(f"{{.items[*]{state}}}" for state in states)

    def submit(self, job: Job, script: Path, remember: Callable[[Submitted], None]) -> Submitted:
        made = Submitted.of(job, job.submission, _context())
        for ended in submitted(job.run_dir):
            if ended.on == job.options.on:  # it keeps the name for minutes, and what it read for ever
                self._delete(ended, "--timeout=100s")
        if self._ask(made, "get", self._kind, job.name, "--ignore-not-found", "--output=name"):
            place = " ".join(_place_of(made))
            raise ConfigError(
                f"there is a {self._kind} {job.name} already, of another run. Name this one --job-name NAME, or remove"
                f" that one: kubectl {place}{' ' if place else ''}delete {self._kind} {job.name}"
            )
        values = job.secrets() | (ray_token() if self._kind == "jobset" else {})
        remember(made)
        try:
            if values:
                self._ask(made, "create", "--filename=-", script=script, stdin=_secret(job, values))
            # Not `apply`, which would change an object that is there into another run's.
            self._ask(made, "create", f"--filename={script}", script=script)
        except SlimeError:
            with contextlib.suppress(SlimeError):  # what it says of the refusal matters more
                self._delete(made, "--wait=false")
            raise
        return made

    def state(self, job: Submitted) -> str:
        # By the label: another job may have taken the name.
        words = ["get", self._kind, _labelled(job)]
        if found := self._ask(job, *words, self._states):
            return found
        return self._ask(job, *words) or _GONE

    def is_active(self, state: str) -> bool:
        return state != _GONE and state.split()[0] not in ("Complete", "Completed", "Failed", "ValidationFailed")

    def logs(self, job: Submitted) -> str:
        if self.state(job) == _GONE:
            raise ConfigError(f"the {self._kind} {job.job_name} is {_GONE}; the files of its run are in the volume")
        if self._kind == "jobset":
            head = f"jobset.sigs.k8s.io/jobset-name={job.job_name},batch.kubernetes.io/job-completion-index=0"
            return self._ask(job, "logs", f"--selector={head}", f"--tail={_SHOWN_LINES}")
        # KubeRay names the cluster, a new one for each try.
        words = ["get", self._kind, _labelled(job), "--output=jsonpath={.items[*].status.rayClusterName}"]
        head = f"ray.io/cluster={self._ask(job, *words)},ray.io/node-type=head"
        pod = self._ask(job, "get", "pods", f"--selector={head}", "--output=name").splitlines()
        if not pod:
            raise ConfigError(f"the job {job.job_name} has no pod yet, or none any more; its files are in the volume")
        # KubeRay has Ray's head run it, which keeps what it prints in a file.
        shown = f"tail -n {_SHOWN_LINES} /tmp/ray/session_latest/logs/job-driver-*.log"
        return self._ask(job, "exec", pod[-1], "--", "sh", "-c", shown)

    def stop(self, job: Submitted) -> str:
        # In the foreground: as long as one of its pods is there, so is the job, and keeps others out.
        self._delete(job, "--wait=false", "--cascade=foreground")
        if self._kind == "jobset":
            return "it saves after its step, and ends"
        return "it was deleted: the run goes on from its newest checkpoint when it is launched again"

    def _delete(self, job: Submitted, *how: str) -> None:
        self._ask(job, "delete", f"{self._kind},configmap,secret", _labelled(job), *how)

    def _ask(self, job: Submitted, *words: str, script: Path | None = None, stdin: str | None = None) -> str:
        return call(["kubectl", *_place_of(job), *words], script, stdin=stdin)


def _context() -> str | None:
    """The cluster that `kubectl` speaks to now; None in a pod, which has its own alone."""
    try:
        return call(["kubectl", "config", "current-context"]) or None
    except ConfigError as error:
        if "current-context is not set" not in str(error):
            raise
        return None


def _place_of(job: Submitted) -> list[str]:
    stated = {"context": job.context, "namespace": job.namespace}
    return [f"--{name}={value}" for name, value in stated.items() if value]


def _labelled(job: Submitted) -> str:
    return f"--selector=slime-launch={job.id}"


def _secret(job: Job, values: Mapping[str, str]) -> str:
    """The manifest of a Secret; it goes through a pipe, never into a file."""
    place = {"namespace": job.options.namespace} if job.options.namespace else {}
    about = {"name": job.submission, "labels": {"slime-launch": job.submission}, **place}
    return json.dumps({"apiVersion": "v1", "kind": "Secret", "metadata": about, "stringData": dict(values)})


class SkyPilot:
    """`sky`."""

    def submit(self, job: Job, script: Path, remember: Callable[[Submitted], None]) -> Submitted:
        values = job.secrets() | ray_token()
        names = [word for name in values if name != "RAY_AUTH_MODE" for word in ("--secret", name)]
        words = ["sky", "launch", "--cluster", job.name, "--detach-run", "--yes", *names, str(script)]
        remember(made := Submitted.of(job, job.name))
        call(words, script, environment=values, timeout_s=_CLOUD_TIMEOUT_S, shown=True)
        return made

    def state(self, job: Submitted) -> str:
        return _unless_gone("does not exist|not found", ["sky", "queue", job.id])

    def is_active(self, state: str) -> bool:
        return re.search(r"\b(INIT|PENDING|SETTING_UP|RUNNING)\b", state) is not None

    def logs(self, job: Submitted) -> str:
        return call(["sky", "logs", job.id, "--no-follow"])

    def stop(self, job: Submitted) -> str:
        call(["sky", "down", "--yes", job.id], timeout_s=_CLOUD_TIMEOUT_S)
        return "its machines are given back"


class RayJobs:
    """`ray job`, on a cluster that runs."""

    def submit(self, job: Job, script: Path, remember: Callable[[Submitted], None]) -> Submitted:
        remember(made := Submitted.of(job, job.submission))
        call(["bash", str(script)], script)
        return made

    def state(self, job: Submitted) -> str:
        return _unless_gone("does not exist", self._words(job, "status"))

    def is_active(self, state: str) -> bool:
        return re.search(r"\b(PENDING|RUNNING)\b", state) is not None

    def logs(self, job: Submitted) -> str:
        return call(self._words(job, "logs"))

    def stop(self, job: Submitted) -> str:
        call(self._words(job, "stop", "--no-wait"))
        return (
            "Ray sends it SIGTERM, and kills it after RAY_JOB_STOP_WAIT_TIME_S (of the head's environment; 3 s unless"
            " set), which may be before it has saved"
        )

    def _words(self, job: Submitted, what: str, *words: str) -> list[str]:
        place = ["--address", job.address] if job.address else []
        ray = str(Path(sys.executable).with_name("ray"))
        return [ray, "job", what, *place, *words, job.id]


TOOLS: dict[str, ClusterTool] = {
    "slurm": Slurm(),
    "kuberay": Kubernetes("rayjob", ".status.jobDeploymentStatus", ".status.jobStatus"),
    "jobset": Kubernetes("jobset", ".status.terminalState"),
    "skypilot": SkyPilot(),
    "ray-job": RayJobs(),
}


def require_nodes(partition: str | None, nodes: int) -> None:
    """Check that Slurm has so many nodes: where it is not told to refuse such jobs, they wait for ever.

    Raises:
        ConfigError: It has fewer, or the partition does not exist.
    """
    where, place = _place(partition)
    listed = call(["sinfo", "--noheader", "--format=%n", *place]).split()
    if not listed and partition is None:
        raise ConfigError("Slurm has no nodes: `sinfo` lists none")
    if not listed:
        names = sorted(set(call(["sinfo", "--noheader", "--format=%R"]).split()))
        raise ConfigError(
            f"--partition {partition}: Slurm has none of this name.{did_you_mean(partition or '', names)}"
        )
    if nodes > len(set(listed)):
        raise ConfigError(f"--nodes {nodes}: {where} has {len(set(listed))}")


def _place(partition: str | None) -> tuple[str, list[str]]:
    return (f"the partition {partition}", [f"--partition={partition}"]) if partition else ("this cluster", [])


def gres_name(partition: str | None, gpus: int) -> str | None:
    """Slurm's name of GPUs, as `sinfo` lists it; None if the nodes have none that Slurm knows of.

    Raises:
        ConfigError: No node has so many.
    """
    where, place = _place(partition)
    listed = call(["sinfo", "--noheader", "--format=%G", *place])
    counts: dict[str, int] = {}
    for name, count in re.findall(r"(\w+)(?::[\w.-]+)?:(\d+)(?:\([^)]*\))?(?=,|\s|$)", listed):
        counts[name] = max(counts.get(name, 0), int(count))
    of_gpus = [name for name in counts if "gpu" in name.lower()]
    if not of_gpus:
        return None
    name = max(of_gpus, key=lambda one: counts[one])
    if counts[name] < gpus:
        raise ConfigError(f"--gpus-per-node {gpus}: the nodes of {where} have up to {counts[name]} (sinfo: {listed})")
    return name
