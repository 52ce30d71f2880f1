"""The C library's heap: glibc keeps freed memory unless told otherwise."""

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters from glibc's malloc.h."""
LARGE_ARRAY = 4 << 20
KEPT_ARRAYS = 16
"""Number of freed arrays that a heap keeps at its end, counted in the largest that are not large."""


def map_large_arrays(smallest: int = LARGE_ARRAY) -> None:
    """Have glibc map every large array, so that its pages go back to the system when it is freed.

    Otherwise its heaps, one for each thread that reads or copies, keep half a GiB of what passing layers have left.
    Smaller arrays stay in the heaps: otherwise each would be given back when it is freed, and mapped again in the next
    pass.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, smallest)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_ARRAYS * smallest)


def trim_heap() -> None:
    """Give freed memory back to the system: a closed model's caches, weights and programs would stay in the heaps."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
