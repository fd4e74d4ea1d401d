"""Reads shell scripts as far as their last commands need it: words, quotes, variables, arrays, sums, sourced files.

Nothing is run. What only a running shell knows, such as the output of a command, is `UNKNOWN` in the words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slime.errors import ConfigError

#: stands in a word for text that only a running shell knows
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_BRANCHES = {"if", "elif", "else", "while", "until", "case"}
#: the variable of a `for`, and its first value if it counts
_LOOP = re.compile(r"(?:\(\(\s*)?([A-Za-z_]\w*)(?:=(\w+))?")
#: `{a..b}` or `{a,b}`, of which only the first value is kept; what is quoted, and `${...}`, stays as it is
_BRACES = re.compile(
    r"""("[^"]*"|'[^']*'|\$\{[^}]*\})"""
    r"|\{(?:(-?\d+|[A-Za-z])\.\.(?:-?\d+|[A-Za-z])(?:\.\.-?\d+)?"
    r"|((?:\$\{[^}]*\}|[^{},])*),(?:\$\{[^}]*\}|[^{}])*)\}"
)
_REDIRECTION = re.compile(r"\d?(<<-?|[<>]+&?|&>)[ \t]*('[^'\n]*'|\"[^\"\n]*\"|\([^()\n]*\)|[^\s;|&]*)")
#: words before a command that do not belong to it
_BEFORE = {*_BRANCHES, "then", "do", "fi", "done", "esac", "{", "}", "!", "time", "exec", "nohup"}
_DECLARES = {"export", "declare", "readonly", "local", "typeset", "-a", "-r", "-x", "-gx", "-i"}
#: files that source each other
_DEEPEST = 8


@dataclass
class Script:
    """What a script says: its commands, each with its words expanded, and what to know of how it was read."""

    commands: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_script(path: Path, text: str, environment: Mapping[str, str] = os.environ) -> Script:
    """The commands of a script.

    Args:
        path: Its file, for sourced files and messages.
        text: What it contains.
        environment: Variables that the script does not set itself.

    Raises:
        ConfigError: A quote or a bracket is not closed.
    """
    reader = _Reader(path, environment)
    reader.read(path, text, 0)
    for name in sorted(reader.unset):
        reader.script.notes.append(f"${name} is not set, neither by the script nor here: it was read as empty")
    return reader.script


class _Reader:
    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        self.script = Script()
        self.unset: set[str] = set()
        self._path, self._environment = path, environment
        self._values: dict[str, list[str]] = {}  # an array has several values

    def read(self, path: Path, text: str, depth: int) -> None:
        """Read the commands of one file, in order."""
        branches = 0
        for line, pieces in _commands(path, text):
            raw = list(pieces)
            while raw and raw[0] in _BEFORE:
                branches += raw[0] in _BRANCHES
                del raw[0]
            if raw[:1] == ["for"]:
                self._loop(path, raw[1:], line)
                continue
            words, only_values = self._assign(raw)
            if only_values or not words:
                continue
            if words[0] in ("source", "."):
                self._source(path, words[1:2], line, depth)
            else:
                self.script.commands.append(words)
        if branches:
            self.script.notes.append(f"{path.name} has branches: all of them were read, the later ones last")

    def _assign(self, raw: list[str]) -> tuple[list[str], bool]:
        """Carry out the assignments that a command begins with; its other words, expanded."""
        rest, declares = list(raw), False
        while rest:
            if rest[0] in _DECLARES:
                declares = True
            elif (match := _ASSIGNED.fullmatch(rest[0])) is not None:
                self._set(match[1], match[3], adds=bool(match[2]))
            else:
                break
            del rest[0]
        return [word for raw_word in rest for word in self._expand(raw_word)], declares or not rest

    def _loop(self, path: Path, raw: list[str], line: int) -> None:
        """Read the variable of `for NAME in VALUES` or `for ((NAME=VALUE; ...))` as its first value."""
        if not raw or (match := _LOOP.match(raw[0])) is None:
            return
        name, counted = match.groups()
        value = next((word for one in raw[2:] for word in self._expand(_first_of_braces(one))), counted or UNKNOWN)
        self._values[name] = [value]
        told = "which only a shell knows" if UNKNOWN in value else f"{value}, its first value"
        self.script.notes.append(f"${name} of the loop in {path.name}:{line} was read as {told}; this is one run of it")

    def _set(self, name: str, raw: str, *, adds: bool) -> None:
        if raw.startswith("("):
            values = [word for piece in _split(raw[1:-1]) for word in self._expand(piece)]
            self._values[name] = (self._values.get(name, []) if adds else []) + values
        else:
            value = " ".join(self._expand(f'"{raw}"' if raw and raw[0] not in "\"'" else raw))
            self._values[name] = [(self._text(name) if adds else "") + value]

    def _source(self, path: Path, names: list[str], line: int, depth: int) -> None:
        for name in names:
            if UNKNOWN in name:
                self.script.notes.append(f"{path.name}:{line} reads a file whose name only a shell knows: not read")
                continue
            file = path.parent / name
            if depth >= _DEEPEST or not file.is_file():
                self.script.notes.append(f"{path.name}:{line} reads {file}, which is not there: not read")
                continue
            self.read(file, file.read_text(encoding="utf-8", errors="replace"), depth + 1)

    def _expand(self, raw: str) -> list[str]:
        """The words that one word of the script becomes. Outside of quotes, values are split at blanks."""
        words, open_word = [""], False
        for quote, piece in _pieces(raw):
            if quote == "'":
                words[-1], open_word = words[-1] + piece, True
                continue
            for kind, part in _parts(piece):
                values = [part] if kind == "text" else self._value(part)
                if kind == "value" and quote == "":
                    values = [word for value in values for word in value.split()]
                open_word = open_word or bool(quote) or bool(values)
                for index, value in enumerate(values):
                    if index:
                        words.append("")
                    words[-1] += value
        return words if open_word else []

    def _text(self, name: str) -> str:
        return " ".join(self._values.get(name, [self._environment.get(name, "")]))

    def _value(self, said: str) -> list[str]:
        """The values of `$said`: a name, `{...}`, `(...)` or `((...))`."""
        if said.startswith("(("):
            return [self._sum(said[2:-2])]
        if said.startswith(("(", "`")):
            return [str(self._path.parent.resolve())] if re.search(r"BASH_SOURCE|dirname", said) else [UNKNOWN]
        inner = said[1:-1] if said.startswith("{") else said
        if inner in ("@", "*"):
            return []
        match = re.fullmatch(r"(#?)(\w+)(\[[@*]\]|\[\d+\])?(?:(:?[-=+?]|##?|%%?|//?)(.*))?", inner, re.DOTALL)
        if match is None or inner.isdigit() or match[1]:
            return [UNKNOWN]
        name, index, operation, argument = match[2], match[3] or "", match[4] or "", match[5] or ""
        values = self._values.get(name, [self._environment[name]] if name in self._environment else [])
        if index not in ("[@]", "[*]"):
            values = values[int(index[1:-1] or 0) :][:1] if index else values[:1]
        if operation in ("-", ":-", "=", ":="):
            return values if values and any(values) else [" ".join(self._expand(f'"{_bare(argument)}"'))]
        if operation in ("+", ":+"):
            return [" ".join(self._expand(f'"{_bare(argument)}"'))] if values else []
        if operation in ("##", "#", "%", "%%", "/", "//"):
            return [_trimmed(value, operation, argument) for value in values]
        if not values and name not in self._values:
            self.unset.add(name)
        return values

    def _sum(self, said: str) -> str:
        """The value of `$((said))`, if it is whole numbers with + - * / and brackets."""
        names = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: self._text(match[1]) or "0", said)
        if not re.fullmatch(r"[\d\s+*/()-]{1,200}", names) or "**" in names:
            return UNKNOWN
        try:
            return str(int(eval(names.replace("/", "//").replace("////", "//"), {"__builtins__": {}})))
        except (SyntaxError, ArithmeticError, TypeError):
            return UNKNOWN


def _first_of_braces(raw: str) -> str:
    return _BRACES.sub(lambda match: match[1] or match[2] or match[3] or "", raw)


def _bare(argument: str) -> str:
    return argument[1:-1] if len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "\"'" else argument


def _trimmed(value: str, operation: str, pattern: str) -> str:
    """`${value##pattern}` and the like, for patterns that are `*` and one character, as paths are cut with."""
    match operation, pattern.replace("*", ""):
        case "##", mark if mark and pattern.startswith("*"):
            return value.rpartition(mark)[2]
        case "%", mark if mark and pattern.endswith("*"):
            return value.rpartition(mark)[0] or value
        case (("%" | "%%"), mark) if mark and "*" not in pattern:
            return value.removesuffix(mark)
        case (("/" | "//"), _) if "/" in pattern and "*" not in pattern:
            old, _, new = pattern.partition("/")
            return value.replace(old, new, 1 if operation == "/" else -1)
    return UNKNOWN


def _commands(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """The commands of a script, each with its first line and its words as they are written."""
    text = text.replace("\r\n", "\n")
    position, line, words, first = 0, 1, list[str](), 1
    heredocs: list[str] = []
    while position < len(text):
        character = text[position]
        if text.startswith("\\\n", position):
            position, line = position + 2, line + 1
        elif character in " \t":
            position += 1
        elif character == "#":
            position = _end_of_line(text, position)
        elif character in ";&|\n" or (character == ")" and not words):
            if words:
                yield first, words
            words = []
            position, line = position + 1, line + (character == "\n")
            if character == "\n" and heredocs:
                position, line = _after_heredocs(text, position, line, heredocs)
        elif character in "<>" or re.match(r"\d[<>]", text[position:]):
            position = _after_redirection(text, position, heredocs)
        else:
            if not words:
                first = line
            end = _end_of_word(path, text, position, line)
            words.append(text[position:end])
            line += text.count("\n", position, end)
            position = end
    if words:
        yield first, words


def _end_of_line(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _after_redirection(text: str, position: int, heredocs: list[str]) -> int:
    match = _REDIRECTION.match(text, position)
    if match is None:
        return position + 1
    if match[1].startswith("<<") and match[2]:
        heredocs.append(match[2].strip("\"'"))
    return max(match.end(), position + 1)


def _after_heredocs(text: str, position: int, line: int, heredocs: list[str]) -> tuple[int, int]:
    for mark in heredocs:
        end = re.compile(rf"^[ \t]*{re.escape(mark)}[ \t]*$", re.MULTILINE).search(text, position)
        after = len(text) if end is None else min(end.end() + 1, len(text))
        line, position = line + text.count("\n", position, after), after
    heredocs.clear()
    return position, line


def _end_of_word(path: Path, text: str, position: int, line: int) -> int:
    """Where the word ends that begins at `position`: at a blank outside of quotes and brackets."""
    start = position
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
        elif (
            character in "\"'`"
            or text.startswith(("$(", "${"), position)
            or (character == "(" and text[position - 1] == "=" and position > start)
        ):
            position = _closed(path, text, position, line)
        elif character in " \t\n;&|<>" or (character == ")" and position > start):
            return position
        else:
            position += 1
    return position


def _closed(path: Path, text: str, position: int, line: int) -> int:
    """The position after what closes the quote or bracket at `position`."""
    start, opened = position, text[position]
    if opened == "$":
        position, opened = position + 1, text[position + 1]
    close = {"(": ")", "{": "}"}.get(opened, opened)
    position += 1
    while position < len(text) and text[position] != close:
        character = text[position]
        if opened == "(" and character == "#" and text[position - 1] in " \t\n":
            position = _end_of_line(text, position)
        elif character == "\\" and opened != "'":
            position += 2
        elif opened != "'" and (text.startswith(("$(", "${"), position) or (opened in "({" and character in "\"'`(")):
            position = _closed(path, text, position, line)
        else:
            position += 1
    if position >= len(text):
        raise ConfigError(f"{path}:{line}: {text[start : start + 2].strip()!r} is opened and not closed")
    return position + 1


def _split(text: str) -> Iterator[str]:
    """The words of an array as they are written."""
    for _, words in _commands(Path("array"), text):
        yield from words


def _pieces(raw: str) -> Iterator[tuple[str, str]]:
    """The parts of a word, with the quote around each; a backslash outside of quotes is resolved."""
    position = 0
    while position < len(raw):
        quote = raw[position] if raw[position] in "\"'" else ""
        if quote:
            end = _closed(Path("word"), raw, position, 1)
            yield quote, raw[position + 1 : end - 1]
        elif raw[position] == "\\":
            end = position + 2
            yield "'", raw[position + 1 : end].replace("\n", "")
        else:
            end = position
            while end < len(raw) and raw[end] not in "\"'\\":
                end = _closed(Path("word"), raw, end, 1) if raw.startswith(("$(", "${"), end) else end + 1
            yield "", raw[position:end]
        position = end


def _parts(piece: str) -> Iterator[tuple[str, str]]:
    """Plain text and values of a part of a word: ("text", ...) and ("value", what follows the dollar)."""
    position = 0
    while position < len(piece):
        match = re.compile(r"\$([A-Za-z_]\w*|\d|[@*#?$!-])").match(piece, position)
        if piece.startswith(("$(", "${"), position):
            end = _closed(Path("word"), piece, position, 1)
            yield "value", piece[position + 1 : end]
        elif piece[position] == "`":
            end = _closed(Path("word"), piece, position, 1)
            yield "value", piece[position:end]
        elif match is not None:
            end = match.end()
            yield "value", match[1]
        elif piece[position] == "\\" and piece[position + 1 : position + 2] in ('"', "\\", "$", "`", "\n"):
            end = position + 2
            yield "text", piece[position + 1 : end].replace("\n", "")
        else:
            end = position + 1
            yield "text", piece[position:end]
        position = end
