"""Stub engines for a benchmark of the rollout process: SGLang's HTTP protocol, without a model.

One process serves many engines, each at its own port of 127.0.0.1. An answer has the fields and the size of SGLang's:
text, token ids, log-probs, versions. Its length depends on the request's sampling seed alone, is long-tailed, and goes
up to `LONGEST` tokens; an answer of n tokens takes n decoding steps of the engine, whose speed is drawn. An engine runs
everything at once that it is sent: there is no queue and no prefill, so a stub says nothing about real engines.

Requests can be single or several in a message, continued, and aborted; an aborted one answers with the tokens that it
would have by then.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import NormalDist
from types import TracebackType
from typing import Any, Self

import orjson

LONGEST = 32_768
#: lengths drawn from; a power of two, so that seeds are spread evenly over them
_QUANTILES = 1024
#: connections of one stub process, which has a limit of descriptors like any other
CONNECTIONS = 15_000
_START_S = 60.0


def lengths(median: int, spread: float, longest: int = LONGEST) -> list[int]:
    """Log-normal lengths in tokens: `spread` is the standard deviation of their logarithm, 0 for equal ones."""
    normal = NormalDist()
    return [
        max(1, min(longest, round(median * math.exp(spread * normal.inv_cdf((place + 0.5) / _QUANTILES)))))
        for place in range(_QUANTILES)
    ]


@dataclass(frozen=True)
class Fleet:
    """What the engines of a fleet have in common."""

    engines: int
    #: see `lengths`; a sample has the one at the place of its sampling seed
    lengths: Sequence[int]
    #: tokens of every prompt, which a continued request has before its partial response
    prompt: int
    #: seconds of a decoding step
    step_s: float = 0.0
    #: an engine's step takes up to this many times as long
    slowest: float = 1.5
    #: answer nothing until this many requests have come and `StubFleet.release` was called
    hold: bool = False
    #: a new request for a longer response than this stands still at this many tokens until it is aborted
    halt: int = LONGEST

    def length(self, seed: int) -> int:
        """Tokens of the whole response of a sample with this sampling seed."""
        return self.lengths[seed % len(self.lengths)]


@dataclass
class Served:
    """What the engines of a fleet have done; lists have an entry for each engine."""

    requests: list[int] = field(default_factory=list)
    #: most requests at the same time
    most: list[int] = field(default_factory=list)
    #: seconds of all requests together
    busy_s: float = 0.0
    tokens: int = 0
    aborts: int = 0
    connections: int = 0
    #: sampling seed -> how often a response was finished for it
    finished: Counter[int] = field(default_factory=Counter)
    waiting: int = 0


class _Answers:
    """Prepared bytes, from which answers of any length are cut."""

    def __init__(self) -> None:
        rng = random.Random(0)
        #: fixed widths, so that n tokens are n * width bytes
        ids = [rng.randrange(10, 40) for _ in range(LONGEST)]
        self._ids = "".join(f"{token}," for token in ids).encode()
        self._rows = "".join(f"[-{rng.uniform(0.1, 9.0):.15f},{token},null]," for token in ids).encode()
        self._row_width = len(self._rows) // LONGEST
        self._text = b"x" * LONGEST

    def answer(self, name: str, tokens: int, reason: str) -> bytes:
        head = (
            b'{"text":"%b","output_ids":[%b],"meta_info":{"id":"%b","finish_reason":{"type":"%b"},'
            b'"prompt_tokens":128,"weight_version":"1","completion_tokens":%d,"cached_tokens":0,"e2e_latency":1.25,'
            b'"weight_versions":[{"version":"1","start":0,"end":%d}],"output_token_logprobs":[%b]}}'
        )
        text, ids = self._text[:tokens], self._ids[: max(0, 3 * tokens - 1)]
        rows = self._rows[: max(0, self._row_width * tokens - 1)]
        return head % (text, ids, name.encode(), reason.encode(), tokens, tokens, rows)


@dataclass(eq=False, slots=True)
class _Running:
    """A request that is being answered."""

    name: str
    seed: int
    tokens: int
    reason: str
    started: float
    #: seconds that it takes
    seconds: float
    message: _Message
    place: int
    #: whether it stands still at `Fleet.halt` tokens
    halts: bool
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False, slots=True)
class _Message:
    """One HTTP request, with one or several requests in it."""

    connection: _Connection
    answers: list[bytes]
    missing: int
    several: bool


class _Engine:
    def __init__(self, process: _Process, index: int, step_s: float) -> None:
        self.process, self.index, self.step_s = process, index, step_s
        self.running: dict[str, _Running] = {}

    def generate(self, connection: _Connection, body: Any) -> None:
        process, several = self.process, isinstance(body["sampling_params"], list)
        requests = (
            list(zip(body["rid"], body["input_ids"], body["sampling_params"], strict=True))
            if several
            else [(body.get("rid") or f"unnamed-{id(body)}", body["input_ids"], body["sampling_params"])]
        )
        message = _Message(connection, [b""] * len(requests), len(requests), several)
        now = process.loop.time()
        for place, (name, tokens, sampling) in enumerate(requests):
            seed, most = sampling["sampling_seed"], sampling["max_new_tokens"]
            length = process.fleet.length(seed) - (len(tokens) - process.fleet.prompt)
            count, reason = (most, "length") if length > most else (length, "stop")
            halts = len(tokens) == process.fleet.prompt and count > process.fleet.halt
            running = _Running(name, seed, count, reason, now, count * self.step_s, message, place, halts)
            assert name not in self.running, "one name for two requests"
            self.running[name] = running
            process.served.requests[self.index] += 1
            if process.holding:
                process.held.append((self, running))
            else:
                self.begin(running)
        process.served.most[self.index] = max(process.served.most[self.index], len(self.running))

    def begin(self, running: _Running) -> None:
        running.started = self.process.loop.time()
        if not running.halts:
            running.timer = self.process.loop.call_later(running.seconds, self.end, running)

    def end(self, running: _Running, *, aborted: bool = False) -> None:
        """Answer one request, with fewer tokens if it was aborted."""
        served, passed_s = self.process.served, self.process.loop.time() - running.started
        tokens, reason = running.tokens, running.reason
        if aborted:
            share = passed_s / running.seconds if running.seconds and running.timer else 0.0
            done = self.process.fleet.halt if running.halts else int(tokens * share)
            tokens, reason = min(tokens - 1, done), "abort"
        else:
            served.finished[running.seed] += 1
        if running.timer is not None:
            running.timer.cancel()
            served.busy_s += passed_s
        served.tokens += tokens
        del self.running[running.name]
        message = running.message
        message.answers[running.place] = self.process.answers.answer(running.name, tokens, reason)
        message.missing -= 1
        if not message.missing:
            joined = b",".join(message.answers)
            message.connection.answer(b"[" + joined + b"]" if message.several else joined)

    def abort(self, name: str) -> None:
        self.process.served.aborts += 1
        if (running := self.running.get(name)) is not None:
            self.end(running, aborted=True)


class _Connection(asyncio.Protocol):
    """As much of HTTP/1.1 as slime's client uses: requests with a length, one at a time."""

    __slots__ = ("_buffer", "_engine", "_transport")

    def __init__(self, engine: _Engine) -> None:
        self._engine, self._buffer = engine, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._engine.process.served.connections += 1

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer = self._buffer + data if self._buffer else data
        head, end, body = buffer.partition(b"\r\n\r\n")
        if not end:
            return
        length = int(head.lower().split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        if len(body) < length:
            return
        self._buffer = b""
        fields = orjson.loads(body)
        if head.startswith(b"POST /abort_request"):
            self._engine.abort(fields["rid"])
            self.answer(b"{}")
        else:
            self._engine.generate(self, fields)

    def answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)  # a closed one is left alone by asyncio


class _Process:
    """The engines of one stub process, in its event loop."""

    def __init__(self, fleet: Fleet, engines: range, pipe: Connection) -> None:
        self.fleet, self.answers, self.holding = fleet, _Answers(), fleet.hold
        self.held: list[tuple[_Engine, _Running]] = []
        self.served = Served([0] * len(engines), [0] * len(engines))
        self._pipe = pipe
        speeds = [random.Random(engine).uniform(1.0, fleet.slowest) for engine in engines]
        self._engines = [_Engine(self, place, speed * fleet.step_s) for place, speed in enumerate(speeds)]

    async def run(self) -> None:
        """Serve until the pipe is closed."""
        self.loop = asyncio.get_running_loop()
        ports = []
        for engine in self._engines:
            server = await self.loop.create_server(
                lambda engine=engine: _Connection(engine), "127.0.0.1", 0, backlog=CONNECTIONS
            )
            ports.append(server.sockets[0].getsockname()[1])
        self._pipe.send(ports)
        self._closed = asyncio.Event()
        self.loop.add_reader(self._pipe.fileno(), self._command)
        await self._closed.wait()

    def _command(self) -> None:
        try:
            command = self._pipe.recv()
        except EOFError:
            self._closed.set()
            return
        if command == "release":
            self.holding = False
            for engine, running in self.held:
                if running.name in engine.running:
                    engine.begin(running)
            self.held = []
        self.served.waiting = len(self.held)
        self._pipe.send(self.served)


def _serve(fleet: Fleet, engines: range, pipe: Connection) -> None:
    asyncio.run(_Process(fleet, engines, pipe).run())


class StubFleet:
    """The processes of a fleet; a context manager that ends them."""

    def __init__(self, fleet: Fleet, *, in_flight: int = 0) -> None:
        """Start the engines, in as many processes as `in_flight` connections need."""
        self.urls: list[str] = []
        self._stack = ExitStack()
        self._pipes: list[Connection] = []
        processes = max(1, min(fleet.engines, -(-in_flight // CONNECTIONS)))
        spawning = multiprocessing.get_context("spawn")
        for number in range(processes):
            engines = range(fleet.engines * number // processes, fleet.engines * (number + 1) // processes)
            here, there = multiprocessing.Pipe()
            process = spawning.Process(target=_serve, args=(fleet, engines, there), name="stub-engines", daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._stack.callback(process.join, 10)
            self._stack.callback(process.terminate)
        for pipe in self._pipes:
            if not pipe.poll(_START_S):
                raise TimeoutError(f"a process of stub engines did not start within {_START_S:g} s")
            self.urls += [f"http://127.0.0.1:{port}" for port in pipe.recv()]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def served(self) -> Served:
        """What all engines have done so far."""
        return self._ask("served")

    def release(self) -> Served:
        """Begin to answer what was held."""
        return self._ask("release")

    def _ask(self, command: str) -> Served:
        for pipe in self._pipes:
            pipe.send(command)
        total = Served()
        for pipe in self._pipes:
            part: Served = pipe.recv()
            total.requests += part.requests
            total.most += part.most
            total.busy_s += part.busy_s
            total.tokens += part.tokens
            total.aborts += part.aborts
            total.connections += part.connections
            total.finished += part.finished
            total.waiting += part.waiting
        return total
