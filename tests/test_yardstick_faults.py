"""How the yardstick kills parts of pools and services, and what it counts then."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from adapters.leftovers import alive_with, growth, holdings
from adapters.sharing_client import Load, OverHttp

# -- what is left behind


def test_processes_are_found_by_their_environment_wherever_they_are() -> None:
    words = "import os, sys; os.setsid(); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "MARK": "this test"},
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        assert alive_with("MARK", "this test") == {child.pid}
        assert alive_with("MARK", "this") == set()
        held = holdings([child.pid])[child.pid]
        assert held == len(os.listdir(f"/proc/{child.pid}/fd")) + 1  # and a thread
        child.communicate()
    assert alive_with("MARK", "this test") == set()
    assert holdings([child.pid]) == {}


def test_what_each_fault_leaves_behind_counts_and_what_comes_and_goes_does_not() -> None:
    assert growth([{1: 40 + n % 3, 2: 14} for n in range(20)]) == 0
    assert growth([{1: 40, 2: 14 + n} for n in range(20)]) == 19
    assert growth([{1: 40 + n} for n in range(10)] + [{2: 90} for _ in range(10)]) == 0


# -- the load over HTTP


class _Handler(http.server.BaseHTTPRequestHandler):
    """Echoes even numbers, refuses those that end in 1, breaks at 3, and is silent at 5."""

    protocol_version = "HTTP/1.1"
    has_ended = threading.Event()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["inputs"]
        if asked % 10 == 3:
            self.close_connection = True
            return
        if asked % 10 == 5:
            self.has_ended.wait()
            return
        body = json.dumps(asked if asked % 10 != 7 else -asked).encode()
        self.send_response(503 if asked % 10 == 1 else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    _Handler.has_ended.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server.server_address[1]
        _Handler.has_ended.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (2, "answered"),
        (1, "Refused"),
        (3, "RemoteDisconnected"),
        (5, "hung"),
        (7, "wrong"),
    ],
)
def test_every_outcome_has_its_name(number: int, outcome: str, port: int) -> None:
    service = OverHttp(port, "plain", timeout=0.2 if outcome == "hung" else 60.0)
    load = Load(service, 0, number - 1)
    assert load.outcome(is_large=False) == outcome
    assert load.end(0.0) == {"outcomes": {}, "hung": 0}
    service.close(drain=False)
