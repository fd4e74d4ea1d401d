"""Finds the answer, code or document in a response, and the label to compare it with."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator

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
_OPENING = re.compile(r"([ \t]*+)(`{3,}+|~{3,}+)\s*+([\w+-]*+)[^`]*+$")
#: spaces by which the end of a block may be indented more than its beginning
_MORE_INDENTED = 3
#: the tags of thinking
_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)
_CLOSING_TAG = re.compile(r"</think>", re.IGNORECASE)
#: tags of thinking in one response; with more it says nothing, so that any is read quickly
_MOST_TAGS = 1_000
#: characters beside a tag that may quote it
_NEARBY = 200
_TRIPLE_QUOTES = re.compile(r"\"{3}|'{3}")
_COMMENT = re.compile(r"(?:^|\s)#(?!#)")
#: quotation marks, and no apostrophes
_QUOTES = (re.compile('"'), re.compile("`"), re.compile(r"(?<!\w)'|'(?!\w)"))
#: what stands before `</think>` right between quotation marks, and behind it
_QUOTE_BEFORE = re.compile(r"(?<![^\s([{,:=+])[bfru]{0,2}([\"'`])(?:<think>[^\"'`\n]*+)?$", re.IGNORECASE)
_QUOTE_BEHIND = re.compile(r"(?:\\n)*+([\"'`])")


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

    A response whose thinking is not closed has said nothing yet. The tags may be in capitals, and tags that an answer
    quotes are a part of it. `<think>` is quoted in a fenced block or between triple quotes, and in quotation marks,
    backticks or a comment within a line. The prompt may have opened the thinking, which says anything, so `</think>` is
    quoted only right between quotation marks, and in a block or string that is closed: behind a `<think>` there, and
    in a block also in quotation marks or a comment.
    """
    start = 0
    for _ in range(_MOST_TAGS):
        if (tag := _next_tag(response, start)) is None:
            return response[start:]
        closing = tag if tag[1] else _CLOSING_TAG.search(response, tag.end())
        if closing is None:
            break
        start = closing.end()
    return ""


def _next_tag(text: str, start: int) -> re.Match[str] | None:
    """The first tag of thinking from `start` on that is not quoted."""
    if _TAG.search(text, start) is None:
        return None
    at, in_string, opened = start, False, False
    is_closed: bool | None = None  # whether the block is, once it is asked
    for line, block, is_content in _fenced_lines(text, start):
        end = at + len(line)
        if not (is_content or in_string):
            opened, is_closed = False, None
        for tag in _TAG.finditer(text, at, end):
            if not tag[1]:
                if not (is_content or in_string or _is_in_quotes(text, start, tag)):
                    return tag
                opened = True
            elif not _is_literal(text, start, tag):
                if is_content and block is not None and is_closed is None:
                    is_closed = _is_closed(text, end + 1, block)
                quotes = opened or (is_content and _is_in_quotes(text, start, tag))
                if not (quotes and (is_closed if is_content else in_string)):
                    return tag
        if not is_content and len(_TRIPLE_QUOTES.findall(line)) % 2 == 1:
            in_string = not in_string and _TRIPLE_QUOTES.search(text, end) is not None
        at = end + 1
    return None


def _is_closed(text: str, start: int, opening: re.Match[str]) -> bool:
    """Whether a fenced block ends behind `start`, and before the beginning of another."""
    for line, block, is_content in _fenced_lines(text, start, opening):
        if block is None:
            return True
        if is_content and (another := _OPENING.match(line)) is not None and another[3]:
            return False
    return False


def _is_literal(text: str, start: int, tag: re.Match[str]) -> bool:
    """Whether `</think>` stands right between quotation marks, alone or with its beginning."""
    before = _QUOTE_BEFORE.search(text[max(start, tag.start() - _NEARBY) : tag.start()])
    behind = _QUOTE_BEHIND.match(text, tag.end(), tag.end() + _NEARBY)
    return before is not None and behind is not None and before[1] == behind[1]


def _is_in_quotes(text: str, start: int, tag: re.Match[str]) -> bool:
    """Whether a tag is in a comment, or between quotation marks or backticks, in its line from `start` on."""
    before = text[max(start, tag.start() - _NEARBY) : tag.start()].rpartition("\n")[2]
    behind = text[tag.end() : tag.end() + _NEARBY].partition("\n")[0]
    return _COMMENT.search(before) is not None or any(
        len(quote.findall(before)) % 2 and quote.search(behind) for quote in _QUOTES
    )


def _fenced_lines(
    text: str, start: int = 0, opened: re.Match[str] | None = None
) -> Iterator[tuple[str, re.Match[str] | None, bool]]:
    """Each line, with the opening of the fenced block that it begins or is in, and whether it is content of one.

    As in CommonMark, a block begins with a line of at least three backticks or tildes, and ends at a line of only
    these, at least as many and indented by at most three spaces more: fences in a docstring do not end it. The text may
    start in a block, that of `opened`.
    """
    while start <= len(text):
        end = text.find("\n", start)
        line = text[start : end if end >= 0 else len(text)]
        start = (end if end >= 0 else len(text)) + 1
        if opened is None:
            opened = _OPENING.match(line)
            yield line, opened, False
            continue
        closing = line.strip()
        indent = len(line) - len(line.lstrip(" \t"))
        if (
            len(closing) >= len(opened[2])
            and closing == opened[2][0] * len(closing)
            and indent <= len(opened[1]) + _MORE_INDENTED
        ):
            opened = None
        yield line, opened, opened is not None


def last_fenced(response: str, names: Collection[str] = ()) -> str | None:
    """The content of the last fenced block; None if there is no block.

    Its lines lose the indentation of its beginning, for blocks in lists. A block that is never closed extends to the
    end, since the response may have been cut off; but an empty one at the end is a stray fence and does not hide the
    block before.

    Args:
        response: The text.
        names: What may be written behind the beginning, such as the language. The last block with such a name counts,
            before those without a name; one with another name, such as `bash`, counts only if there is no other.
    """
    blocks: list[tuple[str, list[str]]] = []
    opened: re.Match[str] | None = None
    for line, opened, is_content in _fenced_lines(response):
        if opened is not None and is_content:
            shared = len(line) - len(line.lstrip(opened[1])) if opened[1] else 0
            blocks[-1][1].append(line[min(len(opened[1]), shared) :])
        elif opened is not None:
            blocks.append((opened[3].casefold(), []))
    if opened is not None and len(blocks) > 1 and not "".join(blocks[-1][1]).strip():
        blocks.pop()
    if not blocks:
        return None
    named = [lines for name, lines in blocks if name in names]
    unnamed = [lines for name, lines in blocks if not name or not names]
    return "\n".join((named or unnamed or [blocks[-1][1]])[-1])
