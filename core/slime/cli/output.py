"""The look of what commands print: colours in a terminal only, long texts in a pager, progress of what takes long.

A pipe or a file gets the bare text, and so does a terminal if NO_COLOR is set. Importing this module loads no rich.
"""

from __future__ import annotations

import codecs
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, TextIO

from slime.cli.text_layout import count

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.text import Text

#: one line: plain, or in parts, each of which may have a style
Line = str | Sequence[str | tuple[str, str]]

#: what is coloured in a plain line, and how: titles, flags, commands, and words for a state
_LOOK: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^(\[{1,2}[\w.]+\]{1,2}|usage:|[a-zA-Z][\w ]*:$|[A-Z]{2}[A-Z ]*$)"), "bold"),
    (re.compile(r"(?<![\w`/.-])--[a-zA-Z][\w.-]*"), "cyan"),
    (re.compile(r"`[^`]+`"), "cyan"),
    (re.compile(r"^problem\b|(?<= )broken(?= )|(?<= )clash(?= )|^broken\b"), "bold red"),
    (re.compile(r"^notes?\b"), "yellow"),
    (re.compile(r"(?<= )ok(?= )|^ok\b"), "green"),
)
#: what stands for a character that an encoding lacks: a curve has as many characters as before
_PLAIN = {"±": "+/-"} | dict(zip("▁▂▃▄▅▆▇█━─│·…→“”‘’–—×", "_.:-=+*#=-|.~>\"\"''--x", strict=True))  # noqa: RUF001
#: seconds after which a person wants to know what a command does
_SOON_S = 2.0


def is_coloured(stream: TextIO) -> bool:
    """Whether what is printed to a stream may have colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _plain(error: UnicodeError) -> tuple[str, int]:
    """What `codecs` asks for in place of characters that an encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(char, "?") for char in error.object[error.start : error.end]), error.end


codecs.register_error("slime-plain", _plain)


def print_plain(stream: TextIO) -> None:
    """From now on, a stream gets plain substitutes for what its encoding lacks, instead of an error."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="slime-plain")


def put(lines: Iterable[Line]) -> None:
    """Print lines of a run's own texts, without the control characters that they may hold."""
    from slime.observe.terminal import printable

    def clean(line: Line) -> Line:
        if isinstance(line, str):
            return printable(line)
        return [printable(part) if isinstance(part, str) else (printable(part[0]), part[1]) for part in line]

    _print((clean(line) for line in lines), sys.stdout)


def write(text: str, stream: TextIO | None = None) -> None:
    """Print a text of slime's own; a terminal gets flags, titles and states in colour."""
    _print(text.splitlines(), stream or sys.stdout)


def page(text: str) -> None:
    """Print a text; in a terminal with fewer lines, through the user's pager."""
    try:
        viewer = shlex.split(os.environ.get("PAGER", "less"))
    except ValueError:  # a quote that is not closed
        viewer = []
    fits = len(text.splitlines()) < shutil.get_terminal_size().lines
    if fits or not (sys.stdout.isatty() and sys.stdin.isatty()) or not viewer or shutil.which(viewer[0]) is None:
        write(text)
        return
    shown = _ansi(text) if is_coloured(sys.stdout) else text
    # Of less: R shows colours, F prints a short text only, X leaves the text on the screen.
    options = {"LESS": os.environ.get("LESS", "FRX"), "LV": os.environ.get("LV", "-c")}
    # Ctrl-C is the pager's: ended by it, a pager would leave the terminal without echo.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        subprocess.run(viewer, input=shown, text=True, env={**os.environ, **options}, check=False)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress(activity: str, noun: str) -> Iterator[Callable[[int, int], None]]:
    """Tell on standard error how far the body is, from its third second on.

    Args:
        activity: What it does, such as "indexing".
        noun: What it counts, in the singular.

    Yields:
        What the body calls often, with the number that is done and the total, or 0 if that is not known. A terminal
        gets a bar with rate and time left; anything else one line.
    """
    began, told = time.monotonic(), False
    bar: Progress | None = None

    def tell(done: int, total: int) -> None:
        nonlocal told, bar
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done, total=total or None, note=count(done, noun))
        elif not told and time.monotonic() - began > _SOON_S:
            told = True
            if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
                print(f"slime: {activity} {count(total, noun) if total else f'{noun}s'}", file=sys.stderr)
                return
            from rich.console import Console

            from slime.observe.terminal import progress_bar

            bar = progress_bar(Console(file=sys.stderr, no_color=not is_coloured(sys.stderr)))
            bar.add_task(activity, total=total or None, completed=done, note="")
            bar.start()

    try:
        yield tell
    finally:
        if bar is not None:
            bar.stop()


def _print(lines: Iterable[Line], stream: TextIO) -> None:
    if is_coloured(stream):
        from rich.console import Console

        console = Console(file=stream, highlight=False)
        for line in lines:
            console.print(_styled(line), soft_wrap=True)
        return
    for line in lines:
        parts = [line] if isinstance(line, str) else line
        print("".join(one if isinstance(one, str) else one[0] for one in parts), file=stream)


def _styled(line: Line) -> Text:
    from rich.text import Text

    if not isinstance(line, str):
        return Text.assemble(*line)
    text = Text(line)
    for pattern, style in _LOOK:
        text.highlight_regex(pattern, style)
    return text


def _ansi(text: str) -> str:
    """A text with its colours, for a pager."""
    from rich.console import Console

    console = Console(highlight=False)
    with console.capture() as captured:
        for line in text.splitlines():
            console.print(_styled(line), soft_wrap=True)
    return captured.get()
