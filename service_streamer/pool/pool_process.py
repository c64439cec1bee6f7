"""The process of a pool: how it is started, and what it does first.

It is no child of the process that starts it, and in a session of its own: neither Ctrl-C in a
terminal nor the end of a web worker ends it. It imports neither the model nor what that needs: its
workers do, with the main module, the folder and the import path of the process that has started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import logging.handlers
import multiprocessing.process
import os
import pickle
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from multiprocessing import spawn
from pathlib import Path
from typing import Any, BinaryIO

from ..engine.build import assemble
from ..errors import StreamerBroken
from ..reporting import summary
from ..workers.starting import find_interpreter, startable
from .directory import Leadership, paths_of
from .pool_memory import PoolMemory
from .pool_protocol import Items, PoolBoot, Unserved, times
from .pool_server import PoolServer, turn_away

#: The first process ends at once, so that the second is nobody's child: no one has to wait for it.
_PROGRAM = """\
import os, sys
if os.fork(): os._exit(0)
import pickle
file = os.fdopen(int(sys.argv[1]), "rb")
sys.path[:] = pickle.load(file)
from service_streamer.pool.pool_process import run_pool
run_pool(file)
"""


def start_pool(boot: PoolBoot) -> None:
    """Start the process. It has its own copies of the descriptors then.

    Raises:
        OSError, StreamerBroken, WorkerStartError: it could not be started.
    """
    executable = find_interpreter() or os.fsdecode(spawn.get_executable())
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    descriptor = os.memfd_create("service_streamer pool", os.MFD_CLOEXEC)
    try:
        with open(os.dup(descriptor), "wb") as file:
            pickle.dump(boot.main["sys_path"], file)
            pickle.dump(boot, file)
        os.lseek(descriptor, 0, os.SEEK_SET)
        with (
            _log_of(boot) as log,
            subprocess.Popen(
                # The argument at the end makes room for the title.
                [executable, *flags, "-P", "-c", _PROGRAM, str(descriptor), " " * 64],
                stdin=subprocess.DEVNULL,
                # Who reads what this process prints, to its end, would wait for that of the pool.
                stdout=log,
                stderr=log,
                pass_fds=(descriptor, boot.lock, boot.listener),
                start_new_session=True,
            ) as process,
        ):
            process.wait()
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _log_of(boot: PoolBoot) -> Iterator[int]:
    """Where the log goes, and what the process and its workers print."""
    if boot.log is None:
        try:
            os.fstat(2)
        except OSError:  # this process has no stderr
            yield subprocess.DEVNULL
        else:
            yield 2
        return
    try:
        descriptor = open_log(boot.log)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise
        raise StreamerBroken(f"the pool has no log: {error}; see pool_log") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_log(path: str) -> int:
    """A descriptor that appends to the file, which is made if it is not there.

    Raises:
        OSError: it cannot be written to.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def main_module() -> dict[str, Any]:
    """What the workers need to import the main module of this process again."""
    with startable():
        found = spawn.get_preparation_data("pool")
    names = (
        "sys_path", "sys_argv", "orig_dir", "dir", "init_main_from_name", "init_main_from_path",
    )  # fmt: skip
    return {name: found[name] for name in names if name in found}


def run_pool(file: BinaryIO) -> None:
    """What the process does, to its end."""
    # Signals that the thread of the client had blocked would end neither the pool nor its workers.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with file:
        boot: PoolBoot = pickle.load(file)
    vars(times).update(vars(boot.times))
    for descriptor in (boot.lock, boot.listener):
        os.set_inheritable(descriptor, False)
    _set_title(f"service-streamer pool {boot.name}")
    _set_main(boot.main)
    layout = f"%(asctime)s pool {boot.name}: %(levelname)s: %(message)s"
    handler = logging.StreamHandler() if boot.log is None else _PoolLog(boot.log)
    logging.basicConfig(handlers=[handler], format=layout)
    logging.getLogger("service_streamer").setLevel(boot.log_level)
    leadership = Leadership(boot.lock, paths_of(boot.name, boot.directory))
    listener = socket.socket(fileno=boot.listener)
    try:
        try:
            server = _server(boot, listener, leadership)
            _handle_signals(server)
            if boot.prepare is not None:
                boot.prepare()
        except Exception as error:
            # The other side may just be starting: the head of a cluster, say.
            may_pass = isinstance(error, ConnectionError)
            turn_away(listener, Unserved(" ".join(summary(error).split()), may_pass))
            raise
        gc.collect()
        gc.freeze()  # what has been imported stays, and need not be gone through
        server.run()
        leadership.resign(keep_log=False)
    finally:
        leadership.resign(keep_log=True)  # this process is about to print why


class _PoolLog(logging.handlers.WatchedFileHandler):
    """Begins a new file if the last one was renamed or removed, as by logrotate."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # no new file can be made: to raise would end who has logged the line
            self.handleError(record)


def _handle_signals(server: PoolServer) -> None:
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    signal.signal(signal.SIGINT, lambda *_: server.end(drain=False))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # else ignored, as by nohup
        # Unlike SIG_IGN no program inherits it that a worker's model starts.
        signal.signal(signal.SIGHUP, lambda *_: None)


def _server(boot: PoolBoot, listener: socket.socket, leadership: Leadership) -> PoolServer:
    """Raises whatever the workers' transport raises."""
    options = boot.options
    memory = PoolMemory(options.shared_memory_limit)
    transport = boot.transport(boot.spec, options, memory)
    engine = assemble(transport, options, _lengths_of if boot.has_lengths else None)
    return PoolServer(boot.name, listener, engine, boot.fingerprint, leadership, memory)


def _lengths_of(items: Any) -> list[float]:
    assert isinstance(items, Items)
    return [*items.lengths]


def _set_main(main: dict[str, Any]) -> None:
    """Have multiprocessing tell the workers of the client's main module, and not of this one."""
    module = types.ModuleType("__main__")
    name, path = main.get("init_main_from_name"), main.get("init_main_from_path")
    module.__spec__ = None if name is None else ModuleSpec(name, None)
    if path is not None:
        module.__file__ = path
    sys.modules["__main__"] = module
    sys.argv[:] = main["sys_argv"]
    multiprocessing.process.ORIGINAL_DIR = main["orig_dir"]  # type: ignore[attr-defined]
    sys.path[:] = main["sys_path"]
    with contextlib.suppress(OSError):  # it is gone; the first client is there all the same
        os.chdir(main["dir"])


def _set_title(title: str) -> None:
    """Show the title in the list of processes: it is written over the command line."""
    with contextlib.suppress(OSError, ValueError, IndexError):  # it is only for people
        # After the name, which may have blanks and brackets itself.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        room = end - start
        if start > 0 and 0 < room < 1 << 20:
            ctypes.memmove(start, title.encode()[: room - 1].ljust(room, b"\0"), room)
