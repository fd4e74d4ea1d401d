"""`slime cluster check`: whether the nodes of a Ray cluster have what a run needs; a line for each lack."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import secrets
import shutil
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slime.cli.arguments import Arguments
from slime.cli.output import write
from slime.config import RunConfig, config_problems, read_config, resolve
from slime.config.assemble import stop_on
from slime.config.run_file import PATHS, with_absolute_paths
from slime.errors import ConfigError, one_line, writing
from slime_launch.node_facts import Inspector, NodeFacts, node_facts

_HELP = """\
usage: slime cluster check RUN.toml [options] [-- FLAGS]

Ask all nodes of a Ray cluster what a run would find there, and print a line
for each thing that is wrong: the node, what was found, and what to do. Nothing
is started but one small process on each node. FLAGS are those of
`slime train`. The exit code is 1 if anything is wrong.

  --ray-address HOST:PORT  of the cluster [the one of this machine]
  --nodes N                how many nodes the cluster is to have
  --timeout-s N            how long the nodes may take to answer [120]
  --json                   what each node answered, and what is wrong, as JSON
"""
_WRITTEN = {"output_dir", "save", "save_hf"}
_CLOCK_S = 2.0
_CLOCK_LOOKS = 5
_SHARED_MEMORY = 1_000_000_000
_TEMPORARY = 1_000_000_000
_OPEN_FILES = 8192
#: bytes of a checkpoint for each byte of a model in 16 bits: weights, and Adam's three copies in 32 bits
_CHECKPOINT = 7


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    node: str
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.node}: {self.found}. {self.advice}"


@dataclass(frozen=True)
class CheckedNode:
    """A node that answered."""

    address: str
    facts: NodeFacts
    #: seconds that its clock is certainly ahead of this machine's, or behind
    clock: float


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
    nodes, problems = _ask(stated, config)
    if stated.json:
        told = {"nodes": {name: asdict(node) for name, node in nodes.items()}, "problems": [*map(asdict, problems)]}
        print(json.dumps(told, indent=1))
    else:
        print("\n".join([*map(str, problems), f"{len(nodes)} nodes answered: {len(problems) or 'no'} problems"]))
    return 1 if problems else 0


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


def _ask(stated: Namespace, config: RunConfig) -> tuple[dict[str, CheckedNode], list[Problem]]:
    """What the nodes of the cluster answer, and what is wrong."""
    import ray

    from slime.run.placement import Demand
    from slime.run.ray_session import ray_session

    paths = inputs(config)
    output = Path(config.run.output_dir)
    with _canary(output) as (canary, text), ray_session(config):
        here = node_facts(canary, paths)
        alive = [one for one in ray.nodes() if one["Alive"]]
        nodes, problems = _answers(alive, canary, paths, stated.timeout_s)
        free = shutil.disk_usage(output).free
    if len(alive) < stated.nodes:
        names = ", ".join(sorted(map(_name, alive)))
        found = f"{len(alive)} of {stated.nodes} nodes are in it: {names}"
        problems.append(
            Problem("cluster", found, "Start Ray on the others, `ray start --address=...`, and read its log")
        )
    demand = Demand.of(config, ranks=config.world_size, num_engines=config.num_engines if config.trains_policy else 0)
    devices = [int(one["Resources"].get(demand.resource, 0)) for one in alive]
    try:
        demand.check(devices)
        demand.nodes_per_engine(devices)
    except ConfigError as error:
        problems.append(Problem("cluster", one_line(error).rstrip("."), "Add nodes, or lower what the run asks for"))
    problems += compare(nodes, here, text, output)
    room = 2 * _CHECKPOINT * _weights(Path(config.checkpoint.hf_checkpoint or "."))
    if free < room:
        found = f"{output} has {_size(free)} free, and two checkpoints take up to {_size(room)}"
        problems.append(Problem("shared folder", found, "Free some, or choose another --output-dir"))
    return nodes, problems


def _answers(
    alive: Sequence[Mapping[str, Any]], canary: str, paths: Sequence[str], timeout_s: float
) -> tuple[dict[str, CheckedNode], list[Problem]]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    deadline = time.monotonic() + timeout_s
    inspector: Any = ray.remote(num_cpus=0, max_restarts=0)(Inspector)
    asked = []
    for one in alive:
        place = NodeAffinitySchedulingStrategy(one["NodeID"], soft=False)
        actor = inspector.options(scheduling_strategy=place).remote()
        asked.append((one, actor, actor.facts.remote(canary, paths)))
    nodes, problems = {}, []
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
            nodes[name] = CheckedNode(one["NodeManagerAddress"], facts, clock)
    return nodes, problems


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


def compare(nodes: Mapping[str, CheckedNode], here: NodeFacts, canary: str, output: Path) -> list[Problem]:
    """What is wrong with the nodes.

    Args:
        nodes: What they answered.
        here: The facts of this machine.
        canary: What is in the file of the run folder.
        output: The folder of that file.
    """
    problems = []
    for path, content in here.contents.items():
        if not content:
            problems.append(Problem("this machine", f"{path} is missing or cannot be read", "Correct the run file"))
    addresses = [node.address for node in nodes.values()]
    for name, node in nodes.items():
        problems += [Problem(name, *pair) for pair in _of_node(node, addresses, here, canary, output)]
    return problems


def _of_node(
    node: CheckedNode, addresses: Sequence[str], here: NodeFacts, canary: str, output: Path
) -> Iterator[tuple[str, str]]:
    facts = node.facts
    if facts.canary != canary:
        yield (
            f"it does not see what this machine writes to {output}",
            "Put --output-dir into a folder that all nodes share",
        )
    for path, content in facts.contents.items():
        if here.contents[path] and not content:
            yield f"{path} is missing or cannot be read there", "Put it into a shared folder, or copy it to that path"
        elif here.contents[path] and content != here.contents[path]:
            yield f"{path} has another content than here", "Copy it anew: all nodes have to read the same"
    for package in sorted({*facts.versions, *here.versions}):
        theirs, ours = (one.get(package, "none") for one in (facts.versions, here.versions))
        if theirs != ours:
            yield f"{package} {theirs} there, {ours} here", "Install the same versions on all nodes, and restart Ray"
    if abs(node.clock) > _CLOCK_S:
        side = "ahead of" if node.clock > 0 else "behind"
        yield f"its clock is {abs(node.clock):.0f} s {side} this machine's", "Set the clocks by NTP"
    if facts.shared_memory < _SHARED_MEMORY:
        yield (
            f"/dev/shm has {_size(facts.shared_memory)} free, of {_size(_SHARED_MEMORY)} at least",
            "Free it, or enlarge it: `docker run --shm-size`, a memory volume of the pod",
        )
    if facts.temporary < _TEMPORARY:
        yield (
            f"{facts.temporary_folder} has {_size(facts.temporary)} free, of {_size(_TEMPORARY)} at least",
            "Free some, or set RAY_TMPDIR where Ray is started",
        )
    if 0 <= facts.open_files < _OPEN_FILES:
        yield (
            f"a process may open {facts.open_files} files, of {_OPEN_FILES} at least",
            "Run `ulimit -n` with more where Ray is started",
        )
    if facts.proxies:
        through = [one for one in addresses if not _excepted(one, facts.no_proxy)]
        if through:
            yield (
                f"{', '.join(facts.proxies)} would take calls to nodes ({', '.join(through)}) to a proxy",
                "Add their addresses to no_proxy where Ray is started",
            )


def _excepted(address: str, no_proxy: str) -> bool:
    """Whether calls to an address go past a proxy: all do, or it is named, by itself or by its network."""
    for word in (one.strip() for one in no_proxy.split(",")):
        if word in ("*", address):
            return True
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(address) in ipaddress.ip_network(word, strict=False):
                return True
    return False


def _weights(model: Path) -> int:
    """Bytes of a model's weights."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def _size(count: int) -> str:
    return f"{count / 1e9:.2g} GB" if count < 1e10 else f"{count / 1e9:.0f} GB"
