"""The README: its snippets over Redis run, and it says the same in both languages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import snippets
from service_streamer import RedisStreamer
from service_streamer.redis.local import LocalRedis

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# Those that need each other, and a Redis. The others run with those of all pages, in test_docs.py.
OVER_REDIS = [each for each in snippets.snippets(ROOT / "README.md") if "localhost:6379" in each]


@pytest.mark.long
def test_a_web_server_and_a_worker_host_over_redis(tmp_path: Path) -> None:
    web_server, worker_host = (tmp_path / "web_server.py", tmp_path / "worker_host.py")
    piped: dict[str, Any] = {"text": True, "env": snippets.ENVIRONMENT}
    with LocalRedis() as redis:
        programs = [
            text.replace("localhost:6379", f"127.0.0.1:{redis.port}") for text in OVER_REDIS
        ]
        before = 'inputs = ["Happy birthday to [MASK]."]\n'
        after = '\nassert outputs == ["you"]\nstreamer.close()\n'
        web_server.write_text(before + programs[0] + after)
        worker_host.write_text(snippets.for_small_machines(programs[1]))
        host = subprocess.Popen([sys.executable, worker_host], stderr=subprocess.PIPE, **piped)
        try:
            with RedisStreamer(redis.url, prefix="bert") as streamer:
                streamer.wait_ready()  # loading the model may take longer than ``predict`` waits
            run = subprocess.run([sys.executable, web_server], capture_output=True, **piped)
        finally:
            host.terminate()
            _, errors = host.communicate()
    assert run.returncode == 0, run.stderr
    assert (host.returncode, errors) == (0, "")


@pytest.mark.parametrize("page", ["README.md", "README_zh.md"])
def test_the_readme_is_short(page: str) -> None:
    """Its links are checked with those of all pages, in test_docs.py."""
    assert len(snippets.snippets(ROOT / page)) == 4
    assert len((ROOT / page).read_text().splitlines()) <= 230


def parts(text: str) -> dict[str, list[str]]:
    """What is the same in every language."""
    patterns = {
        # So the snippets, which are tested above, and the commands.
        "blocks": r"^```\w+\n[\s\S]*?^```",
        "figures": r"<!-- yardstick[\s\S]*?<!-- end -->",
        "levels": r"^#+ ",
        "bullets": r"^\* ",
    }
    return {
        **{part: re.findall(f"(?m){pattern}", text) for part, pattern in patterns.items()},
        "rows": [str(row.count(" | ")) for row in re.findall(r"(?m)^\|.*\|$", text)],
        "links": sorted(set(re.findall(r"\]\(([^)#]+)", text)) - {"README.md", "README_zh.md"}),
    }


@pytest.mark.parametrize("part", parts(""))
def test_the_chinese_readme_is_a_whole_counterpart(part: str) -> None:
    assert parts((ROOT / "README_zh.md").read_text())[part] == parts(README)[part]


def test_the_chinese_readme_names_all_that_the_english_one_names() -> None:
    english, chinese = (
        set(re.findall(r"`[^`\n]+`", re.sub("(?s)```.*?```", "", text)))
        for text in (README, (ROOT / "README_zh.md").read_text())
    )
    assert english <= chinese
    assert "(README_zh.md)" in README
    assert "(README.md)" in (ROOT / "README_zh.md").read_text()
