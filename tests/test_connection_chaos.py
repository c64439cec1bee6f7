"""Connections under random requests, right and wrong, in random pieces: what always holds."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import pytest

from http_in_process import StubClient, run

pytestmark = pytest.mark.no_gevent

PLAIN = ((b"content-type", b"text/plain"),)
BAD = b"Invalid HTTP request received."


class Chaos:
    """One connection: its requests, the application, and how both take their time.

    Attributes:
        running: requests that the application has not answered yet.
        may_end: whether the connection may end before all requests are answered.
        expected: how many requests must have an answer at the end; None if that is not known.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.running: list[Any] = []
        self.may_end = False
        self.expected: int | None = None

    async def pause(self) -> None:
        for _ in range(self.random.choice((0, 0, 1, 3, 8))):
            await asyncio.sleep(0)

    async def application(self, exchange: Any) -> None:
        self.running.append(exchange)
        try:
            await self.answer(exchange)
        finally:
            self.running.remove(exchange)

    async def answer(self, exchange: Any) -> None:
        """Do what the path says, with the path in the answer."""
        name = exchange.target
        await self.pause()
        if name.startswith(b"/early"):
            exchange.answer_early(413, PLAIN, b"<%b>" % name, self.random.choice((0, 20, 1000)))
        elif name.startswith(b"/ignore"):
            exchange.answer(200, PLAIN, b"<%b>" % name)
        else:
            body = exchange.take()
            while not exchange.is_read:
                body += await exchange.more()
            await self.pause()
            if name.startswith(b"/raise"):
                raise RuntimeError("of the test")
            if name.startswith(b"/parts"):
                exchange.start(200, PLAIN)
                await exchange.write(b"<%b>" % name)
                await self.pause()
                await exchange.end(self.random.choice((b"", b"end")))
            else:
                exchange.answer(200, PLAIN, b"<%b>%b" % (name, body))

    def request(self, number: int) -> bytes:
        chance, choice = self.random.random, self.random.choice
        method = choice((b"GET", b"POST", b"POST", b"HEAD"))
        kinds = (b"/early", b"/ignore", b"/echo", b"/echo", b"/parts", b"/raise")
        name = b"%b%d" % (self.random.choices(kinds, (1, 1, 1, 1, 1, 0.1))[0], number)
        head, body = b"host: a\r\n", b""
        for header, share in (
            (b"connection: close\r\n", 0.1),
            (b"upgrade: h2c\r\nconnection: upgrade\r\n", 0.1),
            (b"expect: 100-continue\r\n", 0.15),
        ):
            head += header if chance() < share else b""
        if method != b"HEAD" and chance() < 0.7:
            parts = [b"x" * choice((1, 5, 40)) for _ in range(self.random.randrange(4))]
            if chance() < 0.5:
                body = b"".join(parts)
                head += b"content-length: %d\r\n" % len(body)
            else:
                head += b"transfer-encoding: chunked\r\n"
                body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
                body += b"0\r\n" + choice((b"", b"", b"trailer: a\r\n")) + b"\r\n"
        is_wrong = chance() < 0.06
        if is_wrong:
            body += choice((b"\0\0", b"zz\r\n", b"\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n"))
        version = b"1.0" if chance() < 0.05 else b"1.1"
        ends = (b"/early", b"/raise", b"connection:", b"expect:", b"1.0")
        request = b"%b %b HTTP/%b\r\n%b\r\n" % (method, name, version, head)
        self.may_end |= is_wrong or any(each in request for each in ends)
        return request + body

    async def run(self) -> StubClient:
        client = StubClient(self.application)
        requests = [self.request(number) for number in range(self.random.randrange(1, 6))]
        data = b"".join(requests)
        if not self.may_end:
            self.expected = len(requests)
        position = 0
        while position < len(data) and not client.is_closed:
            for _ in range(200):
                if client.is_read or client.is_closed:
                    break
                await asyncio.sleep(0)
            else:
                raise AssertionError("the service does not read on")
            size = self.random.choice((1, 3, 17, 100, 5000))
            if not client.is_closed:
                client.send(data[position : position + size])
            position += size
            await self.pause()
            if self.random.random() < 0.03:
                self.expected = None
                break
        for _ in range(200):
            await asyncio.sleep(0)
        return client


def check(chaos: Chaos, client: StubClient) -> None:
    """What holds whatever was sent."""
    received = client.received
    assert not client.late, "nothing is written to a closed connection"
    if not client.is_closed:
        assert not any(each.is_read for each in chaos.running), "it is never answered"
    if chaos.expected is not None:
        assert received.count(b"HTTP/1.1 200 OK") == chaos.expected, "a request waits for nothing"
    named = [int(number) for number in re.findall(rb"</[a-z]+(\d)>", received)]
    assert named == sorted(set(named)), "each is answered once, in order"
    if BAD in received:
        assert received.endswith(BAD), "nothing follows a 400"
    client.leave()
    assert not client.server.listeners.open


def survive(seeds: range) -> int:
    """Try them; how many connections had to answer all of their requests."""
    complete = 0

    async def main() -> None:
        nonlocal complete
        for seed in seeds:
            chaos = Chaos(seed)
            client = await chaos.run()
            complete += chaos.expected is not None
            try:
                check(chaos, client)
            except AssertionError as error:
                error.add_note(f"seed {seed}: {client.received!r}")
                raise
            for _ in range(20):
                await asyncio.sleep(0)

    run(main())
    return complete


def test_connection_answers_in_order_or_ends_when_requests_are_random() -> None:
    assert survive(range(1_000)) > 100
