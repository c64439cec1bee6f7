"""A workload behind Flask, with whichever service_streamer is installed: this one or the original.

POST /predict takes {"inputs": ...} and answers the result; POST /stream takes form fields ``s`` and
answers a list, as the original's examples do. Streamers get what the original's interface knows.
"""
# mypy: ignore-errors

from __future__ import annotations

import sys

if __name__ == "__main__" and "gevent" in sys.argv:
    # Before every other import, and in the web process only: spawned workers import this file too.
    from gevent import monkey

    monkey.patch_all()

import argparse
import atexit
import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import service_streamer
from adapters.managed import MODELS
from adapters.service_streamer_adapter import Hosts
from adapters.workloads import BATCH_SIZE, COSTS, WORKLOADS, items

IS_ORIGINAL = not hasattr(service_streamer, "Overloaded")
#: A worker of the original over Redis loses its results until it has subscribed, which is soon
#: after it has loaded its model; nothing tells when.
_SUBSCRIBED_AFTER = 1.0

Predict = Callable[[list[Any]], list[Any]]


def naive(args: argparse.Namespace) -> Predict:
    """The model itself, in this process; a simulated one computes one thing at a time, as a GPU."""
    model = WORKLOADS[args.workload]()
    model.load()
    lock = threading.Lock() if args.workload in COSTS else contextlib.nullcontext()

    def predict(batch: list[Any]) -> list[Any]:
        with lock:
            return model.predict(batch)

    return predict


def threaded(args: argparse.Namespace) -> Predict:
    model = WORKLOADS[args.workload]()
    model.load()
    return service_streamer.ThreadedStreamer(model.predict, BATCH_SIZE, args.max_latency).predict


def streamer(args: argparse.Namespace) -> Predict:
    made = service_streamer.Streamer(
        MODELS[args.workload],
        batch_size=BATCH_SIZE,
        max_latency=args.max_latency,
        worker_num=args.workers,
        cuda_devices=(0, 1, 2, 3) if IS_ORIGINAL else ("cpu",),  # its GPUs are simulated
    )
    made._wait_for_worker_ready() if IS_ORIGINAL else made.wait_ready()
    return made.predict


def redis(args: argparse.Namespace) -> Predict:
    """Workers in a program of their own, as on another host."""
    prefix = uuid.uuid4().hex
    made = service_streamer.RedisStreamer(args.redis, prefix)
    options = {"max_latency": args.max_latency}
    hosts = Hosts(args.workload, args.workers, broker=args.redis, prefix=prefix, options=options)
    atexit.register(hosts.close)
    if IS_ORIGINAL:
        time.sleep(_SUBSCRIBED_AFTER)
    made.predict(items(args.workload, BATCH_SIZE * args.workers))
    return made.predict


MODES = {"naive": naive, "threaded": threaded, "streamer": streamer, "redis": redis}


def create_app(predict: Predict) -> Any:
    from flask import Flask, jsonify, request

    app = Flask(__name__)

    @app.post("/predict")
    def answer():
        return jsonify(predict([request.get_json()["inputs"]])[0])

    @app.post("/stream")
    def answer_all():
        return jsonify(predict(request.form.getlist("s")))

    if not IS_ORIGINAL:
        from flask_example import error_response

        app.register_error_handler(Exception, error_response)
    return app


def serve(app: Any, server: str, port: int) -> None:
    """As each project's own examples do, or better, until this process is ended."""
    address = ("127.0.0.1", port)
    if server == "gevent":
        if IS_ORIGINAL:
            from gevent.pywsgi import WSGIHandler, WSGIServer

            class Handler(WSGIHandler):
                def log_request(self) -> None: ...

            class Server(WSGIServer):
                """Better than its examples have it, which is 40 ms of each answer on a kept-open
                connection, and a line in a log: neither says anything of the original."""

                def handle(self, sock: Any, address: Any) -> None:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    super().handle(sock, address)

            Server(address, app, log=None, handler_class=Handler).serve_forever()
        else:
            from flask_multigpu_example import Server

            Server(address, app).serve_forever()
    elif IS_ORIGINAL:
        app.run(*address, threaded=True)
    else:
        from flask_example import Server

        Server(*address, app).serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--server", choices=["gevent", "threads"], default="gevent")
    parser.add_argument("--mode", choices=MODES, default="streamer")
    parser.add_argument("--max-latency", type=float, default=0.1, help="seconds")
    parser.add_argument("--redis", help="HOST:PORT, for the mode redis")
    args = parser.parse_args()
    serve(create_app(MODES[args.mode](args)), args.server, args.port)


if __name__ == "__main__":
    main()
