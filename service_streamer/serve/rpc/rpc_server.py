"""The gRPC server of a web process: inference, health and reflection.

Several web processes listen at one port (SO_REUSEPORT), and the kernel deals out connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from ..http.accepting import max_connections
from ..http.admission import ServiceOptions
from ..http.background import Failures
from ..http.file_stamps import stamp_of
from ..http.models import Models
from .inference_messages import POOL, SERVICE
from .inference_service import InferenceService

logger = logging.getLogger(__name__)


def _is_no_departure(record: logging.LogRecord) -> bool:
    """Whether a line of gRPC's log is about something else than an answer that nobody takes.

    It logs these as errors, with a traceback: the client has gone while the answer was sent.
    """
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError"


#: Seconds between looks at the models' state, of which ``grpc.health.v1`` tells.
_LOOK = 1.0

#: Seconds of a drain. Arbitrary: ``stop`` ends it.
_UNTIL_STOP = 86_400.0

#: Bytes of a message besides its tensors.
_ROOM = 64 << 10

#: Bytes of the largest message that protobuf has, and the largest number that gRPC takes.
_LARGEST = (1 << 31) - 1


class RPCServer:
    """Serves in the running event loop.

    Args:
        address: host and port to listen at; with others that do so with SO_REUSEPORT.
    """

    def __init__(self, models: Models, address: tuple[str, int]) -> None:
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_departure)
        self._models = models
        host, port = address
        options = models.first.options
        self._server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 1),
                ("grpc.max_receive_message_length", min(options.max_body + _ROOM, _LARGEST)),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_allowed_incoming_connections", max_connections() // 4),
            )
        )
        self._health = health.aio.HealthServicer()
        self._server.add_generic_rpc_handlers((InferenceService(models),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        described = (health_pb2, reflection_pb2)
        for each in described:
            with contextlib.suppress(TypeError):  # it is there already
                POOL.AddSerializedFile(each.DESCRIPTOR.serialized_pb)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server, POOL)
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        credentials = _credentials(options)
        if credentials is None:
            self._server.add_insecure_port(where)
        else:
            self._server.add_secure_port(where, credentials)
        self._looking: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Answer calls from now on."""
        await self._tell_health()
        await self._server.start()
        self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        failures = Failures("gRPC's health was not renewed")
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _LOOK)
            self._changed.clear()
            with failures:
                await self._tell_health()

    def look_soon(self) -> None:
        """A model has become ready: whoever watches its health is told now."""
        self._changed.set()

    async def _tell_health(self) -> None:
        try:
            is_ready = (await self._models.look())[0] == "ready"
        except Exception:  # the loop must go on: there may be an answer the next time
            logger.exception("the state of the models cannot be told")
            is_ready = False
        status = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await self._health.set(name, status.SERVING if is_ready else status.NOT_SERVING)

    async def drain(self) -> None:
        """Tell clients that new calls should go elsewhere, by the health and by GOAWAY."""
        if self._looking is not None:
            self._looking.cancel()
        await self._health.enter_graceful_shutdown()
        self._draining = asyncio.create_task(self._server.stop(_UNTIL_STOP))

    async def stop(self, seconds: float) -> None:
        """End after ``drain``; calls that are open get so many seconds."""
        if self._draining is not None:
            self._draining.cancel()  # or it would keep its own limit
        await self._server.stop(seconds)


def _credentials(options: ServiceOptions) -> Any:
    """Of the service's TLS; None without. Renewed certificates are for new connections.

    The files were read, and found to fit, by ``TLS`` before.
    """
    certfile, authorities = options.ssl_certfile, options.ssl_ca_certs
    if certfile is None:
        return None
    keyfile = options.ssl_keyfile or certfile
    stamp = stamp_of(certfile, keyfile, authorities)

    def configuration() -> Any:
        return grpc.ssl_server_certificate_configuration(
            [(keyfile.read_bytes(), certfile.read_bytes())],
            None if authorities is None else authorities.read_bytes(),
        )

    def renewed() -> Any:
        """In a thread of gRPC's, at each handshake; None if nothing has changed."""
        nonlocal stamp
        try:
            found = stamp_of(certfile, keyfile, authorities)
            if found == stamp:
                return None
            stamp, changed = found, configuration()
        except OSError as error:
            logger.error("gRPC goes on with the certificates that it has: %s", error)
            return None
        return changed

    return grpc.dynamic_ssl_server_credentials(
        configuration(), renewed, require_client_authentication=authorities is not None
    )
