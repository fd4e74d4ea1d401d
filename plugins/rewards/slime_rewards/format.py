"""Reward for a response in the required format."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slime.errors import ConfigError
from slime.plugin import Context, Reward, Sample
from slime_rewards.options import FormatOptions


class Format:
    """`hit` for a response in the required format, `miss` for any other.

    With `tags` A and B the format is `<A>...</A><B>...</B>`: each tag once, in this order, with content, and with only
    white space between and around them. The opening `<A>` may be missing, since chat templates of reasoning models
    write it themselves, behind the prompt. Part `tags`: the share of tags that are opened once and closed once,
    anywhere in the response. An empty response does not have the format.

    With `pattern` the regular expression must match the whole response; `.` also matches line ends. If matching does
    not end, the worker process is killed at the reward's deadline and the sample fails.
    """

    def __init__(self, options: FormatOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        """Initialize.

        Raises:
            ConfigError: `pattern` is not a valid regular expression.
        """
        self._options = options
        self._pattern: re.Pattern[str] | None = None
        if options.pattern is not None:
            try:
                self._pattern = re.compile(options.pattern, re.DOTALL)
            except re.error as error:
                raise ConfigError(f"pattern {options.pattern!r} is not a regular expression: {error}") from None

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return [self._score(sample.response) for sample in samples]

    def _score(self, response: str) -> Reward:
        if self._pattern is not None:
            return Reward(self._value(self._pattern.fullmatch(response) is not None))
        tags = self._options.tags
        if tags and f"</{tags[0]}>" in response and not re.search(rf"<\s*{re.escape(tags[0])}", response):
            response = f"<{tags[0]}>{response}"  # the template has opened it
        whole = [response.count(f"<{tag}>") == 1 == response.count(f"</{tag}>") for tag in tags]
        share = sum(whole) / len(tags) if tags else 1.0
        return Reward(self._value(all(whole) and _in_order(response, tags)), {"tags": share})

    def _value(self, hit: bool) -> float:
        return self._options.hit if hit else self._options.miss


def _in_order(response: str, tags: Sequence[str]) -> bool:
    """Whether the response consists of these tags, one after the other, each with content."""
    rest = response.strip()
    for tag in tags:
        if not rest.startswith(f"<{tag}>"):
            return False
        content, end, rest = rest[len(tag) + 2 :].partition(f"</{tag}>")
        if not end or not content.strip():
            return False
        rest = rest.lstrip()
    return not rest
