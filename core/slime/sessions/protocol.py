"""Requests of OpenAI clients: what is understood, what is refused, and how that is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

#: roles of messages; `developer` is what newer clients call `system`
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
#: what would sample from another distribution than the one that is trained, with the values that change nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
}


class ApiError(Exception):
    """A request that gets no completion, with the status and the JSON that OpenAI's API answers such ones with."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> bytes:
        """The answer's JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What one request asks for."""

    #: the conversation so far, oldest first; None for a text completion
    messages: list[dict[str, Any]] | None
    #: the text to continue; None for a chat
    prompt: str | None
    #: functions that the answer may call, as OpenAI's API describes them
    tools: list[dict[str, Any]]
    #: most tokens of the answer; None: as many as the run allows
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    #: whether a streamed answer ends with its usage
    include_usage: bool
    logprobs: bool
    #: what the client calls the model; only repeated in the answer
    model: str


def parse_request(body: bytes, *, chat: bool) -> CompletionRequest:
    """The request in `body`, of `/v1/chat/completions` (`chat`) or `/v1/completions`.  Raises as `request_of` does."""
    try:
        row = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ApiError(400, f"the body is {_kind(row)}, expected a JSON object")
    return request_of(row, chat=chat)


def request_of(row: Mapping[str, Any], *, chat: bool) -> CompletionRequest:
    """The request that a JSON object describes.

    Sampling is the run's: `temperature`, `top_p`, `top_k`, `min_p` and `seed` are taken and ignored.  Raises
    `ApiError` for what is malformed, and for what would change the distribution in a way that the client would notice
    was ignored (`n` over 1, penalties, `logit_bias`, a `response_format`, a forced `tool_choice`).
    """
    for name, neutral in _NEUTRAL.items():
        value = row.get(name)
        if value is not None and value not in neutral:
            one_of = " or ".join(orjson.dumps(one).decode() for one in neutral) or "nothing"
            raise ApiError(
                400,
                f"{name} = {orjson.dumps(value).decode()[:80]} is not supported: answers come from the run's own"
                f" distribution; expected {one_of}",
                code="unsupported_parameter",
                param=name,
            )
    tools = _tools(row)
    if row.get("tool_choice") == "none":
        tools = []
    options = row.get("stream_options") or {}
    return CompletionRequest(
        messages=_messages(row) if chat else None,
        prompt=None if chat else _prompt(row),
        tools=tools,
        max_tokens=_max_tokens(row),
        stop=_stop(row),
        stream=_flag(row, "stream"),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        logprobs=_flag(row, "logprobs") if chat else _no_logprobs(row),
        model=row["model"] if isinstance(row.get("model"), str) else "policy",
    )


def _messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, f"messages is {_kind(messages)}, expected a list of one or more", param="messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, Any]:
    """A message as chat templates know them: without empty fields, its content a text."""
    if not isinstance(message, dict):
        raise ApiError(400, f"{where} is {_kind(message)}, expected an object", param=where)
    role = message.get("role")
    if role not in _ROLES:
        raise ApiError(400, f"{where}.role is {role!r}, expected one of {', '.join(sorted(_ROLES))}", param=where)
    clean: dict[str, Any] = {"role": "system" if role == "developer" else role}
    clean["content"] = _content(message.get("content"), f"{where}.content")
    calls = message.get("tool_calls")
    if calls is not None and calls != []:
        if role != "assistant" or not isinstance(calls, list):
            raise ApiError(400, f"{where}.tool_calls: expected a list, in a message of the assistant", param=where)
        clean["tool_calls"] = [_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    for name in ("name", "tool_call_id"):
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise ApiError(400, f"{where}.{name} is {_kind(value)}, expected a text", param=where)
            clean[name] = value
    return clean


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} is {_kind(content)}, expected a text or a list of text parts", param=where)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in ("text", "input_text") else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise ApiError(400, f"{where} has a part of type {kind!r}; only text is supported", param=where)
        texts.append(text)
    return "".join(texts)


def _call(call: object, where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object where they are one, which is what templates expect."""
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(name, str) or not isinstance(arguments, str | dict | None):
        raise ApiError(400, f'{where}: expected {{"id", "type": "function", "function": {{...}}}}', param=where)
    if isinstance(arguments, str):
        try:
            parsed = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**known, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def _prompt(row: Mapping[str, Any]) -> str:
    prompt = row.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        [prompt] = prompt
    if not isinstance(prompt, str) or not prompt:
        raise ApiError(400, f"prompt is {_kind(prompt)}, expected one text", param="prompt")
    return prompt


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = row.get("tools")
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise ApiError(400, f"tools is {_kind(tools)}, expected a list", param="tools")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(
                400, f'tools[{place}]: expected {{"type": "function", "function": {{"name", ...}}}}', param="tools"
            )
    return tools


def _max_tokens(row: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = row.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ApiError(400, f"{name} is {value!r}, expected a whole number of at least 1", param=name)
            return value
    return None


def _stop(row: Mapping[str, Any]) -> tuple[str, ...]:
    stop = row.get("stop")
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ApiError(400, "stop: expected a text or a list of texts", param="stop")
    return tuple(texts)


def _flag(row: Mapping[str, Any], name: str) -> bool:
    value = row.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{name} is {value!r}, expected true or false", param=name)
    return bool(value)


def _no_logprobs(row: Mapping[str, Any]) -> bool:
    if row.get("logprobs") not in (None, 0, False):
        raise ApiError(400, "logprobs of text completions are not supported", param="logprobs")
    return False


def _kind(value: object) -> str:
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        int: "a number",
        float: "a number",
    }
    return "missing" if value is None else kinds.get(type(value), f"a {type(value).__name__}")
