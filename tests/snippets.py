"""Runs the Python snippets of README and docs as programs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: The example's folder, behind a model that needs no torch.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "stubs", ROOT / "example"))),
}
REAL_MODEL = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'example'}"}

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
#: Machines of tests have no GPU and are busy.
FOR_SMALL_MACHINES = {
    "worker_num=8": "worker_num=2",
    "timeout=10)": "timeout=60)",
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
    '@app.post("/fill"': """
from starlette.testclient import TestClient
if __name__ == "__main__":
    with TestClient(app) as client:
        assert client.post("/fill", json=["Happy birthday to [MASK]."]).json() == ["you"]
""",
    '@app.post("/draw"': """
from starlette.testclient import TestClient
if __name__ == "__main__":
    with TestClient(app) as client:
        events = client.post("/draw", json={"shape": "star", "steps": 3}).text
        assert events.count("data: [[") == 3
""",
}


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def for_small_machines(text: str) -> str:
    for written, instead in FOR_SMALL_MACHINES.items():
        text = text.replace(written, instead)
    return text


def check(snippet: str, folder: Path, environment: dict[str, str] = ENVIRONMENT) -> None:
    """Run a snippet, and compare what it prints with the comments behind its ``print``."""
    before = [text for part, text in BEFORE.items() if part in snippet]
    after = [text for part, text in AFTER.items() if part in snippet]
    program = folder / "snippet.py"
    program.write_text(for_small_machines("\n".join([*before, snippet, *after])))
    run = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    promised = re.findall(r"print\(.*\)\s+# (.*?)(?:;.*)?$", snippet, re.MULTILINE)
    assert run.stdout.splitlines() == promised
