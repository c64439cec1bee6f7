"""Whether this system has what shared pools are made of."""

from __future__ import annotations

import os
import socket

#: Memory without a name; the end of a process that is no child; the user at the other end of a
#: connection; descriptors that arrive one message at a time.
_NEEDED = (
    (os, "memfd_create"),
    (os, "pidfd_open"),
    (socket, "SO_PEERCRED"),
    (socket, "SOCK_SEQPACKET"),
)


def why_unsupported() -> str:
    """Why no pool can be shared here, and what to do; empty if one can."""
    missing = [name for module, name in _NEEDED if not hasattr(module, name)]
    if not missing:
        return ""
    return (
        f"a shared pool needs Linux: this system has no {', '.join(missing)}; use one process "
        "with a pool of its own (serve: --web-workers 1), or share workers over Redis"
    )
