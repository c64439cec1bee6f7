"""The streamer of a web server whose models are computed by worker hosts, over Redis."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from ..base_streamer import LIBRARY_TIMEOUT, BaseStreamer, DefaultTimeout
from ..options.kinds import documented
from ..options.table import RedisStreamerOptions
from ..single_flight import make_cache
from .client import Client
from .redis_stats import RedisStreamerStats
from .wire import Secret, Serializer


@documented(RedisStreamerOptions)
class RedisStreamer(BaseStreamer):
    """Batches for models on other hosts: any number of web servers share their worker hosts.

    Connects with the first call, in the process that makes it; so it may be built before a fork.
    It holds no model and starts no process: see ``RedisWorker`` and ``run_redis_workers_forever``.

    docs/reference/options.md says more about each option.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range.
    """

    def __init__(
        self,
        redis_broker: Any = "localhost:6379",
        prefix: str = "",
        worker_timeout: float | DefaultTimeout | None = LIBRARY_TIMEOUT,
        *,
        max_pending: int = 100_000,
        serializer: Serializer = "msgpack",
        secret: Secret | None = None,
        error_types: Sequence[type[BaseException]] = (),
        max_message_bytes: int = 32 << 20,
        reply_ttl: float = 120,
        answer_timeout: float | None = 600,
        drain_timeout: float | None = 60,
        trace: str | os.PathLike[str] | None = None,
        deduplicate: bool = False,
        cache_size: int = 0,
        cache_ttl: float | None = None,
    ) -> None:
        given = locals()  # the table of options knows their names
        super().__init__(worker_timeout)
        options = RedisStreamerOptions.select(given, worker_timeout=self._worker_timeout)
        cache = make_cache(options)  # first, since it may raise
        self._client = Client(options)
        self._use(self._client, options, cache)

    def stats(self) -> RedisStreamerStats:
        """What goes on now, and how often what happened so far; ``repr`` shows the gist."""
        deduplicated, cached = self.share_counts
        return dataclasses.replace(self._client.stats(), deduplicated=deduplicated, cached=cached)

    def explain(self) -> str:
        """Where to ask what limits: the batches are those of the worker hosts.

        With what is known here: a finding in each line, as ``Streamer.explain`` has them.
        """
        stats = self.stats()
        lines = [
            "Batches are put together by the worker hosts: RedisWorker.explain() says there what "
            f"limits them. From here: {stats.gist}."
        ]
        if stats.hosts == 0:
            lines.append("No worker host is alive: calls wait in Redis. Start one.")
        if stats.unreadable:
            lines.append(
                f"{stats.unreadable} calls failed so far because the two sides cannot read each "
                "other's messages. Give both the same secret, serializer and max_message_bytes."
            )
        if stats.rejected:
            lines.append(
                f"{stats.rejected} calls were refused so far, since max_pending calls waited. More "
                "comes than the hosts can compute: add hosts, or have callers slow down."
            )
        return "\n".join(lines)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until Redis answers and a worker host is there that has loaded its model.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            BrokerUnavailable: the time ended, and Redis could not be reached.
            WorkerStartTimeout: the time ended, and no worker host was there.
        """
        super().wait_ready(timeout)
