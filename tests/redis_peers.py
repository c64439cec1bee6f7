"""What a test says to Redis itself, in place of a client or of a worker host: see docs/redis.md."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis.connection import AbstractConnection

from conftest import await_that
from service_streamer.observe.record import CallOptions
from service_streamer.options.table import BrokerOptions
from service_streamer.redis.wire import RemoteAnswer, Wire


class Keys:
    """The keys of one prefix, as docs/redis.md names them."""

    def __init__(self, prefix: str) -> None:
        self._root = f"{{service_streamer:{prefix}}}:"
        self.calls = self._root + "calls"
        self.dead = self._root + "dead"
        self.model = self._root + "model"

    def inbox(self, host: str) -> str:
        return f"{self._root}host:{host}"

    def orders_of(self, host: str) -> str:
        return f"{self._root}orders:{host}"

    def client(self, client: str) -> str:
        return f"{self._root}client:{client}"

    def replies(self, client: str) -> str:
        return f"{self._root}replies:{client}"

    def unread(self, client: str) -> str:
        return f"{self._root}unread:{client}"

    def kind(self, key: str) -> str:
        """Which of the above a key is: "calls", "host", ...; empty if it is not of this prefix."""
        return key.removeprefix(self._root).split(":")[0] if key.startswith(self._root) else ""


def wire(prefix: str = "", **options: Any) -> Wire:
    """What makes and reads the messages of one prefix, with these options of both sides."""
    return Wire(BrokerOptions.select({"prefix": prefix, **options}))


def client_name(ask: redis.Redis, keys: Keys) -> str:
    """That of the only client which Redis knows."""
    [key] = ask.keys(keys.client("*"))
    return str(key.decode().rpartition(":")[2])


def await_paused(count: int, traffic: Traffic, ask: redis.Redis, keys: Keys) -> None:
    """Block until hosts of this process have followed the order to pause so many streams."""
    await_that(lambda: len(traffic.paused) == count and not ask.keys(keys.orders_of("*")))


class RawClient:
    """A client whose messages a test writes, and that reads its replies only when told to.

    Attributes:
        name: its name.
    """

    def __init__(self, ask: redis.Redis, prefix: str, name: str = "raw") -> None:
        self.name = name
        self._ask, self._keys = ask, Keys(prefix)
        self._wire = wire(prefix)
        self._numbers = itertools.count(1)
        self._replies, self._unread = self._keys.replies(name), self._keys.unread(name)
        ask.set(self._keys.client(name), 0)

    def stream(self, item: Any) -> bytes:
        """Ask for the outputs of an item; returns the id of the call."""
        payload = self._wire.codec.encode(item)
        message = self._wire.call(
            self.name, next(self._numbers), [payload], CallOptions(stream=True)
        )
        id_: bytes = self._ask.xadd(self._keys.calls, {"d": 0, "m": message})
        return id_

    def pretend_unread(self, size: int, count: int = 1) -> None:
        """Say that so many bytes of outputs wait for this client, among so many replies."""
        with self._ask.pipeline(transaction=True) as pipeline:
            for _ in range(count):
                pipeline.xadd(self._replies, {"c": "a mark"})
            pipeline.xadd(self._unread, {"b": size})
            pipeline.execute()

    @property
    def unread(self) -> int:
        """How many replies wait for this client."""
        return int(self._ask.xlen(self._replies))

    @property
    def sizes(self) -> list[int]:
        """Bytes of the messages with outputs that wait for this client."""
        return [
            len(fields[b"p"]) for _, fields in self._ask.xrange(self._replies) if b"p" in fields
        ]

    def read(self) -> tuple[list[tuple[int, Any]], RemoteAnswer | None]:
        """Read all replies: the outputs, each with its number, and the end of the stream."""
        with self._ask.pipeline(transaction=True) as pipeline:
            pipeline.xrange(self._replies)
            entries = pipeline.delete(self._replies, self._unread).execute()[0]
        outputs: list[tuple[int, Any]] = []
        end = None
        for _, fields in entries:
            for run in self._wire.read_outputs(fields[b"p"], self.name) if b"p" in fields else ():
                outputs += enumerate(map(self._wire.codec.decode, run.outputs), run.first)
            if b"r" in fields:
                end = self._wire.read_reply(fields[b"r"], self.name)
                outputs += enumerate(map(self._wire.codec.decode, end.outputs), end.first or 0)
        return outputs, end

    def close(self) -> None:
        self._ask.delete(self._keys.client(self.name), self._replies, self._unread)


#: What a script is for, by the kinds of keys that it is given.
_SCRIPTS = {
    frozenset(kinds.split()): script
    for kinds, script in {
        "calls client": "send calls", "calls host orders": "give orders",
        "calls client host model": "sign of life of a client",
        "replies unread": "delete replies",
        "calls host model": "sign of life",  # of a host, also with what it joins the others by
        "calls": "take over",
        "calls client replies": "answer",
        "calls orders client replies unread": "send outputs",
    }.items()
}  # fmt: skip


class Traffic:
    """The commands that this process sends to Redis, and what a test does at the next of a kind.

    A kind is the command's name, or what a script is for, as above.
    """

    def __init__(self, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._keys = Keys(prefix)
        self._kinds: dict[int, str] = {}  # of what each connection has sent last
        self._at_commands: list[tuple[str, str, Callable[[], object]]] = []
        self._at_answers: list[tuple[str, str, Callable[[Any], Any]]] = []
        self._counts: Counter[str] = Counter()
        self._last: dict[str, tuple[Any, ...]] = {}
        #: Ids of the streams that hosts of this process were told to pause.
        self.paused: set[bytes] = set()
        send, read = AbstractConnection.send_command, AbstractConnection.read_response

        def watched_send(connection: AbstractConnection, *command: Any, **named: Any) -> None:
            kind = self._kinds[id(connection)] = self._kind(command)
            self._last[kind] = command
            for act in due(self._at_commands, kind):
                act()
            send(connection, *command, **named)

        def watched_read(connection: AbstractConnection, *args: Any, **named: Any) -> Any:
            answer = read(connection, *args, **named)
            kind = self._kinds.get(id(connection), "")
            acts = due(self._at_answers, kind)
            self._counts[kind] += 1
            if kind == "send outputs":
                self._note_orders(answer[0])
            for act in acts:
                answer = act(answer)
            return answer

        monkeypatch.setattr(AbstractConnection, "send_command", watched_send)
        monkeypatch.setattr(AbstractConnection, "read_response", watched_read)

    def _kind(self, command: tuple[Any, ...]) -> str:
        if command[0] not in ("EVALSHA", "EVAL"):
            return str(command[0])
        texts = (each for each in command[2:] if isinstance(each, str))
        kinds = frozenset(filter(None, map(self._keys.kind, texts)))
        return _SCRIPTS.get(kinds, "")

    def _note_orders(self, orders: list[Any]) -> None:
        for _, (what, id_) in orders:
            if what == b"hold":
                self.paused.add(id_)
            else:
                self.paused.discard(id_)

    def last(self, kind: str) -> tuple[Any, ...]:
        """The last command of a kind; empty if there was none."""
        return self._last.get(kind, ())

    def count(self, kind: str) -> int:
        """How many commands of a kind have been answered."""
        return self._counts[kind]

    def at_command(self, kind: str, act: Callable[[], object], *, thread: str = "") -> None:
        """Act once, before such a command is sent: in that thread, if only that of one is meant."""
        self._at_commands.append((kind, thread, act))

    def at_answer(self, kind: str, act: Callable[[Any], Any], *, thread: str = "") -> None:
        """Act once when such an answer has come; what it returns is read instead."""
        self._at_answers.append((kind, thread, act))


def due(acts: list[tuple[str, str, Callable[..., Any]]], kind: str) -> list[Callable[..., Any]]:
    """Take out the next act for this kind of command and this thread, if there is one."""
    name = threading.current_thread().name
    with _LOCK:
        for each in acts:
            if each[0] == kind and each[1] in name:
                acts.remove(each)
                return [each[2]]
    return []


_LOCK = threading.Lock()
