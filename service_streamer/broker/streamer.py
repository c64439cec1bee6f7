"""The streamer of a web server whose models are computed by worker hosts, over Redis."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from ..options import check_count, check_seconds
from ..streamers import BaseStreamer
from .client import Client
from .options import MAX_MESSAGE_BYTES, Secret, Serializer, make_wire
from .redis import Address
from .stats import RedisStreamerStats

__all__ = ["RedisStreamer"]


class RedisStreamer(BaseStreamer):
    """Batches for models on other hosts: any number of web servers share their worker hosts.

    Connects with the first call, in the process that makes it; so it may be built before a fork.
    It holds no model and starts no process: see ``RedisWorker`` and ``run_redis_workers_forever``.

    Args:
        redis_broker: ``host:port``, a ``redis://user:password@host:port/db``, ``rediss://`` (TLS)
            or ``unix://`` URL; or a ``redis.Redis`` client, whose connections are used.
        prefix: keeps models apart on one Redis: that of their worker hosts.
        worker_timeout: how long ``predict`` waits for its results, seconds; None for ever.
        max_pending: the most calls, of all clients of this prefix, that may wait or be computed;
            beyond it calls fail with ``Overloaded``. Each client refuses by its own number.
        serializer: how items and results travel. "msgpack" for plain data, arrays and tensors;
            "pickle" for any object, which needs a secret.
        secret: signs every message, and proves those that come; at least 16 bytes, and the same on
            every side.
        error_types: exceptions of models to be raised here as themselves, besides the built-in
            ones; others become ``ModelError``, which names them. With "pickle" it is not needed.
        max_message_bytes: the most bytes of one call, or its results.
        reply_ttl: for how long replies are kept when this client cannot fetch them, seconds.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range.
    """

    def __init__(
        self,
        redis_broker: Any = "localhost:6379",
        prefix: str = "",
        worker_timeout: float | None = 20,
        *,
        max_pending: int = 100_000,
        serializer: Serializer = "msgpack",
        secret: Secret | None = None,
        error_types: Sequence[type[BaseException]] = (),
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        reply_ttl: float = 120,
    ) -> None:
        super().__init__(worker_timeout)
        check_count("max_pending", max_pending)
        wire = make_wire(
            serializer=serializer,
            secret=secret,
            prefix=prefix,
            max_message_bytes=max_message_bytes,
            error_types=error_types,
        )
        self._client = Client(
            Address(redis_broker),
            wire,
            prefix=prefix,
            max_pending=max_pending,
            reply_ttl=check_seconds("reply_ttl", reply_ttl) or 0.0,
        )
        self._backend = self._client
        # The client's threads hold it and not this object: see PoolStreamer.
        self._finalizer = weakref.finalize(self, self._client.abandon)
        self._finalizer.atexit = False

    def stats(self) -> RedisStreamerStats:
        """What goes on now, and how often what happened so far; ``repr`` shows the gist."""
        return self._client.stats()

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until Redis answers and a worker host is there that has loaded its model.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            BrokerUnavailable: the time ended, and Redis could not be reached.
            WorkerStartTimeout: the time ended, and no worker host was there.
        """
        super().wait_ready(timeout)
