"""A connection of the HTTP server, byte by byte: the answers, their order, and the limits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from service_streamer import Overloaded
from service_streamer.observe.record import Call
from service_streamer.serve.http import connection as module
from service_streamer.serve.http.admission import ServiceOptions
from service_streamer.serve.http.app import create_site
from service_streamer.serve.http.asgi import ASGIBridge, ExchangeBridge
from service_streamer.serve.http.exchange import Disconnected
from service_streamer.serve.http.http_exchange import HTTPExchange
from service_streamer.serve.http.models import Models
from service_streamer.serve.http.service import Service
from service_streamer.serve.http.slow_readers import SlowReaders, _Reader
from stub_exchange import StubClient

pytestmark = pytest.mark.no_gevent

PLAIN = ((b"content-type", b"text/plain"),)


async def echo(exchange: Any) -> None:
    """Answer with the body, in one piece."""
    body = exchange.take()
    while not exchange.is_read:
        body += await exchange.more()
    exchange.answer(200, PLAIN, body)


async def settled() -> None:
    """Let all tasks go as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


def talk(application: Any, *parts: bytes) -> StubClient:
    """Send the parts, with time for the service between them."""

    async def run() -> StubClient:
        client = StubClient(application)
        for part in parts:
            if client.is_closed:
                break
            client.send(part)
            await settled()
        was_closed = client.is_closed
        client.leave()
        await settled()
        client.is_closed = was_closed
        assert not client.late
        assert not client.listeners.open
        return client

    return asyncio.run(run())


def shown(client: StubClient) -> str:
    """What was received, without the date."""
    text = client.received.decode("latin-1")
    dates = re.findall(r"date: \w+, \d\d \w+ \d{4} \d\d:\d\d:\d\d GMT\r\n", text)
    assert len(dates) == len(re.findall(r"HTTP/1.1 (?!100)", text))
    for date in dates:
        text = text.replace(date, "")
    text, ids = re.subn(r"x-request-id: [0-9a-f-]+\r\n", "", text)
    assert ids + text.count("Invalid HTTP") + text.count("head is too long") == len(dates)
    return text.replace("\r\n", "\n")


def post(body: bytes, head: bytes = b"", version: bytes = b"1.1") -> bytes:
    length = b"content-length: %d\r\n" % len(body)
    return b"POST / HTTP/%b\r\nhost: a\r\n%b%b\r\n%b" % (version, length, head, body)


def ok(body: str, more: str = "") -> str:
    return f"HTTP/1.1 200 OK\ncontent-type: text/plain\ncontent-length: {len(body)}\n{more}\n{body}"


CLOSE = "connection: close\n"
UPGRADE = b"upgrade: h2c\r\nconnection: upgrade\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "expected", "is_closed"),
    [
        ([post(b"abc")], ok("abc"), False),
        ([post(b"")], ok(""), False),
        ([post(b"abc"), post(b"d")], ok("abc") + ok("d"), False),
        ([post(b"abc") + post(b"d") + post(b"e")], ok("abc") + ok("d") + ok("e"), False),
        ([bytes([byte]) for byte in post(b"abc")], ok("abc"), False),
        ([CHUNKED, b"3\r\nabc\r\n2\r\nde\r\n", b"0\r\n\r\n"], ok("abcde"), False),
        ([CHUNKED, b"1\r\na\r\n0\r\nx-trailer: 1\r\n\r\n" + post(b"b")], ok("a") + ok("b"), False),
        ([post(b"a", b"connection: close\r\n")], ok("a", CLOSE), True),
        ([post(b"a", b"connection: close\r\n") + post(b"b")], ok("a", CLOSE), True),
        ([post(b"a", version=b"1.0")], ok("a", CLOSE), True),
        ([post(b"hi", UPGRADE)], ok("hi", CLOSE), True),
        ([post(b"hi", UPGRADE)[:-1], b"i"], ok("hi", CLOSE), True),
        ([b"GET / HTTP/1.1\r\n" + UPGRADE + b"\r\n"], ok("", CLOSE), True),
        ([b"HEAD / HTTP/1.1\r\nhost: a\r\n\r\n"], ok(""), False),
    ],
)  # fmt: skip
def test_requests_are_answered_in_order(parts: list[bytes], expected: str, is_closed: bool) -> None:
    client = talk(echo, *parts)
    assert shown(client) == expected
    assert client.is_closed is is_closed


BAD = (
    "HTTP/1.1 400 Bad Request\ncontent-type: text/plain; charset=utf-8\ncontent-length: 30\n"
    "connection: close\n\nInvalid HTTP request received."
)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b"\x16\x03\x01 no HTTP\r\n\r\n"], BAD),
        ([b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n"], BAD),
        ([b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n"], BAD),
        ([CHUNKED, b"no number\r\n"], BAD),
        ([b"GET / HTTP/2.0\r\n\r\n"], BAD),
        ([b"GET /\r\n\r\n"], BAD),
        # What is right before it is answered first, and then the connection ends.
        ([post(b"a") + CHUNKED + b"no number\r\n"], ok("a", CLOSE)),
        ([post(b"a") + b"\0\0\r\n\r\n"], ok("a", CLOSE)),
        ([post(b"a"), b"\0\0\r\n\r\n"], ok("a") + BAD),
    ],
)
def test_what_is_no_http_ends_the_connection(parts: list[bytes], expected: str) -> None:
    client = talk(echo, *parts)
    assert shown(client) == expected
    assert client.is_closed


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET /" + b"a" * (66 << 10) + b" HTTP/1.1\r\n\r\n"],
        [b"GET / HTTP/1.1\r\n" + b"x-a: b\r\n" * (20 << 10) + b"\r\n"],
        [b"GET / HTTP/1.1\r\nx-a: ", *[b"a" * (8 << 10)] * 10],
        [CHUNKED, b"1\r\na\r\n0\r\nx-trailer: ", *[b"a" * (8 << 10)] * 10],
    ],
)
def test_a_head_has_a_bound(parts: list[bytes]) -> None:
    client = talk(echo, *parts)
    assert shown(client).startswith("HTTP/1.1 400 Bad Request\n")
    assert client.is_closed


def test_a_body_of_any_length_is_no_head() -> None:
    body = b"a" * (1 << 20)
    parts = [post(body)[at : at + 9999] for at in range(0, len(post(body)), 9999)]
    assert shown(talk(echo, *parts)) == ok(body.decode())


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"expect: 100-continue\r\n", "HTTP/1.1 100 Continue\n\n" + ok("abc")),
        (b"expect: something\r\n", ok("abc")),
        (b"", ok("abc")),
    ],
)
def test_a_client_that_waits_to_be_asked_for_its_body(head: bytes, expected: str) -> None:
    request = post(b"abc", head)
    assert shown(talk(echo, request[:-3], request[-3:])) == expected


def test_a_bad_request_does_not_interrupt_the_answer_before_it() -> None:
    """The 400 came in the midst of the answer, or in its place."""

    async def run() -> None:
        goes_on = asyncio.Event()

        async def waits(exchange: HTTPExchange) -> None:
            exchange.start(200, PLAIN)
            await exchange.write(b"one")
            await goes_on.wait()
            await exchange.end(b"two")

        client = StubClient(waits)
        client.send(post(b""))
        await settled()
        client.send(CHUNKED + b"no number\r\n")
        await settled()
        goes_on.set()
        await settled()
        assert shown(client) == f"{HEAD}transfer-encoding: chunked\n\n3\none\n3\ntwo\n0\n\n"
        assert client.is_closed
        client.leave()

    asyncio.run(run())


def test_what_is_computed_for_a_bad_request_is_given_up() -> None:
    gone: list[bool] = []

    async def waits(exchange: HTTPExchange) -> None:
        try:
            await echo(exchange)
        except Disconnected:
            gone.append(exchange.is_gone)
            raise

    client = talk(waits, CHUNKED + b"3\r\nabc\r\n", b"no number\r\n")
    assert shown(client) == BAD
    assert gone == [True]


@pytest.mark.parametrize(
    ("behind", "body"),
    [
        (b"CONNECT a:1 HTTP/1.1\r\n\r\n" * 2000, "hi"),
        (b"CONNECT a:1 HTTP/1.1\r\n\r\nDEF", "hi"),
        (post(b"", UPGRADE), "hi"),
        (b"\0\0", "hi"),
    ],
)
@pytest.mark.parametrize("is_chunked", [True, False])
def test_what_follows_an_upgrade_is_ignored(behind: bytes, body: str, *, is_chunked: bool) -> None:
    """It went on as a second upgrade: into the body of the first one, or without an end."""
    request = post(b"hi", UPGRADE)
    if is_chunked:
        head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n" + UPGRADE
        request = head + b"\r\n2\r\nhi\r\n0\r\n\r\n"
    client = talk(echo, request + behind)
    assert shown(client) == ok(body, CLOSE)
    assert client.is_closed


def test_requests_of_a_client_that_does_not_read_wait() -> None:
    """Their answers, of which each may be large, would wait in memory."""

    async def run() -> None:
        client = StubClient(echo)
        client.send(post(b"a"))
        await settled()
        client.stop_reading()
        client.send(post(b"b") + post(b"c"))
        await settled()
        assert shown(client) == ok("a")
        client.read_on()
        await settled()
        assert shown(client) == ok("a") + ok("b") + ok("c")
        client.leave()

    asyncio.run(run())


def test_who_is_gone_before_its_turn_is_not_computed(caplog: pytest.LogCaptureFixture) -> None:
    begun: list[bytes] = []

    async def notes(exchange: HTTPExchange) -> None:
        begun.append(exchange.target)
        exchange.answer(200, PLAIN, b"")

    async def run() -> None:
        client = StubClient(notes)
        client.send(post(b"a") * 3)
        client.leave()
        await settled()

    asyncio.run(run())
    assert begun == []
    assert not caplog.text


def test_many_small_requests_are_no_long_head() -> None:
    async def run() -> None:
        client = StubClient(echo)
        requests = b"GET / HTTP/1.1\r\n\r\n" * 6000
        for at in range(0, len(requests), 9999):
            client.send(requests[at : at + 9999])
            while client.connection._queue:
                await asyncio.sleep(0)
        await settled()
        assert shown(client).count("200 OK") == 6000
        client.leave()

    asyncio.run(run())


def test_trailers_are_no_headers() -> None:
    """A proxy removes headers that clients may not send, and lets trailers pass."""

    async def headers(exchange: HTTPExchange) -> None:
        while not exchange.is_read:
            await exchange.more()
        exchange.answer(200, PLAIN, b",".join(name for name, _ in exchange.headers))

    client = talk(headers, CHUNKED + b"0\r\nx-tenant: evil\r\n\r\n")
    assert shown(client) == ok("host,transfer-encoding")


@pytest.mark.parametrize("method", [b"CONNECT a:80", b"POST http://[::1/predict"])
def test_a_target_that_is_none(method: bytes, caplog: pytest.LogCaptureFixture) -> None:
    client = talk(ASGIBridge(responding()), method + b" HTTP/1.1\r\n\r\n")
    assert shown(client).startswith("HTTP/1.1 400 Bad Request\n")
    assert not caplog.text


def test_a_body_that_nobody_takes_is_not_read_on() -> None:
    async def run() -> None:
        goes_on = asyncio.Event()

        async def waits(exchange: HTTPExchange) -> None:
            await goes_on.wait()
            await echo(exchange)

        client = StubClient(waits)
        body = b"a" * (100 << 10)
        request = post(body)
        client.send(request[:-10])
        await settled()
        assert not client.is_read
        goes_on.set()
        await settled()
        assert client.is_read
        client.send(request[-10:])
        await settled()
        assert shown(client) == ok(body.decode())
        client.leave()

    asyncio.run(run())


def test_requests_ahead_are_not_read_without_end() -> None:
    async def run() -> None:
        may_answer = asyncio.Semaphore(0)

        async def waits(exchange: HTTPExchange) -> None:
            await may_answer.acquire()
            await echo(exchange)

        client = StubClient(waits)
        client.send(post(b"a"))
        await settled()
        assert client.is_read, "the client may leave, which is seen by reading"
        client.send(post(b"b") + post(b"c"))
        assert not client.is_read
        for _ in range(3):
            may_answer.release()
            await settled()
        assert client.is_read
        assert shown(client) == ok("a") + ok("b") + ok("c")
        client.leave()

    asyncio.run(run())


# -- answers before the body is there


async def too_large(exchange: HTTPExchange) -> None:
    exchange.answer_early(413, PLAIN, b"large", 20)


EARLY = (
    "HTTP/1.1 413 Request Entity Too Large\ncontent-type: text/plain\ncontent-length: 5\n"
    "connection: close\n\nlarge"
)


@pytest.mark.parametrize(
    ("parts", "is_closed"),
    [
        ([b""], False),  # the client may send the rest
        ([b"a" * 9], False),
        ([b"a" * 9, b"a" * 3], True),  # that was all
        ([b"a" * 9, b"a" * 3, b"more"], True),
    ],
)
def test_a_refused_body_is_dropped(parts: list[bytes], is_closed: bool) -> None:
    client = talk(too_large, post(b"a" * 12)[:-12], *parts)
    assert shown(client) == EARLY
    assert client.is_closed is is_closed


def test_a_refused_body_is_dropped_up_to_a_bound() -> None:
    head = post(b"a" * 1000)[:-1000]
    assert not talk(too_large, head, b"a" * 20).is_closed
    client = talk(too_large, head, b"a" * 21)
    assert client.is_closed
    assert shown(client) == EARLY


def test_a_refused_request_whose_body_is_there() -> None:
    client = talk(too_large, post(b"a"))
    assert shown(client) == EARLY
    assert client.is_closed


def test_who_was_not_asked_for_its_body_is_answered_and_left() -> None:
    """What it sends next may be the body, or a request: both are right."""

    async def ignores(exchange: HTTPExchange) -> None:
        exchange.answer(200, PLAIN, b"x")

    client = talk(ignores, post(b"abc", b"expect: 100-continue\r\n")[:-3])
    assert shown(client) == ok("x", CLOSE)


def test_an_answered_body_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SPILL", 20)

    async def ignores(exchange: HTTPExchange) -> None:
        exchange.answer(200, PLAIN, b"x")

    head = post(b"a" * 1000)[:-1000]
    assert not talk(ignores, head, b"a" * 20).is_closed
    assert talk(ignores, head, b"a" * 21).is_closed


def test_an_answer_without_the_body_keeps_the_connection() -> None:
    async def ignores(exchange: HTTPExchange) -> None:
        exchange.answer(200, PLAIN, b"x")

    client = talk(ignores, post(b"abc")[:-2], b"bc" + post(b"d"))
    assert shown(client) == ok("x") + ok("x")
    assert not client.is_closed


# -- answers in parts


async def parts(exchange: HTTPExchange) -> None:
    exchange.start(200, PLAIN)
    await exchange.write(b"one")
    await exchange.write(b"")
    await exchange.end(b"two")


HEAD = "HTTP/1.1 200 OK\ncontent-type: text/plain\n"


@pytest.mark.parametrize(
    ("request_", "expected", "is_closed"),
    [
        (post(b""), f"{HEAD}transfer-encoding: chunked\n\n3\none\n3\ntwo\n0\n\n", False),
        (post(b"", version=b"1.0"), f"{HEAD}{CLOSE}\nonetwo", True),
        (b"HEAD / HTTP/1.1\r\n\r\n", f"{HEAD}\n", False),
    ],
)
def test_an_answer_in_parts(request_: bytes, expected: str, is_closed: bool) -> None:
    client = talk(parts, request_)
    assert shown(client) == expected
    assert client.is_closed is is_closed


def test_parts_wait_for_a_client_that_does_not_read() -> None:
    async def run() -> None:
        client = StubClient(parts)
        client.send(post(b""))
        client.stop_reading()
        await settled()
        assert b"one" in client.received
        assert b"two" not in client.received
        client.read_on()
        await settled()
        assert b"two" in client.received
        client.leave()

    asyncio.run(run())


@pytest.mark.parametrize("when", ["before", "paused"])
def test_who_leaves_ends_an_answer_in_parts(when: str) -> None:
    ended: list[type[BaseException]] = []

    async def notes(exchange: HTTPExchange) -> None:
        if when == "before":
            gone = asyncio.Event()
            exchange.on_gone = gone.set
            await gone.wait()
        try:
            await parts(exchange)
        except Disconnected:
            ended.append(Disconnected)
            raise

    async def run() -> None:
        client = StubClient(notes)
        client.send(post(b""))
        if when == "paused":
            client.stop_reading()
        await settled()
        client.leave()
        await settled()
        assert not client.listeners.open

    asyncio.run(run())
    assert ended == [Disconnected]


# -- faults of the application


@pytest.mark.parametrize(("has_begun", "status"), [(False, "500 Internal"), (True, "200 OK")])
def test_an_application_that_raises(
    has_begun: bool, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def raises(exchange: HTTPExchange) -> None:
        if has_begun:
            exchange.start(200, PLAIN)
        raise RuntimeError("a bug")

    client = talk(raises, post(b"a") + post(b"b"))
    assert shown(client).startswith(f"HTTP/1.1 {status}")
    assert client.received.count(b"HTTP/1.1") == 1
    assert client.is_closed
    assert "this is a bug" in caplog.text


def test_an_application_that_forgets_to_answer() -> None:
    async def forgets(_: HTTPExchange) -> None:
        pass

    assert shown(talk(forgets, post(b"a"))).startswith("HTTP/1.1 500 Internal Server Error\n")


# -- limits in time, by a clock that the test has


@pytest.mark.parametrize(
    ("sent", "seconds", "is_closed"),
    [
        (b"", 29.0, False),
        (b"", 31.0, True),  # a head has 30 s
        (post(b"a"), 31.0, False),
        (post(b"a"), 74.0, False),
        (post(b"a"), 76.0, True),  # an idle connection has 75 s
        (post(b"a") + b"POST /", 31.0, True),
        (post(b"abc")[:-2], 1000.0, False),  # the application waits for the body, and bounds it
    ],
)
def test_a_connection_that_does_nothing_is_closed(
    sent: bytes, seconds: float, is_closed: bool
) -> None:
    async def run() -> None:
        client = StubClient(echo)
        if sent:
            client.send(sent)
        await settled()
        connection: Any = client.connection
        for name in ("_idle_since", "_awaits_head_since"):
            setattr(connection, name, getattr(connection, name) - seconds)
        connection._timer.cancel()
        connection._check_limits()
        assert client.is_closed is is_closed
        client.leave()

    asyncio.run(run())


def test_a_refused_client_has_to_come_to_an_end() -> None:
    async def run() -> None:
        client = StubClient(too_large)
        client.send(post(b"abc")[:-3])
        await settled()
        connection: Any = client.connection
        connection._timer.cancel()
        connection._check_limits()
        assert not client.is_closed
        connection._spills_until -= 31.0
        connection._timer.cancel()
        connection._check_limits()
        assert client.is_closed
        client.leave()

    asyncio.run(run())


@pytest.mark.parametrize("is_spilling", [False, True])
@pytest.mark.parametrize(("waited", "is_closed"), [(299.0, False), (301.0, True)])
def test_a_little_unread_has_the_time_that_was_set(
    waited: float, *, is_closed: bool, is_spilling: bool
) -> None:
    async def run() -> None:
        client = StubClient(too_large if is_spilling else echo, SlowReaders(300.0, 1 << 20))
        client.send(post(b"abc")[:-3] if is_spilling else post(b"abc"))
        await settled()
        connection: Any = client.connection
        client.unread = 5
        for at in (0.0, waited):
            connection._unread_since -= at
            connection._timer.cancel()
            connection._check_limits()
        assert client.is_closed is is_closed
        assert client.listeners.readers.cut == is_closed
        assert not connection._timer.cancelled(), "it is looked at again until it is lost"
        client.leave()

    asyncio.run(run())


# -- the end of the server


def test_the_end_of_the_server_does_not_wait_for_a_body_that_was_answered() -> None:
    async def run() -> None:
        client = StubClient(too_large)
        client.send(post(b"abc")[:-3])
        await settled()
        client.connection.shut_down()
        assert client.is_closed
        client.leave()

    asyncio.run(run())


def test_the_end_of_the_server_waits_for_what_has_begun() -> None:
    async def run() -> None:
        goes_on = asyncio.Event()

        async def waits(exchange: HTTPExchange) -> None:
            await goes_on.wait()
            await echo(exchange)

        idle, busy = StubClient(waits), StubClient(waits)
        busy.send(post(b"a") + post(b"b"))
        await settled()
        for client in (idle, busy):
            client.connection.shut_down()
        assert idle.is_closed
        assert not busy.is_closed
        goes_on.set()
        await settled()
        assert busy.is_closed
        assert shown(busy) == ok("a") + ok("b", CLOSE)
        for client in (idle, busy):
            client.leave()

    asyncio.run(run())


def test_nothing_of_a_request_is_left() -> None:
    """The connection, its exchange and its task hold each other only while it is computed."""
    import gc

    async def run() -> None:
        client = StubClient(echo)
        for _ in range(3):
            client.send(post(b"a"))
            await settled()
        assert [each for each in gc.get_objects() if type(each) is HTTPExchange] == []
        client.send(post(b"abc")[:-1])
        await settled()
        client.leave()
        await settled()

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
        assert [each for each in gc.get_objects() if type(each) is HTTPExchange] == []
    finally:
        gc.enable()


# -- the service's endpoints


class Full:
    """A streamer whose queue is full, and its backend."""

    def __init__(self) -> None:
        self.backend = self
        self.is_full = True

    def check_room(self) -> None:
        if self.is_full:
            raise Overloaded("no room")

    def submit(self, call: Call) -> None:
        call.reply.complete([*call.payloads])

    def decode(self, outputs: list[Any]) -> list[Any]:
        return outputs

    def flush(self) -> None:
        """All is answered."""

    def when_workers_change(self, _: Callable[[], None]) -> None:
        """They do not."""

    def model_description(self) -> dict[str, Any]:
        return {}


def test_a_full_queue_is_told_before_the_body() -> None:
    async def run() -> None:
        streamer: Any = Full()
        service = Service(streamer, ServiceOptions("m", max_body=100))
        service.start()
        while not service.is_known:
            await asyncio.sleep(0)
        _, mailbox = service.loop
        client = StubClient(create_site(Models([service])))
        request = post(b'{"inputs": "%b"}' % (b"a" * 50)).replace(b"/ ", b"/predict ", 1)
        client.send(request[:-30])
        await settled()
        assert shown(client).startswith("HTTP/1.1 503 Service Unavailable\n")
        assert "connection: close" not in shown(client)
        assert mailbox.at_once == 16, "results do not hold up those who are refused"
        service._overloaded_at -= 0.9
        service._calm_down()
        assert mailbox.at_once == 16
        service._overloaded_at -= 0.2
        service._calm_down()
        assert mailbox.at_once > 1000
        streamer.is_full = False
        client.received = b""
        client.send(request[-30:] + request)
        await settled()
        assert shown(client).endswith('"' + "a" * 50 + '"')
        assert shown(client).startswith("HTTP/1.1 200 OK\n"), "of the second request, only"
        client.received, streamer.is_full = b"", True
        client.send(post(b"a" * 101).replace(b"/ ", b"/predict ", 1))
        await settled()
        assert shown(client).startswith("HTTP/1.1 413 "), "what can never be served is told first"
        assert client.is_closed
        client.leave()
        service.stop()

    asyncio.run(run())


def test_what_follows_a_full_buffer_was_not_read() -> None:
    async def run() -> None:
        client = StubClient(echo)
        client.unread = 100
        reader = _Reader(client, 0.0)
        client.unread = 1000
        assert reader.taken() == 0
        client.unread = 400
        assert reader.taken() == 600
        client.leave()

    asyncio.run(run())


@pytest.mark.parametrize(("waited", "is_aborted"), [(29, False), (31, True)])
def test_an_end_that_an_encrypted_client_does_not_answer(waited: float, is_aborted: bool) -> None:
    class Closing(StubClient):
        is_aborted = False

        def abort(self) -> None:
            self.is_aborted = True

    async def run() -> bool:
        client = Closing(echo)
        client.connection._unread_since -= 1000
        client.connection._close()
        client.connection._idle_since -= waited
        client.connection._check_limits()
        client.leave()
        return client.is_aborted

    assert asyncio.run(run()) is is_aborted


# -- ASGI, both ways

Respond = Callable[[Any, Any, Any], Awaitable[None]]


def responding(*messages: dict[str, Any]) -> Respond:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        seen.append((scope["method"], scope["path"], scope["query_string"], body))
        for message in messages:
            await send(message)

    return app


seen: list[Any] = []
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"Content-Type", b"text/plain")],
}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([START, {"type": "http.response.body", "body": b"hi"}], ok("hi")),
        ([START, {"type": "http.response.body"}], ok("")),
        (
            [START, {"type": "http.response.body", "body": b"hi", "more_body": True},
             {"type": "http.response.body"}],
            f"{HEAD}transfer-encoding: chunked\n\n2\nhi\n0\n\n",
        ),
    ],
)  # fmt: skip
def test_an_asgi_application_answers(messages: list[dict[str, Any]], expected: str) -> None:
    seen.clear()
    app = ASGIBridge(responding(*messages))
    request = b"GET /a%20b?c=%20d HTTP/1.1\r\ncontent-length: 2\r\n\r\n"
    client = talk(app, request + b"x", b"y")
    assert shown(client) == expected
    assert seen == [("GET", "/a b", b"c=%20d", b"xy")]


def test_an_asgi_application_cannot_break_the_head() -> None:
    start = {**START, "headers": [(b"x-a", b"b\r\nset-cookie: c")]}
    client = talk(ASGIBridge(responding(start)), b"GET / HTTP/1.1\r\n\r\n")
    assert shown(client).startswith("HTTP/1.1 500 ")
    assert "set-cookie" not in shown(client)


@pytest.mark.parametrize("application", [echo, parts, too_large])
def test_an_exchange_over_asgi_is_the_same(application: Any) -> None:
    """Through both bridges: our connection has an ASGI application, which has the exchange."""
    direct = talk(application, post(b"abc"))
    bridged = talk(ASGIBridge(ExchangeBridge(application)), post(b"abc"))
    assert shown(bridged) == shown(direct)


def test_the_limits_are_those_of_the_docs() -> None:
    assert (module._LONGEST_HEAD, module._HEAD_TIME, module._KEEP_ALIVE) == (64 << 10, 30.0, 75.0)
