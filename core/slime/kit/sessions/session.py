"""One agent's requests to the policy: exact tokens in, every answer recorded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson

from slime.errors import RequestRefusedError
from slime.kit.chat import ChatTemplate, SGLangParser, TagParser, ToolCall, ToolCallParser
from slime.kit.chat.conversation import abort_message
from slime.kit.sessions.completion_requests import ApiError, CompletionRequest
from slime.kit.sessions.conversation_tree import ConversationTree, Node, key_of, tools_key
from slime.plugin import Generation, PolicyClient, SamplingParams
from slime.types import Sample

#: Texts up to this many characters are encoded in the event loop, where that takes milliseconds. Larger ones wait for a
#: thread, one after the other, so that several do not need their memory at once.
_SMALL = 16 * 2**10
_ENCODER = ThreadPoolExecutor(1, thread_name_prefix="slime-session-encoder")
#: kind of text completions, unlike that of chats without tools
_TEXT = b"text"
#: makes a parser for the tools of a request
ParserFactory = Callable[[Sequence[Mapping[str, Any]]], ToolCallParser]


def tag_parser(tools: Sequence[Mapping[str, Any]]) -> ToolCallParser:  # noqa: ARG001 - a `ParserFactory`
    """A `slime.kit.chat.TagParser`, whatever the tools are."""
    return TagParser()


def parser_factory(name: str, tokenizer: Any) -> ParserFactory:
    """Tool-call parsers for tools that a client declares with its requests.

    Args:
        name: `tags` for `slime.kit.chat.TagParser`, else the name of one of SGLang's (`--tool-call-parser`).
        tokenizer: The policy's.

    Raises:
        ValueError: If SGLang has no such parser.
    """
    if name == "tags":
        return tag_parser
    SGLangParser(name, [], tokenizer)
    return lambda tools: SGLangParser(name, tools, tokenizer)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one session; None: no limit."""

    #: tokens of each conversation, including its prompt; everything after the prompt is also limited by the run's
    #: `SamplingParams.max_new_tokens`, as in other generators
    max_context: int | None = None
    #: answered requests
    max_requests: int | None = None


@dataclass(slots=True)
class Counts:
    """Counts of what happened in a session."""

    #: answered requests
    answered: int = 0
    #: refused requests: malformed, unsupported, too long or too many
    refused: int = 0
    #: requests whose client disconnected before it received the answer
    disconnected: int = 0
    #: tool calls in answers
    tool_calls: int = 0


class Session:
    """All requests of one agent, and their answers.

    A request that continues an answer of the session is sent as the tokens of that conversation plus the tokens of the
    new messages: the policy's tokens are never encoded again, whatever the client or the chat template made of the
    text. Any other request begins a new conversation.

    Sampling is the run's, so that training samples come from the policy's own distribution: a client chooses only
    `max_tokens` up to the run's, and further `stop` strings. Every request has its own seed.
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
        parser: ParserFactory | None = tag_parser,
    ) -> None:
        """Open a session.

        Args:
            key: Identifies the session to its client and to the engines.
            policy: Answers the requests.
            sampling: The run's sampling parameters.
            template: The policy's chat template.
            tokenizer: The policy's tokenizer.
            limits: Limits of the session.
            parser: Makes the parser that finds tool calls in answers; None: tool calls stay in the text.
        """
        self.key = key
        self.counts = Counts()
        #: what the policy raised, after which the session cannot continue
        self.error: BaseException | None = None
        #: why the engine aborted a request
        self.aborted: str | None = None
        #: whether a request was refused because the session or its context was full
        self.full = False
        #: seconds during which the policy worked on at least one request
        self.engine_seconds = 0.0
        #: set together with `error` or `aborted`
        self.broken = asyncio.Event()
        self._policy = policy
        self._sampling = sampling
        self._template = template
        self._tokenizer = tokenizer
        self.limits = limits or SessionLimits()
        self._parser = parser
        self._tree = ConversationTree()
        self._requests = 0
        self._closed = False
        #: requests that the policy works on, and since when there was one
        self._calls: set[asyncio.Future[Generation]] = set()
        self._busy_since = 0.0

    async def complete(self, request: CompletionRequest) -> Node:
        """Get the policy's answer, as a node of the tree. Cancelling it cancels the engine's work, and records nothing.

        Raises:
            ApiError: If the request gets no answer.
        """
        if self._closed or self.broken.is_set():
            raise ApiError(410, "the session is over", code="session_over")
        self._requests += 1
        try:
            node = await self._node(self._requests, request)
            prompt = node.context()
            node.prompt_tokens = len(prompt)
            sampling = self._sampling_of(request, node, len(prompt))
        except ApiError:
            self.counts.refused += 1
            raise
        answer = await self._ask(prompt, sampling)
        self._record(node, answer, request)
        self._tree.add(node)
        self.counts.answered += 1
        self.counts.tool_calls += len(node.answer.get("tool_calls", ()))
        return node

    def undelivered(self, node: Node) -> None:
        """Forget an answer that its client did not receive: it is not trained on."""
        self.counts.disconnected += 1
        self._tree.remove(node)

    def cut(self) -> None:
        """Mark the last answer as truncated, because the session ended before the agent."""
        for leaf in self._tree.leaves()[-1:]:
            leaf.cut = True

    def samples(self, like: Sample) -> list[Sample]:
        """The training samples of the session; see `ConversationTree.samples`."""
        return self._tree.samples(like, self._template)

    async def close(self) -> None:
        """Refuse further requests, and cancel those that wait for the policy."""
        self._closed = True
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    # --- one request ---------------------------------------------------------------------------------

    async def _node(self, number: int, request: CompletionRequest) -> Node:
        """The request's node in the tree, without an answer."""
        if request.messages is None:
            prompt = request.prompt or ""
            tokens: list[int] = await _encoded(
                len(prompt), partial(self._tokenizer.encode, prompt, add_special_tokens=False)
            )
            message = {"role": "user", "content": prompt}
            return Node(number, None, _TEXT, [message], (key_of(message),), tokens)
        if request.messages[-1]["role"] == "assistant":
            raise ApiError(400, "the last message is the assistant's, expected a message to answer", param="messages")
        kind = tools_key(request.tools)
        keys = [key_of(message) for message in request.messages]
        parent, start = self._tree.find(kind, keys, request.messages)
        messages = request.messages[start:]
        try:
            if parent is None:
                size = _size(messages) + _size(request.tools)
                tools = request.tools or None
                tokens = await _encoded(size, partial(self._template.prompt, messages, tools=tools, trusted=False))
            else:
                messages = _with_names(messages, parent)
                encode = partial(self._template.continuation, messages, parent.tokens)
                tokens = await _encoded(_size(messages), encode)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from None
        return Node(number, parent, kind, messages, tuple(keys[start:]), tokens)

    def _sampling_of(self, request: CompletionRequest, node: Node, length: int) -> SamplingParams:
        run, limits = self._sampling, self.limits
        if limits.max_requests is not None and self.counts.answered + len(self._calls) >= limits.max_requests:
            self._refuse_for_room(node.parent)
            raise ApiError(400, f"the session has used its {limits.max_requests} requests", code="too_many_requests")
        root = len(node.path()[0].new_tokens)
        most = run.max_new_tokens - (length - root)
        if limits.max_context is not None:
            most = min(most, limits.max_context - length)
        if most < 1:
            self._refuse_for_room(node.parent)
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
        # A different seed for every request; otherwise equal requests would get equal answers.
        seed = None if seed is None else (seed + (node.number - 1) * 0x9E3779B1) % 2**31
        stop = tuple(dict.fromkeys((*run.stop, *request.stop)))
        known = 0 if node.parent is None else node.parent.reports.routed_tokens
        return replace(run, max_new_tokens=most, stop=stop, sampling_seed=seed, routed_from=known)

    def _refuse_for_room(self, parent: Node | None) -> None:
        """Mark the session full, and the conversation that the request would have continued as cut."""
        self.full = True
        if parent is not None:
            parent.cut = True

    async def _ask(self, prompt: Sequence[int], sampling: SamplingParams) -> Generation:
        call = asyncio.ensure_future(self._policy.generate(prompt, sampling, session=self.key))
        if not self._calls:
            self._busy_since = time.monotonic()
        self._calls.add(call)
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
        except Exception as error:  # noqa: BLE001 - the generator raises it again
            self.error = error
            self.broken.set()
            raise ApiError(503, f"the policy failed: {error}", code="policy_failed") from None
        finally:
            self._calls.discard(call)
            if not self._calls:
                self.engine_seconds += time.monotonic() - self._busy_since
        if answer.finish_reason not in ("stop", "length"):
            self.aborted = abort_message(answer.meta)
            self.broken.set()
            raise ApiError(503, self.aborted, code="aborted")
        return answer

    def _record(self, node: Node, answer: Generation, request: CompletionRequest) -> None:
        """Write the policy's answer into its node."""
        node.tokens, node.log_probs = answer.tokens, answer.log_probs
        node.cached_tokens = int(answer.meta.get("cached_tokens") or 0)
        node.finish_reason = answer.finish_reason
        node.text = self._template.text(answer.tokens)
        node.answer = {"role": "assistant", "content": _without_stop(node.text, answer)}
        if request.tools and self._parser is not None:
            rest, found = self._parser(request.tools).split(node.text)
            calls = [function for call in found if not call.problem and (function := _as_json(call))]
            if calls:
                # Nine letters and digits, as the strictest templates require of an id.
                rows = [
                    {"id": f"{node.number:05d}{index:04d}", "type": "function", "function": function}
                    for index, function in enumerate(calls)
                ]
                node.answer |= {"content": rest, "tool_calls": rows}
                node.finish_reason = "tool_calls" if node.finish_reason == "stop" else node.finish_reason
        node.answer_key = key_of(node.answer)
        if node.parent is not None:
            node.reports = node.parent.reports.fork()
        node.reports.add(answer)


async def _encoded(size: int, encode: Callable[[], list[int]]) -> list[int]:
    """The tokens that `encode` returns; large texts do not block the event loop."""
    if size <= _SMALL:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(_ENCODER, encode)


def _size(value: Any) -> int:
    """Characters of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _size(part) for key, part in value.items())
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0


def _with_names(messages: Sequence[dict[str, Any]], parent: Node) -> list[dict[str, Any]]:
    """The messages, with the names of the calls that tool messages answer, which some templates print."""
    names = {call["id"]: call["function"]["name"] for call in parent.answer.get("tool_calls", ())}
    return [
        {**message, "name": name}
        if message["role"] == "tool" and "name" not in message and (name := names.get(message.get("tool_call_id")))
        else message
        for message in messages
    ]


def _without_stop(text: str, answer: Generation) -> str:
    """The answer up to the stop string that ended it, as OpenAI's API returns it."""
    reason = answer.meta.get("finish_reason")
    matched = reason.get("matched") if isinstance(reason, Mapping) else None
    return text.partition(matched)[0] if isinstance(matched, str) and matched else text


def _as_json(call: ToolCall) -> dict[str, Any] | None:
    """Name and arguments of a call. None for integers of more than 64 bits and lone surrogates.

    Not all clients could read those.
    """
    try:
        function: dict[str, Any] = orjson.loads(orjson.dumps({"name": call.name, "arguments": dict(call.arguments)}))
    except orjson.JSONEncodeError:
        return None
    return function
