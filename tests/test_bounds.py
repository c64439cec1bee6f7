"""What all clients of a web process can hold together: connections, and bodies of requests."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator

import httpx
import pytest

from command_line import launched
from http_in_process import StubClient, StubStreamer, in_still_time, pass_time, serving, settled
from serve_process import Serving, environment, until
from service_streamer.serve.opening import service_options
from test_tls import Files

pytestmark = [pytest.mark.no_gevent, pytest.mark.xdist_group("bounds")]

KINDS = "served_models:kinds"

#: Starts a service that may have 256 files open, and 100 as long as it does not ask for more.
FEW_FILES = (
    "bash", "-c", 'ulimit -Sn 100; ulimit -Hn 256; exec "$0" "$@"',
    sys.executable, "-m", "service_streamer", "serve",
)  # fmt: skip
MOST = 128

HEAD = b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module", params=["plain", "web processes", "TLS"])
def with_few_files(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    more: tuple[str, ...] = ()
    if request.param == "web processes":
        more = ("--web-workers", "2")
    elif request.param == "TLS":
        more = tuple(Files(tmp_path_factory.mktemp("tls")).arguments)
    with Serving(KINDS, "--port", "0", *more, program=FEW_FILES) as service:
        if request.param == "web processes":
            service.await_web_processes(2)
        yield service


def web_processes(service: Serving) -> int:
    return 2 if "web process 1" in service.log() else 1


def connect(service: Serving, *, speaks_tls: bool = True) -> socket.socket:
    connection = service.connect()
    if service.url.startswith("https") and speaks_tls:
        connection = stranger().wrap_socket(connection)
    return connection


@functools.cache
def stranger() -> ssl.SSLContext:
    """Of a client that trusts any service; it takes a while to make."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def is_refused(connection: socket.socket) -> bool:
    """Whether the service has said so by now; one that waits for the body says nothing."""
    with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
        return connection.recv(12) == b"HTTP/1.1 503"
    return False


def is_served(service: Serving) -> bool:
    with contextlib.suppress(httpx.HTTPError):  # its handshake was the oldest
        return service.predict(1).status_code == 200
    return False


def await_room(service: Serving) -> None:
    """Block until each process has noticed that its clients have left, and serves."""

    def has_room(pid: int) -> bool:
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            return len(os.listdir(f"/proc/{pid}/fd")) < MOST // 2
        return True

    until(lambda: all(map(has_room, (service.process.pid, *service.children()))))
    until(lambda: is_served(service))


def warnings(service: Serving, text: str) -> int:
    return len(re.findall(rf"WARNING .*{text}", service.log()))


def test_silent_connections_do_not_keep_requests_out(with_few_files: Serving) -> None:
    service = with_few_files

    def told() -> int:
        return warnings(service, "clients hold 128 conn") + warnings(service, "64 TLS handshakes")

    before = told()
    with contextlib.ExitStack() as held:
        for _ in range(400):  # of two processes with room for 128 each
            held.enter_context(connect(service, speaks_tls=False))
        for _ in range(3):
            until(lambda: is_served(service), seconds=20)

        def all_are_full() -> bool:
            """The system may give more of the connections to one process than to the other."""
            held.enter_context(connect(service, speaks_tls=False))
            return told() >= before + web_processes(service)

        until(all_are_full)
    await_room(service)


def test_connections_beyond_the_maximum_are_refused(with_few_files: Serving) -> None:
    service = with_few_files
    processes = web_processes(service)
    before = warnings(service, "clients hold 128 connections")
    with contextlib.ExitStack() as held:

        def begin_request() -> socket.socket:
            connection = held.enter_context(connect(service))
            connection.sendall(HEAD + b"content-length: 9\r\n\r\n")
            connection.setblocking(False)
            return connection

        for _ in range(processes * MOST - 20):
            begin_request()
        late: list[socket.socket] = []

        def one_is_refused() -> bool:
            late.append(begin_request())
            return any(map(is_refused, late))

        until(one_is_refused)
        answer = service.predict(1)
        assert answer.status_code == 503
        assert "too many connections" in answer.text
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["connection"] == "close"
        told = warnings(service, "clients hold 128 connections") - before
        assert 1 <= told <= processes
    await_room(service)


@in_still_time
async def test_kept_connection_outlives_silent_ones_and_makes_room_for_busy_ones() -> None:
    async with serving(StubStreamer()) as application:
        kept = StubClient(application.site)
        kept.server.listeners.most = 4

        def others() -> list[StubClient]:
            return [StubClient(application.site, beside=kept) for _ in range(3)]

        assert await kept.ask(HEAD + declared(b'{"inputs": 1}')) == (200, b"1")
        silent = others()
        await pass_time(1)
        busy = others()
        assert [each.is_aborted for each in (kept, *silent)] == [False, True, True, True]
        for client in busy:
            client.send(HEAD + b"content-length: 9\r\n\r\n")
        await pass_time(1)
        StubClient(application.site, beside=kept)
        assert kept.is_aborted


def declared(body: bytes) -> bytes:
    return b"content-length: %d\r\n\r\n%b" % (len(body), body)


def chunked(body: bytes) -> bytes:
    return b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def compressed(body: bytes) -> bytes:
    return b"content-encoding: gzip\r\n" + declared(gzip.compress(body))


@pytest.mark.parametrize("sent", [declared, chunked, compressed])
@in_still_time
async def test_bodies_of_all_requests_together_have_a_bound(
    sent: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    body = b'{"inputs": "%b"}' % (b"a" * 500_000)
    limits = {"max_body": 1_000_000, "max_bodies": 2_000_000}
    async with serving(StubStreamer(), **limits) as application:

        async def answer(request: bytes) -> tuple[int, bytes, bytes]:
            client = StubClient(application.site)
            return *(await client.ask(HEAD + request)), client.received

        assert (await answer(sent(body)))[0] == 200
        slow = [StubClient(application.site) for _ in range(2)]
        for client in slow:
            client.send(HEAD + b"content-length: 990000\r\n\r\n" + b"a" * 900_000)
        await settled()
        for _ in range(2):
            status, text, received = await answer(sent(body))
            assert (status, json.loads(text)["error"]["code"]) == (503, "overloaded")
            assert b"retry-after: 1\r\n" in received
        assert (await answer(declared(b'{"inputs": "small"}')))[0] == 200
        assert caplog.text.count("the bodies of all open requests") == 1
        for client in slow:
            client.leave()
        await settled()
        assert (await answer(sent(body)))[0] == 200


def test_bound_of_all_bodies_comes_from_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1024 if name == "SC_PHYS_PAGES" else read(name))
    [named] = launched(monkeypatch, "serve", KINDS, "--max-body", "500000").models
    assert service_options(named).max_bodies == 1024 * read("SC_PAGE_SIZE") // 4


# -- memory of bodies that are gone

PROGRAM = """
import resource, sys
from service_streamer.serve.running import keep_freed_memory
if sys.argv[1] == "keeps":
    keep_freed_memory()
def bodies():
    return [bytes(600_000 + 4096 * number) for number in range(8)]
bodies()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    bodies()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Pages that the system gave to a program that made 800 large bodies."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True,
        env=environment(),
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_large_bodies_do_not_get_new_pages() -> None:
    assert faults("keeps") < 0.1 * faults("gives back")
