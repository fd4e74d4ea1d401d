"""A conversation as the engine saw it: token ids, which of them the policy wrote, and their log-probs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from slime.chat.answers import Answers
from slime.chat.template import ChatTemplate
from slime.plugin import Generation
from slime.types import Sample


class Conversation:
    """Grows by answers and by messages between them; `to_sample` makes a training sample of it.

        talk = Conversation(template, sample.tokens)
        answer = await policy.generate(talk.tokens, sampling, session=str(sample.index))
        text = talk.generated(answer)
        talk.add([{"role": "tool", "content": "4"}])
        ...
        return [talk.to_sample(sample)]

    The next request is always the tokens of the last one, its answer, and the tokens of what is new.
    """

    __slots__ = ("_answers", "_last", "_prompt", "log_probs", "loss_mask", "messages", "template", "tokens")

    def __init__(
        self, template: ChatTemplate, tokens: Sequence[int], *, prompt: str | list[dict[str, Any]] | None = None
    ) -> None:
        """A conversation that begins with the prompt's `tokens` [P].

        prompt   what the tokens were made of, where that is not the `prompt` of the sample it will become
        """
        self.template = template
        #: [P + T] prompt, answers and messages
        self.tokens: list[int] = list(tokens)
        #: [T] 1 where the policy wrote the token
        self.loss_mask: list[int] = []
        #: [T] the engine's, 0 where the policy did not write the token
        self.log_probs: list[float] = []
        #: answers and messages after the prompt, as text
        self.messages: list[dict[str, Any]] = []
        self._prompt = prompt
        self._answers = Answers()
        #: where the last answer begins and ends in the response
        self._last = (0, 0)

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
        """The engine's word for how the last answer ended; None before the first."""
        return self._answers.finish_reason

    @property
    def last_answer(self) -> list[int]:
        """The tokens of the last answer, as the engine gave them."""
        start, end = (place + self.prompt_length for place in self._last)
        return self.tokens[start:end]

    def generated(self, answer: Generation) -> str:
        """Append what the policy answered to `tokens`.

        Returns its text for parsers: special tokens are kept, but for the one that ends the answer.
        """
        start = len(self.loss_mask)
        self.tokens.extend(answer.tokens)
        self.loss_mask.extend([1] * len(answer.tokens))
        self.log_probs.extend(answer.log_probs)
        self._last = (start, len(self.loss_mask))
        self._answers.add(answer)
        text = self.template.text(answer.tokens)
        self.messages.append({"role": "assistant", "content": text})
        return text

    def continuation(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens that `add(messages)` would append: the way to see whether there is room."""
        return self.template.continuation(messages, self.last_answer if self._last[1] == len(self.loss_mask) else ())

    def add(self, messages: Sequence[Mapping[str, Any]], tokens: Sequence[int] | None = None) -> None:
        """Append messages after an answer, and the generation prompt; none of it is trained on.

        tokens   what `continuation(messages)` returned, if it was asked

        Raises `ValueError` where there is no answer before them, or the template refuses them.
        """
        if self._last[1] != len(self.loss_mask) or not self.messages:
            raise ValueError("messages follow an answer; add all of a turn in one call")
        new = self.continuation(messages) if tokens is None else tokens
        self.tokens.extend(new)
        self.loss_mask.extend([0] * len(new))
        self.log_probs.extend([0.0] * len(new))
        self.messages.extend(dict(message) for message in messages)

    def fork(self, *, train_past: bool = False) -> Conversation:
        """A copy that goes on by itself, for another branch.

        train_past   whether the answers so far are trained on in the copy as well.  By default only the original
                     trains on them, so that no answer counts twice
        """
        other = copy(self)
        other.tokens, other.log_probs = list(self.tokens), list(self.log_probs)
        other.loss_mask = list(self.loss_mask) if train_past else [0] * len(self.loss_mask)
        if not train_past:
            other.log_probs = [0.0] * len(self.loss_mask)
        other.messages = list(self.messages)
        other._answers = self._answers.fork()
        return other

    def to_sample(self, like: Sample) -> Sample:
        """A finished sample: `like`, the sample that was asked for, with this conversation as its response.

        Everything that engines report is filled in; status and finish reason are those of the last answer.
        `response` is the last answer's text without special tokens; the metadata's `messages` are answers and messages
        after the prompt.  What was added after the last answer is left out: no engine has seen it.

        Several samples of one call share the rollout and count once.  Raises `ValueError` where nothing was asked.
        """
        end = self._last[1]
        if self.finish_reason is None:
            raise ValueError(f"sample {like.index}: the policy has not answered anything yet")
        prompt_length = self.prompt_length
        spoken = next(n for n in range(len(self.messages), 0, -1) if self.messages[n - 1]["role"] == "assistant")
        sample = replace(
            like,
            prompt=like.prompt if self._prompt is None else self._prompt,
            tokens=self.tokens[: prompt_length + end],
            response_length=end,
            response=self.template.plain_text(self.last_answer, self.messages[spoken - 1]["content"]),
            loss_mask=self.loss_mask[:end],
            rollout_log_probs=self.log_probs[:end],
            metadata={**like.metadata, "messages": self.messages[:spoken]},
            metrics=dict(like.metrics),
        )
        self._answers.fork().fill(sample)
        return sample
