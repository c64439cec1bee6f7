"""Every Python snippet of the README runs, and prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from service_streamer import RedisStreamer
from service_streamer.redis.local import LocalRedis

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
# Those that need each other, and a Redis.
OVER_REDIS = [snippet for snippet in SNIPPETS if "localhost:6379" in snippet]
ALONE = [snippet for snippet in SNIPPETS if snippet not in OVER_REDIS]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'example'}"}

#: What a snippet takes from the text before it, by a line of it.
BEFORE = {
    "streamer = ThreadedStreamer(model.predict, batch_size=64, max_latency=0.1)": """
from bert_model import TextInfillingModel
from flask import Flask, jsonify, request
app = Flask(__name__)
model = TextInfillingModel()
inputs = ["Happy birthday to [MASK]."]
""",
}
#: Without GPUs, on which eight workers take long to load, and nothing may be done for two seconds.
FOR_SMALL_MACHINES = {
    "worker_num=8": "worker_num=2",
    "timeout=2)": "timeout=60)",
    "cuda_devices=(0, 1, 2, 3)": 'cuda_devices=("cpu",)',
}
#: What checks a snippet that prints nothing.
AFTER = {
    "outputs = streamer.predict(inputs)": 'assert outputs == ["you"]\nstreamer.close()',
    '@app.route("/naive"': """
answer = app.test_client().post("/naive", data={"s": ["Happy birthday to [MASK]."]})
assert answer.json == ["you"]
""",
    '@app.route("/stream"': """
answer = app.test_client().post("/stream", data={"s": ["Happy birthday to [MASK]."] * 3})
assert answer.json == ["you"] * 3
streamer.close()
""",
}


@pytest.mark.parametrize("number", range(len(ALONE)))
def test_snippet(number: int, tmp_path: Path) -> None:
    snippet = ALONE[number]
    before = [text for part, text in BEFORE.items() if part in snippet]
    after = [text for part, text in AFTER.items() if part in snippet]
    program = tmp_path / "snippet.py"
    text = "\n".join([*before, snippet, *after])
    for said, instead in FOR_SMALL_MACHINES.items():
        text = text.replace(said, instead)
    program.write_text(text)
    run = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert run.returncode == 0, run.stderr
    promised = re.findall(r"print\(.*\)\s+# (.*?)(?:;.*)?$", snippet, re.MULTILINE)
    assert run.stdout.splitlines() == promised


def test_a_web_server_and_a_worker_host_over_redis(tmp_path: Path) -> None:
    web_server, worker_host = (tmp_path / "web_server.py", tmp_path / "worker_host.py")
    with LocalRedis() as redis:
        programs = [
            text.replace("localhost:6379", f"127.0.0.1:{redis.port}") for text in OVER_REDIS
        ]
        before = 'inputs = ["Happy birthday to [MASK]."]\n'
        after = '\nassert outputs == ["you"]\nstreamer.close()\n'
        web_server.write_text(before + programs[0] + after)
        # One is as good as eight, and eight of them take long to load on a small machine.
        text = programs[1].replace("worker_num=8", "worker_num=1")
        for said, instead in FOR_SMALL_MACHINES.items():
            text = text.replace(said, instead)
        worker_host.write_text(text)
        host = subprocess.Popen(
            [sys.executable, str(worker_host)], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        try:
            with RedisStreamer(redis.url, prefix="bert") as streamer:
                streamer.wait_ready()  # loading the model may take longer than ``predict`` waits
            run = subprocess.run(
                [sys.executable, str(web_server)], capture_output=True, text=True, env=ENVIRONMENT
            )
        finally:
            host.terminate()
            _, errors = host.communicate()
    assert run.returncode == 0, run.stderr
    assert (host.returncode, errors) == (0, "")


def test_the_readme_has_snippets_and_its_links_lead_somewhere() -> None:
    assert len(SNIPPETS) == 12
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    headings = {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
        for heading in re.findall(r"^## (.*)$", README, re.MULTILINE)
    }
    for anchor in re.findall(r"\]\(#([^)]+)\)", README):
        assert anchor in headings, anchor
