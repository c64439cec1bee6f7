"""Whether files have changed since they were read."""

from __future__ import annotations

import os
from pathlib import Path

Stamp = tuple[tuple[int, ...], ...]


def stamp_of(*paths: Path | None) -> Stamp:
    """What differs after a change of the files; without those that are None. Raises OSError.

    The time of changes of the mode counts: a file may become readable.
    """
    found = (os.stat(path) for path in paths if path is not None)
    return tuple((each.st_mtime_ns, each.st_ctime_ns, each.st_size, each.st_ino) for each in found)
