"""The examples as their users start them: in processes of their own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

from serve_process import ROOT

BIRTHDAY = "Happy birthday to [MASK]."
TWINKLE = "twinkle twinkle [MASK] star."
#: What each has said when it is there.
ADDRESS = r"(?:serving on|running on|Listening at:) http://127\.0\.0\.1:(\d+) "


def environment(**variables: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "example")])
    usual = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "REDIS_URL": "", "PORT": "0"}
    return os.environ | usual | variables


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of this repository to its end."""
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment(), capture_output=True, text=True
    )


def why_it_ended(*command: str) -> str:
    """What a program that cannot start says of that."""
    done = run(*command)
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    return done.stderr


class Program:
    """An example that has said that it is there. Within the block; its end must be a good one.

    Args:
        ready: a pattern of what it says then.

    Attributes:
        output: what it has said so far.
        port: where it serves; 0 if it does not.
        ends_by: the signal to end it.
    """

    def __init__(self, *command: str, ready: str = "^curl ", **variables: str) -> None:
        self.output = ""
        self.ends_by = signal.SIGTERM
        self.process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment(**variables), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        try:
            while not re.search(ready, self.output, re.MULTILINE):
                line = self.stdout.readline()
                self.output += line
                assert line, f"it ended: {self.output}"
        except BaseException:
            self.kill()
            raise
        match = re.search(ADDRESS, self.output)
        self.port = int(match[1]) if match else 0

    @property
    def curl(self) -> str:
        """The line to try that it has shown."""
        return re.findall("^curl .*$", self.output, re.MULTILINE)[-1]

    def check_end(self) -> None:
        # Its children have this pipe too: its end means that all of them are gone.
        self.output += self.stdout.read()
        assert self.process.wait() == 0, self.output
        assert "Traceback" not in self.output

    def stop(self) -> None:
        """End it, and check that it ended well."""
        self.process.send_signal(self.ends_by)
        try:
            self.check_end()
        finally:
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.process.returncode is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and self.process.returncode is None:
            self.stop()
        else:
            self.kill()

    def connect(self) -> contextlib.closing[http.client.HTTPConnection]:
        return contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port))

    def ask(self, method: str, path: str, **fields: Any) -> tuple[int, Any]:
        with self.connect() as connection:
            return ask(connection, method, path, **fields)

    def post(self, path: str, body: bytes | str, kind: str) -> tuple[int, Any]:
        with self.connect() as connection:
            connection.request("POST", path, body, {"Content-Type": kind})
            return answer_of(connection)

    def has_torch(self) -> bool:
        return "libtorch" in Path(f"/proc/{self.process.pid}/maps").read_text()


def ask(
    connection: http.client.HTTPConnection, method: str, path: str, **fields: Any
) -> tuple[int, Any]:
    """The status and the JSON that a form is answered with."""
    send(connection, method, path, **fields)
    return answer_of(connection)


def send(connection: http.client.HTTPConnection, method: str, path: str, **fields: Any) -> None:
    text = urlencode(fields, doseq=True)
    if method == "GET":
        connection.request(method, f"{path}?{text}")
    else:
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        connection.request(method, path, text, headers)


def answer_of(connection: http.client.HTTPConnection) -> tuple[int, Any]:
    response = connection.getresponse()
    text = response.read().decode()
    if response.status == 413:  # the framework's own words
        return 413, {"error": text}
    assert response.headers["Content-Type"] == "application/json", text
    return response.status, json.loads(text)
