"""Run ``make demo-redis``: Redis, a worker host, gunicorn with four workers, and one request.

All of it goes on until Ctrl-C or SIGTERM, which end it in order and leave nothing. The Redis is the
one of ``REDIS_URL`` if it answers, else that of localhost:6379, else one started for this demo.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from service_streamer import RedisStreamer, StreamerClosed
from service_streamer.redis.local import LocalRedis, answers

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_URL = "redis://localhost:6379"
EXAMPLE = "s=Happy birthday to [MASK]."
LOAD = "wrk -t2 -c64 -d20s --timeout=10s -s scripts/streamer.lua"
HOST = ("example/redis_worker_example.py",)
WEB = ("-m", "gunicorn", "-c", "example/redis_streamer_gunicorn.py", "flask_example:app")

#: What the main thread waits for: "ready", or why the demo is over; "" if somebody wants it to be.
Events = SimpleQueue[str]


class Stop(Exception):
    """The demo is over; the text says why, if nobody wanted it to be."""


class Program:
    """A program of the demo, which passes on what it prints."""

    def __init__(self, name: str, command: tuple[str, ...], events: Events) -> None:
        python = Path(sys.executable)
        shown = python.relative_to(ROOT) if python.is_relative_to(ROOT) else python
        print(f"$ {shlex.join([str(shown), *command])}", flush=True)
        self.name = name
        self.url = ""  # where it serves, once it has said so
        self._events = events
        self._process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is for the demo, which ends one after the other
        )
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:  # until its children, too, have ended
                print(line, end="", flush=True)
                if line.startswith("serving on "):
                    self.url = line.split()[2]
                if line.startswith("curl "):
                    self._events.put("ready")
        self._process.wait()
        self._events.put(self._end())

    def _end(self) -> str:
        return f"{self.name} has ended with code {self._process.returncode}"

    def kill(self) -> None:
        """End it and its children by force."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._watcher.join(60)  # seconds; a few are enough
        if self._watcher.is_alive():
            self.kill()
            self._watcher.join()
        if self._process.returncode and isinstance(error, Stop) and not str(error):
            raise Stop(self._end()) from None


class Demo:
    """All of it. For the main thread, whose signals it handles."""

    def __init__(self) -> None:
        self._events: Events = SimpleQueue()
        self._programs: list[Program] = []
        self._told_to_end_at = math.inf

    def run(self) -> None:
        """Raises Stop; RuntimeError, FileNotFoundError if there is no Redis to be had."""
        os.environ.setdefault("REDIS_PREFIX", "demo")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)
        with contextlib.ExitStack() as stack:
            url = find_redis(stack)
            os.environ["REDIS_URL"] = url
            self._start(stack, "the worker host", HOST)
            self._await_host(url)
            web = self._start(stack, "gunicorn", WEB)
            self._await_ready()
            print(ask(f"{web.url}/stream"))
            print(f"under load:\n{LOAD} {web.url}/stream")
            print("for another worker host type the first two $ lines into a second terminal")
            print("Ctrl-C ends all of it", flush=True)
            self._await_ready()

    def _start(self, stack: contextlib.ExitStack, name: str, command: tuple[str, ...]) -> Program:
        program = stack.enter_context(Program(name, command, self._events))
        self._programs.append(program)
        return program

    def _await_ready(self) -> None:
        event = self._events.get()
        if event != "ready":
            print("ending all of it ...", flush=True)
            raise Stop(event)

    def _await_host(self, url: str) -> None:
        with RedisStreamer(url, os.environ["REDIS_PREFIX"]) as streamer:

            def wait() -> None:
                with contextlib.suppress(StreamerClosed):  # the demo is over
                    streamer.wait_ready()
                    self._events.put("ready")

            threading.Thread(target=wait, daemon=True).start()
            self._await_ready()

    def _stop(self, *_: Any) -> None:
        """A signal. The first one ends all in order; a second one by force."""
        now = time.monotonic()
        self._told_to_end_at = min(self._told_to_end_at, now)
        self._events.put("")
        if now > self._told_to_end_at + 1:  # timeout and make may tell it twice at once
            for program in self._programs:
                program.kill()


def find_redis(stack: contextlib.ExitStack) -> str:
    """The URL of a Redis that answers. Says which one it is."""
    prefix = f"REDIS_PREFIX={shlex.quote(os.environ.get('REDIS_PREFIX', 'demo'))}"
    wanted = os.environ.get("REDIS_URL")
    if wanted:
        url = wanted if "://" in wanted else f"redis://{wanted}"
        if answers(url):
            print("Redis: the one of REDIS_URL")  # which may hold a password
            print(f"$ export {prefix}")
            return url
        print("Redis: none answers at REDIS_URL")
    url = DEFAULT_URL
    origin = "which was there"
    if not answers(url):
        url = stack.enter_context(LocalRedis()).url
        origin = "started for this demo, as none answers at localhost:6379"
    print(f"Redis: {url}, {origin}")
    print(f"$ export REDIS_URL={url} {prefix}")
    return url


def check_port(port: int) -> None:
    """Raises RuntimeError if it is in use: gunicorn would say so too, but after all the loading."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise RuntimeError(
            f"cannot serve on 127.0.0.1:{port}: {error.strerror} "
            "(make demo-redis PORT=5006 takes another one)"
        ) from None


def ask(url: str) -> str:
    """What curl prints."""
    try:
        with urllib.request.urlopen(url, EXAMPLE.encode(), timeout=60) as response:
            answer: bytes = response.read()
    except urllib.error.HTTPError as error:
        answer = error.read()
    return answer.decode().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Everything over Redis, at one command.")
    parser.add_argument("--port", type=int, default=5005)
    port = parser.parse_args().port
    os.environ["PORT"] = str(port)
    logging.getLogger("service_streamer").addHandler(logging.NullHandler())  # the programs say it
    try:
        check_port(port)
        Demo().run()
    except Stop as stop:
        sys.exit(str(stop) or 0)
    except (RuntimeError, FileNotFoundError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
