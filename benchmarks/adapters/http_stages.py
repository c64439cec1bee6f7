"""``serve``, layer by layer: each stage adds one to the stage before, and is a service of its own.

``python -m adapters.http_stages STAGE PORT``. What a stage adds to the processor time of a request
is what its layer costs::

    server     uvicorn, and an application that reads the body and answers
    exchange   + what every request of ours passes: headers, timer, counters
    json       + /predict itself, and a model that has answered before it is asked
    engine     + the engine, with the model in a thread of this process

The last one adds a worker process, and is the command ``serve``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import uvloop

from service_streamer import ThreadedStreamer
from service_streamer.observe.record import Call
from service_streamer.pipelines import CustomModel
from service_streamer.serve.http.admission import ServiceOptions
from service_streamer.serve.http.app import Endpoint, create_app
from service_streamer.serve.http.cycle import Receive, Scope, Send
from service_streamer.serve.http.listening import bind, make_server
from service_streamer.serve.http.operations import OPERATIONS, Context
from service_streamer.serve.http.service import Service
from service_streamer.serve.running import run_service

#: What all are asked: see ``yardstick.servers``.
_ANSWER = b'"twinkle twinkle little star"'
_OPTIONS = ServiceOptions("echo", max_pending=1024, batch_size=64)

# -- the stages, each in a process of its own


async def _bare(_: Scope, receive: Receive, send: Send) -> None:
    await receive()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_ANSWER))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": _ANSWER})


class _Instant:
    """A streamer and its backend, to whom every item is its own output, at once."""

    def __init__(self) -> None:
        self.backend = self

    def submit(self, call: Call) -> None:
        outputs = [each["inputs"] if isinstance(each, dict) else each for each in call.payloads]
        call.reply.future.set_result((outputs, None))

    def decode(self, outputs: list[Any]) -> list[Any]:
        return outputs

    async def apredict(self, _: Sequence[Any], timeout: float | None = None) -> list[Any]:
        del timeout
        model = CustomModel()
        model.init_model("adapters.managed:Echo")
        return [model.description]


async def _at_once(_: bytes, __: Context) -> bytes:
    return _ANSWER


async def _serve_without_engine(stage: str, port: int) -> None:
    service = Service(_Instant(), _OPTIONS)  # type: ignore[arg-type]  # all of one that it needs
    service.start()
    app = create_app(service)
    if stage == "server":
        app = _bare
    elif stage == "exchange":
        app = Endpoint(service, OPERATIONS[0]._replace(run=_at_once))
    await make_server("uvicorn", app, bind("127.0.0.1", port)).serve()


def serve_stage(stage: str, port: int) -> None:
    """Run one of the stages until it is ended."""
    if stage == "engine":
        model = CustomModel()
        model.init_model("adapters.managed:Echo")
        streamer = ThreadedStreamer(model.predict, max_pending=_OPTIONS.max_pending)
        run_service(streamer, _OPTIONS, bind("127.0.0.1", port), "uvicorn")
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_without_engine(stage, port))


if __name__ == "__main__":
    serve_stage(sys.argv[1], int(sys.argv[2]))
