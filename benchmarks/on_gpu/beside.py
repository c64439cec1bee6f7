"""Processes that measure only when they are asked to: what a Streamer is compared with.

A question is a line of JSON, and so is its answer. They run in any interpreter, with another
project's packages too: nothing but the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from on_gpu.closing import Closing
from on_gpu.running import VARIABLES

__all__ = ["Beside", "answer_questions"]

#: How long a process may take for anything, seconds.
_PATIENCE = 180


class Beside(Closing):
    """A process that runs ``on_gpu.MODULE`` and answers questions. ``with`` ends it.

    Args:
        module: its main function calls ``answer_questions``.
        settings: for it.
        device: its ``CUDA_VISIBLE_DEVICES``; "cpu" for none.
        python: its interpreter.
    """

    def __init__(
        self, module: str, settings: Mapping[str, Any], device: str, python: str = sys.executable
    ) -> None:
        self._name = module
        self._read = b""
        shown = "" if device == "cpu" else device
        self._process = subprocess.Popen(
            [python, "-m", f"on_gpu.{module}", json.dumps(dict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **VARIABLES, "CUDA_VISIBLE_DEVICES": shown},
        )

    def wait_ready(self) -> None:
        """Until it has loaded all it needs. Raises RuntimeError, as ``ask`` does."""
        self.answer()

    def ask(self, what: str, **arguments: Any) -> Any:
        """The answer to a question.

        Raises:
            RuntimeError: with the process's traceback; or it has died, or takes too long.
        """
        self.begin(what, **arguments)
        return self.answer()

    def begin(self, what: str, **arguments: Any) -> None:
        """Ask only; ``answer`` waits for the answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says that it has died
            self._process.stdin.write(json.dumps([what, arguments]).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        error, value = json.loads(self._line())
        if error:
            raise RuntimeError(f"{self._name}: {error}")
        return value

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        descriptor, ends = self._process.stdout.fileno(), time.monotonic() + _PATIENCE
        while b"\n" not in self._read:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, ends - time.monotonic()))
            if not ready:
                raise RuntimeError(f"{self._name}: no answer within {_PATIENCE} s")
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise RuntimeError(
                    f"{self._name}: its process ended with exit code {self._process.wait()}"
                )
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line

    def close(self) -> None:
        """End the process: its memory on the device is free afterwards."""
        self._process.kill()
        self._process.communicate()


def answer_questions(load: Callable[[dict[str, Any]], Any]) -> None:
    """The main function of such a process: answer until nobody can ask any more.

    Whatever else is written to standard output, by a library say, goes to standard error.

    Args:
        load: gets the settings; a question is the name of a method of what it returns.
    """
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)

        def say(error: str, value: Any = None) -> None:
            print(json.dumps([error, value]), file=output, flush=True)

        try:
            loaded = load(json.loads(sys.argv[1]))
            say("")
            for line in sys.stdin:
                what, arguments = json.loads(line)
                say("", getattr(loaded, what)(**arguments))
        except Exception:
            say(traceback.format_exc())
            sys.exit(1)
