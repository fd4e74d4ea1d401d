"""Is the response in the format that was asked for?"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slime.errors import ConfigError
from slime.plugin import Context, Reward, Sample
from slime_rewards.options import FormatOptions


class Format:
    """`hit` for a response in the format, `miss` for any other.

    The format is `<A>...</A><B>...</B>` for the `tags` A, B: each once, in this order, none empty, nothing but white
    space between and around them.  The part `tags` is the share of the tags that are opened once and closed once,
    wherever they stand.  Or it is the regular expression `pattern`, which must match the whole response, with `.`
    matching line ends too.  An empty response is not in a format with tags.  A pattern that backtracks without end is
    ended with its worker process at the reward's deadline, and the sample fails.
    """

    def __init__(self, options: FormatOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        """Raises `ConfigError` for a pattern that is none."""
        self._options = options
        self._pattern: re.Pattern[str] | None = None
        if options.pattern is not None:
            try:
                self._pattern = re.compile(options.pattern, re.DOTALL)
            except re.error as error:
                raise ConfigError(f"pattern {options.pattern!r} is no regular expression: {error}") from None

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return [self._score(sample.response) for sample in samples]

    def _score(self, response: str) -> Reward:
        if self._pattern is not None:
            return Reward(self._value(self._pattern.fullmatch(response) is not None))
        tags = self._options.tags
        whole = [response.count(f"<{tag}>") == 1 == response.count(f"</{tag}>") for tag in tags]
        share = sum(whole) / len(tags) if tags else 1.0
        return Reward(self._value(all(whole) and _in_order(response, tags)), {"tags": share})

    def _value(self, hit: bool) -> float:
        return self._options.hit if hit else self._options.miss


def _in_order(response: str, tags: Sequence[str]) -> bool:
    """Whether the response is nothing but these tags, one after the other, each with something in it."""
    rest = response.strip()
    for tag in tags:
        if not rest.startswith(f"<{tag}>"):
            return False
        content, end, rest = rest[len(tag) + 2 :].partition(f"</{tag}>")
        if not end or not content.strip():
            return False
        rest = rest.lstrip()
    return not rest
