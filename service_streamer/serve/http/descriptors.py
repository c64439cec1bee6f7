"""How many connections a process may have: as many as its limit of open files allows."""

from __future__ import annotations

import contextlib
import resource

#: Connections of one process, however many files it may open. Arbitrary; bounds their memory.
_MOST = 1 << 14

#: Open files that macOS allows where the hard limit is infinite.
_OPEN_MAX = 10240


def max_connections() -> int:
    """Raise the soft limit of open files to the hard one; returns the bound that follows.

    The soft limit is often 1,024, for programs that use ``select``. The bound is half of the limit:
    TLS handshakes, refused connections, gRPC, pools and models need files, too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, max(soft, _OPEN_MAX)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if limit == resource.RLIM_INFINITY else min(_MOST, limit // 2)
