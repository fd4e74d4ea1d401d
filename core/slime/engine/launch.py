"""The child processes: `python -m slime.engine.launch engine ARGUMENTS...` and `... router JSON`. Both end with their
parent.

The engine is SGLang's server. With a GPU this is plain `sglang.launch_server`. On a CPU host (SGLang's own switch
`SGLANG_USE_CPU_ENGINE=1`, set by `slime.engine.server`) it first makes SGLang importable and correct, and lets the
server's processes be forked from this one, which has imported everything, instead of importing it again in each.

The router gets the fields of sglang-router's `RouterArgs` as one JSON object, because its own command line does not
offer all policies.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Literal

from slime.kit.processes import end_with_parent


def prepare_cpu_host() -> Literal[True]:
    """Import SGLang here, with stand-ins and patches, so that servers can be forked from this process."""
    from slime.cpu import sglang_standins

    gc.disable()  # nothing imported here ever becomes garbage; looking for some takes a second
    sglang_standins.install()
    for module in (
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.managers.scheduler",
        "sglang.srt.models.registry",
    ):
        importlib.import_module(module)

    from slime.cpu import sglang_patches

    sglang_patches.apply()
    _fork_instead_of_spawn()
    # Left to the collector, the imported objects cost every server process pauses of half a second while it serves, and
    # memory that forked processes otherwise share.
    gc.collect()
    gc.freeze()
    gc.enable()
    return True


def _fork_instead_of_spawn() -> None:
    """SGLang asks for "spawn" on every launch, for CUDA's sake; answer with "fork"."""
    set_start_method = multiprocessing.set_start_method

    def set_fork(method: str | None, force: bool = False) -> None:
        del method, force
        set_start_method("fork", force=True)

    multiprocessing.set_start_method = set_fork


def serve(arguments: Sequence[str]) -> None:
    """Run SGLang's server until it ends, as `sglang.launch_server` does."""
    run_server = importlib.import_module("sglang.launch_server").run_server
    importlib.import_module("sglang.srt.plugins").load_plugins()
    server_args = importlib.import_module("sglang.srt.server_args").prepare_server_args(list(arguments))
    try:
        run_server(server_args)
    finally:
        importlib.import_module("sglang.srt.utils").kill_process_tree(os.getpid(), include_parent=False)


def serve_forked(prepared: Literal[True] | None, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """In a process of an `engine_fork_server`: run SGLang's server with its own settings.

    Args:
        prepared: True if `prepare_cpu_host` succeeded before the fork.
        arguments: SGLang's command line.
        environment: Environment variables to set.
    """
    os.environ.update(environment)
    if prepared is None:
        prepare_cpu_host()
    # Both were read before the fork.
    importlib.import_module("torch").set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    tempfile.tempdir = None
    serve(arguments)


def route(fields: str) -> None:
    """Run the stock router until it ends."""
    router_args = importlib.import_module("sglang_router.router_args").RouterArgs(**json.loads(fields))
    # Not `sglang_router.launch_router`: that module imports SGLang (seconds) for a balancer not used here.
    importlib.import_module("sglang_router.router").Router.from_args(router_args).start()


def main() -> None:
    """Entry point of `python -m slime.engine.launch`."""
    end_with_parent()
    role, *arguments = sys.argv[1:]
    if role == "router":
        route(*arguments)
        return
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        prepare_cpu_host()
    serve(arguments)


if __name__ == "__main__":
    main()
