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

from adapters.http_protocols import PROTOCOLS
from adapters.leftovers import alive_with, growth, holdings
from adapters.sharing_client import Load, OverHttp, probed
from yardstick import on_paper
from yardstick.service_faults import faults
from yardstick.systems import SYSTEMS

# -- on paper


@pytest.mark.parametrize(
    ("cores", "pool", "processes", "rate"),
    [
        (8, 10e-6, 6, 60_000),  # web processes on all cores but two
        (32, 10e-6, 10, 100_000),  # the pool is busy all the time
        (32, 1e-6, 20, 200_000),  # or the worker is
    ],
)
def test_more_cores_give_more_until_one_process_is_always_busy(
    cores: int, pool: float, processes: float, rate: float
) -> None:
    found = on_paper.rates(cores, web=100e-6, pool=pool, worker=5e-6, one=80e-6)
    assert found["processes"] == pytest.approx(processes)
    assert found["paper"] == pytest.approx(rate)
    assert found["to_single"] == pytest.approx(rate * 80e-6)


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
    assert load._outcome(is_large=False) == outcome
    assert load.end(0.0) == {"outcomes": {}, "hung": 0}
    service.close(drain=False)


def test_threads_call_until_the_end_and_a_new_connection_follows_a_broken_one(port: int) -> None:
    service = OverHttp(port, "plain", timeout=0.2)
    load = Load(service, 1, 0)
    all_of_them = {"answered", "Refused", "RemoteDisconnected", "wrong", "hung"}
    while load._outcomes.keys() != all_of_them:
        load._is_over.wait(0.01)
    told = load.end(60.0)
    assert {*told["outcomes"], "hung"} == all_of_them
    assert told["outcomes"]["answered"] > 1
    assert told["hung"] > 0
    service.close(drain=False)


def test_nobody_answers_a_probe() -> None:
    from yardstick.servers import free_port

    assert probed(OverHttp(free_port(), "plain", 1.0), patience=0.05) is None


def test_one_item_in_the_open_inference_protocol() -> None:
    protocol = PROTOCOLS["v2"]
    (tensor,) = json.loads(protocol.body("word"))["inputs"]
    assert tensor == {"name": "input", "shape": [1, 1], "datatype": "BYTES", "data": ["word"]}
    assert protocol.answer({"outputs": [{"data": [3]}]}) == 3


# -- with real processes


@pytest.mark.long
@pytest.mark.parametrize("killed", ["pool", "web"])
def test_a_service_of_several_processes_that_is_killed(killed: str) -> None:
    row = faults(SYSTEMS["serve-shared"], {}, killed, 1)
    assert row.point == {"killed": killed}
    assert row.figures["kills"] == 1
    assert row.figures["recovered"] > 0
    assert row.figures["sent"] > row.figures["failed"]
    assert (row.figures["failed"] > 0) is (killed == "web")  # its connections break
    assert (row.figures["hung"], row.figures["left"]) == (0, 0)


@pytest.mark.long
def test_a_pool_that_is_killed_with_its_worker_and_a_client() -> None:
    options = json.dumps({"faults": 1, "killed": ["all"]})
    words = [sys.executable, "-m", "adapters.pool_faults", options]
    from yardstick.environments import environment

    run = subprocess.run(
        words, env=environment(), check=True, capture_output=True, text=True, timeout=280
    )
    first, once, end = (json.loads(line) for line in run.stdout.splitlines())
    assert first["point"] == {"killed": "all"}
    assert {first["figures"][each] for each in ("failed", "hung", "left")} == {0}
    assert {once["figures"][each] for each in ("twice", "hung", "left")} == {0}
    assert end == {"ended": True}
