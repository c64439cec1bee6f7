"""What strangers put into Redis: nothing of it runs, nothing of it stops those who are honest.

``test_wire.py`` and ``test_codec.py`` have random changes of messages and items.
"""

from __future__ import annotations

import logging
import pickle
import random
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis

import models
from conftest import await_that
from redis_peers import Keys, client_name
from service_streamer import BadMessage, ModelError, RedisStreamer, RedisWorker
from service_streamer.options.table import BrokerOptions
from service_streamer.redis.wire import CallOptions, Wire
from service_streamer.testing import Gate

SECRET = "a secret of the honest"
LIMIT = 1 << 20

#: So many dead letters are kept.
KEPT = 1000

Fields = list[Any]


class Site:
    """An honest host and an honest client, and a stranger's connection to their Redis.

    Attributes:
        worker, streamer: they, once they were started.
    """

    worker: RedisWorker
    streamer: RedisStreamer

    def __init__(
        self, host: Callable[..., RedisWorker], client: Callable[..., RedisStreamer],
        stranger: redis.Redis, keys: Keys, prefix: str,
    ) -> None:  # fmt: skip
        self._host, self._client = host, client
        self._stranger, self._prefix = stranger, prefix
        self.keys = keys
        self._options: dict[str, Any] = {}

    def start(self, model: Any = models.echo, *, args: Sequence[Any] = (), **options: Any) -> None:
        self._options = options
        self.worker = self._host(model, model_init_args=args, max_message_bytes=LIMIT, **options)
        self.streamer = self._client(**options)
        self.worker.wait_ready()

    def wire(self, **options: Any) -> Wire:
        """What makes the messages of somebody honest, but for these options."""
        given = {"prefix": self._prefix, "max_message_bytes": 1 << 30, **self._options, **options}
        return Wire(BrokerOptions.select(given))

    def send(self, *messages: Fields, to: str = "") -> None:
        """Put entries with these names and values into a stream: that of the calls, or another."""
        for start in range(0, len(messages), 100):
            with self._stranger.pipeline(transaction=False) as pipeline:
                for fields in messages[start : start + 100]:
                    pipeline.execute_command("XADD", to or self.keys.calls, "*", *fields)
                pipeline.execute()

    def client_name(self) -> str:
        return client_name(self._stranger, self.keys)

    def settled(self, *, may_be_late: bool = False) -> Any:
        """The stats of the host when nothing is left to do.

        Args:
            may_be_late: whether its reply may come after a forged one.
        """
        await_that(lambda: self._stranger.xlen(self.keys.calls) == 0)
        await_that(lambda: self.worker.stats().held == 0)  # type: ignore[union-attr]
        stats: Any = self.worker.stats()
        assert stats.pool.restarts == 0
        assert (stats.taken_over, stats.outages) == (0, 0)
        assert may_be_late or stats.late == 0
        return stats

    def dead_letters(self) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in self._stranger.xrange(self.keys.dead)]


@pytest.fixture
def site(
    host: Callable[..., RedisWorker], client: Callable[..., RedisStreamer], ask: redis.Redis,
    keys: Keys, prefix: str, caplog: pytest.LogCaptureFixture,
) -> Iterator[Site]:  # fmt: skip
    """Checks also that no thread met a bug."""
    yield Site(host, client, ask, keys, prefix)
    ask.delete(keys.dead)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def packed(*fields: Any) -> bytes:
    return bytes(msgpack.packb(fields, unicode_errors="surrogatepass"))


ITEM = packed(1)


def nested(depth: int, length: int = 1) -> bytes:
    """Lists in lists, each of which claims this length."""
    return (b"\xdd" + struct.pack(">I", length)) * depth + b"\x01"


def marked(*parts: Any) -> bytes:
    """An item that says that it is of some kind that msgpack does not know."""
    return bytes(msgpack.packb([msgpack.ExtType(1, b""), *parts], unicode_errors="surrogatepass"))


#: As deep as can be unpacked in a message, and deeper than Python likes to go.
DEEPEST = 1015


def message(
    form: object = 2, codec: object = "msgpack", client: object = "c", number: object = 1,
    content: object = (ITEM,), headers: object = None,
) -> bytes:  # fmt: skip
    return packed(form, codec, client, number, (content, {} if headers is None else headers))


def with_raw(position: int, raw: bytes) -> bytes:
    """A message with these bytes for one of its five parts."""
    parts = [packed(part)[1:] for part in (2, "msgpack", "c", 1, [[ITEM], {}])]
    parts[position] = raw
    return b"\x95" + b"".join(parts)


BAD_HEADERS: list[Any] = [
    7, "abc", [1], {b"priority": 1}, {"p": 1}, {"priority": "0"}, {"priority": True},
    {"priority": 1.0}, {"priority": 10**9 + 1}, {"tenant": b""}, {"tenant": None},
    {"tenant": "x" * 257}, {"tenant": [[[]]]}, {"has_deadline": 0}, {"has_deadline": None},
    {"stream": None}, {"stream": []}, {"stream": 1}, {"stream": [0, 0]},
]  # fmt: skip

#: Each of them alone; what is to become of them: they are set aside, or expire, or (None) either is
#: right as long as it is the end of them.
NASTY: dict[str, tuple[Fields, str | None]] = {
    "no message": (["x", "y"], "set aside"),
    "empty": (["d", "0", "m", ""], "set aside"),
    "empty name": (["", ""], "set aside"),
    "a claimed length of 4 G": (["m", b"\xdd\xff\xff\xff\xff"], "set aside"),
    "a claimed string of 4 G": (["m", b"\x95\x02\xdb\xff\xff\xff\xffabc"], "set aside"),
    "a claimed map of 4 G": (["m", b"\x95\xdf\xff\xff\xff\xff"], "set aside"),
    "lists in lists": (["m", nested(100_000)], "set aside"),
    "long lists in lists": (["m", nested(500, 1 << 19) + b"\x01" * (1 << 19)], "set aside"),
    "a serializer that is deep": (["m", with_raw(1, nested(DEEPEST))], "set aside"),
    "a serializer that is long": (["m", message(codec="x" * 500_000)], "set aside"),
    "a serializer of half characters": (["m", message(codec="\ud800")], "set aside"),
    "a client of half characters": (["m", message(client="\ud800")], None),
    "a client of zero bytes": (["m", message(client="\0\n}")], None),
    "a client that is long": (["m", message(client="c" * 65)], "set aside"),
    "a client without a name": (["m", message(client="")], "set aside"),
    "a client that is a number": (["m", message(client=5)], "set aside"),
    "a number that is true": (["m", message(number=True)], "set aside"),
    "a number that is text": (["m", message(number="7")], "set aside"),
    "a number that is huge": (["m", message(number=2**64 - 1)], "computed"),
    "no items": (["m", message(content=())], "set aside"),
    "items that are text": (["m", message(content=("x",))], "set aside"),
    "items of which one is text": (["m", message(content=(ITEM, "x"))], "set aside"),
    "items that are one": (["m", message(content=ITEM)], "set aside"),
    "an empty item": (["m", message(content=(b"",))], "set aside"),
    "an item of unknown kind": (["m", message(content=(msgpack.packb(msgpack.ExtType(5, b"")),))],
                                "set aside"),
    "a date of half characters": (["m", message(content=(marked(3, "\ud800"),))], "set aside"),
    "a kind of half characters": (["m", message(content=(marked("\ud800"),))], "set aside"),
    "an item that is deep": (["m", message(content=(nested(5000),))], "set aside"),
    **{f"headers {each}": (["m", message(headers=each)], "set aside") for each in BAD_HEADERS},
    "a part too few": (["m", packed(2, "msgpack", "c", 1)], "set aside"),
    "another format": (["m", message(form=1)], "set aside"),
    "a format that is deep": (["m", with_raw(0, nested(DEEPEST))], "set aside"),
    "a deadline that is text": (["d", "soon", "m", message()], "set aside"),
    "a deadline that is empty": (["d", "", "m", message()], "set aside"),
    "a deadline that is past": (["d", "1", "m", message()], "expired"),
    "a deadline that is negative": (["d", "-9", "m", message()], "expired"),
    "a deadline in a million years": (["d", "9" * 17, "m", message()], "computed"),
    "a deadline that no float holds": (["d", "9" * 400, "m", message()], None),
    "a deadline of too many digits": (["d", "9" * 5000, "m", message()], "set aside"),
    "a deadline of minus infinity": (["d", "-" + "9" * 400, "m", message()], None),
    "many fields": ([*["m", "x"] * 5000], "set aside"),
    "too long": (["m", message(content=(bytes(LIMIT),))], "set aside"),
}  # fmt: skip


def test_each_nasty_call_is_disposed_of(site: Site) -> None:
    site.start()
    before = site.settled()
    for name, (fields, end) in NASTY.items():
        site.send(fields)
        assert site.streamer.predict([name], timeout=240) == [name]
        stats = site.settled()
        ends = (stats.set_aside - before.set_aside, stats.expired - before.expired)
        expected = {"set aside": [(1, 0)], "expired": [(0, 1)], "computed": [(0, 0)]}
        assert ends in (expected[end] if end else [(1, 0), (0, 1), (0, 0)]), name
        before = stats
    letters = site.dead_letters()
    assert len(letters) == before.set_aside
    for letter in letters:
        assert 0 < len(letter[b"reason"]) <= 1000
        assert len(letter[b"start"]) <= 4096
    assert before.claimed == 2 * len(NASTY)


def test_dead_letters_are_bounded_and_say_why(site: Site, ask: Any) -> None:
    site.start()
    assert site.streamer.predict([1]) == [1]
    site.send(*(["m", b"%d" % number + bytes(10_000)] for number in range(KEPT + 100)))
    assert site.settled().set_aside == KEPT + 100
    letters = site.dead_letters()
    assert len(letters) == KEPT
    for letter in letters:
        assert letter.keys() == {b"id", b"host", b"reason", b"bytes", b"start"}
        assert b"cannot be decoded" in letter[b"reason"]
        assert int(letter[b"bytes"]) > 10_000
        assert len(letter[b"start"]) == 4096
    assert letters[-1][b"start"].startswith(b"%d\0" % (KEPT + 99))
    assert 0 < ask.pttl(site.keys.dead) <= 7 * 86_400_000
    # Garbage in the inbox of a host is ignored.
    [inbox] = ask.keys(site.keys.inbox("*"))
    garbage = random.Random(3)
    site.send(*([garbage.randbytes(5), garbage.randbytes(50)] for _ in range(100)), to=inbox)
    assert site.streamer.predict([2]) == [2]


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def forgeries(honest: Wire, stranger: Wire, other: Wire, bomb: bytes) -> dict[str, bytes]:
    """How a bomb may come, given the wire of the honest, of strangers and of another prefix."""
    right, unsigned = honest.call("c", 1, [bomb]), packed(2, "pickle", "c", 1, [[bomb], {}])
    return {
        "not signed": unsigned,
        "signed with zeros": bytes(32) + unsigned,
        "signed by a stranger": stranger.call("c", 1, [bomb]),
        "of another prefix": other.call("c", 1, [bomb]),
        "a reply": honest.results("c", 1, [bomb]),
        "changed": honest.call("d", 1, [bomb]).replace(b"\xa1d", b"\xa1c"),
        "a signature moved": honest.call("c", 1, [b"harmless"])[:32] + right[32:],
        "other headers": right[:32] + honest.call("c", 1, [bomb], CallOptions(9))[32:],
        "cut off": right[:-1],
        "a mere signature": right[:32],
    }


def test_a_bomb_without_the_right_signature_does_not_go_off(site: Site, tmp_path: Path) -> None:
    site.start(serializer="pickle", secret=SECRET)
    bomb = pickle.dumps(Bomb(tmp_path / "bomb"))
    wires = site.wire(), site.wire(secret="that of a stranger"), site.wire(prefix="other")
    forged = forgeries(*wires, bomb).values()
    site.send(*(["d", "0", "m", each] for each in forged))
    assert site.streamer.predict(["honest"]) == ["honest"]
    assert site.settled().set_aside == len(forged)
    assert {letter[b"reason"] for letter in site.dead_letters()} == {
        b"its signature is wrong; give clients and worker hosts the same secret"
    }
    assert not (tmp_path / "bomb").exists()
    # It would have: with the right signature it does.
    site.streamer.predict([Bomb(tmp_path / "bomb")])
    assert (tmp_path / "bomb").exists()


def test_a_bomb_in_a_reply_does_not_go_off(site: Site, tmp_path: Path, gate: Gate) -> None:
    site.start(models.Gated, args=(gate,), serializer="pickle", secret=SECRET)
    future = site.streamer.submit(["honest"])
    gate.await_arrival()
    name = site.client_name()
    bomb = pickle.dumps(Bomb(tmp_path / "bomb"))
    stranger, other = site.wire(secret="that of a stranger"), site.wire(prefix="other")
    forged = [
        packed(2, "pickle", name, 1, [bomb]),
        bytes(32) + packed(2, "pickle", name, 1, [bomb]),
        stranger.results(name, 1, [bomb]),
        other.results(name, 1, [bomb]),
        site.wire().call(name, 1, [bomb]),
        site.wire().results("another client", 1, [bomb]),
        packed(2, "pickle", name, 1, ("builtins.ValueError", bomb, "text", None, None)),
    ]
    site.send(*(["r", reply] for reply in forged), to=site.keys.replies(name))
    with pytest.raises(BadMessage, match="the signature is wrong"):
        future.result()
    assert not (tmp_path / "bomb").exists()
    gate.let_through()


def test_garbage_among_replies_is_dropped(site: Site) -> None:
    site.start()
    assert site.streamer.predict([1]) == [1]
    name = site.client_name()
    wire = site.wire()
    honest = [
        wire.results(name, 10**6, [ITEM]),
        wire.results("another", 1, [ITEM]),
        wire.failure(name, 10**6, ValueError("text")),
    ]
    garbage = [
        ["r", nested(100_000)], ["r", with_raw(1, nested(DEEPEST))],
        ["r", b"\x95\x02\xdb\xff\xff\xff\xff"],
        ["r", message(client=name, content=("builtins.SystemExit", b"", "text", None, None))],
        ["r", message(client=name, content=5)], ["r", message(client=name, number=2**64 - 1)],
        ["r", ""] * 1000, ["x", "y"],
        *(["r", reply[:length]] for reply in honest for length in range(0, len(reply), 3)),
    ]  # fmt: skip
    for start in range(0, len(garbage), 20):
        site.send(*garbage[start : start + 20], to=site.keys.replies(name))
        assert site.streamer.predict([start]) == [start]
    stats = site.streamer.stats()
    assert (stats.state, stats.pending, stats.outages) == ("connected", 0, 0)


def test_a_reply_cannot_raise_what_would_end_a_thread(site: Site, gate: Gate) -> None:
    site.start(models.Gated, args=(gate,))
    before = threading.active_count()
    kinds = ["builtins.SystemExit", "builtins.KeyboardInterrupt", "os.system", "builtins.eval"]
    for number, kind in enumerate(kinds, 1):
        future = site.streamer.submit([number])
        gate.await_arrival()
        forged = packed(2, "msgpack", site.client_name(), number, (kind, None, "text", None, None))
        site.send(["r", forged], to=site.keys.replies(site.client_name()))
        with pytest.raises(ModelError, match=f"stands in for {kind}"):
            future.result()
        gate.let_through()
    site.settled(may_be_late=True)
    assert threading.active_count() == before + 2  # those of the streamer
