"""What both sides of a broker must agree on, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from ..engine.item_lengths import Length
from ..options.checks import Devices, check_count
from ..supervision.hangs import Timeout
from .codec import Codec, MsgpackCodec, PickleCodec
from .wire import Wire

__all__ = ["MAX_MESSAGE_BYTES", "PoolOptions", "Secret", "Serializer", "make_wire"]

Serializer = Literal["msgpack", "pickle"]
Secret = str | bytes

_SHORTEST_SECRET = 16

#: The longest message, bytes: Redis holds it in memory, and so does everybody that it passes.
MAX_MESSAGE_BYTES = 32 << 20


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


def make_wire(
    *,
    serializer: Serializer,
    secret: Secret | None,
    prefix: str,
    max_message_bytes: int,
    error_types: Sequence[type[BaseException]] = (),
) -> Wire:
    """Raises TypeError, ValueError: an option is of the wrong type or out of range."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a string, not {prefix!r}")
    if set("{}\0") & set(prefix):
        raise ValueError(f"prefix must have no braces and no zero byte, not {prefix!r}")
    check_count("max_message_bytes", max_message_bytes, least=1024)
    if secret is not None:
        if not isinstance(secret, (str, bytes)):
            raise TypeError("secret must be a string or bytes")
        secret = secret.encode() if isinstance(secret, str) else secret
        if len(secret) < _SHORTEST_SECRET:
            raise ValueError(
                f"secret has {len(secret)} bytes, and {_SHORTEST_SECRET} are the least; make one "
                'with: python -c "import secrets; print(secrets.token_hex(32))"'
            )
    codec: Codec
    if serializer == "msgpack":
        codec = MsgpackCodec()
    elif serializer == "pickle":
        if secret is None:
            raise ValueError(
                'serializer="pickle" needs a secret that every side has: whoever can write to '
                "Redis could run code here otherwise"
            )
        codec = PickleCodec()
    else:
        raise ValueError(f'serializer must be "msgpack" or "pickle", not {serializer!r}')
    _check_error_types(error_types)
    return Wire(
        codec,
        secret=secret,
        prefix=prefix,
        max_bytes=max_message_bytes,
        error_types=error_types,
    )


def _check_error_types(error_types: Any) -> None:
    wanted = "error_types must be a tuple or list of exception classes"
    if not isinstance(error_types, (tuple, list)):
        raise TypeError(f"{wanted}, not {error_types!r}")
    for kind in error_types:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError(f"{wanted}; {kind!r} is none")
