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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slime.cli.arguments import Arguments
from slime.cli.output import write
from slime.config import RunConfig, config_problems, read_config, resolve
from slime.config.assemble import stop_on
from slime.config.run_file import PATHS, with_absolute_paths
from slime.errors import ConfigError, one_line, writing
from slime_launch.cluster_problems import (
    CheckedNode,
    Problem,
    compare,
    of_folder,
    of_links,
    of_many,
    of_ports,
    rate_text,
)
from slime_launch.link_speed import Link, measure
from slime_launch.node_facts import Inspector, node_facts

_HELP = """\
usage: slime cluster check RUN.toml [options] [-- FLAGS]

Ask all nodes of a Ray cluster what a run would find there, and print a line
for each thing that is wrong: the node, what was found, and what to do. Then
come the ports of the nodes, and what was measured of links and shared folder.
Nothing is started but one small process on each node. FLAGS are those of
`slime train`. The exit code is 1 if anything is wrong.

  --ray-address HOST:PORT  of the cluster [the one of this machine]
  --nodes N                how many nodes the cluster is to have
  --timeout-s N            how long the nodes may take to answer [120]
  --json                   what each node answered, and what is wrong, as JSON
"""
_WRITTEN = {"output_dir", "save", "save_hf"}
_CLOCK_LOOKS = 5
#: bytes of a checkpoint for each byte of a model in 16 bits: weights, and Adam's three copies in 32 bits
_CHECKPOINT = 7
#: how much is written to the output folder to measure it: so many bytes, for so long at most
_WRITTEN_BYTES, _WRITTEN_S = 256 << 20, 3.0
_CHUNK = 16 << 20


@dataclass
class Checked:
    """What was found."""

    nodes: dict[str, CheckedNode] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    links: Sequence[Link] = ()
    #: bytes per second that this machine writes to the output folder
    written: float = 0.0

    def lines(self) -> Iterator[str]:
        """For users."""
        yield from map(str, self.problems)
        maps: dict[str, list[str]] = {}
        for name, node in self.nodes.items():
            maps.setdefault(str(node.facts.ports), []).append(name)
        for ports, names in maps.items():
            yield f"ports of {', '.join(names)}: {ports}"
        network, rates = "", {"disk-write": f"{self.written:.2g}"}
        yield f"measured: this machine writes {rate_text(self.written)} to the output folder"
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


def inputs(config: RunConfig) -> list[str]:
    """The files and folders that a run reads; addresses are left out."""
    stated = [
        getattr(getattr(config, section), key) for section, keys in PATHS.items() for key in keys if key not in _WRITTEN
    ]
    stated += [path for _, path in config.evaluation.eval_prompt_data]
    stated += [one.path for one in config.evaluation.sets]
    paths = [path for one in stated if one for path in (one if isinstance(one, list | tuple) else [one])]
    return list(dict.fromkeys(path for path in paths if "://" not in path))


@contextlib.contextmanager
def _canary(folder: Path) -> Iterator[tuple[str, str]]:
    """A file in the output folder, and its content; both are gone in the end, also the folder if it was made."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    path, text = folder / f".cluster-check-{secrets.token_hex(8)}", secrets.token_hex(16)
    try:
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output-dir {folder} cannot be written to: {error.strerror}") from error
    try:
        yield str(path), text
    finally:
        path.unlink(missing_ok=True)
        for one in made:
            with contextlib.suppress(OSError):
                one.rmdir()


def _ask(stated: Namespace, config: RunConfig) -> Checked:
    """What the nodes of the cluster answer, and what is wrong."""
    import ray

    from slime.run.placement import Demand
    from slime.run.ray_session import ray_session

    paths = inputs(config)
    output = Path(config.run.output_dir)
    checked = Checked()
    with _canary(output) as (canary, text), ray_session(config):
        session = ray.get_runtime_context().get_session_name()
        here = node_facts(canary, paths, session)
        alive = sorted((one for one in ray.nodes() if one["Alive"]), key=_name)
        actors = _answers(checked, alive, (canary, paths, session), stated.timeout_s)
        checked.links = measure(actors, {name: node.address for name, node in checked.nodes.items()})
        free = shutil.disk_usage(output).free
        checked.written = _speed(Path(canary))
    problems = checked.problems
    if len(alive) < stated.nodes:
        names = ", ".join(sorted(map(_name, alive)))
        found = f"{len(alive)} of {stated.nodes} nodes are in it: {names}"
        problems.append(
            Problem("cluster", found, "Start Ray on the others, `ray start --address=...`, and read its log")
        )
    engines = config.num_engines if config.trains_policy else 0
    demand = Demand.of(config, ranks=config.world_size, num_engines=engines)
    devices = [int(one["Resources"].get(demand.resource, 0)) for one in alive]
    try:
        demand.check(devices)
        demand.nodes_per_engine(devices)
    except ConfigError as error:
        problems.append(Problem("cluster", one_line(error).rstrip("."), "Add nodes, or lower what the run asks for"))
    problems += compare(checked.nodes, here, text, output)
    first = config.cluster.engine_port
    problems += of_ports(
        checked.nodes, {} if first is None else dict.fromkeys(range(first, first + engines), "--engine-port")
    )
    problems += of_links(checked.links)
    problems += of_many(here.ray_settings if not checked.nodes else _common(checked.nodes), len(alive))
    checkpoint = _CHECKPOINT * _weights(Path(config.checkpoint.hf_checkpoint or "."))
    deadline_s = config.cluster.step_timeout_s
    problems += of_folder(output, free=free, written=checked.written, checkpoint=checkpoint, deadline_s=deadline_s)
    return checked


def _common(nodes: Mapping[str, CheckedNode]) -> dict[str, str]:
    """Settings of Ray that all nodes have."""
    every = [node.facts.ray_settings for node in nodes.values()]
    return {name: value for name, value in every[0].items() if all(name in one for one in every)}


def _speed(beside: Path) -> float:
    """Bytes per second that this machine writes into a folder."""
    path, chunk, written = beside.with_suffix(".speed"), os.urandom(_CHUNK), 0
    started = time.perf_counter()
    try:
        with writing(path), path.open("wb") as file:
            while written < _WRITTEN_BYTES and time.perf_counter() - started < _WRITTEN_S:
                file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
                written += len(chunk)
        return written / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)


def _answers(
    checked: Checked, alive: Sequence[Mapping[str, Any]], question: tuple[str, Sequence[str], str], timeout_s: float
) -> dict[str, Any]:
    """Ask each node; Ray's handles of those that have answered."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    deadline = time.monotonic() + timeout_s
    inspector: Any = ray.remote(num_cpus=0, max_restarts=0)(Inspector)
    asked = []
    for one in alive:
        place = NodeAffinitySchedulingStrategy(one["NodeID"], soft=False)
        actor = inspector.options(scheduling_strategy=place).remote()
        asked.append((one, actor, actor.facts.remote(*question)))
    actors, problems = {}, checked.problems
    for one, actor, answer in asked:
        name = f"{_name(one)} ({one['NodeManagerAddress']})"
        try:
            facts = ray.get(answer, timeout=max(1.0, deadline - time.monotonic()))
            clock = _clock(actor, max(1.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            found = f"it has not answered for {timeout_s:g} s"
            problems.append(Problem(name, found, "Read Ray's logs there; a firewall, or a shared folder that hangs?"))
        except ray.exceptions.RayError as error:
            reason = one_line(error).rstrip(".")
            advice = "Install the same slime there, in the environment that Ray runs in"
            problems.append(Problem(name, f"slime could not look at it: {reason}", advice))
        else:
            checked.nodes[name] = CheckedNode(one["NodeManagerAddress"], facts, clock)
            actors[name] = actor
    return actors


def _name(node: Mapping[str, Any]) -> str:
    """The name of a node: that of the machine, where Ray was given none and has its address in place of one."""
    return str(node["NodeManagerHostname"] if node["NodeName"] == node["NodeManagerAddress"] else node["NodeName"])


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


def _weights(model: Path) -> int:
    """Bytes of a model's weights."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))
