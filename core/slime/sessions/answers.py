"""Answers as OpenAI's API gives them, in one piece or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from slime.sessions.protocol import CompletionRequest
from slime.sessions.session import Completion


def answer_body(request: CompletionRequest, completion: Completion, tokens: Sequence[str]) -> bytes:
    """The JSON of an answer.  `tokens` [A]: the text of each token, where log-probs were asked for."""
    row = _head(request, completion, stream=False)
    if request.messages is None:
        choice: dict[str, Any] = {"text": completion.node.text, "logprobs": None}
    else:
        choice = {"message": {**_message(completion), "refusal": None}, "logprobs": _log_probs(completion, tokens)}
    row["choices"] = [{"index": 0, "finish_reason": completion.finish_reason, **choice}]
    row["usage"] = _usage(completion)
    return orjson.dumps(row)


def answer_events(request: CompletionRequest, completion: Completion, tokens: Sequence[str]) -> Iterator[bytes]:
    """The same as server-sent events.  The text comes in one of them: the engine is asked for whole answers."""
    head = _head(request, completion, stream=True)
    reason = completion.finish_reason
    if request.messages is None:
        yield _event(head, {"text": completion.node.text, "finish_reason": None})
        yield _event(head, {"text": "", "finish_reason": reason})
    else:
        message = _message(completion)
        calls = message.pop("tool_calls", None)
        yield _event(head, {"delta": message, "finish_reason": None, "logprobs": _log_probs(completion, tokens)})
        if calls:
            delta = [{"index": place, **call} for place, call in enumerate(calls)]
            yield _event(head, {"delta": {"tool_calls": delta}, "finish_reason": None})
        yield _event(head, {"delta": {}, "finish_reason": reason})
    if request.include_usage:
        yield b"data: " + orjson.dumps({**head, "choices": [], "usage": _usage(completion)}) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _head(request: CompletionRequest, completion: Completion, *, stream: bool) -> dict[str, Any]:
    text = request.messages is None
    kind = "text_completion" if text else "chat.completion.chunk" if stream else "chat.completion"
    return {
        "id": f"{'cmpl' if text else 'chatcmpl'}-{completion.node.number}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }


def _event(head: dict[str, Any], choice: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps({**head, "choices": [{"index": 0, **choice}]}) + b"\n\n"


def _message(completion: Completion) -> dict[str, Any]:
    """The answer as clients know it: the arguments of tool calls are a JSON text."""
    message = dict(completion.node.answer)
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


def _usage(completion: Completion) -> dict[str, Any]:
    answered = len(completion.node.tokens)
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": answered,
        "total_tokens": completion.prompt_tokens + answered,
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
    }


def _log_probs(completion: Completion, tokens: Sequence[str]) -> dict[str, Any] | None:
    if not tokens:
        return None
    content = [
        {"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, log_prob in zip(tokens, completion.node.log_probs, strict=True)
    ]
    return {"content": content, "refusal": None}
