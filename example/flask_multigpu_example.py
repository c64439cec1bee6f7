"""Run ``python example/flask_multigpu_example.py``: one Flask service over several GPUs.

gevent answers the users, in one process and without torch; eight worker processes hold a model
each, two on each of four GPUs. Without a GPU they run on the CPU. ``--model package.module:Name``
serves another ManagedModel, whose items are the fields ``s``.
"""

from __future__ import annotations

if __name__ == "__main__":
    # Before every other import, and in the web process only: a spawned worker imports this file
    # too, as __mp_main__, and has no use for greenlets.
    from gevent import monkey

    monkey.patch_all()

import argparse
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event
from gevent.pool import Pool
from gevent.pywsgi import WSGIHandler, WSGIServer

from bert_model import ManagedBertModel, SentenceEncoder
from flask_example import EXAMPLE, create_app
from http_errors import MAX_PENDING
from service_streamer import Streamer


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """The numbers of the GPUs that workers may use, as cuda_devices has them; without torch."""
    count = len(list(devices.glob("nvidia[0-9]*")))
    if not count:  # under WSL there are no such files
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["nvidia-smi", "-L"]
            listing = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
            count = sum(line.startswith("GPU ") for line in listing.splitlines())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:  # what it leaves is numbered from 0
        names = [name.strip() for name in chosen.split(",")]
        count = min(
            count, len(list(itertools.takewhile(lambda name: name not in ("", "-1"), names)))
        )
    return [str(number) for number in range(count)]


class RequestHandler(WSGIHandler):  # type: ignore[misc]
    """gevent's handler, which otherwise formats a line per request even without a log."""

    def log_request(self) -> None:
        pass


class Server(WSGIServer):  # type: ignore[misc]
    """gevent's server, without its delays and with an end that cuts nobody off."""

    handler_class = RequestHandler

    def __init__(self, address: tuple[str, int], app: Any) -> None:
        self._connections: set[Any] = set()
        # The pool knows the greenlets that stop() has to wait for.
        super().__init__(address, app, log=None, spawn=Pool())

    def handle(self, sock: Any, address: Any) -> None:
        # The head of an answer and its body are sent apart. On a connection that is kept open the
        # body would wait for the client's acknowledgement of the head, which comes 40 ms later.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.add(sock)
        try:
            super().handle(sock, address)
        finally:
            self._connections.discard(sock)

    def drain(self) -> None:
        """Refuse new connections and answer the requests that were accepted."""
        self.close()
        for connection in self._connections.copy():
            with contextlib.suppress(OSError):  # the client has gone
                connection.shutdown(socket.SHUT_RD)  # ends the greenlets that wait for a request
        self.stop(timeout=60)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One Flask service over several GPUs.")
    parser.add_argument("--workers", type=int, help="processes (8; without a GPU one per core)")
    parser.add_argument("--devices", help="such as 0,1,2,3 (the default) or cpu")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-latency", type=float, default=0.1, help="seconds")
    parser.add_argument(
        "--max-pending", type=int, default=MAX_PENDING, help="sentences that may wait; then 503"
    )
    parser.add_argument("--model", help="another ManagedModel, as package.module:Name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5005)
    return parser.parse_args()


def place_workers(args: argparse.Namespace) -> tuple[int, list[str]]:
    """The number of workers and their devices: what the user said, or what this machine has."""
    devices = args.devices.split(",") if args.devices else visible_gpus()[:4] or ["cpu"]
    workers: int = args.workers or 8
    if devices == ["cpu"]:
        note = "no GPU here: running on the CPU" if not args.devices else "running on the CPU"
        if not args.workers:
            cores = (
                len(os.sched_getaffinity(0))
                if hasattr(os, "sched_getaffinity")
                else os.cpu_count() or 1
            )
            workers = min(8, cores)
            note += f", with {workers} workers for its cores (--workers sets another number)"
        print(note)
    return workers, devices


def main() -> None:
    args = parse_arguments()
    for number in (signal.SIGINT, signal.SIGTERM):
        # A handler of Python's own would interrupt whatever greenlet runs, the streamer's included.
        gevent.signal_handler(number, gevent.kill, gevent.getcurrent(), SystemExit)
    workers, devices = place_workers(args)
    with Streamer(
        args.model or ManagedBertModel,
        batch_size=args.batch_size,
        max_latency=args.max_latency,
        worker_num=workers,
        cuda_devices=devices,
        max_pending=args.max_pending,
    ) as streamer:
        app = create_app(streamer, None if args.model else SentenceEncoder().check)
        server = Server((args.host, args.port), app)
        try:
            server.start()
        except OSError as error:
            sys.exit(f"cannot serve on {args.host}:{args.port}: {error.strerror}")
        streamer.wait_ready()
        url = f"http://{args.host}:{server.server_port}"
        print(f"serving on {url} ({workers} workers on {', '.join(devices)}); try:")
        print(f"curl -X POST {url}/stream -d '{EXAMPLE}'", flush=True)
        try:
            Event().wait()  # until a signal
        finally:
            server.drain()  # a second signal ends this, and does not wait for anybody


if __name__ == "__main__":
    main()
