"""Makes a process look like one under macOS: what that system lacks is missing, or fails.

Put this folder on ``PYTHONPATH``: the processes that a streamer starts are then alike. Native code
still finds Linux.
"""

import fcntl
import importlib
import mmap
import os
import re
import resource
import select
import selectors
import signal
import socket
import sys
import time

#: Modules of the standard library that look at ``sys.platform`` when they are imported, and would
#: need macOS's own native modules.
_EARLY = "asyncio ctypes.util multiprocessing.context subprocess urllib.request zoneinfo"
for _name in _EARLY.split():
    importlib.import_module(_name)

#: Patterns of whole names.
_MISSING = {
    fcntl: "F_(SETPIPE|GETPIPE)_SZ|F_(ADD|GET)_SEALS|F_SEAL_.*|F_NOTIFY",
    mmap: "MADV_.*|MAP_(POPULATE|STACK|DENYWRITE|EXECUTABLE|LOCKED)",
    os: "memfd_create|MFD_.*|pidfd_open|eventfd.*|EFD_.*|sched_.*|SCHED_.*|posix_fa.*|pipe2|splice"
    "|SPLICE_.*|copy_file_range|getrandom|[gs]etres[ug]id|O_(PATH|TMPFILE|DIRECT)|waitid|.*xattr"
    "|fdatasync",
    resource: "prlimit|RUSAGE_THREAD",
    select: "(?i:epoll.*)",
    selectors: "EpollSelector",
    signal: "sigwaitinfo|sigtimedwait|pidfd_send_signal|SIGRT.*|SIGPWR",
    socket: "SO_(PEERCRED|PASSCRED|DOMAIN|PROTOCOL)|SOCK_(CLOEXEC|NONBLOCK|SEQPACKET)|AF_VSOCK"
    "|MSG_(NOSIGNAL|CMSG_CLOEXEC)|TCP_(USER_TIMEOUT|DEFER_ACCEPT|QUICKACK)|AF_(NETLINK|PACKET)|TCP_KEEPIDLE",
    time: "pthread_getcpuclockid|CLOCK_BOOTTIME",
}
_FOLDERS = ("/proc", "/sys/fs", "/dev/shm")
_SYMBOLS = ("prctl", "memfd_create", "sched_getaffinity")


def _fail(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir"):
        path = arguments[0]
        if isinstance(path, str) and path.startswith(_FOLDERS):
            raise FileNotFoundError(2, "no such file under macOS", path)
    elif event == "ctypes.dlsym" and arguments[1] in _SYMBOLS:
        raise AttributeError(f"no such symbol under macOS: {arguments[1]}")
    elif event == "socket.bind" and isinstance(arguments[1], str) and len(arguments[1]) > 103:
        raise OSError("AF_UNIX path too long")


for _module, _names in _MISSING.items():
    for _name in list(vars(_module)):
        if re.fullmatch(_names, _name):
            delattr(_module, _name)
os.__all__ = [_name for _name in os.__all__ if hasattr(os, _name)]
selectors.DefaultSelector = selectors.PollSelector  # in place of KqueueSelector
sys.platform = "darwin"
sys.addaudithook(_fail)
