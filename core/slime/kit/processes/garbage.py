"""Garbage and freed memory in processes that live as long as a run."""

import ctypes
import gc

#: new objects after which a process that handles many samples looks for garbage; Python's default is 700. The thousands
#: of samples that are in flight at once are not garbage, and looking through them again and again took as much time as
#: everything else that is done for a sample.
COLLECT_AFTER = 10_000


def keep_out_of_collections() -> None:
    """Exempt what this process has loaded from garbage collection: what stays is not garbage.

    A full collection looks at every object, hundreds of thousands after the imports, and stops the process for 0.2 s.
    """
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """Look for garbage every `COLLECT_AFTER` new objects: for processes that generate.

    Not for training ranks: garbage there may hold activations.
    """
    gc.set_threshold(COLLECT_AFTER)


def return_freed() -> None:
    """Give back to the system what the allocator keeps of memory that was freed."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # only glibc keeps so much
        libc.malloc_trim(ctypes.c_size_t(0))
