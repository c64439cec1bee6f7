"""A web process keeps the memory of large bodies."""

from __future__ import annotations

import subprocess
import sys

import pytest

from serve_process import environment

PROGRAM = """
import resource, sys
from service_streamer.serve.heap import keep_freed_memory
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
