"""Where the processor time of a request to ``service-streamer serve`` goes: a table by subtraction.

Each stage adds a layer to the one before it, is loaded by wrk with 128 connections, and is charged
what its process used, per request. What the table says of a layer is what it adds::

    server     uvicorn or granian, and an application that reads the body and answers
    exchange   + what every request of ours passes: headers, timer, counters
    json       + /predict itself, and a model that has answered before it is asked
    engine     + the engine, with the model in a thread of this process
    serve      + a worker process instead: the real thing

The stages are measured in turn, ``--rounds`` times; the figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import uvloop

from harness import OURS, machine, terminate_cleanly
from http_load import Load, Running, free_port, running
from service_streamer import ThreadedStreamer
from service_streamer.pipelines import CustomModel
from service_streamer.server.app import Endpoint, create_app
from service_streamer.server.exchange import Receive, Scope, Send
from service_streamer.server.listening import ServerName, bind, make_server
from service_streamer.server.operations import OPERATIONS, Context
from service_streamer.server.options import ServiceOptions
from service_streamer.server.running import run_service
from service_streamer.server.service import Service

_SENTENCE = "twinkle twinkle [MASK] star."
_BODY = b'{"inputs": "%s"}' % _SENTENCE.encode()
_ANSWER = b'"%s"' % _SENTENCE.encode()
_CONNECTIONS = 128
_OPTIONS = ServiceOptions("echo", max_pending=1024, batch_size=64)

STAGES = {
    "server": "the server alone",
    "exchange": "+ headers, timer, counters",
    "json": "+ JSON and its checks",
    "engine": "+ the engine, batches in a thread",
    "serve": "+ a worker process: all of serve",
}


# -- the stages, each in a process of its own


async def _bare(_: Scope, receive: Receive, send: Send) -> None:
    await receive()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_ANSWER))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": _ANSWER})


class _Instant:
    """A streamer and its backend, to whom every item is its own output, at once."""

    def __init__(self) -> None:
        self._backend = self

    def submit(self, items: Sequence[Any], reply: Any, **_: Any) -> None:
        outputs = [each["inputs"] if isinstance(each, dict) else each for each in items]
        reply.future.set_result((outputs, None))

    def decode(self, outputs: list[Any]) -> list[Any]:
        return outputs

    async def apredict(self, _: Sequence[Any], timeout: float | None = None) -> list[Any]:
        del timeout
        model = CustomModel()
        model.init_model("simulated:Echo")
        return [model.description]


async def _at_once(_: bytes, __: Context) -> bytes:
    return _ANSWER


async def _serve_without_engine(stage: str, server: ServerName, port: int) -> None:
    service = Service(_Instant(), _OPTIONS)  # type: ignore[arg-type]  # all of one that it needs
    service.start()
    app = create_app(service)
    if stage == "server":
        app = _bare
    elif stage == "exchange":
        app = Endpoint(service, OPERATIONS[0]._replace(run=_at_once))
    await make_server(server, app, bind("127.0.0.1", port)).serve()


def serve_stage(stage: str, server: ServerName, port: int) -> None:
    """Run one of the stages but the last, which is the command ``serve``."""
    if stage == "engine":
        model = CustomModel()
        model.init_model("simulated:Echo")
        streamer = ThreadedStreamer(model.predict, max_pending=_OPTIONS.max_pending)
        run_service(streamer, _OPTIONS, bind("127.0.0.1", port), server)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_without_engine(stage, server, port))


# -- measuring them


def _stage(stage: str, server: str, model: str) -> AbstractContextManager[Running]:
    port = free_port()
    options = ["--server", server, "--port", str(port)]
    if stage == "serve":
        command = [OURS, "-m", "service_streamer", "serve", f"simulated:{model}", *options]
    else:
        command = [OURS, __file__, "--stage", stage, *options]
    return running(command, port, "/predict", _BODY, _SENTENCE)


def _measure(stage: str, server: str, model: str, seconds: int) -> tuple[Load, float]:
    """The load, and how many requests made a batch; 0 without batches."""
    with _stage(stage, server, model) as service:
        service.load(_CONNECTIONS, min(2, seconds))
        load = service.load(_CONNECTIONS, seconds)
        if load.errors:
            sys.exit(f"{stage}, {server}: not all answers are: {load.errors}")
        if stage not in ("engine", "serve"):
            return load, 0.0
        stats = service.get("/stats")
        batches = sum(bucket["count"] for bucket in stats["batch_sizes"])
        return load, stats["totals"]["answered"] / max(1, batches)


def _report(servers: Sequence[str], rounds: int, seconds: int) -> None:
    found: dict[tuple[str, str, str], list[tuple[Load, float]]] = {}
    for _ in range(rounds):
        for server in servers:
            for stage, model in [*((stage, "Echo") for stage in STAGES), ("serve", "SimulatedGPU")]:
                print(f"{server}: {stage}: {model}", end=" ... ", file=sys.stderr, flush=True)
                measured = _measure(stage, server, model, seconds)
                found.setdefault((server, stage, model), []).append(measured)
                print(f"{1e6 * measured[0].web:.1f} µs", file=sys.stderr)
    print(f"\nMedians of {rounds} rounds of {seconds} s; {machine()}.")
    for server in servers:
        columns = ["µs of processor time", "the layer's", "the kernel's"]
        columns += ["requests/s", "requests per batch"]
        print(f"\n| {server}, echo, 128 connections | {' | '.join(columns)} |")
        print("|---|---:|---:|---:|---:|---:|")
        before = 0.0
        for stage, title in STAGES.items():
            before = _row(title, found[server, stage, "Echo"], before)
        _row("serve, simulated GPU", found[server, "serve", "SimulatedGPU"], None)


def _row(title: str, measured: list[tuple[Load, float]], before: float | None) -> float:
    loads = [load for load, _ in measured]
    web = 1e6 * statistics.median(load.web for load in loads)
    kernel = 1e6 * statistics.median(load.kernel for load in loads)
    rate = statistics.median(load.rate for load in loads)
    size = statistics.median(size for _, size in measured)
    adds = "" if before is None else f"{web - before:.1f}"
    batch = f"{size:.1f}" if size else ""
    print(f"| {title} | {web:.1f} | {adds} | {kernel:.1f} | {rate:,.0f} | {batch} |")
    return web


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the time of a request goes.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=5, help="of each measurement")
    parser.add_argument("--server", default="uvicorn,granian", help="with commas between")
    parser.add_argument("--stage", choices=list(STAGES)[:-1], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        serve_stage(args.stage, args.server, args.port)
        return
    terminate_cleanly()
    if not shutil.which("wrk"):
        parser.error("this needs wrk: apt-get install wrk")
    _report(args.server.split(","), args.rounds, args.seconds)


if __name__ == "__main__":
    main()
