"""What both sides of a broker must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict

from ..engine.item_lengths import Length
from ..options.checks import Devices
from ..options.table import BrokerOptions
from ..supervision.health import Timeout
from .codec import Codec, MsgpackCodec, PickleCodec
from .wire import Wire

__all__ = ["PoolOptions", "Secret", "Serializer", "make_wire"]

Serializer = Literal["msgpack", "pickle"]
Secret = str | bytes


class PoolOptions(TypedDict, total=False):
    """The options of ``Streamer`` that a worker host takes as well, and passes on."""

    worker_num: int
    cuda_devices: Devices
    mp_start_method: str
    cpu_threads: int | Literal["auto"] | None
    max_attempts: int
    isolate_errors: bool
    batch_timeout: Timeout
    start_timeout: Timeout
    max_restarts: int
    restart_window: float
    length: Length | None
    max_batch_cost: float | None
    tenant_weights: Mapping[str, float] | None


def make_wire(options: BrokerOptions) -> Wire:
    """What both sides of a broker read and write messages with."""
    codec: Codec = MsgpackCodec() if options.serializer == "msgpack" else PickleCodec()
    secret = options.secret
    return Wire(
        codec,
        secret=secret.encode() if isinstance(secret, str) else secret,
        prefix=options.prefix,
        max_bytes=options.max_message_bytes,
        error_types=options.error_types,
    )
