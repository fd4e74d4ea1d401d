"""OpenAI's API over HTTP: the body of a request, and answers at once or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from slime.kit.sessions.completion_requests import ApiError, CompletionRequest, json_value, kind_of, request_of
from slime.kit.sessions.conversation_tree import Node


def parse_request(body: bytes, *, chat: bool) -> CompletionRequest:
    """Parse the body of `/v1/chat/completions` (`chat`) or `/v1/completions`. Raises like `request_of`."""
    try:
        row = json_value(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ApiError(400, f"the body is {kind_of(row)}, expected a JSON object")
    return request_of(row, chat=chat)


def error_body(error: ApiError) -> bytes:
    """The JSON of an error."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return orjson.dumps({"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}})


def answer_body(request: CompletionRequest, node: Node, tokens: Sequence[str]) -> bytes:
    """The JSON of an answer. `tokens` [A]: the text of each token, if log-probs were requested."""
    row = _head(request, node, stream=False)
    if request.messages is None:
        choice: dict[str, Any] = {"text": node.text, "logprobs": None}
    else:
        choice = {
            "message": {**_answer_message(node), "refusal": None},
            "logprobs": _log_probs(node, tokens),
        }
    row["choices"] = [{"index": 0, "finish_reason": node.finish_reason, **choice}]
    row["usage"] = _usage(node)
    return orjson.dumps(row)


def answer_events(request: CompletionRequest, node: Node, tokens: Sequence[str]) -> Iterator[bytes]:
    """The same as server-sent events. All text is in one event, because the engine does not stream."""
    head = _head(request, node, stream=True)
    reason = node.finish_reason
    if request.messages is None:
        yield _event(head, {"text": node.text, "finish_reason": None})
        yield _event(head, {"text": "", "finish_reason": reason})
    else:
        message = _answer_message(node)
        calls = message.pop("tool_calls", None)
        yield _event(head, {"delta": message, "finish_reason": None, "logprobs": _log_probs(node, tokens)})
        if calls:
            delta = [{"index": index, **call} for index, call in enumerate(calls)]
            yield _event(head, {"delta": {"tool_calls": delta}, "finish_reason": None})
        yield _event(head, {"delta": {}, "finish_reason": reason})
    if request.include_usage:
        yield b"data: " + orjson.dumps({**head, "choices": [], "usage": _usage(node)}) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _head(request: CompletionRequest, node: Node, *, stream: bool) -> dict[str, Any]:
    text = request.messages is None
    kind = "text_completion" if text else "chat.completion.chunk" if stream else "chat.completion"
    return {
        "id": f"{'cmpl' if text else 'chatcmpl'}-{node.number}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }


def _event(head: dict[str, Any], choice: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps({**head, "choices": [{"index": 0, **choice}]}) + b"\n\n"


def _answer_message(node: Node) -> dict[str, Any]:
    """The answer as clients expect it, with the arguments of tool calls as JSON strings."""
    message = dict(node.answer)
    calls = message.get("tool_calls")
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _json(call["function"]["arguments"])}}
            for call in calls
        ]
    return message


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _usage(node: Node) -> dict[str, Any]:
    answered = len(node.tokens)
    return {
        "prompt_tokens": node.prompt_tokens,
        "completion_tokens": answered,
        "total_tokens": node.prompt_tokens + answered,
        "prompt_tokens_details": {"cached_tokens": node.cached_tokens},
    }


def _log_probs(node: Node, tokens: Sequence[str]) -> dict[str, Any] | None:
    if not tokens:
        return None
    content = [
        {"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, log_prob in zip(tokens, node.log_probs, strict=True)
    ]
    return {"content": content, "refusal": None}
