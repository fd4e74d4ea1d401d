"""`slime launch`: hands a run to a cluster, and asks about it."""

from __future__ import annotations

import contextlib
import io
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from slime.cli.arguments import Arguments
from slime.cli.output import write
from slime.cli.run_folders import RunLock
from slime.errors import ConfigError, SlimeError
from slime_launch.job import (
    KUBERNETES,
    Job,
    LaunchOptions,
    Submitted,
    read_job,
    record,
    remember,
    submitted,
    write_launch,
)
from slime_launch.render import TEMPLATES, render
from slime_launch.tools import TOOLS, ClusterTool, gres_name, require_nodes

_HELP = """\
usage: slime launch RUN.toml --on slurm|kuberay|jobset|skypilot|ray-job
                    [options] [-- FLAGS]
       slime launch RUN_FOLDER --status | --logs | --stop

Write the script or manifest of a run for a cluster into launch/ of its run
folder, and hand it to the cluster's own tool: sbatch, kubectl, sky or ray. The
run starts, or goes on where it was (`slime train --resume auto`). FLAGS are
those of `slime train`.

  --dry-run             print the script or manifest; hand nothing over
  --status              what the tool says of the run's jobs
  --logs                the end of what they have printed
  --stop                end them; on Slurm they save a checkpoint first
  --nodes N             [as many as the run's GPUs need]
  --gpus-per-node N     0: the run computes on CPUs
  --cpus-per-node N     [all, with the node's memory; on Kubernetes no limit]
  --job-name NAME       [that of the run]
  --template FILE       a template of your own, in place of slime's
  --setup LINE          shell before Ray on each node: 'module load cuda'
  --secret NAME ...     environment variables for the job, such as HF_TOKEN

Slurm:
  --partition, --account, --time (others: sbatch reads them from SBATCH_...)
  --singleton           queue behind the jobs of this run that go on
  --interactive         start the cluster, leave it idle and say how to attach
  --container pyxis|apptainer, --image IMAGE, --mount FROM:TO ...
Slurm and JobSet:
  --interface NAME      the network interface; default: the one with the address
  --join-timeout-s N    how long to wait for all nodes [600]
Kubernetes:
  --image IMAGE, --namespace NAME, --volume CLAIM:PATH ..., --memory AMOUNT
  --gang kueue|volcano|kai=QUEUE   all pods at once; JobSet: kueue alone
  --retries N           new tries after failures [3]
SkyPilot:
  --accelerator NAME    such as H100; --image IMAGE, --volume BUCKET:PATH ...
Ray job:
  --address URL         of the cluster's dashboard [RAY_API_SERVER_ADDRESS]
"""
_ASKED = ("status", "logs", "stop")


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code. Raises `ConfigError`."""
    words, flags = list(argv), []
    if "--" in words:
        words, flags = words[: words.index("--")], words[words.index("--") + 1 :]
    if not words or {"-h", "--help"} & set(words):
        write(_HELP)
        return 0 if words else 2
    stated = _arguments().read(words)
    asked = [name for name in _ASKED if getattr(stated, name)]
    if asked:
        if len(asked) > 1 or stated.on or flags:
            raise ConfigError(f"--{asked[0]} asks about a job that was launched: slime launch RUN_FOLDER --{asked[0]}")
        return _answer(stated.run, asked[0])
    if stated.on is None:
        raise ConfigError(f"--on is missing: where to run. One of {', '.join(TEMPLATES)}")
    if stated.run.is_dir():
        raise ConfigError(
            f"{stated.run} is a folder; expected a run file (to ask about its job: --status, --logs, --stop)"
        )
    job = read_job(stated.run, flags, _options(stated), time.strftime("%Y-%m-%d_%H%M%S"))
    return _launch(job, TOOLS[stated.on], dry=stated.dry_run)


def _arguments() -> Arguments:
    parser = Arguments("slime launch")
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("--on", choices=[*TEMPLATES])
    for name in ("dry-run", *_ASKED, "singleton", "interactive"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("nodes", "gpus-per-node", "cpus-per-node", "join-timeout-s", "retries"):
        parser.add_argument(f"--{name}", type=int)
    words = [one.name.replace("_", "-") for one in fields(LaunchOptions) if one.metadata.get("one_word")]
    for name in ("job-name", *words, "gang"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--template", type=Path)
    parser.add_argument("--container", choices=["pyxis", "apptainer"])
    for name in ("setup", "secret", "mount", "volume"):
        parser.add_argument(f"--{name}", action="append", default=[])
    return parser


def _options(stated: Namespace) -> LaunchOptions:
    """The options of a job. Raises `ConfigError` for one that its kind of cluster does not have, or that is wrong."""
    given = {}
    for one in fields(LaunchOptions):
        value, flag, about = getattr(stated, one.name), f"--{one.name.replace('_', '-')}", one.metadata
        if value is None or value is False or value == []:
            continue
        if about.get("kinds") and stated.on not in about["kinds"]:
            raise ConfigError(f"{flag} is an option of --on {' and '.join(about['kinds'])}")
        if about.get("least") is not None and value < about["least"]:
            raise ConfigError(f"{flag} {value}: expected {about['least']} or more")
        if about.get("one_word") and not _is_word(value):
            raise ConfigError(f"{flag} {value!r}: expected one word")
        given[one.name] = value
    options = LaunchOptions(**given)
    if options.on in KUBERNETES and options.image is None:
        raise ConfigError(
            f"--image is missing: pods of --on {options.on} need one with slime (the Dockerfile builds it)"
        )
    if (options.container is None) != (options.image is None) and options.on == "slurm":
        raise ConfigError("--container and --image belong together: what starts containers, and which one")
    if options.mount and options.container is None:
        raise ConfigError("--mount is for --container")
    if options.gang is not None and not all(_gang(options.gang)):
        raise ConfigError(f"--gang {options.gang!r}: expected SCHEDULER=QUEUE, with kueue, volcano or kai")
    if options.on == "jobset" and options.gang and not options.gang.startswith("kueue="):
        raise ConfigError(f"--gang {options.gang}: a JobSet starts all pods at once with kueue alone")
    if options.on == "skypilot" and options.gpus_per_node and options.accelerator is None:
        raise ConfigError("--accelerator is missing: which GPU, such as H100 (`sky show-gpus` lists them)")
    return options


def _gang(stated: str) -> tuple[bool, bool]:
    scheduler, _, queue = stated.partition("=")
    return scheduler in ("kueue", "volcano", "kai"), _is_word(queue)


def _is_word(text: str) -> bool:
    return text.isprintable() and text.split() == [text]


def _launch(job: Job, tool: ClusterTool, *, dry: bool) -> int:
    job.secrets()  # a missing one is found before anything is written
    options = job.options
    known = submitted(job.run_dir)
    # A dry run leaves the tool alone, unless the script depends on it.
    live = _live(job.run_dir) if options.singleton or not dry else []
    if live and not (options.singleton and all(one.on == "slurm" for one in live)):
        queue = "; --singleton queues another behind it" if options.on == "slurm" and not options.singleton else ""
        raise ConfigError(
            f"the run {job.run_dir} has a job that has not ended: {live[-1].id} on {live[-1].on}. Wait, or end it with"
            f" `slime launch {job.run_dir} --stop`{queue}"
        )
    if options.on == "slurm" and not options.interactive and not job.in_container and (said := _nothing_left(job)):
        print(said)
        return 0
    gres = None
    if options.on == "slurm":
        require_nodes(options.partition, job.nodes)
        gres = gres_name(options.partition, job.gpus_per_node) if job.gpus_per_node else None
    text = render(job, gres, [one.id for one in live])
    if dry:
        print(text, end="")
        return 0
    with RunLock(job.launch, "a launch in") as lock:
        lock.write()
        if submitted(job.run_dir) != known:
            raise ConfigError(
                f"the run {job.run_dir} was launched by another command meanwhile: slime launch {job.run_dir} --status"
            )
        script = write_launch(job, TEMPLATES[options.on], text)
        done = tool.submit(job, script, lambda made: remember(job.run_dir, [*live, made]))
    print(f"job {done.id} on {done.on}: {script}")
    print(f"to ask about it: slime launch {job.run_dir} --status (or --logs, --stop)")
    if options.interactive:
        print(f"when it runs, {job.launch}/attempt_{done.id}_0/head has the address for --ray-address. To attach:")
        print(f"  srun --jobid={done.id} --overlap --nodes=1 --pty bash")
        print(f"  set -a; . {job.launch}/secrets.env; set +a  # the key of its Ray")
    return 0


def _live(run_dir: Path) -> list[Submitted]:
    """The jobs of a run folder that have not ended. Raises `ConfigError` if that cannot be told."""
    live = []
    for job in submitted(run_dir):
        try:
            state = TOOLS[job.on].state(job)
        except SlimeError as error:
            raise ConfigError(
                f"{error}\nSo it is not known whether the job {job.id} on {job.on}, of the run {run_dir}, has ended. If"
                f" it has, remove {record(run_dir)}"
            ) from error
        if TOOLS[job.on].is_active(state):
            live.append(job)
    return live


def _nothing_left(job: Job) -> str:
    """Make the checks of `slime train --dry-run`: what they refuse would be refused after hours in a queue.

    Returns:
        What to say if the run is finished, or "".
    """
    from slime.cli import train

    with contextlib.redirect_stdout(io.StringIO()) as shown:
        train.run([*job.command(str(job.source))[2:], "--ray-address", "auto", "--dry-run"], elsewhere=True)
    return shown.getvalue().strip() if shown.getvalue().startswith(train.NOTHING_LEFT) else ""


def _answer(run: Path, asked: str) -> int:
    """Print what the tool says of the jobs of a run folder."""
    jobs = submitted(run) if run.is_dir() else []
    if not jobs:
        raise ConfigError(f"{run} is not the folder of a run that `slime launch` has launched (outputs/NAME)")
    # Those that wait for another end before it, or they would begin.
    for job in reversed(jobs) if asked == "stop" else jobs:
        tool = TOOLS[job.on]
        if asked == "logs":
            print(tool.logs(job))
        else:
            print(f"job {job.id} on {job.on}: {tool.state(job) if asked == 'status' else tool.stop(job)}")
    return 0
