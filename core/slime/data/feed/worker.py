"""The program of a data worker: `python -m slime.data.feed.worker`.

It reads jobs from its standard input and writes rows to its standard output until the input ends, which it does when
the process that started it closes it or dies.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import IO

from slime.data.feed.frames import FAULT, ROWS, pack_drawn, read_frame, write_frame
from slime.data.feed.work import Work
from slime.errors import SlimeError


def serve(jobs: IO[bytes], answers: IO[bytes]) -> None:
    """Perform jobs until there are no more."""
    first = read_frame(jobs)
    if first is None:
        return
    path, content = pickle.loads(first)
    sys.path[:] = path
    readers, recipe, form, max_tokens = pickle.loads(content)
    work = Work(readers, None if recipe is None else recipe.make(), form, max_tokens)
    while (job := read_frame(jobs)) is not None:
        try:
            answer = ROWS + pack_drawn(work.perform(pickle.loads(job)))
        except SlimeError as error:
            answer = FAULT + str(error).encode()
        except Exception as error:  # noqa: BLE001 - the boundary of the process: the other side says which rows it was
            answer = FAULT + f"{type(error).__name__}: {error}".encode()
        write_frame(answers, answer)


def main() -> None:
    """Keep standard output to the answers: what libraries print goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it is told, and closes the input
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        serve(sys.stdin.buffer, answers)
    except BrokenPipeError:
        os._exit(0)  # nobody wants the answer any more


if __name__ == "__main__":
    main()
