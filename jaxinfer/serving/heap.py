"""What the C library does with memory that was freed: glibc keeps it unless told otherwise."""

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""
LARGE_ARRAY = 4 << 20
KEPT_ARRAYS = 16
"""How many freed arrays a heap keeps at its end, of the largest that are not large."""


def map_large_arrays(smallest: int = LARGE_ARRAY) -> None:
    """Have glibc give every large array pages of its own, which go back to the system when it is freed.

    Otherwise its heaps, one for each thread that reads or copies, keep half a GiB of what passing layers have left. The
    smaller ones stay in the heaps: each would else be given back when it is freed, and mapped anew in the next pass.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, smallest)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_ARRAYS * smallest)


def trim_heap() -> None:
    """Give the system back what was freed: a closed model's caches, weights and programs, else kept in the heaps."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
