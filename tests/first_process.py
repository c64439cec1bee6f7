"""The command line as the first process of a container, whose children orphans become."""

from __future__ import annotations

import ctypes
import os

import service_streamer.serve.cli.main as cli

_PR_SET_CHILD_SUBREAPER = 36

if __name__ == "__main__":  # workers import this file, too
    first, getpid = os.getpid(), os.getpid
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.getpid = lambda: 1 if getpid() == first else getpid()
    cli.main()
