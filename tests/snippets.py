"""Runs the Python snippets of README and docs as programs."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
"""
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


#: Runs programs one after the other. A line with a form feed begins what each prints.
RUNNER = """
import runpy, sys, traceback
for path in sys.argv[1:]:
    for stream in (sys.stdout, sys.stderr):
        print("\f", file=stream, flush=True)
    try:
        runpy.run_path(path, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        print("failed, see the errors")
"""


@functools.cache
def printed_by(programs: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Run snippets in one interpreter, and those that show the real model in another one.

    Returns what each has printed: to its standard output, and as errors.
    """
    printed = {}
    with tempfile.TemporaryDirectory() as folder:
        for environment in (ENVIRONMENT, REAL_MODEL):
            paths = {}
            for number, snippet in enumerate(programs):
                if (REAL_MODEL if "'universe'" in snippet else ENVIRONMENT) is environment:
                    paths[snippet] = Path(folder, f"snippet_{number}.py")
                    paths[snippet].write_text(as_program(snippet))
            if not paths:
                continue
            command = [sys.executable, "-c", RUNNER, *map(str, paths.values())]
            run = subprocess.run(command, capture_output=True, text=True, env=environment)
            assert run.returncode == 0, run.stderr
            told = (text.split("\f\n")[1:] for text in (run.stdout, run.stderr))
            printed.update(zip(paths, zip(*told, strict=True), strict=True))
    return printed


def as_program(snippet: str) -> str:
    """A snippet with what it takes from the text before it, and with what checks it."""
    before = [text for part, text in BEFORE.items() if part in snippet]
    after = [text for part, text in AFTER.items() if part in snippet]
    return for_small_machines("\n".join([*before, snippet, *after]))


def check(snippet: str, programs: Sequence[str]) -> None:
    """Compare what a snippet prints with the comments behind its ``print``.

    Args:
        snippet: one of ``programs``.
        programs: all snippets of its page that run alone.
    """
    output, errors = printed_by(tuple(programs))[snippet]
    promised = re.findall(r"print\(.*\)\s+# (.*?)(?:;.*)?$", snippet, re.MULTILINE)
    assert output.splitlines() == promised, errors
