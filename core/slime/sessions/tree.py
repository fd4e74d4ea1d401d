"""What was said in one session, as a tree: each node is one request's new messages and the policy's answer.

A path from a root is one conversation as the engine saw it.  Each node holds only what is new in it, so a long
conversation costs its length and not the square of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from slime.chat import Answers, ChatTemplate
from slime.sessions.messages import Key
from slime.types import Sample, Status


@dataclass(slots=True, eq=False)
class Node:
    """One request that was answered."""

    #: place among the session's requests, by when they came
    number: int
    #: the answer that it goes on from; None: it began a conversation
    parent: Node | None
    #: tells conversations apart that were begun with other tools
    kind: bytes
    #: what was new in the request
    messages: list[dict[str, Any]]
    keys: tuple[Key, ...]
    #: [N] the new messages and the generation prompt, never trained on; a root's are its whole prompt
    new_tokens: list[int]
    #: [A] the answer
    tokens: list[int]
    log_probs: list[float]
    #: the answer as clients get it, and what tells it apart
    answer: dict[str, Any]
    answer_key: Key
    #: the answer as the policy wrote it
    text: str
    #: what the engine reported of this answer and those before it
    reports: Answers
    children: list[Node] = field(default_factory=list)
    #: a request after this answer was refused, because the session or its context was full
    cut: bool = False

    def path(self) -> list[Node]:
        """From the conversation's beginning to this answer."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def context(self) -> list[int]:
        """All tokens up to and with this answer."""
        return list(chain.from_iterable(chain(node.new_tokens, node.tokens) for node in self.path()))


class Tree:
    """The answers of one session."""

    def __init__(self) -> None:
        self._roots: list[Node] = []

    def find(self, kind: bytes, keys: Sequence[Key], messages: Sequence[Mapping[str, Any]]) -> tuple[Node | None, int]:
        """The answer that a request goes on from, and how many of its messages lie before that.

        keys, messages   [M] the request's messages and what tells them apart

        Of several the one with the longest conversation, and of those the one whose answers came back as they were
        given: attempts at the same prompt may have answers that only call ids, or reasoning, tell apart.  None and 0
        where the request begins a conversation.
        """
        best: tuple[Node | None, int] = (None, 0)
        most = -1
        places = [(root, 0, 0) for root in self._roots if root.kind == kind]
        while places:
            node, start, alike = places.pop()
            end = start + len(node.keys)
            # Something must be new after the answer.
            if end + 1 < len(keys) and keys[end] == node.answer_key and tuple(keys[start:end]) == node.keys:
                alike += _alike(messages[end], node.answer)
                if (end + 1, alike) > (best[1], most):
                    best, most = (node, end + 1), alike
                places.extend((child, end + 1, alike) for child in node.children)
        return best

    def add(self, node: Node) -> None:
        """One more answer."""
        (self._roots if node.parent is None else node.parent.children).append(node)

    def remove(self, node: Node) -> None:
        """Forget an answer that nobody got; one that was gone on from stays."""
        siblings = self._roots if node.parent is None else node.parent.children
        if not node.children and node in siblings:
            siblings.remove(node)

    def leaves(self) -> list[Node]:
        """The answers that nothing followed, in the order in which they were asked for."""
        leaves = []
        places = list(self._roots)
        while places:
            node = places.pop()
            places.extend(node.children)
            if not node.children:
                leaves.append(node)
        return sorted(leaves, key=lambda node: node.number)

    def samples(self, like: Sample, template: ChatTemplate) -> list[Sample]:
        """One finished sample for each leaf: `like`, the sample that was asked for, with the leaf's conversation.

        Every answer is trained on in one of them: what branches share is masked in all but the first.  Empty where
        the policy has said nothing.
        """
        trained: set[Node] = set()
        samples = []
        for leaf in self.leaves():
            path = leaf.path()
            if any(node.tokens for node in path if node not in trained):
                samples.append(_sample(path, trained, like, template))
                trained.update(path)
        return samples


def _alike(sent: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    """Whether an answer came back as it was given, and not only one that means the same."""
    calls = answer.get("tool_calls", ())
    if calls:
        return [call.get("id") for call in sent.get("tool_calls", ())] == [call["id"] for call in calls]
    return bool(sent["content"] == answer["content"])


def _sample(path: Sequence[Node], trained: set[Node], like: Sample, template: ChatTemplate) -> Sample:
    root, leaf = path[0], path[-1]
    response: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    messages: list[dict[str, Any]] = []
    for node in path:
        if node is not root:
            response += node.new_tokens
            mask += [0] * len(node.new_tokens)
            log_probs += [0.0] * len(node.new_tokens)
            messages += node.messages
        masked = node in trained
        response += node.tokens
        mask += [0 if masked else 1] * len(node.tokens)
        log_probs += [0.0] * len(node.tokens) if masked else node.log_probs
        messages.append({"role": "assistant", "content": node.text})
    prompt: str | list[dict[str, Any]] = like.prompt
    if root.new_tokens != like.tokens:
        # The data's messages in other tokens, with tools perhaps: the text tells it from the data's prompt.
        prompt = template.text(root.new_tokens) if root.messages == like.prompt else root.messages
    sample = replace(
        like,
        prompt=prompt,
        tokens=root.new_tokens + response,
        response_length=len(response),
        response=template.plain_text(leaf.tokens),
        loss_mask=mask,
        rollout_log_probs=log_probs,
        metadata={**like.metadata, "messages": messages},
        metrics={},
    )
    leaf.reports.fork().fill(sample)
    if leaf.cut and sample.status is Status.COMPLETED:
        sample.status = Status.TRUNCATED
    return sample
