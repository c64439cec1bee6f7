"""Every Python snippet of the README runs, and prints what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import snippets
from service_streamer import RedisStreamer
from service_streamer.redis.local import LocalRedis

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = snippets.snippets(ROOT / "README.md")
# Those that need each other, and a Redis.
OVER_REDIS = [snippet for snippet in SNIPPETS if "localhost:6379" in snippet]
ALONE = [snippet for snippet in SNIPPETS if snippet not in OVER_REDIS]


@pytest.mark.parametrize("number", range(len(ALONE)))
def test_snippet(number: int, tmp_path: Path) -> None:
    snippets.check(ALONE[number], tmp_path)


@pytest.mark.long
def test_a_web_server_and_a_worker_host_over_redis(tmp_path: Path) -> None:
    web_server, worker_host = (tmp_path / "web_server.py", tmp_path / "worker_host.py")
    with LocalRedis() as redis:
        programs = [
            text.replace("localhost:6379", f"127.0.0.1:{redis.port}") for text in OVER_REDIS
        ]
        before = 'inputs = ["Happy birthday to [MASK]."]\n'
        after = '\nassert outputs == ["you"]\nstreamer.close()\n'
        web_server.write_text(before + programs[0] + after)
        worker_host.write_text(snippets.for_small_machines(programs[1]))
        host = subprocess.Popen(
            [sys.executable, str(worker_host)],
            stderr=subprocess.PIPE,
            text=True,
            env=snippets.ENVIRONMENT,
        )
        try:
            with RedisStreamer(redis.url, prefix="bert") as streamer:
                streamer.wait_ready()  # loading the model may take longer than ``predict`` waits
            run = subprocess.run(
                [sys.executable, str(web_server)],
                capture_output=True,
                text=True,
                env=snippets.ENVIRONMENT,
            )
        finally:
            host.terminate()
            _, errors = host.communicate()
    assert run.returncode == 0, run.stderr
    assert (host.returncode, errors) == (0, "")


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len(SNIPPETS) == 4
    assert len(README.splitlines()) <= 215
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    headings = {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
        for heading in re.findall(r"^## (.*)$", README, re.MULTILINE)
    }
    for anchor in re.findall(r"\]\(#([^)]+)\)", README):
        assert anchor in headings, anchor
