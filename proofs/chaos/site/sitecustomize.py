"""Fault injector: Python imports this at the start of every process of a run under test.

- The wall clock goes wrong by the seconds that the file `clock` of the folder `CHAOS` holds, in all Python code.
- An engine spoils answers: `http-0` says of engine 0 which ones (`path`, `kind`, `count`). Each is noted in `spoiled`.
"""

import asyncio
import importlib.abc
import importlib.machinery
import json
import mmap
import os
import re
import struct
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["CHAOS"])
SERVER = "uvicorn.protocols.http.h11_impl"
#: seconds by which an answer is late
DELAY_S = 3.0


def move_clock():
    """Add the seconds in the file `clock` to the wall clock."""
    with (FOLDER / "clock").open("rb") as file:
        page = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + struct.unpack("d", page)[0]
    time.time_ns = lambda: real_ns() + int(struct.unpack("d", page)[0] * 1e9)


def due(path):
    """How the answer to a request for `path` is to be spoiled, if at all."""
    engine = re.search(r"/engine-(\d+)\.log$", os.readlink("/proc/self/fd/1"))
    order = None if engine is None else FOLDER / f"http-{engine[1]}"
    try:
        wanted = None if order is None else json.loads(order.read_text())
    except FileNotFoundError:
        wanted = None
    if wanted is None:
        return None
    if wanted.setdefault("pid", os.getpid()) != os.getpid():  # this engine has been started in place of the faulty one
        order.unlink(missing_ok=True)
        return None
    if not re.search(wanted["path"], path):
        return None
    wanted["count"] -= 1
    if wanted["count"]:
        # At once: the engine may be killed meanwhile, and the next one reads it.
        new = order.with_suffix(".told")
        new.write_text(json.dumps(wanted))
        new.replace(order)
    else:
        order.unlink(missing_ok=True)
    with (FOLDER / "spoiled").open("a") as notes:
        notes.write(f"{time.monotonic()} {wanted['kind']} {path}\n")
    return wanted["kind"]


def spoil(server):
    """Let the HTTP server spoil answers."""
    cycle = server.RequestResponseCycle
    answer = cycle.run_asgi

    async def run_asgi(self, app):
        kind = due(self.scope["path"])
        if kind == "close":
            self.transport.abort()
            return
        if kind == "delay":
            await asyncio.sleep(DELAY_S)

        async def spoiled(scope, receive, send):
            if kind in (None, "delay"):
                await app(scope, receive, send)
                return
            message = b"<html>502 Bad Gateway</html>" if kind == "garbage" else b'{"text": "4'
            length = len(message) if kind == "garbage" else 4096
            headers = [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": message, "more_body": kind == "truncate"})
            if kind == "truncate":
                await asyncio.sleep(0.1)  # until it has been sent
                self.transport.abort()

        await answer(self, spoiled)

    cycle.run_asgi = run_asgi


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Changes the HTTP server once it is imported."""

    def find_spec(self, name, path=None, target=None):
        del path, target
        if name != SERVER:
            return None
        sys.meta_path.remove(self)
        self.spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        return importlib.machinery.ModuleSpec(name, self, origin=self.spec.origin)

    def create_module(self, spec):
        del spec
        return importlib.util.module_from_spec(self.spec)

    def exec_module(self, module):
        self.spec.loader.exec_module(module)
        spoil(module)


move_clock()
sys.meta_path.insert(0, _Finder())
