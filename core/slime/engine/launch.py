"""`python -m slime.engine.launch <SGLang server arguments>`: SGLang's server on every kind of machine.

With a GPU this is plain `sglang.launch_server` that ends with its parent.  On a CPU host
(`SGLANG_USE_CPU_ENGINE=1`, SGLang's own switch, set by `slime.engine.server`) it first makes SGLang
importable and correct there, and lets the server's processes be forked from this one, which has
imported everything already, instead of importing it all again in each.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
from collections.abc import Sequence

from slime.engine.parent_watch import end_with_parent


def on_cpu_host() -> bool:
    """Whether SGLang is asked to run its CPU engine."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def prepare_cpu_host() -> None:
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
    # Left to the collector, what was imported costs every server process pauses of half a second while
    # it serves, and memory that the forked processes otherwise share.
    gc.collect()
    gc.freeze()
    gc.enable()


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


def main() -> None:
    """Entry point of `python -m slime.engine.launch`."""
    end_with_parent()
    if on_cpu_host():
        prepare_cpu_host()
    serve(sys.argv[1:])


if __name__ == "__main__":
    main()
