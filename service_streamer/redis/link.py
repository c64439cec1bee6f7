"""Connections to Redis: addresses, links, retries, outages, and one class of errors."""

from __future__ import annotations

import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..engine.threads import rest_if_copied
from ..errors import BrokerError
from ..reporting import quiet_log
from ..supervision.supervisor import backoff
from .scripts import Script

log = quiet_log(__name__)


#: Seconds that a read blocks in Redis. Its end shows that the connection is alive.
BLOCK = 5.0

#: Seconds that Redis may take to answer, and to accept a connection.
_ANSWER_TIMEOUT = 3.0
_CONNECT_TIMEOUT = 2.0

_HOST_AND_PORT = re.compile(r"(?P<host>[^\s:/@\[\]]+|\[[0-9a-fA-F:.%\w]+\]):(?P<port>\d{1,5})")


class LinkError(BrokerError):
    """A command failed: Redis is unreachable, refuses us, or is no Redis."""


class NoGroup(LinkError):
    """A stream or its consumer group was deleted or has expired."""


class Address:
    """The address of a Redis, with a pool of connections.

    Args:
        broker: ``host:port``, a ``redis://``, ``rediss://`` or ``unix://`` URL, or a
            ``redis.Redis`` client, whose connections and settings are used.

    Raises:
        TypeError, ValueError: it is none of these.
    """

    def __init__(self, broker: object) -> None:
        self._pool: Any = None
        self._url = ""
        if isinstance(broker, redis.Redis):
            self._pool = broker.connection_pool
        elif isinstance(broker, str):
            self._url = _url(broker)
        else:
            raise TypeError(
                'redis_broker must be "host:port", a redis://, rediss:// or unix:// URL, or a '
                "synchronous redis.Redis client; not "
                f"{type(broker).__module__}.{type(broker).__qualname__}"
            )
        settings = self.pool().connection_kwargs  # a bad URL is refused here
        if settings.get("decode_responses"):
            raise ValueError("redis_broker must have decode_responses=False: messages are bytes")

    def pool(self, *, blocks: float = 0.0) -> redis.ConnectionPool:
        """A pool of connections without retries.

        Args:
            blocks: seconds that its commands block in Redis.
        """
        return self._pool or self._connection_pool(
            socket_timeout=_ANSWER_TIMEOUT + blocks,
            socket_connect_timeout=_CONNECT_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )

    @property
    def longest_block(self) -> float:
        """Seconds that a command may block within the connection's timeout."""
        pool = self.pool(blocks=BLOCK)
        # A connection, not yet connected: its class may have another default.
        connection = pool.connection_class(**pool.connection_kwargs)
        timeout: float | None = connection.socket_timeout
        if timeout is None:
            return BLOCK
        return max(0.001, min(BLOCK, max(timeout - _ANSWER_TIMEOUT, timeout / 2)))

    def _connection_pool(self, **settings: Any) -> redis.ConnectionPool:
        if not self._url.startswith("unix:"):
            settings["socket_keepalive"] = True
        try:
            return redis.ConnectionPool.from_url(self._url, **settings)
        except (ValueError, TypeError):
            # redis-py's error may contain a part of the password.
            raise ValueError(
                "redis_broker is not a valid Redis URL; percent-encode /, #, ?, @ and : in user "
                "and password, and use only redis-py's options after ?"
            ) from None

    def __str__(self) -> str:
        """The address without user and password, for messages."""
        settings = self.pool().connection_kwargs
        if self._pool is not None and not settings.keys() & {"path", "host"}:
            return "the Redis of the client"  # a Sentinel's, say
        place = settings.get("path") or (
            f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"
        )
        return f"Redis at {place}"


def _url(broker: str) -> str:
    if broker.startswith(("redis://", "rediss://", "unix://")):
        return broker
    if not _HOST_AND_PORT.fullmatch(broker):
        # Not repeated: it may contain a password.
        raise ValueError(
            'redis_broker must be "host:port" or a redis://, rediss:// or unix:// URL, such as '
            '"redis://user:password@localhost:6379/0"'
        )
    return f"redis://{broker}"


class Link:
    """One connection to Redis for one thread; reconnects after it was lost.

    Not a ``redis.Redis``, which takes a connection from its pool for each command and checks it:
    half of the latency of a lone call.

    Args:
        blocks: seconds that its commands block in Redis.
    """

    def __init__(self, address: Address, *, blocks: float = 0.0) -> None:
        self._address = address
        self._blocks = blocks
        self._pool: redis.ConnectionPool | None = None
        self._connection: Any = None
        self._sent: tuple[Script, tuple[Any, ...]]
        self._is_owed = False  # a command is sent, its answer not read
        self._pid = os.getpid()
        _links.add(self)
        #: Why the last command failed; None if it succeeded.
        self.failure: LinkError | None = None

    def run(self, script: Script, keys: Sequence[str], *arguments: Any) -> Any:
        """Run a script, and return its result. Raises LinkError."""
        self.send(script, keys, *arguments)
        return self.receive()

    def send(self, script: Script, keys: Sequence[str], *arguments: Any) -> None:
        """Send a script; ``receive`` gets its result. Raises LinkError."""
        rest = (len(keys), *keys, *arguments)
        self._sent = script, rest
        self._send("EVALSHA", script.sha, *rest)

    def receive(self) -> Any:
        """Receive the result of the sent script. Raises LinkError."""
        try:
            return self._receive()
        except redis.exceptions.NoScriptError:
            script, rest = self._sent
            return self.call("EVAL", script.text, *rest)

    def call(self, *command: Any) -> Any:
        """Run a command, and return its raw result. Raises LinkError."""
        self._send(*command)
        return self._receive()

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def _send(self, *command: Any) -> None:
        rest_if_copied(self._pid)
        try:
            if self._is_owed:  # an interrupt came in between: drop that answer
                self.close()
            if self._connection is None:
                self._pool = self._address.pool(blocks=self._blocks)
                self._connection = self._pool.get_connection()
            self._is_owed = True
            # No numbers: hiredis 3.5 crashes the process if a signal handler raises while it makes
            # text of one.
            self._connection.send_command(
                *[each if isinstance(each, (bytes, str)) else str(each) for each in command]
            )
        except (redis.RedisError, OSError, AttributeError) as error:  # closed by another thread
            raise self._failed(error) from error
        except BaseException:  # an interrupt: perhaps half is sent
            self.close()
            raise

    def _receive(self) -> Any:
        try:
            answer = self._connection.read_response()
        except redis.exceptions.NoScriptError:
            self._is_owed = False
            raise
        except (redis.RedisError, OSError, AttributeError) as error:  # closed by another thread
            raise self._failed(error) from error
        except BaseException:
            self.close()
            raise
        self._is_owed = False
        self.failure = None
        return answer

    def _failed(self, error: Exception) -> LinkError:
        """Close and note the error, also if Redis refused: it may accept us later."""
        rest_if_copied(self._pid)
        self.close()
        is_gone = any(word in str(error) for word in ("NOGROUP", "UNBLOCKED"))
        kind = NoGroup if is_gone else LinkError
        text = str(error).rstrip(".") or type(error).__name__
        self.failure = kind(f"{self._address} is unavailable: {text}")
        return self.failure

    def close(self) -> None:
        self._is_owed = False
        pool, self._pool = self._pool, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
        if pool is not None and connection is not None:
            pool.release(connection)

    def abandon_in_forked_child(self) -> None:
        """Close this process's copy of the connection; the parent's stays open."""
        self._is_owed = False
        connection, self._connection, self._pool = self._connection, None, None
        if connection is not None:
            connection.disconnect()  # says nothing to Redis in another process


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _abandon_all() -> None:
    for link in [*_links]:
        link.abandon_in_forked_child()


# With gevent threads are greenlets, which a fork copies: the copy of one that waits for an answer
# would take it from the parent.
os.register_at_fork(after_in_child=_abandon_all)


def entries(answer: Any) -> Iterator[tuple[bytes, bytes, list[bytes]]]:
    """Entries of ``XREAD`` and ``XREADGROUP``: stream, id, alternating names and values.

    Redis answers with a list of streams, or a map in the newer protocol of a user's client.
    """
    for stream, found in answer.items() if isinstance(answer, dict) else answer or ():
        for id_, fields in found:
            yield stream, id_, fields or []  # no fields if deleted


class Backoff:
    """Exponential back-off in seconds, with jitter: clients must not all reconnect at once."""

    _FIRST = 0.05
    _LONGEST = 1.0

    def __init__(self, jitter: Callable[[], float]) -> None:
        self._jitter = jitter
        self._tries = 0

    def failed(self) -> float:
        self._tries += 1
        return backoff(self._tries - 1, self._FIRST, self._LONGEST, self._jitter())

    def succeeded(self) -> None:
        self._tries = 0


class Outages:
    """Logs the loss of Redis once for several links, and its return once.

    Attributes:
        count: number of losses.
        is_on: whether Redis is lost now.
    """

    def __init__(self, links: Sequence[Link], meanwhile: str) -> None:
        self._links = links
        self._meanwhile = meanwhile
        self._lock = threading.Lock()
        self.count = 0
        self.is_on = False

    def lost(self, error: LinkError) -> None:
        with self._lock:
            is_news, self.is_on = not self.is_on, True
            self.count += is_news
        if is_news:
            log(logging.WARNING, "%s; %s until it is back", error, self._meanwhile)

    def over(self, address: Address) -> None:
        """Note a success of a link."""
        if not self.is_on:
            return
        with self._lock:
            is_news = self.is_on and not any(link.failure for link in self._links)
            self.is_on = self.is_on and not is_news
        if is_news:
            log(logging.INFO, "%s is back", address)
