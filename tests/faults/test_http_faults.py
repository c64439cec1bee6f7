"""Faults, seen over HTTP: answers stay correct or are honest errors, and nobody waits for ever."""

from __future__ import annotations

import collections
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from serve_process import Serving, until
from service_streamer.testing import Gate

OBEDIENT = "served_models:Obedient"
WORKERS = 2


@pytest.fixture(scope="module")
def patient() -> Iterator[Serving]:
    """A service whose requests may take their time."""
    with Serving(OBEDIENT, "--timeout", "3000") as service:
        yield service


def workers(service: Serving) -> list[int]:
    """Its worker processes that are there."""
    found = []
    for pid in service.children():
        try:
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


def test_requests_are_answered_when_every_worker_is_killed_under_load(gate: Gate) -> None:
    """Ready turns red and green again; what is answered is right, and all is answered."""
    gate.let_through(WORKERS)
    env = {"TEST_GATE": str(gate.__getstate__())}
    with Serving("served_models:Late", "--workers", str(WORKERS), **env) as service:
        until(lambda: all_ready(service))  # or one could leave its permit to a later worker
        statuses: collections.Counter[int] = collections.Counter()
        is_over = threading.Event()

        def ask(caller: int) -> None:
            number = caller
            while not is_over.is_set():
                number += 100
                response = service.predict(number)
                statuses[response.status_code] += 1
                if response.status_code == 200:
                    assert response.json() == number
                else:
                    assert response.json()["error"]["id" if response.status_code == 500 else "type"]

        with ThreadPoolExecutor(16) as threads:
            callers = [threads.submit(ask, number) for number in range(16)]
            try:
                for _ in range(2):
                    served = statuses[200]
                    until(lambda served=served: statuses[200] > served + 50)
                    victims = workers(service)
                    assert len(victims) == WORKERS
                    for victim in victims:
                        os.kill(victim, signal.SIGKILL)
                    until(lambda: service.ready() == 503)  # and so until they are let in
                    gate.let_through(WORKERS)
                    until(lambda: all_ready(service))
            finally:
                is_over.set()
            for caller in callers:
                caller.result()
        assert set(statuses) <= {200, 500}
        assert statuses[500] <= 2 * 16  # who was there twice, at most
        assert service.stats()["totals"]["restarts"] >= 2 * WORKERS


def all_ready(service: Serving) -> bool:
    states = [worker["state"] for worker in service.stats()["workers"]]
    return service.ready() == 200 and {*states} <= {"idle", "busy"} and len(states) == WORKERS


@pytest.mark.long
def test_service_is_not_ready_while_no_worker_comes_back(tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text(
        "import os\n"
        "if os.path.exists('was here'): raise OSError('the disk is gone')\n"
        "open('was here', 'w').close()\n"
        "def model(batch): return batch\n"
    )
    with Serving("once:model", cwd=tmp_path) as service:
        assert service.ready() == 200
        [worker] = workers(service)
        os.kill(worker, signal.SIGKILL)
        until(lambda: service.client.get("/health/ready").json()["status"] == "broken")
        response = service.predict(1)
        assert (response.status_code, response.json()["error"]["type"]) == (503, "unavailable")
        assert service.client.get("/health/live").status_code == 200
        (tmp_path / "was here").unlink()
        until(lambda: service.ready() == 200)  # it is tried again and again
        assert service.predict(1).json() == 1
        assert service.terminate() == 0


@pytest.mark.xdist_group("http-faults")
def test_request_that_kills_its_worker_fails_alone(patient: Serving) -> None:
    with ThreadPoolExecutor(8) as threads:
        deadly = threads.submit(patient.predict, "kill")
        others = [threads.submit(patient.predict, number) for number in range(50)]
        assert deadly.result().status_code == 500
        assert "died" in deadly.result().json()["error"]["message"]
        assert [other.result().json() for other in others] == [*range(50)]


@pytest.mark.long
def test_overload_is_refused_at_once_at_twice_the_capacity() -> None:
    """What is refused is refused at once; what is accepted is answered in its time."""
    arguments = ("--max-pending", "8", "--batch-size", "4", "--timeout", "60")
    with Serving("served_models:SimulatedGPU", *arguments) as service:
        with ThreadPoolExecutor(32) as threads:
            responses = [*threads.map(service.predict, range(2000))]
        statuses = collections.Counter(response.status_code for response in responses)
        assert set(statuses) <= {200, 503}
        assert statuses[200]
        right = [response.json() == number for number, response in enumerate(responses)
                 if response.status_code == 200]  # fmt: skip
        assert all(right)
        stats = service.stats()
        assert stats["totals"]["answered"] == statuses[200]
        assert stats["totals"]["rejected"]["overloaded"] == statuses[503]
        assert stats["queue"]["pending"] == 0


@pytest.mark.xdist_group("http-faults")
def test_slow_callers_do_not_hold_up_others(patient: Serving) -> None:
    before = patient.stats()["totals"]["disconnected"]
    slow = [connection(patient) for _ in range(200)]
    try:
        for number, each in enumerate(slow):
            head = b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n"
            each.sendall(head if number % 2 else head + b'\r\n{"inp')
        assert [patient.predict(number).json() for number in range(20)] == [*range(20)]
        until(lambda: patient.ready() == 200)
    finally:
        for each in slow:
            each.close()
    until(lambda: patient.stats()["totals"]["disconnected"] == before + 100)


def connection(service: Serving) -> socket.socket:
    url = httpx.URL(service.url)
    return socket.create_connection((url.host, url.port))


def test_inputs_of_a_hundred_callers_that_left_are_not_computed(tmp_path: Path, gate: Gate) -> None:
    record = tmp_path / "record"
    env = {"TEST_GATE": str(gate.__getstate__()), "TEST_RECORD": str(record)}
    with Serving(OBEDIENT, "--batch-size", "1", **env) as service:
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(service.predict, 0)
            gate.await_arrival()
            ahead = threads.submit(service.predict, 1)
            until(lambda: service.stats()["queue"]["in_flight"] == 2)
            leaving = [connection(service) for _ in range(100)]
            for each in leaving:
                each.sendall(
                    b'POST /predict HTTP/1.1\r\nhost: a\r\ncontent-length: 13\r\n\r\n{"inputs": 9}'
                )
            until(lambda: service.stats()["queue"]["pending"] == 100)
            for each in leaving:
                each.close()
            until(lambda: service.stats()["queue"]["pending"] == 0)
            gate.let_through(3)
            assert [first.result().json(), ahead.result().json()] == [0, 1]
        assert service.predict(2).json() == 2
    assert record.read_text().split() == ["[0]", "[1]", "[2]"]


@pytest.mark.xdist_group("http-faults")
@pytest.mark.parametrize(
    "head",
    [
        b"GARBAGE\r\n\r\n",
        b"POST /predict HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /predict HTTP/1.1\r\ncontent-length: abc\r\n\r\n",
        b"POST /predict HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /predict HTTP/1.1\r\nhost: \xff\xfe\r\nx-request-timeout: \xff\r\n"
        b"content-length: 0\r\n\r\n",
        b"POST /%ff%fe HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n",
    ],
)
def test_bytes_that_are_not_http_are_refused_and_others_served(
    patient: Serving, head: bytes
) -> None:
    with connection(patient) as sock:
        sock.sendall(head)
        answer = sock.recv(1 << 16)
        assert re.match(rb"HTTP/1.1 4\d\d ", answer) or not answer
    assert patient.predict(1).json() == 1
    assert "this is a bug" not in patient.log()
