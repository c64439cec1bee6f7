"""Faults, seen over HTTP: answers stay correct or are honest errors, and nobody waits for ever."""

from __future__ import annotations

import collections
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve_process import Serving, until
from service_streamer.testing import Gate

OBEDIENT = "served_models:Obedient"
WORKERS = 2


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
                    victims = service.workers()
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
        [worker] = service.workers()
        os.kill(worker, signal.SIGKILL)
        until(lambda: service.client.get("/health/ready").json()["status"] == "broken")
        response = service.predict(1)
        assert (response.status_code, response.json()["error"]["type"]) == (503, "unavailable")
        assert service.client.get("/health/live").status_code == 200
        (tmp_path / "was here").unlink()
        until(lambda: service.ready() == 200)  # it is tried again and again
        assert service.predict(1).json() == 1
        assert service.terminate() == 0


def test_request_that_kills_its_worker_fails_alone() -> None:
    with Serving(OBEDIENT, "--timeout", "3000") as service, ThreadPoolExecutor(8) as threads:
        deadly = threads.submit(service.predict, "kill")
        others = [threads.submit(service.predict, number) for number in range(50)]
        assert deadly.result().status_code == 500
        assert "died" in deadly.result().json()["error"]["message"]
        assert [other.result().json() for other in others] == [*range(50)]
