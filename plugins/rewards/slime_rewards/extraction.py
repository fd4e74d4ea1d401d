"""Finds the answer, code or document in a response, and the label to compare it with."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from slime.plugin import Sample
from slime_rewards.options import AnswerOptions

#: where a box begins
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
#: what LaTeX writes around words, and what stands for it in plain text
_STYLED = re.compile(r"\\(?:text|textbf|textit|textrm|texttt|mathrm|mathbf|mathit|mathsf|mbox)\s*\{([^{}]*)\}")
_PLAIN = (
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\!|(?<=\d)\\,(?=\d)|\\(?:left|right)(?![A-Za-z])|\\[()]|\\?\$"), ""),
    (re.compile(r"\\(?:[,;: ]|q?quad(?![A-Za-z]))|~"), " "),
    (re.compile(r"\\([%#&_{}])"), r"\1"),
)
#: characters at the end of a text, and boxes in it, that are searched: enough for any answer, and quick for any text
_SEARCHED = 10_000
_BOXES = 10
_STYLES = 10
#: indentation, backticks or tildes, and the name behind them, such as the language
_OPENING = re.compile(r"([ \t]*)(`{3,}|~{3,})\s*([\w+-]*)[^`]*$")


def label_of(sample: Sample) -> str:
    """The sample's label.

    Raises:
        ValueError: The sample has no label and cannot be scored.
    """
    if sample.label is None:
        raise ValueError(f"{describe(sample)} has no label to compare with; check --label-key")
    return sample.label


def labels_of(sample: Sample) -> list[str]:
    """The accepted labels: those of a JSON list of strings; any other label is the only one."""
    label = label_of(sample)
    if label.lstrip().startswith("["):
        try:
            several = json.loads(label)
        except ValueError:
            return [label]
        if isinstance(several, list) and several and all(isinstance(one, str) for one in several):
            return several
    return [label]


def describe(sample: Sample) -> str:
    """The sample's index, with the source and row that its metadata states, for messages."""
    row = [str(sample.metadata[key]) for key in ("source", "row", "line") if key in sample.metadata]
    return f"sample {sample.index}" + (f" ({' '.join(row)[:100]})" if row else "")


def answer_in(response: str, options: AnswerOptions) -> str | None:
    """The answer in a response, as plain text; None if a marker that the options require is missing."""
    answer = marked_in(response, options)
    if answer is None or not options.boxed:
        return answer
    boxed = last_boxed(answer)
    return None if boxed is None else plain_text(boxed)


def marked_in(response: str, options: AnswerOptions) -> str | None:
    """The part of a response that `after` and `tag` select, `boxed` aside; None if one of these markers is missing.

    Both are looked for behind the thinking.
    """
    answer = without_thinking(response)
    if options.after is not None:
        _, marker, answer = answer.rpartition(options.after)
        if not marker:
            return None
    if options.tag is not None:
        before, end, _ = answer.rpartition(f"</{options.tag}>")
        _, begin, answer = before.rpartition(f"<{options.tag}>")
        if not (begin and end):
            return None
    return answer


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` whose braces match, or of `\boxed 5` up to white space or `$`.

    `\fbox` is read like `\boxed`. Searches the last 10,000 characters and the last ten boxes.
    """
    text = text[-_SEARCHED:]
    for box in reversed(list(BOX.finditer(text))[-_BOXES:]):
        rest = text[box.end() :].lstrip()
        content = _braced(rest) if rest.startswith("{") else _word(text[box.end() :].lstrip(" "))
        if content is not None:
            return content
    return None


def plain_text(latex: str) -> str:
    r"""Words and numbers without the LaTeX around them: `Paris` of `\text{Paris}`, `1,200` of `1{,}200`, `5` of `$5$`.

    Formulas, such as `\frac{1}{2}`, stay as they are.
    """
    text = latex
    for _ in range(_STYLES):  # from the inside out, for nested styles
        text, count = _STYLED.subn(r"\1", text)
        if not count:
            break
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    return text


def _word(text: str) -> str | None:
    found = re.match(r"(?:\\[A-Za-z]+\s*(?:\{[^{}]*\})+|[^\s${}])+", text)
    return found.group() if found else None


def _braced(text: str) -> str | None:
    """The content of the braces that `text` begins with; None if they are not closed."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if brace.group() == "{":
            depth += 1
        elif brace.group() == "}":
            depth -= 1
            if depth == 0:
                return text[1 : brace.start()]
    return None


def without_thinking(response: str) -> str:
    """What a response says behind its thinking: the text after the last `</think>`, or all of it without one.

    A response whose thinking is not closed has said nothing yet.
    """
    _, end, answer = response.rpartition("</think>")
    if "<think>" in answer:
        return ""
    return answer if end else response


def last_fenced(response: str, names: Collection[str] = ()) -> str | None:
    """The content of the last fenced block; None if there is no block.

    As in CommonMark, a block begins with a line of at least three backticks or tildes, and ends at a line of only
    these, at least as many and indented by at most three spaces more: fences in a docstring do not end it. Its lines
    lose the indentation of its beginning, for blocks in lists. A block that is never closed extends to the end, since
    the response may have been cut off; but an empty one at the end is a stray fence and does not hide the block before.

    Args:
        response: The text.
        names: What may be written behind the beginning, such as the language. The last block with such a name counts,
            before those without a name; one with another name, such as `bash`, counts only if there is no other.
    """
    blocks: list[tuple[str, list[str]]] = []
    closing: re.Pattern[str] | None = None
    indent = ""
    for line in response.split("\n"):
        if closing is not None and closing.fullmatch(line):
            closing = None
        elif closing is not None:
            shared = len(line) - len(line.lstrip(indent)) if indent else 0
            blocks[-1][1].append(line[min(len(indent), shared) :])
        elif (opened := _OPENING.match(line)) is not None:
            indent, fence = opened[1], opened[2]
            closing = re.compile(rf"[ \t]{{0,{len(indent) + 3}}}{fence[0]}{{{len(fence)},}}\s*")
            blocks.append((opened[3].strip().casefold(), []))
    if closing is not None and len(blocks) > 1 and not "".join(blocks[-1][1]).strip():
        blocks.pop()
    if not blocks:
        return None
    named = [lines for name, lines in blocks if name in names]
    unnamed = [lines for name, lines in blocks if not name or not names]
    return "\n".join((named or unnamed or [blocks[-1][1]])[-1])
