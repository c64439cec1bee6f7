"""Every Python snippet of the README runs, and prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

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


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet(number: int, tmp_path: Path) -> None:
    snippet = SNIPPETS[number]
    before = [text for part, text in BEFORE.items() if part in snippet]
    after = [text for part, text in AFTER.items() if part in snippet]
    program = tmp_path / "snippet.py"
    program.write_text("\n".join([*before, snippet, *after]))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'example'}"}
    run = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    promised = re.findall(r"print\(.*\)\s+# (.*?)(?:;.*)?$", snippet, re.MULTILINE)
    assert run.stdout.splitlines() == promised


def test_the_readme_has_snippets_and_its_links_lead_somewhere() -> None:
    assert len(SNIPPETS) == 8
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    for anchor in re.findall(r"\]\(#([^)]+)\)", README):
        assert re.search(rf"^## {anchor}$", README, re.MULTILINE | re.IGNORECASE), anchor
