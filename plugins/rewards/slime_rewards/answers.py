"""Finds the answer in a response, and the label to compare it with."""

from __future__ import annotations

import json
import re

from slime.plugin import Sample
from slime_rewards.options import AnswerOptions

_BOXED = "\\boxed"
_LOOKED_AT = 10_000
_BOXES = 10


def label_of(sample: Sample) -> str:
    """The label.  Raises `ValueError` for a sample that has none: it cannot be scored."""
    if sample.label is None:
        raise ValueError(f"{named(sample)} has no label to compare with; check --label-key")
    return sample.label


def labels_of(sample: Sample) -> list[str]:
    """The labels: a JSON list of texts means any of them, everything else is one label."""
    label = label_of(sample)
    if label.lstrip().startswith("["):
        try:
            several = json.loads(label)
        except ValueError:
            return [label]
        if isinstance(several, list) and several and all(isinstance(one, str) for one in several):
            return several
    return [label]


def named(sample: Sample) -> str:
    """The sample, so that its row can be found: where its data says so, by that."""
    place = [str(sample.metadata[key]) for key in ("source", "row", "line") if key in sample.metadata]
    return f"sample {sample.index}" + (f" ({' '.join(place)[:100]})" if place else "")


def answer_in(response: str, options: AnswerOptions) -> str | None:
    """The part of the response that answers; None where it has no such part."""
    answer = response
    if options.after is not None:
        _, marker, answer = answer.rpartition(options.after)
        if not marker:
            return None
    if options.tag is not None:
        before, end, _ = answer.rpartition(f"</{options.tag}>")
        _, begin, answer = before.rpartition(f"<{options.tag}>")
        if not (begin and end):
            return None
    return last_boxed(answer) if options.boxed else answer


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` whose braces match; also `\boxed 5`, up to white space or `$`.

    Looks at the last 10,000 characters and the last ten boxes, so that no text takes long.
    """
    text = text[-_LOOKED_AT:]
    end = len(text)
    for _ in range(_BOXES):
        start = text.rfind(_BOXED, 0, end)
        if start < 0:
            break
        rest = text[start + len(_BOXED) :].lstrip(" ")
        content = _braced(rest) if rest.startswith("{") else _word(rest)
        if content is not None:
            return content
        end = start
    return None


def _word(text: str) -> str | None:
    found = re.match(r"[^\s${}]+", text)
    return found.group() if found else None


def _braced(text: str) -> str | None:
    """The content of the braces that `text` begins with; None where they are not closed."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if brace.group() == "{":
            depth += 1
        elif brace.group() == "}":
            depth -= 1
            if depth == 0:
                return text[1 : brace.start()]
    return None
