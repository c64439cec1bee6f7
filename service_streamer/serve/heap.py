"""Memory for large bodies, which come and go with each request.

By default the C library gives a block of more than 128 kB back to the system when it is freed, and
later the end of the heap as soon as it is about twice as large as such a block. The next body gets
new pages, which the system has to clear: for arrays of 602 kB over HTTP that was 40 % of the web
process's time.
"""

from __future__ import annotations

import contextlib
import ctypes

#: Names of glibc's <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

#: Freed bytes that stay with this process. Arbitrary: four of the largest bodies, by default.
_KEPT = 64 << 20

#: Blocks below this are of the heap. The most that glibc allows.
_LARGEST = 32 << 20


def keep_freed_memory() -> None:
    """Have this process keep what it frees, up to a bound; no effect without glibc."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)
