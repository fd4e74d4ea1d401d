"""The conversations of one session as a tree: each node is one request's new messages and the policy's answer.

A path from a root is one conversation as the engine saw it. Each node holds only its new tokens, so the memory for a
long conversation grows with its length, not with its square.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

import orjson

from slime.kit.chat import Answers, ChatTemplate, Conversation
from slime.types import Sample, Status

#: equal for messages that mean the same
MessageKey: TypeAlias = tuple[str, ...]

#: end of the reasoning in an answer; clients often send an answer back without its reasoning
_REASONING_END = "</think>"


@dataclass(slots=True, eq=False)
class Node:
    """One request and, once the policy has written it, its answer."""

    #: number of the request in the session, in order of arrival
    number: int
    #: the answer that it continues; None if it began a conversation
    parent: Node | None
    #: equal for conversations that began with the same tools
    kind: bytes
    #: the new messages of the request
    messages: list[dict[str, Any]]
    keys: tuple[MessageKey, ...]
    #: [N] tokens of the new messages and the generation prompt, never trained on; for a root, the whole prompt
    new_tokens: list[int]
    #: [A] tokens of the answer
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    #: the answer as clients receive it, and its key
    answer: dict[str, Any] = field(default_factory=dict)
    answer_key: MessageKey = ()
    #: text of the answer as the policy wrote it
    text: str = ""
    #: "stop", "length" or "tool_calls"
    finish_reason: str = ""
    #: tokens of the whole prompt, and how many of them the engine had cached
    prompt_tokens: int = 0
    cached_tokens: int = 0
    #: the engine's reports of this answer and all before it
    reports: Answers = field(default_factory=Answers)
    children: list[Node] = field(default_factory=list)
    #: whether a request after this answer was refused because the session or its context was full
    cut: bool = False

    def path(self) -> list[Node]:
        """The nodes from the beginning of the conversation to this answer."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def context(self) -> list[int]:
        """All tokens up to and including this answer."""
        return list(chain.from_iterable(chain(node.new_tokens, node.tokens) for node in self.path()))


class ConversationTree:
    """All answers of one session."""

    def __init__(self) -> None:
        self._roots: list[Node] = []

    def find(
        self, kind: bytes, keys: Sequence[MessageKey], messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Node | None, int]:
        """Find the answer that a request continues.

        Of several candidates the longest conversation wins, and among those the one whose answers came back unchanged:
        attempts at the same prompt may have answers that differ only in call ids or reasoning.

        Args:
            kind: Equal for requests with the same tools.
            keys: [M] keys of the request's messages.
            messages: [M] the request's messages.

        Returns:
            The answer and the number of messages up to it; None and 0 if the request begins a conversation.
        """
        best: tuple[Node | None, int] = (None, 0)
        most_unchanged = -1
        stack = [(root, 0, 0) for root in self._roots if root.kind == kind]
        while stack:
            node, start, num_unchanged = stack.pop()
            end = start + len(node.keys)
            # At least one message must follow the answer.
            if end + 1 < len(keys) and keys[end] == node.answer_key and tuple(keys[start:end]) == node.keys:
                num_unchanged += _is_unchanged(messages[end], node.answer)
                if (end + 1, num_unchanged) > (best[1], most_unchanged):
                    best, most_unchanged = (node, end + 1), num_unchanged
                stack.extend((child, end + 1, num_unchanged) for child in node.children)
        return best

    def add(self, node: Node) -> None:
        """Add an answer."""
        (self._roots if node.parent is None else node.parent.children).append(node)

    def remove(self, node: Node) -> None:
        """Remove an answer that was not delivered, unless another request continued it."""
        siblings = self._roots if node.parent is None else node.parent.children
        if not node.children and node in siblings:
            siblings.remove(node)

    def leaves(self) -> list[Node]:
        """The answers that no request continued, in the order of their requests."""
        leaves = []
        stack = list(self._roots)
        while stack:
            node = stack.pop()
            stack.extend(node.children)
            if not node.children:
                leaves.append(node)
        return sorted(leaves, key=lambda node: node.number)

    def samples(self, like: Sample, template: ChatTemplate) -> list[Sample]:
        """One finished sample for each leaf: a copy of `like` with the leaf's conversation.

        Every answer is trained on in exactly one of them: shared parts of branches are masked in all but the first.
        Empty if the policy has not answered.
        """
        trained: set[Node] = set()
        samples = []
        for leaf in self.leaves():
            path = leaf.path()
            if any(node.tokens for node in path if node not in trained):
                samples.append(_sample(path, trained, like, template))
                trained.update(path)
        return samples


def _is_unchanged(sent: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    """Whether an answer came back unchanged, and not merely with the same meaning."""
    calls = answer.get("tool_calls", ())
    if calls:
        return [call.get("id") for call in sent.get("tool_calls", ())] == [call["id"] for call in calls]
    return bool(sent["content"] == answer["content"])


def _sample(path: Sequence[Node], trained: set[Node], like: Sample, template: ChatTemplate) -> Sample:
    root, leaf = path[0], path[-1]
    prompt: str | list[dict[str, Any]] = like.prompt
    if root.new_tokens != like.tokens:
        # The data set's messages rendered differently, for example with tools: the text shows the difference.
        prompt = template.text(root.new_tokens) if root.messages == like.prompt else root.messages
    talk = Conversation(template, root.new_tokens, prompt=prompt)
    for node in path:
        if node is not root:
            talk.add(node.messages, node.new_tokens)
        talk.append(node.tokens, node.log_probs, node.text, train=node not in trained)
    talk.answers = leaf.reports
    sample = talk.to_sample(replace(like, metrics={}))
    if leaf.cut and sample.status is Status.COMPLETED:
        sample.status = Status.TRUNCATED
    return sample


def key_of(message: Mapping[str, Any]) -> MessageKey:
    """Equal for messages that mean the same, although a client has converted them through its own types.

    Clients drop some parts of an assistant's message, which are therefore ignored: surrounding white space, reasoning,
    text beside tool calls. Call ids are ignored too.
    """
    role, content = message["role"], message["content"]
    calls = message.get("tool_calls", ())
    if role == "assistant":
        text = "" if calls else content.rpartition(_REASONING_END)[2].strip()
        return (role, text, *(_call_key(call) for call in calls))
    return (role, content, message.get("name", ""), message.get("tool_call_id", ""))


def tools_key(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Equal for the same tools in the same order."""
    return orjson.dumps(tools, option=orjson.OPT_SORT_KEYS)


def _call_key(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return f"{function['name']} {orjson.dumps(function['arguments'], option=orjson.OPT_SORT_KEYS).decode()}"
