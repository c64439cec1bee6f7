"""A connection of the HTTP server, byte by byte: the answers, their order, and the limits."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from http_in_process import (
    ASGIBridge,
    ExchangeBridge,
    StubClient,
    StubStreamer,
    asking,
    await_that,
    in_still_time,
    pass_time,
    post,
    run,
    serving,
    settled,
)

pytestmark = pytest.mark.no_gevent

PLAIN = ((b"content-type", b"text/plain"),)


async def echo(exchange: Any) -> None:
    """Answer with the body, in one piece."""
    body = exchange.take()
    while not exchange.is_read:
        body += await exchange.more()
    exchange.answer(200, PLAIN, body)


async def ignores(exchange: Any) -> None:
    """Answer without a look at the body."""
    exchange.answer(200, PLAIN, b"x")


def talk(application: Any, *parts: bytes) -> StubClient:
    """Send the parts, with time for the service between them."""

    async def main() -> StubClient:
        client = StubClient(application)
        for part in parts:
            if client.is_closed:
                break
            await client.tell(part)
        was_closed = client.is_closed
        client.leave()
        await settled()
        client.is_closed = was_closed
        assert not client.late
        assert not client.server.listeners.open
        return client

    return run(main())


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


def ok(body: str, more: str = "") -> str:
    return f"HTTP/1.1 200 OK\ncontent-type: text/plain\ncontent-length: {len(body)}\n{more}\n{body}"


CLOSE = "connection: close\n"
KEEP = b"connection: Keep-Alive\r\n"
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
        ([post(b"a", KEEP, version=b"1.0")] * 2, 2 * ok("a", "connection: keep-alive\n"), False),
        ([post(b"a", KEEP)], ok("a"), False),
        ([CHUNKED.replace(b"1.1\r\n", b"1.0\r\n" + KEEP) + b"1\r\na\r\n0\r\n\r\n"], ok("a", CLOSE),
         True),  # proxies of HTTP/1.0 may not see where it ends
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
def test_connection_ends_with_400_after_invalid_http(parts: list[bytes], expected: str) -> None:
    client = talk(echo, *parts)
    assert shown(client) == expected
    assert client.is_closed


#: More than 64 kB, which is all that a head may have.
LONG = [b"a" * (8 << 10)] * 10


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET /" + b"a" * (66 << 10) + b" HTTP/1.1\r\n\r\n"],
        [b"GET / HTTP/1.1\r\n" + b"x-a: b\r\n" * (20 << 10) + b"\r\n"],
        [b"GET / HTTP/1.1\r\nx-a: ", *LONG],
        [b"GET / HTTP/1.1\r\nx-a", *LONG],
        [CHUNKED, b"1\r\na\r\n0\r\nx-trailer: ", *LONG],
        [CHUNKED[:-2] + UPGRADE, b"\r\n0\r\nx-trailer: ", *LONG],
        [CHUNKED, b"1;", *LONG],  # the extension of a chunk
    ],
    ids=["line", "headers", "value", "name", "trailer", "trailer behind an upgrade", "extension"],
)
def test_head_is_refused_when_it_is_longer_than_64_kilobytes(parts: list[bytes]) -> None:
    client = talk(echo, *parts)
    assert shown(client).startswith("HTTP/1.1 400 Bad Request\n")
    assert client.is_closed


def test_connection_is_cut_when_a_trailer_has_no_end_after_the_answer() -> None:
    client = talk(ignores, CHUNKED, b"0\r\nx-trailer: ", *LONG)
    assert shown(client) == ok("x")
    assert client.is_closed


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"expect: 100-continue\r\n", "HTTP/1.1 100 Continue\n\n" + ok("abc")),
        (b"expect: something\r\n", ok("abc")),
        (b"", ok("abc")),
    ],
)
def test_client_is_asked_for_its_body_if_it_expects_100(head: bytes, expected: str) -> None:
    request = post(b"abc", head)
    assert shown(talk(echo, request[:-3], request[-3:])) == expected


def test_computation_is_given_up_when_its_body_is_bad(caplog: pytest.LogCaptureFixture) -> None:
    gone: list[bool] = []

    async def waits(exchange: Any) -> None:
        try:
            await echo(exchange)
        finally:
            gone.append(exchange.is_gone)

    client = talk(waits, CHUNKED + b"3\r\nabc\r\n", b"no number\r\n")
    assert shown(client) == BAD
    assert gone == [True]
    assert not caplog.text


@pytest.mark.parametrize(
    "behind",
    [
        b"CONNECT a:1 HTTP/1.1\r\n\r\n" * 2000,
        b"CONNECT a:1 HTTP/1.1\r\n\r\nDEF",
        post(b"", UPGRADE),
        b"\0\0",
    ],
)
@pytest.mark.parametrize("is_chunked", [True, False])
def test_bytes_behind_a_request_to_upgrade_are_ignored(behind: bytes, *, is_chunked: bool) -> None:
    """It went on as a second upgrade: into the body of the first one, or without an end."""
    request = post(b"hi", UPGRADE)
    if is_chunked:
        head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n" + UPGRADE
        request = head + b"\r\n2\r\nhi\r\n0\r\n\r\n"
    client = talk(echo, request + behind)
    assert shown(client) == ok("hi", CLOSE)
    assert client.is_closed


def test_body_behind_an_upgrade_is_read_wherever_it_is_cut() -> None:
    sent = CHUNKED[:-2] + UPGRADE + b"\r\n5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n" + post(b"xyz")
    for cut in range(1, len(sent)):
        client = talk(echo, sent[:cut], sent[cut:])
        assert shown(client) == ok("hello!", CLOSE), cut
        assert client.is_closed


@in_still_time
async def test_requests_wait_while_their_client_does_not_read() -> None:
    """Their answers, of which each may be large, would wait in memory."""
    client = StubClient(echo)
    client.send(post(b"a") + post(b"b"))
    client.stop_reading()  # the first answer fills the buffer
    await settled()
    assert shown(client) == ok("a")
    await client.tell(post(b"c"))
    assert shown(client) == ok("a")
    client.read_on()
    await settled()
    assert shown(client) == ok("a") + ok("b") + ok("c")


@in_still_time
async def test_requests_are_not_computed_without_client(caplog: pytest.LogCaptureFixture) -> None:
    begun: list[bytes] = []

    async def notes(exchange: Any) -> None:
        begun.append(exchange.target)

    client = StubClient(notes)
    client.send(post(b"a") * 3)
    client.leave()
    await settled()
    assert begun == []
    assert not caplog.text


@in_still_time
async def test_many_small_requests_do_not_count_as_one_long_head() -> None:
    client = StubClient(echo)
    requests = b"GET / HTTP/1.1\r\n\r\n" * 4000
    for at in range(0, len(requests), 9999):
        client.send(requests[at : at + 9999])
        await await_that(lambda: client.is_read)  # else requests wait for their turn
    await settled()
    assert shown(client).count("200 OK") == 4000


def test_trailers_are_not_passed_on_as_headers() -> None:
    """A proxy removes headers that clients may not send, and lets trailers pass."""

    async def headers(exchange: Any) -> None:
        while not exchange.is_read:
            await exchange.more()
        exchange.answer(200, PLAIN, b",".join(name for name, _ in exchange.headers))

    client = talk(headers, CHUNKED + b"0\r\nx-tenant: evil\r\n\r\n")
    assert shown(client) == ok("host,transfer-encoding")


@pytest.mark.parametrize("method", [b"CONNECT a:80", b"POST http://[::1/predict"])
def test_request_with_bad_target_is_a_400(method: bytes, caplog: pytest.LogCaptureFixture) -> None:
    client = talk(ASGIBridge(responding()), method + b" HTTP/1.1\r\n\r\n")
    assert shown(client).startswith("HTTP/1.1 400 Bad Request\n")
    assert not caplog.text


@in_still_time
async def test_reading_pauses_while_the_body_is_not_taken() -> None:
    goes_on = asyncio.Event()

    async def waits(exchange: Any) -> None:
        await goes_on.wait()
        await echo(exchange)

    client = StubClient(waits)
    body = b"a" * (100 << 10)
    request = post(body)
    await client.tell(request[:-10])
    assert not client.is_read
    goes_on.set()
    await settled()
    assert client.is_read
    await client.tell(request[-10:])
    assert shown(client) == ok(body.decode())


@in_still_time
async def test_reading_pauses_while_requests_wait() -> None:
    may_answer = asyncio.Semaphore(0)

    async def waits(exchange: Any) -> None:
        await may_answer.acquire()
        await echo(exchange)

    client = await asking(waits, post(b"a"))
    assert client.is_read, "the client may leave, which is seen by reading"
    client.send(post(b"b") + post(b"c"))
    assert not client.is_read
    for _ in range(3):
        may_answer.release()
        await settled()
    assert client.is_read
    assert shown(client) == ok("a") + ok("b") + ok("c")


async def too_large(exchange: Any) -> None:
    exchange.answer_early(413, PLAIN, b"large", 20)


EARLY = (
    "HTTP/1.1 413 Request Entity Too Large\ncontent-type: text/plain\ncontent-length: 5\n"
    "connection: close\n\nlarge"
)


@pytest.mark.parametrize(
    ("size", "parts", "is_closed"),
    [
        (12, [], False),  # the client may send the rest
        (12, [9], False),
        (12, [9, 3], True),  # that was all
        (12, [9, 3, 4], True),
        (1000, [20], False),
        (1000, [21], True),  # more than the application lets it send
        (0, [], True),
    ],
)
def test_refused_body_is_dropped_to_its_bound(size: int, parts: list[int], is_closed: bool) -> None:
    head = post(b"a" * size)[: -size or None]
    client = talk(too_large, head, *(b"a" * part for part in parts))
    assert shown(client) == EARLY
    assert client.is_closed is is_closed


def test_connection_closes_when_the_client_was_not_asked_for_its_body() -> None:
    """What it sends next may be the body, or a request: both are right."""
    client = talk(ignores, post(b"abc", b"expect: 100-continue\r\n")[:-3])
    assert shown(client) == ok("x", CLOSE)


def test_unread_body_of_an_answered_request_is_dropped_up_to_64_megabytes() -> None:
    part = b"a" * (8 << 20)
    head = post(b"")[:-2].replace(b"length: 0", b"length: 1000000000") + b"\r\n"
    assert not talk(ignores, head, *[part] * 8).is_closed
    assert talk(ignores, head, *[part] * 8, b"a").is_closed


def test_connection_stays_open_when_the_body_comes_after_the_answer() -> None:
    client = talk(ignores, post(b"abc")[:-2], b"bc" + post(b"d"))
    assert shown(client) == ok("x") + ok("x")
    assert not client.is_closed


async def parts(exchange: Any) -> None:
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
def test_answer_in_parts_is_framed(request_: bytes, expected: str, is_closed: bool) -> None:
    client = talk(parts, request_)
    assert shown(client) == expected
    assert client.is_closed is is_closed


@pytest.mark.parametrize("when", ["before", "paused"])
@in_still_time
async def test_parts_end_with_their_client(when: str, caplog: pytest.LogCaptureFixture) -> None:
    ended: list[bool] = []

    async def notes(exchange: Any) -> None:
        if when == "before":
            gone = asyncio.Event()
            exchange.on_gone = gone.set
            await gone.wait()
        try:
            await parts(exchange)
        finally:
            ended.append(exchange.is_gone)

    client = StubClient(notes)
    client.send(post(b""))
    if when == "paused":
        client.stop_reading()
    await settled()
    client.leave()
    await settled()
    assert ended == [True]
    assert b"two" not in client.received
    assert not client.server.listeners.open
    assert not caplog.text


@pytest.mark.parametrize(("has_begun", "status"), [(False, "500 Internal"), (True, "200 OK")])
def test_connection_closes_when_the_application_raises(
    has_begun: bool, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def raises(exchange: Any) -> None:
        if has_begun:
            exchange.start(200, PLAIN)
        raise RuntimeError("a bug")

    client = talk(raises, post(b"a") + post(b"b"))
    assert shown(client).startswith(f"HTTP/1.1 {status}")
    assert client.received.count(b"HTTP/1.1") == 1
    assert client.is_closed
    assert "this is a bug" in caplog.text


def test_request_is_answered_500_when_the_application_forgets_it() -> None:
    async def forgets(_: Any) -> None:
        pass

    assert shown(talk(forgets, post(b"a"))).startswith("HTTP/1.1 500 Internal Server Error\n")


@pytest.mark.parametrize(
    ("application", "sent", "seconds", "is_closed"),
    [
        (echo, b"", 29.0, False),
        (echo, b"", 31.0, True),  # a head has 30 s
        (echo, post(b"a"), 31.0, False),
        (echo, post(b"a"), 74.0, False),
        (echo, post(b"a"), 76.0, True),  # an idle connection has 75 s
        (echo, post(b"a") + b"POST /", 31.0, True),
        (echo, post(b"abc")[:-2], 1000.0, False),  # the application bounds the time for a body
        (too_large, post(b"abc")[:-3], 29.0, False),
        (too_large, post(b"abc")[:-3], 31.0, True),  # unless it was refused: it has 30 s
    ],
)
@in_still_time
async def test_connection_is_closed_after_its_time(
    application: Any, sent: bytes, seconds: float, is_closed: bool
) -> None:
    client = StubClient(application)
    if sent:
        client.send(sent)
    await settled()
    await pass_time(seconds)
    assert client.is_closed is is_closed


@pytest.mark.parametrize("application", [echo, too_large])
@pytest.mark.parametrize(
    ("unread", "last_look", "is_cut"),
    [
        ((5, 5), 0.9, False),
        ((5, 5), 1.1, True),
        ((0, 0, 0), 1.1, False),
        ((9, 8, 7), 1.1, False),
        ((9, 8, 8), 1.1, True),
        ((5, 0), 1.1, False),
    ],
)
@in_still_time
async def test_small_unread_answer_is_cut_when_nothing_of_it_is_read(
    application: Any, unread: tuple[int, ...], last_look: float, *, is_cut: bool
) -> None:
    """Its buffer is not full, so that nothing waits for the client."""
    request = post(b"abc") if application is echo else post(b"abc")[:-3]
    client = await asking(application, request, write_timeout=1.0)
    for client.unread in unread[:-1]:
        await pass_time(1.1)
    client.unread = unread[-1]
    await pass_time(last_look)
    assert client.is_aborted is is_cut
    assert client.server.listeners.readers.cut == is_cut


@pytest.mark.parametrize(
    ("waited", "taken", "is_cut"),
    [
        (29.9, 0, False),
        (30.1, 0, True),
        (31.0, 32 << 10, False),  # 32 kB/s
        (31.1, 32 << 10, True),
        (1000.0, 1000 * (32 << 10), False),
        (1000.0, 960 * (32 << 10), True),
    ],
)
@in_still_time
async def test_full_buffer_is_cut_when_its_client_reads_too_slowly(
    waited: float, taken: int, *, is_cut: bool
) -> None:
    client = await asking(parts, post(b""), write_timeout=30.0)
    client.unread = 1 << 30
    client.stop_reading()
    client.unread -= taken
    await pass_time(waited)
    assert client.is_aborted is is_cut


@in_still_time
async def test_bytes_written_behind_a_full_buffer_do_not_count_as_read() -> None:
    client = StubClient(echo, write_timeout=30.0)
    client.unread = 1000
    client.stop_reading()
    client.unread += 32 << 10  # the rest of an answer
    await pass_time(5)
    client.unread -= 32 << 10
    await pass_time(25.9)
    assert not client.is_aborted, "32 kB are a second more"
    client.unread += 64 << 10
    await pass_time(5)
    assert client.is_aborted


@in_still_time
async def test_slowest_clients_are_cut_when_all_together_leave_too_much_unread() -> None:
    """No client is cut whose answer was just written: alone it may be larger than all may be."""
    first = StubClient(echo, write_timeout=1000.0, max_unread=100)
    reading, silent, third, large = first, *(StubClient(echo, beside=first) for _ in range(3))

    def stall(client: StubClient, unread: int) -> list[bool]:
        client.unread = unread
        client.stop_reading()
        return [each.is_aborted for each in (reading, silent, third, large)]

    stall(reading, 60)
    reading.unread = 30
    assert stall(silent, 60) == [False, False, False, False]
    assert stall(third, 20) == [False, True, False, False]
    assert stall(large, 1000) == [True, True, True, False]
    assert first.server.listeners.readers.cut == 3


@pytest.mark.parametrize(("waited", "is_aborted"), [(29, False), (31, True)])
@in_still_time
async def test_encrypted_connection_is_aborted_in_the_end(waited: float, is_aborted: bool) -> None:
    client = await asking(echo, post(b"a", b"connection: close\r\n"), is_secure=True)
    assert client.is_closed
    await pass_time(waited)
    assert client.is_aborted is is_aborted


@in_still_time
async def test_end_of_the_server_does_not_wait_for_a_refused_body() -> None:
    client = await asking(too_large, post(b"abc")[:-3])
    client.connection.shut_down()
    assert client.is_closed


@in_still_time
async def test_end_of_the_server_waits_for_requests_that_have_begun() -> None:
    goes_on = asyncio.Event()

    async def waits(exchange: Any) -> None:
        await goes_on.wait()
        await echo(exchange)

    idle, busy = StubClient(waits), StubClient(waits)
    await busy.tell(post(b"a") + post(b"b"))
    for client in (idle, busy):
        client.server.drain()
        client.connection.shut_down()
    assert idle.is_closed
    assert not busy.is_closed
    goes_on.set()
    await settled()
    assert busy.is_closed
    assert shown(busy) == ok("a") + ok("b", CLOSE)


@in_still_time
async def test_connections_end_with_their_answers_while_the_server_drains() -> None:
    begun = await asking(parts, post(b"a")[:-1])  # its answer comes before its body
    idle = StubClient(parts, beside=begun)
    begun.server.drain()
    for client in (begun, idle):
        assert not client.is_closed
        await client.tell(b"a" if client is begun else post(b""))
        assert client.is_closed
        assert (CLOSE in shown(client)) == (client is idle)


@in_still_time
async def test_full_queue_is_answered_before_the_body_and_results_make_way() -> None:
    streamer = StubStreamer()
    streamer.is_full = True
    async with serving(streamer, max_body=100) as (service, site, _):
        _, mailbox = service.loop
        client = StubClient(site)
        request = post(b'{"inputs": "%b"}' % (b"a" * 50), path=b"/predict")
        await client.tell(request[:-30])
        assert shown(client).startswith("HTTP/1.1 503 Service Unavailable\n")
        assert "connection: close" not in shown(client)
        assert mailbox.at_once == 16, "results do not hold up those who are refused"
        await pass_time(0.9)
        assert mailbox.at_once == 16
        await pass_time(0.2)
        assert mailbox.at_once > 1000
        streamer.is_full = False
        client.received = b""
        await client.tell(request[-30:] + request)
        assert shown(client).endswith('"' + "a" * 50 + '"')
        assert shown(client).startswith("HTTP/1.1 200 OK\n"), "of the second request, only"
        client.received, streamer.is_full = b"", True
        await client.tell(post(b"a" * 101, path=b"/predict"))
        assert shown(client).startswith("HTTP/1.1 413 "), "waiting would not help"
        assert client.is_closed
        client.leave()


def responding(*messages: dict[str, Any]) -> Any:
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
def test_asgi_application_answers(messages: list[dict[str, Any]], expected: str) -> None:
    seen.clear()
    app = ASGIBridge(responding(*messages))
    request = b"GET /a%20b?c=%20d HTTP/1.1\r\ncontent-length: 2\r\n\r\n"
    client = talk(app, request + b"x", b"y")
    assert shown(client) == expected
    assert seen == [("GET", "/a b", b"c=%20d", b"xy")]


def test_asgi_header_with_a_line_break_is_refused() -> None:
    start = {**START, "headers": [(b"x-a", b"b\r\nset-cookie: c")]}
    client = talk(ASGIBridge(responding(start)), b"GET / HTTP/1.1\r\n\r\n")
    assert shown(client).startswith("HTTP/1.1 500 ")
    assert "set-cookie" not in shown(client)


@pytest.mark.parametrize("application", [echo, parts, too_large])
def test_exchange_over_asgi_gives_the_same_answer(application: Any) -> None:
    """Through both bridges: our connection has an ASGI application, which has the exchange."""
    direct = talk(application, post(b"abc"))
    bridged = talk(ASGIBridge(ExchangeBridge(application)), post(b"abc"))
    assert shown(bridged) == shown(direct)
