"""wrk with the scripts that README and the examples name."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from example_programs import ROOT, Program
from test_examples import COMMANDS
from test_redis_examples import DEMO

pytestmark = pytest.mark.xdist_group("wrk")


def wrk(connections: int, script: str, port: int) -> str:
    """What wrk says after three seconds of load."""
    if shutil.which("wrk") is None:
        pytest.skip("wrk is not installed (Debian's package wrk has it)")
    url = f"http://127.0.0.1:{port}/stream"
    command = ["wrk", "-t2", f"-c{connections}", "-d3s", "--timeout=10s", "-s", script, url]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def service() -> Iterator[Program]:
    with Program(*COMMANDS["streamer"]) as service:
        yield service


def test_example_answers_every_request_of_the_script(service: Program) -> None:
    said = wrk(8, "scripts/streamer.lua", service.port)
    assert re.search(r"answers: [1-9]\d*, not 2xx: 0, socket errors: 0", said), said


@pytest.mark.long
def test_example_answers_every_request_of_the_original_s_script(service: Program) -> None:
    said = wrk(8, "example/benchmark.lua", service.port)
    assert re.search(r"^ +[1-9]\d* requests in", said, re.MULTILINE), said
    assert not re.search(r"Non-2xx|Socket errors", said), said


@pytest.mark.long
def test_demo_over_redis_answers_every_request_of_the_script() -> None:
    with Program(*DEMO, ready="^Ctrl-C", REDIS_PREFIX="wrk") as demo:
        said = wrk(32, "scripts/streamer.lua", demo.port)
    good = r"answers: [1-9]\d*, not 2xx: 0, socket errors: 0, timeouts: 0"
    assert re.search(good, said), said
