"""Gives memory of tensors back to the kernel, and takes it again on first use.

The pages of a tensor are dropped, the tensor stays: its address, shape and views. What is read before it was written
again is zero.
"""

from __future__ import annotations

import array
import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

_PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)
#: where Linux says which pages this process uses
USED_PAGES = Path("/proc/self/pagemap")
#: of an entry there: the page is swapped out, or mapped by this process alone. "In memory" (bit 63) would not do: a
#: page that is read before it is written is the kernel's page of zeros (Documentation/admin-guide/mm/pagemap.rst)
_WRITTEN = 1 << 62 | 1 << 56
_ENTRY_BYTES = 8


def drop_pages(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Give back the whole pages of these tensors' memory; addresses and sizes of what was given back.

    Tensors may share memory. The parts of pages at both ends, which may belong to something else, stay.

    Raises:
        OSError: The kernel refuses.
    """
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    dropped = []
    for address, size in storages.items():
        first = -(-address // _PAGE) * _PAGE
        length = (address + size) // _PAGE * _PAGE - first
        if length > 0:
            if _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), f"madvise of {length} bytes")
            dropped.append((first, length))
    return dropped


def pages_missing(ranges: Iterable[tuple[int, int]]) -> int:
    """How many pages of what `drop_pages` returned have not been written since.

    Pages that this process shares with a living fork count as missing.
    """
    missing = 0
    with USED_PAGES.open("rb", buffering=0) as file:
        for first, length in ranges:
            file.seek(first // _PAGE * _ENTRY_BYTES)
            entries = array.array("Q", file.read(length // _PAGE * _ENTRY_BYTES))
            missing += sum(1 for entry in entries if not entry & _WRITTEN)
    return missing
