"""Faults, seen over HTTP: answers stay correct or are honest errors, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve_process import Serving, until

OBEDIENT = "served_models:Obedient"


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
