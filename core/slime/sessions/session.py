"""One agent's talk with the policy: every request token for token, every answer kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from slime.chat import Answers, ChatTemplate, TagParser, ToolCall, ToolCallParser
from slime.errors import RequestRefusedError
from slime.plugin import Generation, PolicyClient, SamplingParams
from slime.sessions.messages import Key, key_of, tools_key
from slime.sessions.protocol import ApiError, CompletionRequest
from slime.sessions.tree import Node, Tree
from slime.types import Sample

#: what tells text completions from chats without tools
_TEXT = b"text"
#: makes a parser for the tools of a request
ParserFactory = Callable[[Sequence[Mapping[str, Any]]], ToolCallParser]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How much one session may do; None: as much as it likes."""

    #: tokens of each conversation, its prompt included.  All after the prompt together is limited by the run's
    #: `SamplingParams.max_new_tokens`, as it is in other generators
    max_context: int | None = None
    #: requests that are answered
    max_requests: int | None = None


@dataclass(slots=True)
class Counts:
    """What happened in a session."""

    #: requests that were answered
    answered: int = 0
    #: requests that were refused: malformed, unsupported, too long or too many
    refused: int = 0
    #: requests whose client went away before it had the answer
    disconnected: int = 0
    #: tool calls in answers
    tool_calls: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer."""

    node: Node
    prompt_tokens: int
    #: "stop", "length" or "tool_calls"
    finish_reason: str
    cached_tokens: int


@dataclass(slots=True)
class _Turn:
    """A request in the policy's terms."""

    parent: Node | None
    kind: bytes
    messages: list[dict[str, Any]]
    keys: tuple[Key, ...]
    new_tokens: list[int]


class Session:
    """What one agent asks, and what it is answered.

    A request whose messages go on from an answer of the session is sent as the tokens of that conversation and the
    tokens of the new messages: what the policy wrote is never encoded again, whatever the client or the chat template
    made of it.  Any other request begins a conversation of its own.

    Sampling is the run's (`sampling`), so that what is trained on comes from the policy's own distribution: a client
    chooses `max_tokens` up to the run's, and further `stop` texts.  Every request has a seed of its own.
    """

    def __init__(
        self,
        key: str,
        policy: PolicyClient,
        sampling: SamplingParams,
        template: ChatTemplate,
        tokenizer: Any,
        *,
        limits: SessionLimits | None = None,
        parser: ParserFactory | None = None,
    ) -> None:
        """`parser` finds tool calls in answers to requests with tools; default: `slime.chat.TagParser`."""
        self.key = key
        self.counts = Counts()
        #: why the session cannot go on, through no fault of the agent's: what the policy raised
        self.error: BaseException | None = None
        #: why the engine aborted a request
        self.aborted: str | None = None
        #: set as soon as `error` or `aborted` is
        self.broken = asyncio.Event()
        self._policy = policy
        self._sampling = sampling
        self._template = template
        self._tokenizer = tokenizer
        self._limits = limits or SessionLimits()
        self._parser: ParserFactory = parser or (lambda _: TagParser())
        self._tree = Tree()
        self._requests = 0
        self._closed = False
        self._full = False
        self._calls: set[asyncio.Task[Generation]] = set()
        self._busy = _Busy()

    @property
    def engine_seconds(self) -> float:
        """Time during which the policy worked on at least one request."""
        return self._busy.seconds

    @property
    def full(self) -> bool:
        """Whether a request was refused because the session or its context was full."""
        return self._full

    async def complete(self, request: CompletionRequest) -> Completion:
        """The policy's answer.  Raises `ApiError` for a request that gets none.

        Cancelling it cancels the engine's work, and nothing is kept of it.
        """
        self._check_open()
        self._requests += 1
        number = self._requests
        try:
            turn = self._turn(request)
            before = [] if turn.parent is None else turn.parent.context()
            prompt = before + turn.new_tokens
            sampling = self._sampling_of(request, turn, len(prompt), number)
        except ApiError:
            self.counts.refused += 1
            raise
        answer = await self._ask(prompt, sampling)
        node = self._node(number, turn, answer, request)
        self._tree.add(node)
        self.counts.answered += 1
        calls = len(node.answer.get("tool_calls", ()))
        self.counts.tool_calls += calls
        reason = "length" if answer.finish_reason == "length" else "tool_calls" if calls else "stop"
        return Completion(node, len(prompt), reason, int(answer.meta.get("cached_tokens") or 0))

    def undelivered(self, completion: Completion) -> None:
        """The client went away before it had the answer: it is not trained on."""
        self.counts.disconnected += 1
        self._tree.remove(completion.node)

    def disconnected(self) -> None:
        """The client went away before there was an answer."""
        self.counts.disconnected += 1

    def cut(self) -> None:
        """The session is over before the agent was done: its last answer counts as truncated."""
        for leaf in self._tree.leaves()[-1:]:
            leaf.cut = True

    def samples(self, like: Sample) -> list[Sample]:
        """The training samples of the session: see `Tree.samples`."""
        return self._tree.samples(like, self._template)

    async def close(self) -> None:
        """Refuse further requests, and end those that wait for the policy."""
        self._closed = True
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    # --- one request ---------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed or self.broken.is_set():
            raise ApiError(410, "the session is over", code="session_over")

    def _turn(self, request: CompletionRequest) -> _Turn:
        if request.messages is None:
            prompt = request.prompt or ""
            tokens: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False)
            message = {"role": "user", "content": prompt}
            return _Turn(None, _TEXT, [message], (key_of(message),), tokens)
        if request.messages[-1]["role"] == "assistant":
            raise ApiError(400, "the last message is the assistant's, expected one to answer", param="messages")
        kind = tools_key(request.tools)
        keys = [key_of(message) for message in request.messages]
        parent, start = self._tree.find(kind, keys, request.messages)
        messages = request.messages[start:]
        try:
            if parent is None:
                tokens = self._template.prompt(messages, tools=request.tools or None, trusted=False)
            else:
                messages = _with_names(messages, parent)
                tokens = self._template.continuation(messages, parent.tokens)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from None
        return _Turn(parent, kind, messages, tuple(keys[start:]), tokens)

    def _sampling_of(self, request: CompletionRequest, turn: _Turn, length: int, number: int) -> SamplingParams:
        run, limits = self._sampling, self._limits
        if limits.max_requests is not None and self.counts.answered + len(self._calls) >= limits.max_requests:
            self._refuse_for_room(turn.parent)
            raise ApiError(400, f"the session had its {limits.max_requests} requests", code="too_many_requests")
        root = length if turn.parent is None else len(turn.parent.path()[0].new_tokens)
        most = run.max_new_tokens - (length - root)
        if limits.max_context is not None:
            most = min(most, limits.max_context - length)
        if most < 1:
            self._refuse_for_room(turn.parent)
            context = "any" if limits.max_context is None else limits.max_context
            raise ApiError(
                400,
                f"the conversation has {length} tokens, {length - root} of them after its first request; the context"
                f" may have {context}, and {run.max_new_tokens} of them after the first request",
                code="context_length_exceeded",
                param="messages",
            )
        if request.max_tokens is not None:
            most = min(most, request.max_tokens)
        seed = run.sampling_seed
        # Another seed for every request, or two equal ones would get the same answer.
        seed = None if seed is None else (seed + (number - 1) * 0x9E3779B1) % 2**31
        stop = tuple(dict.fromkeys((*run.stop, *request.stop)))
        return replace(run, max_new_tokens=most, stop=stop, sampling_seed=seed)

    def _refuse_for_room(self, parent: Node | None) -> None:
        """A request that would begin a conversation leaves those that were had as they are."""
        self._full = True
        if parent is not None:
            parent.cut = True

    async def _ask(self, prompt: Sequence[int], sampling: SamplingParams) -> Generation:
        call: asyncio.Task[Generation] = asyncio.ensure_future(self._generate(prompt, sampling))
        self._calls.add(call)
        self._busy.start()
        try:
            answer = await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ApiError(410, "the session is over", code="session_over") from None
        except RequestRefusedError as error:
            self.counts.refused += 1
            raise ApiError(400, str(error), code="request_refused") from None
        except Exception as error:  # noqa: BLE001 - whatever the policy raises is the generator's to raise again
            self.error = error
            self.broken.set()
            raise ApiError(503, f"the policy failed: {error}", code="policy_failed") from None
        finally:
            self._busy.stop()
            self._calls.discard(call)
        if answer.finish_reason not in ("stop", "length"):
            reason = answer.meta.get("finish_reason")
            message = reason.get("message") if isinstance(reason, Mapping) else None
            self.aborted = f"the engine aborted the request: {message or 'no reason given'}"
            self.broken.set()
            raise ApiError(503, self.aborted, code="aborted")
        return answer

    async def _generate(self, prompt: Sequence[int], sampling: SamplingParams) -> Generation:
        return await self._policy.generate(prompt, sampling, session=self.key)

    def _node(self, number: int, turn: _Turn, answer: Generation, request: CompletionRequest) -> Node:
        text = self._template.text(answer.tokens)
        calls: list[ToolCall] = []
        said = _without_stop(text, answer)
        if request.tools:
            rest, found = self._parser(request.tools).split(text)
            calls = [call for call in found if not call.problem and _fits_json(call)]
            said = rest if calls else said
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if calls:
            message["tool_calls"] = [_call_row(call, number, place) for place, call in enumerate(calls)]
        reports = Answers() if turn.parent is None else turn.parent.reports.fork()
        reports.add(answer)
        return Node(
            number=number,
            parent=turn.parent,
            kind=turn.kind,
            messages=turn.messages,
            keys=turn.keys,
            new_tokens=turn.new_tokens,
            tokens=answer.tokens,
            log_probs=answer.log_probs,
            answer=message,
            answer_key=key_of(message),
            text=text,
            reports=reports,
        )


@dataclass(slots=True)
class _Busy:
    """Seconds in which at least one request was with the policy."""

    seconds: float = 0.0
    _open: int = 0
    _since: float = 0.0

    def start(self) -> None:
        if self._open == 0:
            self._since = time.monotonic()
        self._open += 1

    def stop(self) -> None:
        self._open -= 1
        if self._open == 0:
            self.seconds += time.monotonic() - self._since


def _with_names(messages: Sequence[dict[str, Any]], parent: Node) -> list[dict[str, Any]]:
    """Tool messages with the names of the calls that they answer, which some templates print."""
    names = {call["id"]: call["function"]["name"] for call in parent.answer.get("tool_calls", ())}
    return [
        {**message, "name": name}
        if message["role"] == "tool" and "name" not in message and (name := names.get(message.get("tool_call_id")))
        else message
        for message in messages
    ]


def _without_stop(text: str, answer: Generation) -> str:
    """The answer up to the stop text that ended it, as OpenAI's API gives it."""
    reason = answer.meta.get("finish_reason")
    matched = reason.get("matched") if isinstance(reason, Mapping) else None
    return text.partition(matched)[0] if isinstance(matched, str) and matched else text


def _fits_json(call: ToolCall) -> bool:
    """Not so for whole numbers of more than 64 bits and half surrogate pairs: clients would not read them alike."""
    try:
        orjson.dumps([call.name, dict(call.arguments)])
    except orjson.JSONEncodeError:
        return False
    return True


def _call_row(call: ToolCall, number: int, place: int) -> dict[str, Any]:
    """A call as messages have it.  Nine letters and digits, which is what the strictest templates want of an id."""
    arguments = orjson.loads(orjson.dumps(dict(call.arguments)))
    return {
        "id": f"{number:05d}{place:04d}",
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
