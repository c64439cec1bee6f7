"""How the yardstick kills parts of pools and services, and what it counts then."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

from adapters.leftovers import alive_with, growth, holdings
from adapters.sharing_client import Load, OverHttp


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


class _Handler(http.server.BaseHTTPRequestHandler):
    """Echoes even numbers, refuses those that end in 1, breaks at 3, and is silent at 5."""

    has_ended = threading.Event()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["inputs"]
        if asked == 5:
            self.has_ended.wait()
        if asked in (3, 5):
            return
        self.send_response(503 if asked == 1 else 200)
        self.end_headers()
        self.wfile.write(json.dumps(-asked if asked == 7 else asked).encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


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
def test_every_outcome_of_a_call_over_http_has_its_name(number: int, outcome: str) -> None:
    _Handler.has_ended.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        service = OverHttp(
            server.server_address[1], "plain", timeout=0.2 if outcome == "hung" else 60.0
        )
        load = Load(service, 0, number - 1)
        assert load.outcome(is_large=False) == outcome
        assert load.end(0.0) == {"outcomes": {}, "hung": 0}
        service.close(drain=False)
        _Handler.has_ended.set()
        server.shutdown()
        thread.join()
