"""The child processes: `python -m slime.engine.launch engine KEYS DEVICE ARGUMENTS...` and `... router FIELDS`, where
KEYS and FIELDS are descriptors of in-memory files with JSON. Both end with their parent.

The engine is SGLang's server. With a GPU this is plain `sglang.launch_server`; on another device, its platform first
prepares this process (see `slime.platform`).

An engine's keys are given to SGLang's own guard, but not to its `ServerArgs`, which it logs, dumps and answers to
`/server_info`. The router gets the fields of sglang-router's `RouterArgs` as one JSON object, because its own command
line does not offer all policies and would show the keys.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from slime.engine.control import EngineKeys, call
from slime.errors import SlimeError
from slime.kit.processes import end_with_parent
from slime.kit.processes.pulse import STACK_SIGNAL
from slime.platform import platform_of

#: seconds in which the server must listen, and between two attempts
_FREEZE_S = 10.0
_FREEZE_RETRY_S = 0.1


def prepare(device: str) -> Literal[True]:
    """Make SGLang's server usable in this process, and in those forked from it."""
    platform_of(device).prepare_engine()
    return True


def serve(arguments: Sequence[str], keys: EngineKeys | None) -> None:
    """Run SGLang's server until it ends, as `sglang.launch_server` does, for clients that present `keys`."""
    faulthandler.register(STACK_SIGNAL, all_threads=True)  # forked processes inherit it
    # Its processes unpickle what arrives at their sockets in the temporary folder, which may be /tmp.
    os.umask(0o077)
    if keys is not None:
        lock(keys)
    run_server = importlib.import_module("sglang.launch_server").run_server
    importlib.import_module("sglang.srt.plugins").load_plugins()
    server_args = importlib.import_module("sglang.srt.server_args").prepare_server_args(list(arguments))
    try:
        run_server(server_args)
    finally:
        importlib.import_module("sglang.srt.utils").kill_process_tree(os.getpid(), include_parent=False)


def lock(keys: EngineKeys) -> None:
    """Make this process's server refuse requests without the right key, except for health and metrics."""
    server: Any = importlib.import_module("sglang.srt.entrypoints.http_server")
    auth = importlib.import_module("sglang.srt.utils.auth")
    auth.add_api_key_middleware(server.app, api_key=keys.api, admin_api_key=keys.admin)
    close_websockets(server.app)
    # Anybody on the machine can send any number of those, each of which would be a line in the log.
    logging.getLogger("uvicorn.error").addFilter(lambda record: "Invalid HTTP request" not in str(record.msg))
    # The one request that the server sends to itself.
    server._freeze_gc_after_server_warmup = partial(_freeze_gc, keys)


def close_websockets(app: Any) -> None:
    """Remove what the guard does not guard: it looks at HTTP requests only."""
    kind = importlib.import_module("starlette.routing").WebSocketRoute
    app.router.routes[:] = [route for route in app.router.routes if not isinstance(route, kind)]


def _freeze_gc(keys: EngineKeys, server_args: Any) -> None:
    """What SGLang's function of this name does, with a key: keep what is in memory now out of garbage collections."""
    deadline = time.monotonic() + _FREEZE_S
    while True:
        try:
            call("POST", server_args.url(), "/freeze_gc", timeout_s=_FREEZE_S, key=keys.admin)
            return
        except SlimeError as error:  # it may not listen yet
            if time.monotonic() > deadline:
                logging.getLogger(__name__).warning("garbage collections stay slow: %s", error)
                return
        time.sleep(_FREEZE_RETRY_S)


def serve_forked(
    device: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    keys: EngineKeys | None,
    prepared: Literal[True] | None,
) -> None:
    """In a process of an `engine_fork_server`: run SGLang's server with its own settings.

    Args:
        device: What it computes on.
        arguments: SGLang's command line.
        environment: Environment variables to set.
        keys: What its clients must present.
        prepared: True if `prepare` succeeded before the fork.
    """
    os.environ.update(environment)
    if prepared is None:
        prepare(device)
    # Both were read before the fork.
    importlib.import_module("torch").set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    tempfile.tempdir = None
    serve(arguments, keys)


def route(fields: dict[str, Any]) -> None:
    """Run the stock router until it ends."""
    router_args = importlib.import_module("sglang_router.router_args").RouterArgs(**fields)
    # Not `sglang_router.launch_router`: that module imports SGLang (seconds) for a balancer not used here.
    importlib.import_module("sglang_router.router").Router.from_args(router_args).start()


def main() -> None:
    """Entry point of `python -m slime.engine.launch`."""
    end_with_parent()
    role, descriptor, *arguments = sys.argv[1:]
    with open(int(descriptor), "rb") as file:
        secret = json.load(file)
    if role == "router":
        route(secret)
        return
    device, *arguments = arguments
    prepare(device)
    serve(arguments, None if secret is None else EngineKeys(**secret))


if __name__ == "__main__":
    main()
