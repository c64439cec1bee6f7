"""A shared pool as tests see it: its files, its process, and both ends of a connection by hand."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from service_streamer.pool.pool_protocol import (
    ANSWER,
    ASK,
    PROTOCOL,
    VISITOR_PROTOCOL,
    WELCOME,
    Hello,
    pack,
)
from service_streamer.serve.cli.main import main


def folder() -> Path:
    """Of the pools: that of the test, which the fixture ``shared`` has made."""
    return Path(os.environ["XDG_RUNTIME_DIR"], "service-streamer")


def command(*arguments: str, code: int = 0) -> str:
    """What ``service-streamer pool ...`` prints."""
    done = CliRunner().invoke(main, ["pool", *arguments], terminal_width=1000)
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done.output


def pool_names() -> list[str]:
    """The pools that have a process. What killed ones have left is removed."""
    names = [line.split()[0] for line in command("list").splitlines()]
    return [] if names[:1] == ["there"] else names


def await_end(pid: int, seconds: float = 60.0) -> bool:
    """Wait so long for a process to end; whether it has ended."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            return bool(poll.poll(1000 * seconds))
        finally:
            os.close(descriptor)
    return True


class Peer:
    """One end of a connection. The first bytes are exchanged before its messages.

    Attributes:
        hello: what a client has said first, if this is the pool's end.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.hello: Hello | None = None
        self._file = connection.makefile("rb")
        self._messages: list[Any] = []
        self._descriptors: list[int] = []  # what results in shared memory come by

    def begin(self, memory: int | None = None) -> None:
        """Send the first byte, with the descriptor of a memory if there is one."""
        socket.send_fds(self.connection, [b"\0"], [] if memory is None else [memory])

    def begun(self) -> None:
        """Take that of the other end."""
        first, self._descriptors, _, _ = socket.recv_fds(self.connection, 1, 1)
        if not first:
            raise EOFError

    def send(self, *messages: Any) -> None:
        frame = pack([*messages])
        self.connection.sendall(len(frame).to_bytes(8, "little") + frame)

    def receive_frame(self) -> list[Any]:
        """The messages that were sent together. Raises EOFError: the other end has closed."""
        with contextlib.suppress(ConnectionResetError):
            size = int.from_bytes(self._file.read(8), "little")
            if frame := self._file.read(size):
                messages: list[Any] = pickle.loads(frame)
                return messages
        raise EOFError

    def receive(self) -> Any:
        """The next message."""
        while not self._messages:
            self._messages = self.receive_frame()
        return self._messages.pop(0)

    def receive_kind(self, kind: int) -> Any:
        """The next message of a kind; those before it are dropped."""
        while (message := self.receive())[0] != kind:
            pass
        return message

    def receive_all(self) -> list[Any]:
        """All messages until the other end closes."""
        messages: list[Any] = []
        with contextlib.suppress(EOFError):
            while True:
                messages.append(self.receive())
        return messages

    def ask(self, method: str, *arguments: Any) -> Any:
        """The pool's answer to a question, in this thread. Messages before it are dropped."""
        self.send((ASK, 1, method, arguments))
        return self.receive_kind(ANSWER)[2]

    def close(self) -> None:
        self._file.close()
        for descriptor in self._descriptors:
            os.close(descriptor)


@contextlib.contextmanager
def greeting(
    name: str,
    fingerprint: Any = None,
    *,
    linger: float = 0.0,
    memory: int | None = None,
    protocol: int | None = None,
) -> Iterator[Peer]:
    """One that has said hello: a client of a pool with this fingerprint, or a visitor.

    Args:
        memory: descriptor of the memory that its large items are in.
        protocol: None for that of this version.
    """
    if protocol is None:
        protocol = VISITOR_PROTOCOL if fingerprint is None else PROTOCOL
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(folder() / f"{name}.sock"))
        with contextlib.closing(Peer(connection)) as peer:
            peer.begin(memory)
            peer.send((*Hello(protocol, fingerprint, linger),))
            yield peer


@contextlib.contextmanager
def connected(
    name: str = "a", *, makes_calls: bool = True, memory: int | None = None
) -> Iterator[Peer]:
    """A client, or a visitor, of the pool of a name."""
    fingerprint = ask_pool(name, "status")["fingerprint"] if makes_calls else None
    with greeting(name, fingerprint, memory=memory) as peer:
        peer.begun()
        peer.receive_kind(WELCOME)
        yield peer


def ask_pool(name: str, method: str, *arguments: Any) -> Any:
    """Ask the pool of a name. Raises OSError, EOFError: there is none."""
    with connected(name, makes_calls=False) as peer:
        return peer.ask(method, *arguments)


def pool_pid(name: str = "a") -> int:
    pid: int = ask_pool(name, "status")["pid"]
    return pid


class FakePool:
    """Has the name of a pool, and says to its clients what a test wants."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    def accepts(self) -> socket.socket:
        """The connection of the next client, to which nothing was said."""
        return self._listener.accept()[0]

    @contextlib.contextmanager
    def accepted(self) -> Iterator[Peer]:
        """The next client, which is welcome."""
        with self.accepts() as connection, contextlib.closing(Peer(connection)) as peer:
            peer.begin()
            peer.begun()
            peer.hello = Hello(*peer.receive())
            peer.send((WELCOME, os.getpid()))
            yield peer


@contextlib.contextmanager
def fake_pool(name: str = "a") -> Iterator[FakePool]:
    folder().mkdir(mode=0o700, exist_ok=True)
    path = folder() / f"{name}.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        try:
            yield FakePool(listener)
        finally:
            path.unlink()
