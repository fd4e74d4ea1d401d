"""The client of the engines: token ids in, token ids with log-probs out, through the router.

Thousands of requests are in flight at once in one process, so the cost of each counts: orjson builds the request and
decodes the answer, and no Python loop runs over tokens. Training and evaluation share the requests in flight fairly.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from binascii import a2b_base64
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, Self

import aiohttp
import numpy as np
import orjson
from yarl import URL

from slime.engine.control import bearer
from slime.engine.direct_engines import DirectEngines
from slime.engine.keys import EngineKeys
from slime.engine.together import LONGEST_TOGETHER, Answer, Request, Together
from slime.errors import DeadlineError, EngineError, GarbledAnswerError, NoEngineError, RequestRefusedError
from slime.plugin import Generation, SamplingParams


class FairSlots:
    """Limits how many requests run at once, and shares the slots between training and evaluation.

    A free slot goes to the kind that holds fewer slots, among those with requests waiting. So neither has to wait for
    the other to finish: an evaluation that starts while a rollout fills all slots soon has half of them, and gives them
    back as it ends. Requests of one kind are served in the order they came.
    """

    def __init__(self, total: int) -> None:
        self._free = self._total = total
        #: by whether they are of an evaluation
        self._held = {True: 0, False: 0}
        self._waiting: dict[bool, deque[asyncio.Future[None]]] = {True: deque(), False: deque()}

    @asynccontextmanager
    async def slot(self, *, evaluation: bool) -> AsyncIterator[None]:
        """Wait for a slot, and hold it in the body."""
        if self._free > 0 and not (self._waiting[True] or self._waiting[False]):
            self._hold(evaluation)
        else:
            await self._wait(evaluation)
        try:
            yield
        finally:
            self._release(evaluation)

    async def _wait(self, evaluation: bool) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[evaluation].append(granted)
        self._grant()
        try:
            await granted
        except BaseException:
            granted.cancel()  # has no effect once it is granted
            if not granted.cancelled():
                self._release(evaluation)
            raise

    def _hold(self, evaluation: bool) -> None:
        self._held[evaluation] += 1
        self._free -= 1

    def _release(self, evaluation: bool) -> None:
        self._held[evaluation] -= 1
        self._free += 1
        self._grant()

    def limit(self, total: int) -> None:
        """Change the total. Holders beyond it keep their slots."""
        self._free += total - self._total
        self._total = total
        self._grant()

    def _grant(self) -> None:
        """Give away the free slots."""
        while self._free > 0 and (self._waiting[True] or self._waiting[False]):
            for waiting in self._waiting.values():
                while waiting and waiting[0].cancelled():
                    waiting.popleft()
            kinds = [kind for kind, waiting in self._waiting.items() if waiting]
            if not kinds:
                return
            kind = min(kinds, key=self._held.__getitem__)
            self._waiting[kind].popleft().set_result(None)
            self._hold(kind)


#: header by which the router keeps the requests of one session on one engine
_SESSION_HEADER = "X-SMG-Routing-Key"
#: status with which the router answers while it has no engine
_UNAVAILABLE = 503
_HEADERS = {"Content-Type": "application/json"}
_EXCERPT = 500
_SEED_BITS = 63
_CONNECT_ATTEMPTS = 4
_CONNECT_BACKOFF_S = 0.2  # doubled after each attempt
#: seconds an idle connection is kept; less than the server keeps it (SGLang: 5), so that no request is sent over a
#: connection that is just being closed
_KEEP_ALIVE_S = 4.0
#: abort messages in flight at once, and seconds that each may take
_ABORTS_AT_ONCE = 32
_ABORT_TIMEOUT_S = 30.0
#: meta of an aborted request that was never sent
_NOT_SENT = {"finish_reason": {"type": "abort", "message": "aborted before the request was sent"}}


class HttpPolicyClient:
    """Implements `slime.plugin.PolicyClient` over HTTP.

    A request is sent again only if no connection could be made, so that nothing was accepted. After a timeout or a lost
    connection the engine may have done the work, and the caller decides.
    """

    def __init__(
        self,
        base_url: str,
        keys: EngineKeys | None = None,
        *,
        timeout_s: float,
        concurrency: int = 1024,
        vocab_size: int | None = None,
        routed_layers: int | None = None,
        together: bool = False,
        direct: bool = False,
    ) -> None:
        """Does not connect yet.

        Args:
            base_url: Address of the router, or of one engine.
            keys: Keys of the engines and the router; None if they have none.
            timeout_s: Seconds that one generation may take after it was sent.
            concurrency: Requests in flight at once; more wait here.
            vocab_size: Token ids outside it are refused here, because they would crash the engine's scheduler.
            routed_layers: Layers of the model, to ask which experts compute each token; None: do not ask. Such requests
                go to the engines directly, because the router drops the question. Evaluations do not ask.
            together: Send requests of the same moment in one message if their answers are short. Such messages go to
                the engines directly, because the router does not know seeds and names of several.
            direct: Send all requests to the engines directly, and aborts only to the engine that has the request.
                Through the router, every engine gets every abort.
        """
        self._headers = {**_HEADERS, **bearer(None if keys is None else keys.api)}
        self._abort_headers = bearer(None if keys is None else keys.admin)
        self.connect(base_url)
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._slots = FairSlots(concurrency)
        #: name of a request that still waits for a slot -> whether it was aborted
        self._unsent: dict[str, bool] = {}
        #: name of a request that was sent to an engine directly -> that engine's address for aborts
        self._asked: dict[str, URL] = {}
        self._vocab_size = vocab_size
        self._routed_layers = routed_layers
        self._always = direct
        self._together = Together(self._ask_together, lambda: len(self._engine_urls)) if together else None
        self._session: aiohttp.ClientSession | None = None

    def connect(self, base_url: str, engines: Sequence[str] | None = None) -> None:
        """Send later requests to the router (or engine) at `base_url`, and aborts to each of `engines`.

        A router cannot abort, and only the router knows which engine has which request. If `engines` is None,
        `base_url` is the only one.
        """
        engines = (base_url,) if engines is None else engines
        self._url = URL(base_url.rstrip("/") + "/generate")
        self._engine_urls = [URL(url.rstrip("/") + "/generate") for url in engines]
        self._abort_urls = [URL(url.rstrip("/") + "/abort_request") for url in engines]
        self._direct = DirectEngines(len(self._engine_urls))

    def limit(self, requests: int) -> None:
        """Keep at most this many requests in flight from now on, and never more than `concurrency`.

        Requests that the engines cannot run yet wait here, where training and evaluation take turns. The engines' own
        queues are first come, first served: an evaluation would wait behind a whole rollout.
        """
        self._slots.limit(min(requests, self._concurrency))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. The client opens new ones when it is used again."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str | None = None,
        rid: str | None = None,
        direct: bool = False,
    ) -> Generation:
        """One response to `tokens`; see `slime.plugin.PolicyClient`.

        Temperature 0 is greedy; its log-probs are those of temperature 1.

        Args:
            tokens: Prompt token ids.
            sampling: Sampling parameters.
            session: Requests of one session go to the same engine.
            rid: Name of the request, for `abort`.
            direct: Ask an engine directly, so that an error names it.

        Raises:
            RequestRefusedError: If the request is invalid.
            GarbledAnswerError: If the answer is none.
            NoEngineError: If no engine takes it.
            EngineError: If the engine fails.
            DeadlineError: After `timeout_s`.
        """
        self._check_tokens(tokens)
        routed = self._routed_layers is not None and not sampling.evaluation
        request = _request(tokens, sampling, rid, routed=routed)
        short = sampling.max_new_tokens <= LONGEST_TOGETHER
        together = self._together if short and session is None and not (routed or direct) else None
        name, url = rid or "", self._url
        try:
            if rid is not None:
                self._unsent[rid] = False
            async with self._slots.slot(evaluation=sampling.evaluation):
                if self._unsent.pop(name, False):
                    return Generation([], [], "abort", [], _NOT_SENT)
                try:
                    async with asyncio.timeout(self._timeout_s):
                        if together is not None:
                            answer, url = await together.ask(request)
                        else:
                            with self._chosen([name], session, direct=routed or direct or self._always) as url:
                                answer = await self._ask(url, request, session)
                except TimeoutError:
                    raise DeadlineError(
                        f"POST {url}: no answer within {self._timeout_s:g} s to a prompt of {len(tokens)} tokens"
                        f" (max_new_tokens {sampling.max_new_tokens}). Raise the time limit, or look at the engine's"
                        " log."
                    ) from None
        finally:
            self._unsent.pop(name, None)  # cancelled while it waited
        generation = self._generation(answer, url)
        if not routed or self._routed_layers is None:
            return generation
        return _with_routed_experts(generation, len(tokens), sampling.routed_from, self._routed_layers, url)

    async def _ask(self, url: URL, request: Request, session: str | None = None) -> Any:
        """The fields of the answer to one request."""
        headers = self._headers if session is None else {**self._headers, _SESSION_HEADER: session}
        return _fields(await self._post(url, _encoded(request), headers), url)

    async def _ask_together(self, requests: list[Request]) -> list[Answer | Exception]:
        """The answers to requests that are sent in one message; each has its own seed, name, and error."""
        if len(requests) == 1:
            return [(await self._ask(self._url, requests[0]), self._url)]
        message: Request = {
            "input_ids": [request["input_ids"] for request in requests],
            "sampling_params": [request["sampling_params"] for request in requests],
            "rid": [request.get("rid") or uuid.uuid4().hex for request in requests],
            "return_logprob": True,
        }
        try:
            with self._chosen(message["rid"], None, direct=True) as url:
                answers = _fields(await self._post(url, _encoded(message), self._headers), url)
        except RequestRefusedError:
            # One of them is at fault, and must not take the others with it. The engine may still be busy with those, so
            # their names are taken.
            alone = (self._ask(self._url, {**request, "rid": uuid.uuid4().hex}) for request in requests)
            found = await asyncio.gather(*alone, return_exceptions=True)
            return [one if isinstance(one, Exception) else (one, self._url) for one in found]
        names = _names(answers)
        if names != message["rid"]:
            raise GarbledAnswerError(
                f"POST {url}: the answers are those of requests {names}, expected {message['rid']}", str(url.origin())
            )
        return [(answer, url) for answer in answers]

    @contextmanager
    def _chosen(self, names: Sequence[str], session: str | None, *, direct: bool) -> Iterator[URL]:
        """Where to send the requests of these names, in one message, that run in the body."""
        if not direct:
            yield self._url
            return
        if not self._engine_urls:
            raise NoEngineError(f"POST {self._url}: no engine is there to take the request")
        with self._direct.engine(session, len(names)) as index:
            self._asked |= dict.fromkeys(names, self._abort_urls[index])
            try:
                yield self._engine_urls[index]
            finally:
                for name in names:
                    self._asked.pop(name, None)

    async def abort(self, rids: Collection[str]) -> None:
        """End the requests of these names; they return the tokens they have, with finish reason "abort".

        Requests that still wait for a slot are never sent. For each of the others the engine that was asked directly
        gets a message; if the router chose it, every engine does, and ignores it if it does not have the request. A
        request that has not reached an engine yet is not aborted.

        Raises:
            EngineError: If an engine does not accept the message.
        """
        at_once = asyncio.Semaphore(_ABORTS_AT_ONCE)
        sent = [rid for rid in rids if rid not in self._unsent]
        self._unsent |= {rid: True for rid in rids if rid in self._unsent}

        async def send(url: URL, rid: str) -> None:
            async with at_once:
                try:
                    async with asyncio.timeout(_ABORT_TIMEOUT_S):
                        message = self._open_session().post(url, json={"rid": rid}, headers=self._abort_headers)
                        async with message as response:
                            await response.read()
                except (aiohttp.ClientError, TimeoutError) as error:
                    raise EngineError(
                        f"POST {url}: the engine did not accept the message within {_ABORT_TIMEOUT_S:g} s"
                        f" ({type(error).__name__}: {error}); it may have ended"
                    ) from error
            if response.status != 200:
                raise EngineError(f"POST {url}: status {response.status}")

        everywhere, known = self._abort_urls, set(self._abort_urls)  # one that is gone has no request any more
        to_send = [(url, rid) for rid in sent for url in ((self._asked[rid],) if rid in self._asked else everywhere)]
        await asyncio.gather(*(send(url, rid) for url, rid in to_send if url in known))

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if len(tokens) == 0:
            raise RequestRefusedError("generate: the prompt has no tokens; expected at least one")
        if self._vocab_size is not None and (min(tokens) < 0 or max(tokens) >= self._vocab_size):
            raise RequestRefusedError(
                f"generate: the prompt has token ids from {min(tokens)} to {max(tokens)}; "
                f"the model's vocabulary has {self._vocab_size}"
            )

    async def _post(self, url: URL, body: bytes, headers: Mapping[str, str]) -> bytes:
        """The body of a successful answer."""
        attempt = 1
        while True:
            try:
                async with self._open_session().post(url, data=body, headers=headers) as response:
                    answer = await response.read()
                    if response.status != 200:
                        text = answer[:_EXCERPT].decode(errors="replace")
                        refused = 400 <= response.status < 500
                        kind = RequestRefusedError if refused else EngineError
                        if response.status == _UNAVAILABLE:
                            kind = NoEngineError
                        raise kind(f"POST {url}: status {response.status}, answer: {text}")
                    return answer
            except aiohttp.ClientConnectorError as error:  # no connection: nothing was accepted
                if attempt >= _CONNECT_ATTEMPTS:
                    raise NoEngineError(f"POST {url}: no connection in {attempt} attempts ({error})") from error
            except aiohttp.ClientError as error:
                raise EngineError(
                    f"POST {url}: the connection was lost before the answer came "
                    f"({type(error).__name__}: {error}); the engine or the router may have ended"
                ) from error
            await asyncio.sleep(_CONNECT_BACKOFF_S * 2 ** (attempt - 1))
            attempt += 1

    def _open_session(self) -> aiohttp.ClientSession:
        """The session, made on first use because it belongs to the running event loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # The slots limit requests; a limit here would make them wait inside their time limit.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
                read_bufsize=2**20,  # an answer in one piece, instead of pausing the transport every 64 KiB
            )
        return self._session

    def _generation(self, answer: Any, url: URL) -> Generation:
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


def _fields(answer: bytes, url: URL) -> Any:
    """What an answer holds."""
    try:
        return orjson.loads(answer)
    except ValueError as error:
        raise _garbled(url, error, answer[:_EXCERPT].decode(errors="replace")) from error


def _names(answers: Any) -> Any:
    """The names of the requests that were answered in one message, or what was answered instead."""
    try:
        return [answer["meta_info"]["id"] for answer in answers]
    except (KeyError, TypeError):
        return str(answers)[:_EXCERPT]


def _garbled(url: URL, error: Exception, text: str) -> GarbledAnswerError:
    return GarbledAnswerError(
        f"POST {url}: the answer is not one of SGLang's /generate with log-probs "
        f"({type(error).__name__}: {error}): {text[:_EXCERPT]}",
        str(url.origin()),
    )


def _with_routed_experts(answer: Generation, prompt_length: int, start: int, layers: int, url: URL) -> Generation:
    """The answer with the routed experts that its `meta` holds encoded: base64 of int32, here in fewer bytes.

    They are those of the tokens from `start` on.
    """
    meta = dict(answer.meta)
    encoded = meta.pop("routed_experts", None)
    if encoded is None and answer.finish_reason == "abort":
        return answer  # whoever continues it gets those of all tokens
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


def _request(tokens: Sequence[int], sampling: SamplingParams, rid: str | None, *, routed: bool) -> Request:
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
    request: Request = {"input_ids": tokens, "sampling_params": parameters, "return_logprob": True}
    if rid is not None:
        request["rid"] = rid
    if routed:
        request["return_routed_experts"] = True
        request["routed_experts_start_len"] = sampling.routed_from
    return request


def _encoded(request: Request) -> bytes:
    return orjson.dumps(request, option=orjson.OPT_SERIALIZE_NUMPY)
