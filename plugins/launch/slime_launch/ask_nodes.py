"""Asking the nodes of a Ray cluster that this process has joined: a small process on each of them answers."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.config import RunConfig
from slime.config.run_file import PATHS
from slime.errors import one_line, writing
from slime_launch.cluster_problems import Problem
from slime_launch.node_facts import Inspector, Question

_WRITTEN = {"output_dir", "save", "save_hf"}


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
def canary(folder: Path) -> Iterator[tuple[str, str]]:
    """A file in a folder, and its content; both are gone in the end, also a folder that was made for it.

    Raises `OSError`.
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    path, text = folder / f".cluster-check-{secrets.token_hex(8)}", secrets.token_hex(16)
    try:
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        yield str(path), text
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        for one in made:
            with contextlib.suppress(OSError):
                one.rmdir()


def name_of(node: Mapping[str, Any]) -> str:
    """The name of a node: that of the machine, where Ray was given none and has its address in place of one."""
    named = str(node["NodeManagerHostname"] if node["NodeName"] == node["NodeManagerAddress"] else node["NodeName"])
    return f"{named} ({node['NodeManagerAddress']})"


class Asked:
    """Nodes that were asked, all at the same time."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]], timeout_s: float) -> None:
        """Start a process on each of Ray's nodes. They may take so long to answer."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        inspector: Any = ray.remote(num_cpus=0, max_restarts=0)(Inspector)
        places = [NodeAffinitySchedulingStrategy(one["NodeID"], soft=False) for one in nodes]
        self._nodes = nodes
        #: Ray's handle of the `Inspector` of each node
        self._actors = [inspector.options(scheduling_strategy=place).remote() for place in places]
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s

    def answers(
        self, call: str, questions: Sequence[Question], problems: list[Problem]
    ) -> Iterator[tuple[Mapping[str, Any], Any, Any]]:
        """Each node that has answered, Ray's handle of its process, and the answer.

        Args:
            call: A method of `Inspector`.
            questions: For each node.
            problems: Gets those of nodes that have not.
        """
        import ray

        asked = [getattr(actor, call).remote(one) for actor, one in zip(self._actors, questions, strict=True)]
        for node, actor, answer in zip(self._nodes, self._actors, asked, strict=True):
            try:
                yield node, actor, ray.get(answer, timeout=self.left_s())
            except ray.exceptions.GetTimeoutError:
                found = f"it has not answered for {self._timeout_s:g} s"
                advice = "Read Ray's logs there; a firewall, or a shared folder that hangs?"
                problems.append(Problem(name_of(node), found, advice))
            except ray.exceptions.RayError as error:
                found = f"slime could not look at it: {one_line(error).rstrip('.')}"
                advice = "Install the same slime there, in the environment that Ray runs in"
                problems.append(Problem(name_of(node), found, advice))

    def left_s(self) -> float:
        """Seconds to the deadline, at least one."""
        return max(1.0, self._deadline - time.monotonic())
