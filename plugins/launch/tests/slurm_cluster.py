"""Slurm's own daemons on this machine: a controller, and a node daemon in each of several network namespaces."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.nodes import Node, network

_DAEMONS = ("slurmctld", "slurmd", "munged")
_CONF = """\
ClusterName=two
SlurmctldHost={head}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
EnforcePartLimits=ALL
{nodes}
PartitionName=tiny Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=NO
"""


@dataclass
class SlurmCluster:
    """A running cluster."""

    folder: Path
    nodes: list[Node]

    @property
    def login(self) -> Node:
        """Where jobs are submitted: the first node."""
        return self.nodes[0]

    def environment(self, **variables: str) -> dict[str, str]:
        """Of commands."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1", **variables}

    def call(self, *words: str, where: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the first node."""
        return subprocess.run(
            self.login.command(*(("env", f"--chdir={where}") if where else ()), *words),
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def states(self) -> str:
        """The states of all jobs and nodes, for messages."""
        return self.call("squeue", "--states=all").stdout + self.call("sinfo", "--Node").stdout


@contextlib.contextmanager
def slurm_cluster(count: int, folder: Path) -> Iterator[SlurmCluster]:
    """A Slurm cluster of so many nodes; skips the test where Slurm or root is missing."""
    if lacking := [name for name in _DAEMONS if shutil.which(name, path="/usr/sbin:/usr/bin") is None]:
        pytest.skip(f"Slurm is not installed here ({', '.join(lacking)}): apt-get install slurm-wlm munge")
    with network(count) as nodes, contextlib.ExitStack() as last_to_first:
        made = SlurmCluster(folder, nodes)
        (folder / "state").mkdir(parents=True)
        listed = "\n".join(
            f"NodeName={node.name} NodeAddr={node.address} CPUs=4 RealMemory=4000 State=UNKNOWN" for node in nodes
        )
        (folder / "slurm.conf").write_text(
            _CONF.format(folder=folder, head=nodes[0].name, address=nodes[0].address, nodes=listed)
        )
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        munge = [
            f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "key-file", "log-file", "pid-file")
        ]
        # One of Munge's for all nodes: its socket is a file, and files are common to them.
        _daemon(
            made,
            nodes[0],
            ["munged", "--force", "--foreground", *munge, f"--seed-file={folder}/munge.seed"],
            last_to_first,
        )
        wait_until((folder / "munge.socket").exists, 30, "Munge's socket")
        _daemon(made, nodes[0], ["slurmctld", "-D", "-f", str(folder / "slurm.conf")], last_to_first)
        for node in nodes:
            _daemon(made, node, ["slurmd", "-D", "-N", node.name, "-f", str(folder / "slurm.conf")], last_to_first)
        wait_until(lambda: made.call("sinfo", "--noheader", "--format=%T").stdout.strip() == "idle", 60, "idle nodes")
        yield made


def _daemon(cluster: SlurmCluster, node: Node, words: Sequence[str], ends: contextlib.ExitStack) -> None:
    with (cluster.folder / f"{words[0]}_{node.name}.out").open("wb") as out:
        path = {"PATH": f"{os.environ['PATH']}:/usr/sbin"}
        program = [shutil.which(words[0], path=path["PATH"]) or words[0], *words[1:]]
        process = subprocess.Popen(
            node.command(*program), env=cluster.environment(**path), stdout=out, stderr=subprocess.STDOUT
        )
    ends.callback(process.wait, 60)
    ends.callback(process.terminate)


def wait_until(condition: Callable[[], object], timeout_s: float, what: str, show: Callable[[], str] = str) -> None:
    """Wait until `condition` is true; fail with what `show` says."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s\n{show()}"
        time.sleep(0.5)
