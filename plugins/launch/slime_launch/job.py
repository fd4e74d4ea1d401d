"""What a job is: a run, the nodes that it gets, and the files of its launch."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slime.config import RunConfig, config_problems, read_config, resolve
from slime.config.assemble import stop_on
from slime.errors import ConfigError, PreemptedError, writing
from slime.errors.redaction import places_of_mark

#: the folder of a launch in its run folder
FOLDER = "launch"
_RECORD = "job.json"
_SECRETS = "secrets.env"
#: seconds between what `--preemption-timeout-s` grants and the moment when the cluster kills
_MARGIN_S = 30
#: seconds by which Slurm may send the signal of `--signal` too early: sbatch(1)
_SLURM_EARLY_S = 60
#: seconds that a run needs at the very least to start Ray, load the model and reach its first step
_START_S = 60
#: where pods and cloud machines find the run file
MOUNTED = "/etc/slime"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*").fullmatch
_NAMES = {
    "slurm": (re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}").fullmatch, "letters, digits, '.', '_' and '-'"),
    "ray-job": (re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}").fullmatch, "letters, digits, '.', '_' and '-'"),
    # The names of pods are made from it, and have at most 63 characters.
    "kuberay": (
        re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?").fullmatch,
        "up to 40 of a-z, 0-9 and '-', from a letter",
    ),
}


#: kinds of clusters whose nodes are asked for, and those of them that are Kubernetes
_NODES = ("slurm", "jobset", "kuberay", "skypilot")
KUBERNETES = ("kuberay", "jobset")


def _of(*kinds: str, default: Any = None, least: int | None = None, one_word: bool = False) -> Any:
    """An option of these kinds of clusters (of all, if none is named), and what its value has to be."""
    return field(default=default, metadata={"kinds": kinds, "least": least, "one_word": one_word})


@dataclass(frozen=True)
class LaunchOptions:
    """What the command line says of a job. A field that is None or empty was not given."""

    on: str
    nodes: int | None = _of(*_NODES, least=1)
    gpus_per_node: int | None = _of(least=0)
    cpus_per_node: int | None = _of(*_NODES, least=1)
    memory: str | None = _of(*KUBERNETES, one_word=True)
    job_name: str | None = None
    template: Path | None = None
    time: str | None = _of("slurm", one_word=True)
    partition: str | None = _of("slurm", one_word=True)
    account: str | None = _of("slurm", one_word=True)
    singleton: bool = _of("slurm", default=False)
    interactive: bool = _of("slurm", default=False)
    interface: str | None = _of("slurm", "jobset", one_word=True)
    join_timeout_s: int = _of("slurm", "jobset", default=600, least=1)
    container: str | None = _of("slurm")
    image: str | None = _of("slurm", *KUBERNETES, "skypilot", one_word=True)
    mount: Sequence[str] = _of("slurm", default=())
    namespace: str | None = _of(*KUBERNETES, one_word=True)
    volume: Sequence[str] = _of(*KUBERNETES, "skypilot", default=())
    gang: str | None = _of(*KUBERNETES)
    retries: int = _of(*KUBERNETES, default=3, least=0)
    accelerator: str | None = _of("skypilot", one_word=True)
    address: str | None = _of("ray-job", one_word=True)
    setup: Sequence[str] = _of("slurm", "jobset", "skypilot", default=())
    secret: Sequence[str] = _of(*_NODES, default=())


@dataclass(frozen=True)
class Job:
    """One run on a cluster."""

    options: LaunchOptions
    config: RunConfig
    #: the run file, as it is here
    source: Path
    #: the words of `slime train` behind the run file
    words: Sequence[str]
    name: str
    nodes: int
    gpus_per_node: int
    #: when it was launched: Ray wants another name for each try
    stamp: str

    @property
    def run_dir(self) -> Path:
        """The folder that remembers the launch: that of the run, if the nodes have the files of this machine."""
        return Path(os.path.abspath(self.config.run.output_dir if self.shares_files else "outputs"), self.run_name)

    @property
    def run_name(self) -> str:
        """The run's name."""
        assert self.config.run.run_name is not None
        return self.config.run.run_name

    @property
    def shares_files(self) -> bool:
        """Whether the nodes have the files of this machine, under the same paths."""
        return self.options.on in ("slurm", "ray-job")

    @property
    def launch_there(self) -> str:
        """The folder of a launch, as the nodes see it."""
        return str(self.launch) if self.shares_files else f"{self.config.run.output_dir}/{self.run_name}/{FOLDER}"

    @property
    def launch(self) -> Path:
        """The folder of what is written here."""
        return self.run_dir / FOLDER

    @property
    def submission(self) -> str:
        """What tells this launch from others of the same name."""
        return f"{self.name}-{self.stamp.replace('_', '-')}"  # Kubernetes' names have no `_`

    @property
    def run_file(self) -> Path:
        """The run file as it was when the job was launched, which later changes leave alone."""
        return self.launch / f"run_{self.stamp}.toml"

    @property
    def in_container(self) -> bool:
        """Whether slime comes with an image."""
        return self.options.image is not None

    def command(self, run_file: str) -> list[str]:
        """The words of `slime train`, which starts the run or goes on with it."""
        program = "slime" if self.in_container else str(Path(sys.executable).with_name("slime"))
        named = ["--run-name", self.run_name, "--device", self.config.device]
        return [program, "train", run_file, *self.words, *named, "--resume", "auto"]

    def tool(self, name: str) -> str:
        """A program of slime's environment, as the shell is to call it."""
        return name if self.in_container else shlex.quote(str(Path(sys.executable).with_name(name)))

    @property
    def signal_s(self) -> int:
        """How long before the end of its time the run is asked to save."""
        return int(self.config.checkpoint.preemption_timeout_s) + _MARGIN_S

    @property
    def saves(self) -> bool:
        """Whether the run saves checkpoints, without which it would begin anew."""
        return self.config.checkpoint.save is not None or self.config.checkpoint.save_interval is not None

    def secrets(self) -> dict[str, str]:
        """The variables of `--secret`, with their values. Raises `ConfigError`."""
        found = {}
        for name in self.options.secret:
            if not _VARIABLE(name):
                raise ConfigError(f"--secret {name!r}: expected the name of an environment variable, without its value")
            if not (value := os.environ.get(name)):
                raise ConfigError(f"--secret {name}: this variable is not set here. Set it, or drop the option")
            found[name] = value
        return found


def read_job(run_file: Path, words: Sequence[str], options: LaunchOptions, stamp: str) -> Job:
    """Read a run, and what it needs.

    Args:
        run_file: The run file.
        words: Flags of `slime train`.
        options: Those of the launch.
        stamp: The time, which names the run if it has no name.

    Raises:
        ConfigError: The run, the name of the job or the number of its nodes is wrong.
    """
    for own in ("--ray-address", "--resume", "--device", "--dry-run"):
        if any(word.partition("=")[0] == own for word in words):
            raise ConfigError(f"{own} among the flags of `slime train`: `slime launch` sets it itself. Drop it")
    _require_no_secrets(read_config(words), "the flags, which others see on the command line, have")
    stated = read_config([str(run_file), *words])
    if options.on in KUBERNETES:
        _require_no_secrets(stated, f"{run_file}, which goes into the manifest, has")
    gpus = _gpus(options, stated)
    stated = stated.with_options("run", run_name=stated.run.run_name or stamp)
    device = "cuda" if gpus else "cpu"
    config = resolve(stated.with_options("cluster", device=device, ray_address="auto"))
    stop_on(config_problems(config))
    name = options.job_name or config.run.run_name or stamp
    job = Job(
        options,
        config,
        Path(os.path.abspath(run_file)),
        _without(words, "--run-name"),
        _checked_name(name, options),
        _nodes(options, config, gpus),
        gpus,
        stamp,
    )
    if options.on == "slurm":
        _require_plain(Path.cwd(), job.launch)
        _require_time(job)
    if not job.shares_files:
        _require_kept(config, [path for _, path in volumes(options)])
    return job


def _require_plain(*folders: Path) -> None:
    """Check paths that #SBATCH lines have, where Slurm replaces `%` and gives quotes and spaces a meaning."""
    for folder in folders:
        if not str(folder).isprintable() or re.search(r"[\s%\"'\\\\#]", str(folder)):
            raise ConfigError(
                f"{folder}: Slurm's scripts cannot have a folder whose name has spaces, quotes, %, # or \\"
            )


def _require_time(job: Job) -> None:
    """Refuse a time limit that leaves a job no time to train.

    A job gets SIGTERM some minutes before its time limit, so that it can save, and is then requeued. If the limit is so
    short that SIGTERM comes while the run is still starting, no step is trained and the job is requeued endlessly.
    A limit of 0 is Slurm's word for no limit.
    """
    stated = job.options.time
    seconds = seconds_of(stated) if stated is not None else None
    least = job.signal_s + _SLURM_EARLY_S + _START_S
    if seconds and seconds < least:
        raise ConfigError(
            f"--time {stated} leaves no time to train: it has to be at least {least} s. A job is asked to save"
            f" {job.signal_s} s before its time is over (--preemption-timeout-s"
            f" {job.config.checkpoint.preemption_timeout_s:g}, and {_MARGIN_S} s), Slurm may ask {_SLURM_EARLY_S} s"
            f" earlier, and the run needs {_START_S} s or more to start. Raise --time, or lower"
            " --preemption-timeout-s"
        )


def seconds_of(stated: str) -> int | None:
    """A time as Slurm reads it: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None for another, such as `infinite`."""
    days, dash, rest = stated.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:
        numbers = [*numbers, 0, 0][:3]
    elif len(numbers) < 3:
        numbers = [0, *numbers, 0][:3]
    hours, minutes, seconds = numbers
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _require_kept(config: RunConfig, volumes: Sequence[str]) -> None:
    """Check that what a run writes outlives its pods and machines."""
    kept = {
        "--output-dir": config.run.output_dir,
        "--save": config.checkpoint.save,
        "--save-hf": config.checkpoint.save_hf,
    }
    for option, folder in kept.items():
        if folder is not None and not any(Path(folder).is_relative_to(path) for path in volumes):
            raise ConfigError(
                f"{option} {folder} is in no volume ({', '.join(volumes) or 'there is none'}), and would be lost with"
                f" the job's machines. Mount one, --volume NAME:PATH, and set {option} to a folder in PATH"
            )


def _without(words: Sequence[str], flag: str) -> list[str]:
    """Words without a flag that takes one value."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == flag:
            skip = True
        elif not word.startswith(f"{flag}="):
            kept.append(word)
    return kept


def _require_no_secrets(config: RunConfig, where: str) -> None:
    if places := list(places_of_mark(config.model_dump())):
        raise ConfigError(
            f"{where} the secret {places[0]}. Put it into an environment variable, and name that: --secret NAME"
        )


def _gpus(options: LaunchOptions, config: RunConfig) -> int:
    if options.gpus_per_node is not None:
        return options.gpus_per_node
    if config.cluster.device == "cpu":
        return 0
    raise ConfigError(
        "--gpus-per-node is missing: how many GPUs each node has (0: the run computes on CPUs). This machine need not"
        " be like the nodes, so it is not asked"
    )


def _nodes(options: LaunchOptions, config: RunConfig, gpus: int) -> int:
    trained, engines = config.world_size, 0 if config.cluster.colocate else config.rollout_devices
    if not config.trains_policy:
        engines = 0
    if not gpus:
        return options.nodes or config.cluster.actor_num_nodes
    if config.cluster.actor_num_gpus_per_node > gpus:
        raise ConfigError(
            f"--actor-num-gpus-per-node {config.cluster.actor_num_gpus_per_node}: the nodes have --gpus-per-node {gpus}"
        )
    needed = -(-(trained + engines) // gpus)
    if options.nodes is not None and options.nodes < needed:
        raise ConfigError(
            f"--nodes {options.nodes}: the run needs {trained + engines} GPUs ({trained} for training + {engines} for"
            f" engines), so {needed} nodes of --gpus-per-node {gpus}"
        )
    return options.nodes or needed


def _checked_name(name: str, options: LaunchOptions) -> str:
    matches, rule = _NAMES.get(options.on, _NAMES["kuberay"])
    if not matches(name):
        raise ConfigError(
            f"{'--job-name' if options.job_name else 'the run'} {name!r} cannot name a job of {options.on}: expected"
            f" {rule}. Give it one with --job-name NAME"
        )
    return name


# --- the files of a launch -----------------------------------------------------------------------


@dataclass(frozen=True)
class Submitted:
    """A job that was handed to a tool, as its run folder remembers it."""

    on: str
    id: str
    job_name: str
    #: the folder of its files
    launch: str
    namespace: str | None = None
    address: str | None = None
    #: which cluster of `kubectl` it is on
    context: str | None = None

    @classmethod
    def of(cls, job: Job, number: str, context: str | None = None) -> Submitted:
        """A job that has this id."""
        options = job.options
        return cls(options.on, number, job.name, str(job.launch), options.namespace, options.address, context)


def record(run_dir: Path) -> Path:
    """The file that names the jobs of a run folder."""
    return run_dir / FOLDER / _RECORD


def remember(run_dir: Path, jobs: Sequence[Submitted]) -> None:
    """Write the jobs of a run folder that may go on: one, or several that wait for each other."""
    _write(record(run_dir), json.dumps([asdict(job) for job in jobs], indent=1) + "\n")


def submitted(run_dir: Path) -> list[Submitted]:
    """The newest jobs of a run folder, the newest last. Raises `ConfigError` if their file is damaged."""
    path = record(run_dir)
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        return [Submitted(**one | {"launch": str(path.parent)}) for one in content]  # it may have been moved
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}). If no job of this run goes on, remove the file") from error


def write_launch(job: Job, file: str, text: str) -> Path:
    """Write the script or manifest, and return its path. Raises `ConfigError` if the folder cannot be written to."""
    try:
        job.launch.mkdir(parents=True, exist_ok=True)
        if job.shares_files:
            _write(job.run_file, job.source.read_text(encoding="utf-8"))
        _write(job.launch / file, text)
    except OSError as error:
        raise ConfigError(f"{job.launch} cannot be written to: {error.strerror}") from error
    return job.launch / file


def write_secrets(job: Job) -> None:
    """Write what only this user may read: the run's secrets, and the token that Ray's processes ask each other for."""
    values = job.secrets() | ray_token()
    path = job.launch / _SECRETS
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write("".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items()))
    partial.replace(path)


def ray_token() -> dict[str, str]:
    """A new token of a Ray cluster."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _write(path: Path, text: str) -> None:
    with writing(path):
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def volumes(options: LaunchOptions) -> Iterator[tuple[str, str]]:
    """The name and the path of each volume. Raises `ConfigError`."""
    for word in options.volume:
        first, colon, second = word.rpartition(":")
        if not (first and colon and second.startswith("/")):
            raise ConfigError(f"--volume {word!r}: expected NAME:PATH, with the absolute path where it appears")
        yield first, second


#: the exit code of a run that has saved because it was asked to end
PREEMPTED = PreemptedError.exit_code
