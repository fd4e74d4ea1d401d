"""The tools of clusters, which take jobs, and say and do what is asked about them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from slime.errors import ClusterError, ConfigError, did_you_mean
from slime_launch.job import Job, Submitted, ray_token, write_secrets

_TIMEOUT_S = 120
#: a cloud starts machines meanwhile
_CLOUD_TIMEOUT_S = 3600
_GONE = "not there any more"
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

    def submit(self, job: Job, script: Path) -> str:
        """Hand the job over; its id. Raises `ConfigError` with the tool's own words."""

    def state(self, job: Submitted) -> str:
        """What the tool says of it."""

    def goes_on(self, state: str) -> bool:
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
) -> str:
    """What a tool prints.

    Args:
        words: The command.
        script: What it was given, whose line is named when it refuses.
        stdin: What it reads.
        environment: Variables besides those of this process.
        timeout_s: Seconds that it may take.

    Raises:
        ConfigError: There is no such tool, or it refuses: its words, and the line of the script that they are about.
        ClusterError: It does not answer.
    """
    try:
        done = subprocess.run(
            [*words],
            input=stdin,
            stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True,
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
        return done.stdout.strip()
    said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").rstrip(".")
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


class Slurm:
    """`sbatch`, `squeue` and `scancel`."""

    def submit(self, job: Job, script: Path) -> str:
        write_secrets(job)
        return call(["sbatch", "--parsable", str(script)], script).partition(";")[0].splitlines()[-1]

    def state(self, job: Submitted) -> str:
        try:
            # Its name too: another cluster, or this one made anew, has other jobs under the same numbers.
            place = [f"--jobs={job.id}", f"--name={job.job_name}"]
            found = call(["squeue", "--noheader", *place, "--states=all", "--format=%T %r %N"])
        except ConfigError as error:
            if "Invalid job id" not in str(error):
                raise
            found = ""
        return found or "ENDED: Slurm has forgotten it"  # minutes after its end

    def goes_on(self, state: str) -> bool:
        return state.startswith(
            ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "SUSPENDED", "SIGNALING")
        )

    def logs(self, job: Submitted) -> str:
        launch = Path(job.launch)
        attempts = sorted(launch.glob(f"attempt_{job.id}_*"), key=lambda path: int(path.name.rpartition("_")[2]))
        files = [launch / "slurm.log", *(sorted(attempts[-1].glob("*.log")) if attempts else [])]
        said = [f"==> {path} <==\n{path.read_text(errors='replace')}" for path in files if path.is_file()]
        return "\n".join(said) or f"job {job.id} has printed nothing yet: {self.state(job)}"

    def stop(self, job: Submitted) -> str:
        state = self.state(job)
        if not self.goes_on(state):
            return f"it has ended already: {state}"
        if not state.startswith("RUNNING"):
            call(["scancel", f"--name={job.job_name}", job.id])
            return "it was waiting, and was removed from the queue"
        call(["scancel", "--signal=USR1", "--batch", f"--name={job.job_name}", job.id])
        return f"it saves after its step, and ends. `scancel {job.id}` ends it at once"


class Kubernetes:
    """`kubectl`, for a RayJob or a JobSet."""

    def __init__(self, kind: str, head: str, state: str) -> None:
        """Describe the kind of object.

        Args:
            kind: As kubectl knows it.
            head: Labels of the pod where the run is, besides the object's name.
            state: Where in the object its state is, as jsonpath has it.
        """
        self._kind, self._head, self._state = kind, head, state

    def submit(self, job: Job, script: Path) -> str:
        place = _namespace(job.options.namespace)
        if call(["kubectl", *place, "get", self._kind, job.name, "--ignore-not-found", "--output=name"]):
            raise ConfigError(
                f"there is a {self._kind} {job.name} already, of another run or one that has ended. Name this one"
                f" --job-name NAME, or remove that one: kubectl {' '.join([*place, 'delete', self._kind, job.name])}"
            )
        # Kubernetes removes a job that has ended, but not what it read.
        left = [f"configmap/{job.name}", f"secret/{job.name}-secrets"]
        call(["kubectl", *place, "delete", "--ignore-not-found", *left])
        values = job.secrets() | (ray_token() if self._kind == "jobset" else {})
        if values:
            call(["kubectl", "apply", "--server-side", "--filename=-"], script, stdin=_secret(job, values))
        # Not `apply`, which would change an object that is there into another run's.
        call(["kubectl", "create", f"--filename={script}"], script)
        return job.submission

    def state(self, job: Submitted) -> str:
        # By the label: another job may have taken the name.
        words = ["get", self._kind, _labelled(job)]
        if found := self._ask(job, *words, f"--output=jsonpath={{.items[*]{self._state}}}"):
            return found
        return self._ask(job, *words) or _GONE

    def goes_on(self, state: str) -> bool:
        return state not in (_GONE, "SUCCEEDED", "FAILED", "STOPPED", "Completed", "Failed")

    def logs(self, job: Submitted) -> str:
        if self.state(job) == _GONE:
            raise ConfigError(f"the {self._kind} {job.job_name} is {_GONE}; the files of its run are in the volume")
        head = f"{self._head.format(name=job.job_name)}"
        if self._kind == "jobset":
            return self._ask(job, "logs", f"--selector={head}", "--tail=-1")
        pod = self._ask(job, "get", "pods", f"--selector={head}", "--output=name").splitlines()
        if not pod:
            raise ConfigError(f"the job {job.job_name} has no pod yet, or none any more; its files are in the volume")
        # KubeRay has Ray's head run it, which keeps what it prints in a file.
        return self._ask(job, "exec", pod[-1], "--", "sh", "-c", "cat /tmp/ray/session_latest/logs/job-driver-*.log")

    def stop(self, job: Submitted) -> str:
        self._ask(job, "delete", f"{self._kind},configmap,secret", _labelled(job), "--wait=false")
        return "it was deleted: the run goes on from its newest checkpoint when it is launched again"

    def _ask(self, job: Submitted, *words: str) -> str:
        return call(["kubectl", *_namespace(job.namespace), *words])


def _namespace(stated: str | None) -> list[str]:
    return [f"--namespace={stated}"] if stated else []


def _labelled(job: Submitted) -> str:
    return f"--selector=slime-launch={job.id}"


def _secret(job: Job, values: Mapping[str, str]) -> str:
    """The manifest of a Secret; it goes through a pipe, never into a file."""
    place = {"namespace": job.options.namespace} if job.options.namespace else {}
    about = {"name": f"{job.name}-secrets", "labels": {"slime-launch": job.submission}, **place}
    return json.dumps({"apiVersion": "v1", "kind": "Secret", "metadata": about, "stringData": dict(values)})


class SkyPilot:
    """`sky`."""

    def submit(self, job: Job, script: Path) -> str:
        values = job.secrets() | ray_token()
        names = [word for name in values if name != "RAY_AUTH_MODE" for word in ("--secret", name)]
        words = ["sky", "launch", "--cluster", job.name, "--detach-run", "--yes", *names, str(script)]
        call(words, script, environment=values, timeout_s=_CLOUD_TIMEOUT_S)
        return job.name

    def state(self, job: Submitted) -> str:
        return call(["sky", "queue", job.id])

    def goes_on(self, state: str) -> bool:
        return re.search(r"\b(INIT|PENDING|SETTING_UP|RUNNING)\b", state) is not None

    def logs(self, job: Submitted) -> str:
        return call(["sky", "logs", job.id, "--no-follow"])

    def stop(self, job: Submitted) -> str:
        call(["sky", "down", "--yes", job.id], timeout_s=_CLOUD_TIMEOUT_S)
        return "its machines are given back"


class RayJobs:
    """`ray job`, on a cluster that runs."""

    def submit(self, job: Job, script: Path) -> str:
        call(["bash", str(script)], script)
        return job.submission

    def state(self, job: Submitted) -> str:
        return self._ask(job, "status")

    def goes_on(self, state: str) -> bool:
        return re.search(r"\b(PENDING|RUNNING)\b", state) is not None

    def logs(self, job: Submitted) -> str:
        return self._ask(job, "logs")

    def stop(self, job: Submitted) -> str:
        self._ask(job, "stop", "--no-wait")
        return (
            "Ray sends it SIGTERM, and kills it after RAY_JOB_STOP_WAIT_TIME_S (of the head's environment; 3 s unless"
            " set), which may be before it has saved"
        )

    def _ask(self, job: Submitted, what: str, *words: str) -> str:
        place = ["--address", job.address] if job.address else []
        ray = str(Path(sys.executable).with_name("ray"))
        return call([ray, "job", what, *place, *words, job.id])


TOOLS: dict[str, ClusterTool] = {
    "slurm": Slurm(),
    "kuberay": Kubernetes("rayjob", "ray.io/originated-from-cr-name={name},ray.io/node-type=head", ".status.jobStatus"),
    "jobset": Kubernetes(
        "jobset",
        "jobset.sigs.k8s.io/jobset-name={name},batch.kubernetes.io/job-completion-index=0",
        ".status.terminalState",
    ),
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
