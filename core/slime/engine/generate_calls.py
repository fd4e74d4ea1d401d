"""What goes to an engine's /generate and comes back, and how it gets there if not through the router.

It is JSON, with token ids and their log-probs; short requests of the same moment share a message.

No Python loop runs over tokens: orjson builds the request and decodes the answer.
"""

from __future__ import annotations

import asyncio
import random
from binascii import a2b_base64
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeAlias

import numpy as np
import orjson
from yarl import URL

from slime.errors import EngineError, GarbledAnswerError
from slime.plugin import Generation, SamplingParams

#: the fields of a request to /generate
Request = dict[str, Any]
#: the fields of its answer, and who gave it
Answer = tuple[Any, URL]

#: characters of an answer in messages
EXCERPT = 500
_SEED_BITS = 63


def generation_of(answer: Any, url: URL) -> Generation:
    """The generation that the fields of an answer tell. Raises `GarbledAnswerError` or `EngineError`."""
    try:
        meta = answer["meta_info"]
        rows = meta.get("output_token_logprobs") or ()  # T rows of (log-prob, token id, text or None)
        flat = list(chain.from_iterable(rows))
        log_probs, tokens = flat[0::3], flat[1::3]
        reason = meta["finish_reason"]["type"]
        spans = meta.get("weight_versions")
        versions = list(dict.fromkeys(span["version"] for span in spans)) if spans else [meta["weight_version"]]
        if not tokens:  # aborted before the first one: no weights were used
            versions = []
    except (ValueError, KeyError, TypeError) as error:
        raise _garbled(url, error, str(answer)) from error
    if None in log_probs:
        raise EngineError(
            f"POST {url}: log-prob of response token {log_probs.index(None)} is not a number; "
            f"the model's weights or activations have overflowed"
        )
    return Generation(tokens=tokens, log_probs=log_probs, finish_reason=reason, weight_versions=versions, meta=meta)


def fields_of(answer: bytes, url: URL) -> Any:
    """What an answer holds."""
    try:
        return orjson.loads(answer)
    except ValueError as error:
        raise _garbled(url, error, answer[:EXCERPT].decode(errors="replace")) from error


def names_of(answers: Any) -> Any:
    """The names of the requests that were answered in one message, or what was answered instead."""
    try:
        return [answer["meta_info"]["id"] for answer in answers]
    except (KeyError, TypeError):
        return str(answers)[:EXCERPT]


def _garbled(url: URL, error: Exception, text: str) -> GarbledAnswerError:
    return GarbledAnswerError(
        f"POST {url}: the answer is not one of SGLang's /generate with log-probs "
        f"({type(error).__name__}: {error}): {text[:EXCERPT]}",
        str(url.origin()),
    )


def with_routed_experts(answer: Generation, prompt_length: int, start: int, layers: int, url: URL) -> Generation:
    """The answer with the routed experts that its `meta` holds encoded: base64 of int32, here in fewer bytes.

    They belong to the tokens from `start` on.
    """
    meta = dict(answer.meta)
    encoded = meta.pop("routed_experts", None)
    if encoded is None and answer.finish_reason == "abort":
        return answer  # the request that continues it gets the experts of all its tokens
    rows = prompt_length + len(answer.tokens) - 1 - start
    if rows < 1:  # aborted before the first new token
        return replace(answer, meta=meta)
    experts = np.frombuffer(a2b_base64(encoded or ""), dtype=np.int32)
    if experts.size == 0 or experts.size % (rows * layers):
        raise EngineError(
            f"POST {url}: the answer has the routed experts of {experts.size} places, expected a multiple of {rows}"
            f" tokens x {layers} layers; the engine needs --enable-return-routed-experts and a model with experts"
        )
    kind = np.uint8 if experts.max() < 256 else np.int16
    return replace(answer, meta=meta, routed_experts=experts.reshape(rows, layers, -1).astype(kind), routed_from=start)


def request_of(tokens: Sequence[int], sampling: SamplingParams, rid: str, *, routed: bool) -> Request:
    """The fields of a request; `routed`: ask which experts compute each token."""
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }
    if sampling.stop:
        parameters["stop"] = sampling.stop
    if sampling.stop_token_ids:
        parameters["stop_token_ids"] = sampling.stop_token_ids
    # An engine with seeded sampling gives all requests without a seed the same one, and so the same response to all
    # samples of a prompt.
    seed = sampling.sampling_seed
    parameters["sampling_seed"] = random.getrandbits(_SEED_BITS) if seed is None else seed
    request: Request = {"input_ids": tokens, "sampling_params": parameters, "return_logprob": True, "rid": rid}
    if routed:
        request["return_routed_experts"] = True
        request["routed_experts_start_len"] = sampling.routed_from
    return request


def encoded(request: Request) -> bytes:
    """A request as JSON."""
    return orjson.dumps(request, option=orjson.OPT_SERIALIZE_NUMPY)


# --- ways to engines without the router -------------------------------------------------------------
# A request costs 1.3 ms of CPU on its way (in this process, the router and the engine's HTTP server), more than the few
# tokens of a short answer cost the engine. Most of that is paid once for a message of many.

#: How requests reach engines. "router": through the router, which chooses one. "direct": to an engine that the client
#: chooses, which alone gets the request's abort; through the router, every engine gets every abort. "together": short
#: requests of the same moment to such an engine in one message, because the router does not know seeds and names of
#: several; the others through the router.
Route: TypeAlias = Literal["router", "direct", "together"]

#: sessions whose engine is remembered; of the others, an engine has hardly a prefix cached
_SESSIONS = 2**16


class DirectEngines:
    """Chooses an engine for each request, as the router does.

    A session stays on its engine. Everything else goes to an engine with the fewest requests, of those to the one that
    has had no other for the longest time.
    """

    def __init__(self, count: int) -> None:
        #: of each engine: its requests, and when their number changed last. The order begins anywhere, so that the
        #: engines share what the processes of a run begin with.
        self._load = [(0, turn) for turn in random.sample(range(count), count)]
        self._changes = count
        self._of_session: OrderedDict[str, int] = OrderedDict()

    @contextmanager
    def engine(self, session: str | None, requests: int = 1) -> Iterator[int]:
        """The index of the engine for a request, or several in one message, that run in the body."""
        index = None if session is None else self._of_session.get(session)
        if index is None:
            index = self._load.index(min(self._load))
        if session is not None:
            self._of_session[session] = index
            self._of_session.move_to_end(session)
            if len(self._of_session) > _SESSIONS:
                self._of_session.popitem(last=False)
        self._add(index, requests)
        try:
            yield index
        finally:
            self._add(index, -requests)

    def _add(self, index: int, requests: int) -> None:
        self._changes += 1
        self._load[index] = self._load[index][0] + requests, self._changes


#: requests in one message at most; more would hardly cost less, and the engine would begin later
MOST_TOGETHER = 32
#: only requests for at most this many tokens go together. A message is answered when its slowest request is done, so a
#: request may wait this many decoding steps longer than alone
LONGEST_TOGETHER = 64


class SharedMessages:
    """Collects the requests that are made in one turn of the event loop, and sends them in few messages."""

    def __init__(
        self, send: Callable[[list[Request]], Awaitable[Sequence[Answer | Exception]]], engines: Callable[[], int]
    ) -> None:
        """
        Args:
            send: Sends one message; its result has an answer or an error for each request. The client's
                `_ask_together`.
            engines: Number of engines to spread the messages over.
        """
        self._send = send
        self._engines = engines
        self._waiting: list[tuple[Request, asyncio.Future[Answer]]] = []
        #: the messages on their way; the event loop itself keeps no reference to them
        self._messages: set[asyncio.Task[None]] = set()

    async def ask(self, request: Request) -> Answer:
        """The answer to one request. A message is given up when all that wait for it are cancelled."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._start)
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((request, answer))
        return await answer

    def _start(self) -> None:
        waiting, self._waiting = [one for one in self._waiting if not one[1].done()], []
        if not waiting:
            return
        size = min(MOST_TOGETHER, -(-len(waiting) // max(1, self._engines())))
        for first in range(0, len(waiting), size):
            part = waiting[first : first + size]
            message = asyncio.get_running_loop().create_task(self._carry(part))
            self._messages.add(message)
            message.add_done_callback(self._messages.discard)
            for _, answer in part:
                answer.add_done_callback(partial(_give_up, part, message))

    async def _carry(self, part: list[tuple[Request, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._send([request for request, _ in part])
        except Exception as error:  # noqa: BLE001 - raised again where the answers are awaited
            answers = [error] * len(part)
        for (_, waiting), answer in zip(part, answers, strict=True):
            if waiting.done():
                continue
            if isinstance(answer, Exception):
                waiting.set_exception(answer)
            else:
                waiting.set_result(answer)


def _give_up(
    part: list[tuple[Request, asyncio.Future[Answer]]], message: asyncio.Task[None], _: asyncio.Future[Answer]
) -> None:
    """End a message that nobody waits for any more."""
    if all(waiting.cancelled() for _, waiting in part):
        message.cancel()
