"""A conversation as the engine saw it: token ids, which of them the policy wrote, and their log-probs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.errors import ConfigError
from slime.kit.chat.template import ChatTemplate
from slime.plugin import Generation
from slime.plugin.columns import SOURCES
from slime.types import Sample, SpecInfo, Status

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


class Conversation:
    """Grows by answers and by messages between them; `to_sample` turns it into a training sample.

        talk = Conversation(template, sample.tokens)
        answer = await policy.generate(talk.tokens, sampling, session=str(sample.index))
        text = talk.generated(answer)
        talk.add([{"role": "tool", "content": "4"}])
        ...
        return [talk.to_sample(sample)]

    The next request always consists of the tokens of the last one, its answer, and the tokens of the new messages.
    """

    def __init__(
        self, template: ChatTemplate, tokens: Sequence[int], *, prompt: str | list[dict[str, Any]] | None = None
    ) -> None:
        """Begin a conversation.

        Args:
            template: Turns messages into tokens.
            tokens: Token ids of the prompt [P].
            prompt: What the tokens were made from, if not from the `prompt` of the later sample.
        """
        self.template = template
        #: [P + T] prompt, answers and messages
        self.tokens: list[int] = list(tokens)
        #: [T] 1 for tokens that the policy wrote
        self.loss_mask: list[int] = []
        #: [T] the engine's log-probs, 0 for tokens that the policy did not write
        self.log_probs: list[float] = []
        #: [T] who wrote each token, as in `slime.plugin.columns.SOURCES`
        self.sources: list[int] = []
        #: answers and messages after the prompt, as text
        self.messages: list[dict[str, Any]] = []
        #: what the engine reported of the answers
        self.answers = Answers()
        self._prompt = prompt
        #: start and end of the last answer in the response
        self._last_answer = (0, 0)

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens P."""
        return len(self.tokens) - len(self.loss_mask)

    @property
    def response_length(self) -> int:
        """Number of tokens T after the prompt."""
        return len(self.loss_mask)

    @property
    def finish_reason(self) -> str | None:
        """How the last answer ended, as the engine reports it; None before the first."""
        return self.answers.finish_reason

    @property
    def last_answer(self) -> list[int]:
        """The tokens of the last answer."""
        start, end = (index + self.prompt_length for index in self._last_answer)
        return self.tokens[start:end]

    def generated(self, answer: Generation) -> str:
        """Append the policy's answer to `tokens`.

        Returns:
            Its text for parsers, with all special tokens except the one that ends the answer.
        """
        self.answers.add(answer)
        text = self.template.text(answer.tokens)
        self.append(answer.tokens, answer.log_probs, text)
        return text

    def append(self, tokens: Sequence[int], log_probs: Sequence[float], text: str, *, train: bool = True) -> None:
        """Append an answer that `answers` includes already.

        Args:
            tokens: Token ids [A] of the answer.
            log_probs: [A] the engine's log-probs.
            text: Its text, as `generated` returns it.
            train: Whether it is trained on.
        """
        start = len(self.loss_mask)
        self.tokens.extend(tokens)
        self.loss_mask.extend([int(train)] * len(tokens))
        self.log_probs.extend(log_probs if train else [0.0] * len(tokens))
        self.sources.extend([SOURCES["policy"]] * len(tokens))
        self._last_answer = (start, len(self.loss_mask))
        self.messages.append({"role": "assistant", "content": text})

    def continuation(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens that `add(messages)` would append, to see whether they fit."""
        return self.template.continuation(
            messages, self.last_answer if self._last_answer[1] == len(self.loss_mask) else ()
        )

    def add(self, messages: Sequence[Mapping[str, Any]], tokens: Sequence[int] | None = None) -> None:
        """Append messages after an answer, and the generation prompt. None of these tokens are trained on.

        Args:
            messages: All messages of the turn.
            tokens: The result of `continuation(messages)`, if it was called before.

        Raises:
            ValueError: If no answer precedes them, or the template refuses them.
        """
        if self._last_answer[1] != len(self.loss_mask) or not self.messages:
            raise ValueError("messages must follow an answer; add all messages of a turn in one call")
        new = self.continuation(messages) if tokens is None else tokens
        try:
            bare = self.continuation([{**message, "content": ""} for message in messages])
        except ConfigError:  # a template may want contents: then only its control tokens are known
            bare = []
        self.sources.extend(_sources(new, bare, self.template.control_tokens))
        self.tokens.extend(new)
        self.loss_mask.extend([0] * len(new))
        self.log_probs.extend([0.0] * len(new))
        self.messages.extend(dict(message) for message in messages)

    def fork(self, *, train_past: bool = False) -> Conversation:
        """An independent copy, for another branch.

        Args:
            train_past: Whether the copy trains on the answers so far too. By default only the original does, so that no
                answer counts twice.
        """
        other = copy(self)
        other.tokens, other.log_probs = list(self.tokens), list(self.log_probs)
        other.loss_mask = list(self.loss_mask) if train_past else [0] * len(self.loss_mask)
        if not train_past:
            other.log_probs = [0.0] * len(self.loss_mask)
        other.messages, other.sources = list(self.messages), list(self.sources)
        other.answers = self.answers.fork()
        return other

    def to_sample(self, like: Sample) -> Sample:
        """A finished sample: a copy of `like` with this conversation as its response.

        Everything that engines report is filled in; status and finish reason come from the last answer. `response`
        is the last answer's text without special tokens; `messages` in the metadata are the answers and messages after
        the prompt. Messages added after the last answer are left out, because no engine has seen them.

        Several samples of one call share the rollout and count once.

        Raises:
            ValueError: If the policy has not answered yet.
        """
        end = self._last_answer[1]
        if self.finish_reason is None:
            raise ValueError(f"sample {like.index}: the policy has not answered anything yet")
        prompt_length = self.prompt_length
        num_messages = next(n for n in range(len(self.messages), 0, -1) if self.messages[n - 1]["role"] == "assistant")
        sources = self.sources[:end]
        columns = {"source": np.asarray(sources, dtype=np.float32)} if any(sources) else {}
        sample = replace(
            like,
            prompt=like.prompt if self._prompt is None else self._prompt,
            tokens=self.tokens[: prompt_length + end],
            response_length=end,
            response=self.template.plain_text(self.last_answer, self.messages[num_messages - 1]["content"]),
            loss_mask=self.loss_mask[:end],
            rollout_log_probs=self.log_probs[:end],
            metadata={**like.metadata, "messages": self.messages[:num_messages]},
            metrics=dict(like.metrics),
            columns=like.columns | columns,
        )
        self.answers.fork().fill(sample)
        return sample


class Answers:
    """Adds up what the engine reported of a sample's answers: `add` each, then `fill` the sample.

    Keeps only totals, not the engine's `meta_info` with its row for each token.
    """

    def __init__(self) -> None:
        #: finish reason of the last answer; None before the first
        self.finish_reason: str | None = None
        #: weight versions of all answers, in order, without repeats
        self.weight_versions: list[str] = []
        #: (tokens, version) of all answers, in order; their sum is below the policy's tokens if some are not known
        self._spans: tuple[tuple[int, str], ...] = ()
        self._spec: SpecInfo | None = None
        self._cached: float | None = None
        self._abort: str | None = None
        #: the routed experts of all tokens so far, in parts that copies share
        self._routed: tuple[NDArray[np.integer[Any]], ...] = ()

    @classmethod
    def of(cls, sample: Sample) -> Answers:
        """The totals of an interrupted sample's earlier answers; empty for a new sample."""
        answers = cls()
        answers.weight_versions = list(sample.weight_versions)
        if (column := sample.columns.get("weight_version")) is not None and not np.isnan(column).any():
            answers._spans = tuple((1, str(int(version))) for version in column)
        elif len(sample.weight_versions) == 1:
            answers._spans = ((sample.response_length, sample.weight_versions[0]),)
        answers._spec = SpecInfo(**vars(sample.spec_info)) if sample.spec_info.spec_verify_ct else None
        answers._cached = sample.metrics.get("cached_tokens")
        if sample.rollout_routed_experts is not None:
            answers._routed = (sample.rollout_routed_experts,)
        return answers

    def add(self, answer: Generation) -> None:
        """Add the latest answer."""
        meta = answer.meta
        self.finish_reason = answer.finish_reason
        for version in answer.weight_versions:
            if version not in self.weight_versions:
                self.weight_versions.append(version)
        self._spans += _spans(answer)
        if answer.finish_reason == "abort":
            self._abort = abort_message(meta)
        if "spec_verify_ct" in meta:
            self._add_spec_info(meta)
        if (cached := meta.get("cached_tokens")) is not None:
            self._cached = (self._cached or 0.0) + cached
        if answer.routed_experts is not None:
            # Rows that are held stay: like the log-probs, they come from the weights that generated the tokens. The
            # copy lets go of the others.
            known = self.routed_tokens - answer.routed_from
            self._routed = (*self._routed, answer.routed_experts[known:].copy())

    @property
    def routed_tokens(self) -> int:
        """Tokens whose experts are known, for `SamplingParams.routed_from` of the next request.

        An engine asked without it reports the experts of all tokens in every turn.
        """
        return sum(map(len, self._routed))

    def fork(self) -> Answers:
        """An independent copy."""
        other = copy(self)
        other.weight_versions = list(self.weight_versions)
        other._spec = copy(self._spec)
        return other

    def fill(self, sample: Sample) -> None:
        """Set status, failure, weight versions, finish reason and counters of a sample.

        Of a response of several weight versions, the column `weight_version` says which token is of which. Status and
        failure follow from how the last answer ended. The metric `cached_tokens` counts the prompt tokens
        that engines had in their prefix cache, over all answers. `rollout_routed_experts` is set if the engines
        reported the experts of every token but the last.
        """
        sample.weight_versions = list(self.weight_versions)
        sample.finish_reason = self.finish_reason
        sample.spec_info = SpecInfo() if self._spec is None else self._spec
        if self._cached is not None:
            sample.metrics["cached_tokens"] = self._cached
        sample.rollout_routed_experts = self._routed_experts(len(sample.tokens) - 1)
        if (versions := self._token_versions(sample)) is not None:
            sample.columns = {**sample.columns, "weight_version": versions}
        status = _STATUS.get(self.finish_reason or "")
        sample.status = Status.FAILED if status is None else status
        sample.failure = None
        if status is None:
            sample.failure = f"unknown finish reason {self.finish_reason!r}"
        elif status is Status.ABORTED:
            sample.failure = self._abort

    def _routed_experts(self, rows: int) -> NDArray[np.integer[Any]] | None:
        """The routed experts of the first `rows` tokens; None if some are missing."""
        if rows < 1 or self.routed_tokens < rows:
            return None
        if len(self._routed) == 1:
            return self._routed[0][:rows]
        return np.concatenate(self._routed)[:rows]

    def _token_versions(self, sample: Sample) -> NDArray[np.float32] | None:
        """[T] the version of each token, NaN where the policy did not write it; None if one version wrote all."""
        if len(self.weight_versions) < 2 or not all(version.isdecimal() for version in self.weight_versions):
            return None
        source = sample.columns.get("source")
        written = np.ones(sample.response_length, dtype=bool) if source is None else source == SOURCES["policy"]
        counts = [count for count, _ in self._spans]
        if written.sum() != sum(counts):
            return None
        versions = np.full(sample.response_length, np.nan, dtype=np.float32)
        versions[written] = np.repeat([float(version) for _, version in self._spans], counts)
        return versions

    def _add_spec_info(self, meta: Mapping[str, Any]) -> None:
        spec = self._spec = self._spec or SpecInfo()
        spec.spec_accept_token_num += meta.get("spec_num_correct_drafts", 0)
        spec.spec_draft_token_num += meta.get("spec_num_proposed_drafts", 0)
        spec.spec_verify_ct += meta["spec_verify_ct"]
        spec.completion_token_num += meta.get("completion_tokens", 0)


def _sources(tokens: Sequence[int], bare: Sequence[int], control: Collection[int]) -> list[int]:
    """Who wrote each token between two answers: the template or a message.

    Contents hold no control tokens (see `ChatTemplate`), so that these divide `tokens` as they divide `bare`, the
    tokens of the same messages without contents. What both have at the start and at the end of a part is the
    template's.
    """
    parts, others = _parts(tokens, control), _parts(bare, control)
    if len(parts) != len(others):
        others = [[] for _ in parts]
    sources: list[int] = []
    for part, other in zip(parts, others, strict=True):
        start = _alike(part, other)
        end = _alike(part[start:][::-1], other[start:][::-1])
        sources += [SOURCES["template"]] * start + [SOURCES["tool"]] * (len(part) - start - end)
        sources += [SOURCES["template"]] * (end + 1)  # and the control token after the part
    return sources[:-1]


def _parts(tokens: Sequence[int], control: Collection[int]) -> list[list[int]]:
    """What stands between control tokens."""
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token in control:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two lists share at their start."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _spans(answer: Generation) -> tuple[tuple[int, str], ...]:
    """(tokens, version) of one answer, in order; empty if the engine does not say which token is of which version."""
    if len(answer.weight_versions) == 1:
        return ((len(answer.tokens), answer.weight_versions[0]),)
    spans = answer.meta.get("weight_versions") or ()
    return tuple((span["end"] - span["start"], span["version"]) for span in spans)


def abort_message(meta: Mapping[str, Any]) -> str:
    """What is said of a request that the engine aborted, with the reason in its `meta_info`."""
    reason = meta.get("finish_reason")
    message = reason.get("message") if isinstance(reason, Mapping) else None
    return f"the engine aborted the request: {message or 'no reason given'}"
