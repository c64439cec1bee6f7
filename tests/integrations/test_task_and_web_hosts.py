"""Streamers in programs that start their own processes: uWSGI, Celery, Jupyter."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_process import python
from test_by_value import DATA, SAID, USES

TESTS = Path(__file__).parents[1]
PLACES = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


@contextlib.contextmanager
def started(folder: Path, *command: str, ready: str = "") -> Iterator[list[str]]:
    """Runs a program within the block, from when it has said that it is ready.

    Returns its lines. Behind the block they are all that it and its descendants have said.
    """
    places = [str(folder), str(TESTS), str(TESTS.parent), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as program:  # fmt: skip
        assert program.stdout is not None
        said: list[str] = []
        try:
            while ready not in "".join(said):
                said.append(program.stdout.readline())
                assert said[-1], f"it ended: {said}"
            yield said
        finally:
            program.terminate()
            said += program.stdout  # every descendant has it, so its end is theirs


@pytest.mark.parametrize(
    "loaded_as", ["--module=app", pytest.param("--wsgi-file=app.py", marks=pytest.mark.long)]
)
def test_streamer_serves_in_uwsgi(tmp_path: Path, loaded_as: str) -> None:
    uwsgi = shutil.which("uwsgi", path=PLACES)
    if uwsgi is None:
        pytest.skip("uWSGI is not installed: pip install uwsgi")
    source = """
        from service_streamer import ManagedModel, Streamer

        class Doubler(ManagedModel):
            def init_model(self):
                pass

            def predict(self, batch):
                return [2 * item for item in batch]

        streamer = Streamer(Doubler, worker_timeout=None)

        def application(environ, start_response):
            start_response("200 OK", [("Content-Type", "text/plain")])
            return [repr(streamer.predict([1, 2])).encode()]
    """
    (tmp_path / "app.py").write_text(textwrap.dedent(source))
    command = (
        *(uwsgi, "--http-socket=127.0.0.1:0", loaded_as, "--master", "--lazy-apps"),
        *("--enable-threads", "--die-on-term", "--need-app", f"--home={sys.prefix}"),
    )
    with started(tmp_path, *command, ready="port auto-assigned") as said:
        port = said[-1].partition("127.0.0.1:")[2].split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
            assert answer.read() == b"[2, 4]"
    assert "Traceback" not in "".join(said)


@pytest.mark.long
def test_streamer_serves_in_a_prefork_pool_of_celery(tmp_path: Path) -> None:
    pytest.importorskip("celery")
    source = """
        import functools
        import models
        from celery import Celery
        from service_streamer import Streamer

        folder = __file__.rpartition("/")[0]
        app = Celery(
            "tasks",
            broker="filesystem://",
            backend=f"file://{folder}",
            broker_transport_options={
                "data_folder_in": folder, "data_folder_out": folder, "control_folder": folder
            },
        )

        @functools.cache
        def streamer():
            return Streamer(models.double, worker_timeout=None)

        @app.task
        def double(number):
            return streamer().predict([number])
    """
    (tmp_path / "tasks.py").write_text(textwrap.dedent(source))
    command = (
        *(sys.executable, "-m", "celery", "-A", "tasks", "worker", "--concurrency=1"),
        *("--pool=prefork", "--without-gossip", "--without-mingle"),
    )
    with started(tmp_path, *command) as said:
        call = "import tasks; print(tasks.double.delay(21).get(timeout=240))"
        client = python("-c", call, cwd=tmp_path)
    assert client.stdout == "[42]\n", client.stderr + "".join(said)


def test_model_of_a_notebook_is_served_cell_after_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real kernel runs it: cell after cell, as a person would."""
    pytest.importorskip("nbclient")
    program = textwrap.dedent("""
        import json, sys, warnings
        warnings.simplefilter("ignore")
        import nbformat
        from nbclient import NotebookClient

        cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(sys.stdin)]
        notebook = nbformat.v4.new_notebook(cells=cells)
        NotebookClient(notebook, kernel_name="python3", timeout=280).execute()
        for cell in notebook.cells:
            for output in cell.outputs:
                print(output["text"], end="")
    """)
    python("-m", "ipykernel", "install", "--prefix", str(tmp_path), cwd=tmp_path)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    given = json.dumps([DATA, *USES.split("\n\n")])
    done = python("-c", program, cwd=tmp_path, given=given)
    assert done.stdout.splitlines() == SAID, done.stderr
