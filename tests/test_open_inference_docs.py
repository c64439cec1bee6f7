"""The programs of docs/open-inference-protocol.md do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_process import Serving, environment
from test_http_docs import blocks

pytestmark = pytest.mark.xdist_group("open-inference-docs")

TEXT = (Path(__file__).parent.parent / "docs" / "open-inference-protocol.md").read_text()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("page")
    model, _ = blocks(TEXT, "python")
    (folder / "scaling.py").write_text(model)
    path = environment()["PYTHONPATH"]
    with Serving("scaling:Scaled", "--grpc-port", "0", PYTHONPATH=f"{folder}:{path}") as service:
        yield service


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_the_client(service: Serving, kind: str) -> None:
    _, program = blocks(TEXT, "python")
    found = re.search(r"gRPC on (\S+)", service.line)
    assert found is not None
    address = found[1] if kind == "grpc" else service.url.removeprefix("http://")
    program = program.replace("127.0.0.1:8000", address).replace("http as", f"{kind} as")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[[2. 4. 6.]]\n"
