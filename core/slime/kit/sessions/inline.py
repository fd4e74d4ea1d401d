"""`generate_single`: how a user's own generate function asks the policy, with messages in and text out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from slime.errors import SlimeError
from slime.kit.sessions.completion_requests import ApiError, request_of
from slime.kit.sessions.session import Session
from slime.types import Sample

#: error codes of requests that no longer fit
_FULL = frozenset({"context_length_exceeded", "too_many_requests"})


class ContextFull(SlimeError):
    """A conversation has no room for another answer.

    If a generate function does not catch it, its sample ends as truncated, with the answers so far.
    """


class Inline:
    """The session of one call of a generate function, opened by its first request.

    async with Inline(open_session) as inline:
        ...  # `generate_single` uses it here, and in tasks started here
    """

    def __init__(self, open_session: Callable[[], Session]) -> None:
        self.open_session = open_session
        self.session: Session | None = None

    async def __aenter__(self) -> Inline:
        self._token = _current.set(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        _current.reset(self._token)
        if self.session is not None:
            await self.session.close()


#: the session of the running generate function; each task has its own
_current: ContextVar[Inline] = ContextVar("slime_inline_session")


async def generate_single(
    conversation: str | Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
) -> str:
    """Get the policy's answer to a conversation, within a function of --custom-generate-function-path.

    slime records tokens, log-probs and masks of all answers, and fills them into a sample that is returned without
    tokens.

    Args:
        conversation: Messages with `role` and `content`, or the text of one user message. If it continues an earlier
            answer, the engine gets the tokens of that answer, never its text encoded again.
        tools: JSON schemas that the chat template shows the model.
        max_tokens: Limit of this answer; at most the rest of --rollout-max-response-len.
        stop: Strings that end the answer, in addition to the run's.

    Raises:
        ContextFull: If there is no room for another answer.
        SlimeError: If the engines fail.
    """
    inline = _current_session("generate_single")
    session = inline.session = inline.session or inline.open_session()
    messages = [{"role": "user", "content": conversation}] if isinstance(conversation, str) else list(conversation)
    row = {"messages": messages, "tools": list(tools), "max_tokens": max_tokens, "stop": list(stop)}
    try:
        node = await session.complete(request_of(row, chat=True))
    except ApiError as error:
        if session.error is not None:
            raise session.error from None
        raise (ContextFull if error.code in _FULL else SlimeError)(f"generate_single: {error}") from None
    return str(node.answer["content"])


def build_loss_mask(sample: Sample) -> list[int]:
    """[T] 1 for tokens that the policy wrote in the latest conversation of `generate_single`, 0 for all others.

    For functions that train on fewer tokens; a sample without a mask gets this one.
    """
    session = _current_session("build_loss_mask").session
    samples = [] if session is None else session.samples(sample)
    if not samples:
        raise SlimeError("build_loss_mask: generate_single has not answered anything yet")
    return list(samples[-1].loss_mask or ())


def _current_session(name: str) -> Inline:
    inline = _current.get(None)
    if inline is None:
        raise SlimeError(
            f"{name} was called outside of a generate function that slime runs (--custom-generate-function-path), or in"
            " another thread: it belongs to the sample being generated"
        )
    return inline
