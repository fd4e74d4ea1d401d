"""A request to a session, as OpenAI's API states it: read from a JSON object, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from slime.errors import did_you_mean, json_type

#: levels of nesting that a part of a request may get around it
_ROOM_AROUND = 32
#: roles of messages; newer clients say `developer` for `system`
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
#: options that would sample from another distribution than the trained one, with the values that change nothing
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
    "repetition_penalty": (1,),
    "parallel_tool_calls": (True,),
}


def _number(least: float, most: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_flag(value: Any) -> bool:
    """Whether it is true or false, which Python takes for 1 and 0."""
    return isinstance(value, bool)


def _instance(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


_TEXT = ("a string", _instance(str))
#: options that change nothing here, with what their values must be. Sampling is the run's; the others are for a service
_IGNORED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("a number of at least 0", _number(0)),
    "top_p": ("a number from 0 to 1", _number(0, 1)),
    "min_p": ("a number from 0 to 1", _number(0, 1)),
    "top_k": ("a whole number", _whole),
    "seed": ("a whole number", _whole),
    "metadata": ("an object", _instance(dict)),
    "store": ("true or false", _instance(bool)),
    **dict.fromkeys(("user", "service_tier", "reasoning_effort", "verbosity", "safety_identifier"), _TEXT),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "model"), _TEXT),
    "stream_options": ("an object", _instance(dict)),
}
#: options of one kind of request
_ONLY_TEXT, _ONLY_CHAT = ("prompt",), ("messages", "tools")
#: options that are read
_READ = frozenset(
    {"messages", "prompt", "tools", "max_tokens", "max_completion_tokens", "stop", "stream", "logprobs"}
)  # fmt: skip


class ApiError(Exception):
    """A request that gets no completion, with the status and code of OpenAI's API."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request."""

    #: the conversation so far, oldest first; None for a text completion
    messages: list[dict[str, Any]] | None
    #: the text to continue; None for a chat
    prompt: str | None
    #: tools that the answer may call, as OpenAI's API describes them
    tools: list[dict[str, Any]]
    #: limit of the answer; None: the run's
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    #: whether a streamed answer ends with the token counts
    include_usage: bool
    logprobs: bool
    #: the client's name for the model, repeated in the answer
    model: str


def request_of(row: Mapping[str, Any], *, chat: bool) -> CompletionRequest:
    """Read a request from a JSON object.

    Sampling is the run's: `temperature`, `top_p`, `top_k`, `min_p` and `seed` are checked and ignored.

    Raises:
        ApiError: If the request is malformed, has an option that nobody knows, or asks for another distribution in a
            way that the client would notice: `n` over 1, penalties, `logit_bias`, a `response_format`, a forced
            `tool_choice`, one call at most (`parallel_tool_calls`).
    """
    for name in row.keys() - _NEUTRAL.keys() - _IGNORED.keys() - _READ:
        near = did_you_mean(name, (*_READ, *_IGNORED, *_NEUTRAL))
        raise ApiError(400, f"{name!r:.80} is no option of a request.{near}", code="unknown_parameter", param=name)
    for name, (expected, fits) in _IGNORED.items():
        if (value := row.get(name)) is not None and not fits(value):
            raise ApiError(400, f"{name} is {orjson.dumps(value).decode()[:80]}, expected {expected}", param=name)
    for name, neutral in _NEUTRAL.items():
        value = row.get(name)
        if value is not None and not any(value == one and _is_flag(value) == _is_flag(one) for one in neutral):
            one_of = " or ".join(orjson.dumps(one).decode() for one in neutral) or "nothing"
            raise ApiError(
                400,
                f"{name} = {orjson.dumps(value).decode()[:80]} is not supported: answers come from the run's own"
                f" distribution; expected {one_of}",
                code="unsupported_parameter",
                param=name,
            )
    for name in _ONLY_TEXT if chat else _ONLY_CHAT:
        if row.get(name) not in (None, []):
            kind = "chat" if chat else "text completion"
            raise ApiError(400, f"{name} is no option of a {kind}", code="unsupported_parameter", param=name)
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
        include_usage=_flag(options, "include_usage"),
        logprobs=_flag(row, "logprobs") if chat else _no_logprobs(row),
        model=row.get("model") or "policy",
    )


def json_value(text: bytes | str) -> Any:
    """A JSON value that can be written again, also as part of a larger one: orjson reads deeper nesting than it writes.

    Raises:
        ValueError: If it is not JSON, or nested too deeply.
    """
    value = orjson.loads(text)
    wrapped = value
    for _ in range(_ROOM_AROUND):
        wrapped = [wrapped]
    try:
        orjson.dumps(wrapped)
    except orjson.JSONEncodeError:
        raise ValueError("it is nested too deeply") from None
    return value


def _messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, f"messages is {kind_of(messages)}, expected a list of one or more", param="messages")
    return [_parse_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _parse_message(message: object, field: str) -> dict[str, Any]:
    """A message as chat templates expect it: without empty fields, its content a string."""
    if not isinstance(message, dict):
        raise ApiError(400, f"{field} is {kind_of(message)}, expected an object", param=field)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(400, f"{field}.role is {role!r:.80}, expected one of {', '.join(sorted(_ROLES))}", param=field)
    clean: dict[str, Any] = {"role": "system" if role == "developer" else role}
    clean["content"] = _content(message.get("content"), f"{field}.content")
    if message.get("function_call") is not None:
        raise ApiError(400, f"{field}.function_call is not supported: use tool_calls", param=field)
    calls = message.get("tool_calls")
    if calls is not None and calls != []:
        if role != "assistant" or not isinstance(calls, list):
            raise ApiError(400, f"{field}.tool_calls: expected a list, in an assistant's message", param=field)
        clean["tool_calls"] = [_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(calls)]
    for name in ("name", "tool_call_id"):
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise ApiError(400, f"{field}.{name} is {kind_of(value)}, expected a string", param=field)
            clean[name] = value
    return clean


def _content(content: object, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{field} is {kind_of(content)}, expected a string or a list of text parts", param=field)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in ("text", "input_text") else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else kind_of(part)
            raise ApiError(400, f"{field} has a part of type {kind!r:.80}; only text is supported", param=field)
        texts.append(text)
    return "".join(texts)


def _call(call: object, field: str) -> dict[str, Any]:
    """A tool call whose arguments are parsed if they are a JSON object, as templates expect."""
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(name, str) or not isinstance(arguments, str | dict | None):
        raise ApiError(400, f'{field}: expected {{"id", "type": "function", "function": {{...}}}}', param=field)
    if isinstance(arguments, str):
        try:
            parsed = json_value(arguments)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**known, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def _prompt(row: Mapping[str, Any]) -> str:
    prompt = row.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        [prompt] = prompt
    if not isinstance(prompt, str) or not prompt:
        raise ApiError(400, f"prompt is {kind_of(prompt)}, expected one string", param="prompt")
    return prompt


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = row.get("tools")
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise ApiError(400, f"tools is {kind_of(tools)}, expected a list", param="tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ApiError(
                400, f'tools[{index}]: expected {{"type": "function", "function": {{"name", ...}}}}', param="tools"
            )
        for name, kind, expected in (("description", str, "a string"), ("parameters", dict, "an object")):
            if (value := function.get(name)) is not None and not isinstance(value, kind):
                raise ApiError(
                    400, f"tools[{index}].function.{name} is {kind_of(value)}, expected {expected}", param="tools"
                )
    return tools


def _max_tokens(row: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = row.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ApiError(400, f"{name} is {value!r:.80}, expected a whole number of at least 1", param=name)
            return value
    return None


def _stop(row: Mapping[str, Any]) -> tuple[str, ...]:
    stop = row.get("stop")
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ApiError(400, "stop: expected a string or a list of strings", param="stop")
    return tuple(texts)


def _flag(row: Mapping[str, Any], name: str) -> bool:
    value = row.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{name} is {value!r:.80}, expected true or false", param=name)
    return bool(value)


def _no_logprobs(row: Mapping[str, Any]) -> bool:
    if row.get("logprobs") not in (None, 0, False):
        raise ApiError(400, "logprobs of text completions are not supported", param="logprobs")
    return False


def kind_of(value: object) -> str:
    """What a value of a request is, for messages."""
    return "missing" if value is None else json_type(value)
