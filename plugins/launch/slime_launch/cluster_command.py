"""`slime cluster check`: whether the nodes of a Ray cluster have what a run needs; a line for each lack."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from slime.cli.arguments import Arguments
from slime.cli.output import write
from slime.config import RunConfig, config_problems, read_config, resolve
from slime.config.assemble import stop_on
from slime.config.demand import Demand
from slime.config.run_file import with_absolute_paths
from slime.errors import ConfigError, DiskFullError, one_line, writing
from slime.shops import import_shop
from slime_launch.ask_nodes import Asked, canary, inputs, name_of
from slime_launch.cluster_problems import (
    CheckedNode,
    Problem,
    compare,
    of_folder,
    of_links,
    of_many,
    of_memory,
    of_ports,
    rate_text,
    settings_of,
)
from slime_launch.link_speed import Link, measure
from slime_launch.node_facts import Inspector, Question

_HELP = """\
usage: slime cluster check RUN.toml [options] [-- FLAGS]

Ask all nodes of a Ray cluster what a run would find there, and print a line
for each thing that is wrong: the node, what was found, and what to do. Then
come the ports of the nodes, and what was measured of links and shared folder.
Nothing is started but one small process on each node. It takes the FLAGS of
`slime train`. The exit code is 1 if anything is wrong.

  --ray-address HOST:PORT  of the cluster [the one of this machine]
  --nodes N                how many nodes the cluster is to have
  --timeout-s N            how long the nodes may take to answer [120]
  --json                   what each node answered, and what is wrong, as JSON
"""
#: as Ray calls what its head has
_HEAD = "node:__internal_head__"
_CLOCK_LOOKS = 5
#: how much is written to the output folder to measure it: so many bytes, for so long at most
_WRITTEN_BYTES, _WRITTEN_S = 256 << 20, 3.0
_CHUNK = 16 << 20


@dataclass
class Checked:
    """What was found."""

    nodes: dict[str, CheckedNode] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    links: Sequence[Link] = ()
    #: bytes per second that this machine writes to the folder of checkpoints, or of outputs
    written: float = 0.0

    def lines(self) -> Iterator[str]:
        """For users."""
        yield from map(str, self.problems)
        maps: dict[str, list[str]] = {}
        for name, node in self.nodes.items():
            maps.setdefault(str(node.facts.ports), []).append(name)
        for ports, names in maps.items():
            yield f"ports of {', '.join(names)}: {ports}"
        network, rates = "", dict[str, str]()
        if self.written:
            rates["disk-write"] = f"{self.written:.2g}"
            yield f"measured: this machine writes {rate_text(self.written)} to the folder of outputs"
        if measured := [link for link in self.links if link.broadcast is not None]:
            slowest = min(measured, key=lambda link: link.broadcast or 0.0)
            rate, small = slowest.broadcast or 0.0, max(link.all_reduce_s or 0.0 for link in measured)
            yield (
                f"measured: TCP between nodes carries {rate_text(rate)} ({' and '.join(slowest.nodes)}) or more,"
                f" and a small all-reduce takes up to {1e3 * small:.2g} ms"
            )
            # NCCL would use it, which is faster than TCP.
            if not any(node.facts.infiniband for node in self.nodes.values()):
                rates = {"network-share": "1", **rates}
                network = f"--network 1x{rate / 1e9:.2g}GB "
        if rates:
            yield f"for `slime plan`: {network}{' '.join(f'--rate-{name} {value}' for name, value in rates.items())}"
        yield f"{len(self.nodes)} nodes answered: {len(self.problems) or 'no'} problems"


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code. Raises `ConfigError` and `ClusterError`."""
    words, flags = list(argv), []
    if "--" in words:
        words, flags = words[: words.index("--")], words[words.index("--") + 1 :]
    if not words or {"-h", "--help"} & set(words):
        write(_HELP)
        return 0 if words else 2
    stated = _arguments().read(words)
    config = _config(stated, flags)
    checked = _ask(stated, config)
    print(json.dumps(asdict(checked), indent=1) if stated.json else "\n".join(checked.lines()))
    return 1 if checked.problems else 0


def _arguments() -> Arguments:
    parser = Arguments("slime cluster")
    parser.add_argument("what", choices=["check"])
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("--ray-address", default="auto")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    parser.add_argument("--json", action="store_true")
    return parser


def _config(stated: Namespace, flags: Sequence[str]) -> RunConfig:
    if stated.nodes < 1 or not stated.timeout_s > 0:
        raise ConfigError("--nodes and --timeout-s: expected more than 0")
    config = read_config([str(stated.run), *flags]).with_options("cluster", ray_address=stated.ray_address)
    config = with_absolute_paths(resolve(config))
    stop_on(config_problems(config))
    return config


def _ask(stated: Namespace, config: RunConfig) -> Checked:
    """What the nodes of the cluster answer, and what is wrong."""
    import ray

    from slime.run.ray_session import ray_session

    output = Path(config.run.output_dir)
    checked = Checked()
    problems = checked.problems
    engines = config.num_engines if config.trains_policy else 0
    with _canary(output, problems) as (path, text), ray_session(config):
        session = ray.get_runtime_context().get_session_name()
        here = Inspector().facts(Question(path, inputs(config), session))
        alive = sorted((one for one in ray.nodes() if one["Alive"]), key=name_of)
        actors = _answers(checked, alive, Question(path, inputs(config), session), stated.timeout_s)
        checked.links = measure(actors, {name: node.address for name, node in checked.nodes.items()})
        saved = _existing(Path(config.checkpoint.save or output))
        checked.written = _speed(saved, problems)
        free = shutil.disk_usage(saved).free
    if len(alive) < stated.nodes:
        found = f"{len(alive)} of {stated.nodes} nodes are in it: {', '.join(map(name_of, alive))}"
        problems.append(
            Problem("cluster", found, "Start Ray on the others, `ray start --address=...`, and read its log")
        )
    demand = Demand.of(config, ranks=config.world_size, num_engines=engines)
    devices = [int(one["Resources"].get(demand.resource, 0)) for one in alive]
    try:
        demand.check(devices)
        demand.nodes_per_engine(devices)
    except ConfigError as error:
        problems.append(Problem("cluster", one_line(error).rstrip("."), "Add nodes, or lower what the run asks for"))
    problems += compare(checked.nodes, here, text, output)
    problems += of_memory(checked.nodes, *_planner().host_at_hand(config))
    first = config.cluster.engine_port
    problems += of_ports(
        checked.nodes, {} if first is None else dict.fromkeys(range(first, first + engines), "--engine-port")
    )
    problems += of_links(checked.links)
    head = next((name_of(one) for one in alive if _HEAD in one["Resources"]), "")
    problems += of_many(settings_of(checked.nodes, head) if checked.nodes else here.ray_settings, len(alive))
    saves = config.checkpoint.save is not None or config.checkpoint.save_interval is not None
    checkpoint = int(_planner().checkpoint_at_hand(config)) if saves else 0
    deadline_s = config.cluster.step_timeout_s
    where = Path(config.checkpoint.save or output)
    problems += of_folder(where, free=free, written=checked.written, checkpoint=checkpoint, deadline_s=deadline_s)
    return checked


@contextlib.contextmanager
def _canary(folder: Path, problems: list[Problem]) -> Iterator[tuple[str, str]]:
    """`canary`, or empty words if the folder is full: what else is wrong is still found."""
    with contextlib.ExitStack() as held:
        try:
            found = held.enter_context(canary(folder))
        except DiskFullError as error:
            problems.append(_full(error))
            found = "", ""
        except OSError as error:
            raise ConfigError(f"--output-dir {folder} cannot be written to: {error.strerror}") from error
        yield found


def _full(error: DiskFullError) -> Problem:
    return Problem("shared folder", one_line(error).rstrip("."), "Free some, or choose another --output-dir or --save")


def _existing(folder: Path) -> Path:
    """A folder, or the nearest one around it that exists."""
    return next(one for one in (folder, *folder.parents) if one.is_dir())


def _planner() -> ModuleType:
    return import_shop("slime_planner.at_hand", "`slime cluster check`")


def _speed(folder: Path, problems: list[Problem]) -> float:
    """Bytes per second that this machine writes into a folder; 0 if it is full."""
    path, chunk, written = folder / f".cluster-check-{secrets.token_hex(8)}", os.urandom(_CHUNK), 0
    started = time.perf_counter()
    try:
        with writing(path), path.open("wb") as file:
            while written < _WRITTEN_BYTES and time.perf_counter() - started < _WRITTEN_S:
                file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
                written += len(chunk)
        return written / (time.perf_counter() - started)
    except DiskFullError as error:
        problems.append(_full(error))
        return 0.0
    finally:
        path.unlink(missing_ok=True)


def _answers(checked: Checked, alive: Sequence[Mapping[str, Any]], about: Question, timeout_s: float) -> dict[str, Any]:
    """Ask each node; Ray's handles of those that have answered."""
    import ray

    drivers = live_drivers()
    questions = [replace(about, drivers=drivers.get(one["NodeManagerAddress"], ())) for one in alive]
    asked = Asked(alive, timeout_s)
    actors = {}
    for node, actor, facts in asked.answers("facts", questions, checked.problems):
        name = name_of(node)
        try:
            clock = _clock(actor, asked.left_s())
        except ray.exceptions.RayError as error:
            found = f"it answered once, and then no more: {type(error).__name__}"
            checked.problems.append(Problem(name, found, "Read Ray's logs there"))
            continue
        checked.nodes[name] = CheckedNode(node["NodeManagerAddress"], facts, clock)
        actors[name] = actor
    return actors


def live_drivers() -> dict[str, list[int]]:
    """The processes that use the cluster as this one does, by the address of their node."""
    from ray._private.state import state

    found: dict[str, list[int]] = {}
    for job in state.job_table():
        if not job["IsDead"]:
            found.setdefault(job["DriverIPAddress"], []).append(job["DriverPid"])
    return found


def _clock(actor: Any, timeout_s: float) -> float:
    """How far the node's clock is off for certain: what the fastest of several answers does not explain."""
    import ray

    looks = []
    for _ in range(_CLOCK_LOOKS):
        sent = time.time()
        theirs = ray.get(actor.now.remote(), timeout=timeout_s)
        looks.append((time.time() - sent, theirs - sent))
    return off(*min(looks))


def off(took: float, later: float) -> float:
    """Seconds of a clock that showed `later` than this one's at the question, whose answer took `took`."""
    return later - took if later > took else min(later, 0.0)
