"""`generate_single`: how a generate function of the user's own asks the policy, messages in and a text out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from slime.chat import ToolCall
from slime.errors import SlimeError
from slime.sessions.protocol import ApiError, request_of
from slime.sessions.session import Session
from slime.types import Sample

#: codes of requests that found no room
_FULL = frozenset({"context_length_exceeded", "too_many_requests"})


class ContextFull(SlimeError):
    """A conversation has no room for another answer.

    A generate function that lets it pass ends its sample as truncated, with what was said so far.
    """


class Inline:
    """The session of one call of a generate function, opened when the function first asks."""

    def __init__(self, open_session: Callable[[], Session]) -> None:
        self._open = open_session
        self.session: Session | None = None

    def opened(self) -> Session:
        """The session."""
        if self.session is None:
            self.session = self._open()
        return self.session

    async def close(self) -> None:
        """End it, where there is one."""
        if self.session is not None:
            await self.session.close()


class TextsOnly:
    """Leaves tool calls in the text: a generate function looks for them itself."""

    def parse(self, text: str) -> list[ToolCall]:  # noqa: ARG002 - the contract of parsers
        """No calls."""
        return []

    def split(self, text: str) -> tuple[str, list[ToolCall]]:
        """All of the text, and no calls."""
        return text, []


#: that of the generate function that is running; each task has its own
_current: ContextVar[Inline] = ContextVar("slime_inline_session")


@contextmanager
def answering(inline: Inline) -> Iterator[None]:
    """`generate_single` asks `inline` in the body, and in tasks that are begun there."""
    token = _current.set(inline)
    try:
        yield
    finally:
        _current.reset(token)


async def generate_single(
    conversation: str | Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
) -> str:
    """The policy's answer to a conversation; within a function of --custom-generate-function-path.

    conversation   messages with `role` and `content`, or the text of one message of the user's.  Where it goes on from
                   an earlier answer, the engine is sent the tokens of that answer, never its text encoded again
    tools          JSON schemas that the chat template tells the model of
    max_tokens     most tokens of this answer; at most what is left of --rollout-max-response-len
    stop           texts that end the answer, besides the run's

    slime keeps tokens, log-probs and masks of all answers, and gives them to a sample that comes back without tokens.
    Raises `ContextFull`, and what the engines raise.
    """
    session = _asked("generate_single").opened()
    messages = [{"role": "user", "content": conversation}] if isinstance(conversation, str) else list(conversation)
    row = {"messages": messages, "tools": list(tools), "max_tokens": max_tokens, "stop": list(stop)}
    try:
        completion = await session.complete(request_of(row, chat=True))
    except ApiError as error:
        if session.error is not None:
            raise session.error from None
        raise (ContextFull if error.code in _FULL else SlimeError)(f"generate_single: {error}") from None
    return str(completion.node.answer["content"])


def build_loss_mask(sample: Sample) -> list[int]:
    """[T] 1 on the tokens that the policy wrote in the latest conversation of `generate_single`, 0 on all others.

    For functions that train on less than that: a sample whose function sets no mask gets this one.
    """
    session = _asked("build_loss_mask").session
    samples = [] if session is None else session.samples(sample)
    if not samples:
        raise SlimeError("build_loss_mask: generate_single has not answered anything yet")
    return list(samples[-1].loss_mask or ())


def _asked(name: str) -> Inline:
    inline = _current.get(None)
    if inline is None:
        raise SlimeError(
            f"{name} was called outside of a generate function that slime runs (--custom-generate-function-path), or in"
            " a thread of its own: it is about the sample at hand"
        )
    return inline
