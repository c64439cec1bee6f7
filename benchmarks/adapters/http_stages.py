"""``serve``, layer by layer: each stage adds one to the stage before, and is a service of its own.

``python -m adapters.http_stages STAGE PORT``. What a stage adds to the processor time of a request
is what its layer costs::

    server     our connections, and an application that answers at once
    exchange   + what every request of ours passes: headers, timer, counters
    json       + /predict itself, and a model that has answered before it is asked
    engine     + the engine, with the model in a thread of this process

The last one adds a worker process, and is the command ``serve``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any

import uvloop

from service_streamer import ThreadedStreamer
from service_streamer.observe.record import Call
from service_streamer.pipelines import CustomModel
from service_streamer.serve.configuration import Configuration, NamedModel
from service_streamer.serve.hosted_model import OpenedModel
from service_streamer.serve.http.admission import ServiceOptions
from service_streamer.serve.http.app import create_site
from service_streamer.serve.http.context import RequestContext
from service_streamer.serve.http.endpoint import Endpoint
from service_streamer.serve.http.exchange import Exchange
from service_streamer.serve.http.listening import HTTPServer, bind
from service_streamer.serve.http.models import Models
from service_streamer.serve.http.operations import OPERATIONS
from service_streamer.serve.http.service import Service
from service_streamer.serve.running import run_service

#: What all are asked: see ``yardstick.servers``.
_ANSWER = b'"twinkle twinkle little star"'
_OPTIONS = ServiceOptions("echo", max_pending=1024, batch_size=64)

# -- the stages, each in a process of its own


async def _bare(exchange: Exchange) -> None:
    exchange.answer(200, ((b"content-type", b"application/json"),), _ANSWER)


class _Instant:
    """A streamer and its backend, to whom every item is its own output, at once."""

    def __init__(self) -> None:
        self.backend = self

    def submit(self, call: Call) -> None:
        outputs = [each["inputs"] if isinstance(each, dict) else each for each in call.payloads]
        call.reply.future.set_result((outputs, None))

    def decode(self, outputs: list[Any]) -> list[Any]:
        return outputs

    def check_room(self) -> None:
        """There is always some."""

    def flush(self) -> None:
        """All calls are answered."""

    def when_workers_change(self, _: Callable[[], None]) -> None:
        """They do not."""

    def model_description(self) -> Mapping[str, Any]:
        model = CustomModel()
        model.init_model("adapters.managed:Echo")
        return model.describe()


async def _at_once(_: bytes, __: RequestContext) -> bytes:
    return _ANSWER


async def _serve_without_engine(stage: str, port: int) -> None:
    service = Service(_Instant(), _OPTIONS)  # type: ignore[arg-type]  # all of one that it needs
    service.start()
    site: Any = create_site(Models([service]))
    if stage == "server":
        site = _bare
    elif stage == "exchange":
        site = Endpoint(service, OPERATIONS[0]._replace(run=_at_once))
    await HTTPServer(site, bind("127.0.0.1", port)).serve()


def _cannot_open(named: NamedModel) -> OpenedModel:
    raise ValueError(f"{named.name}: this service has one model")


def serve_stage(stage: str, port: int) -> None:
    """Run one of the stages until it is ended."""
    if stage == "engine":
        model = CustomModel()
        model.init_model("adapters.managed:Echo")
        streamer = ThreadedStreamer(model.predict, max_pending=_OPTIONS.max_pending)
        configuration = Configuration([], _cannot_open)
        run_service(configuration, [OpenedModel(streamer, _OPTIONS)], bind("127.0.0.1", port))
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_without_engine(stage, port))


if __name__ == "__main__":
    serve_stage(sys.argv[1], int(sys.argv[2]))
