"""The API keys of a service: who may send a request, and how many.

They are those of --api-key, and those of a file that may change. A file that cannot be read, or is
not valid, changes nothing: the keys that were read last stay, and the log says why once.

What a key has used of its limits is in numbers, its cells, that all web processes of a service
have, so the limits hold for all of them together. There is no lock, which a dying process could
keep: two that take at the same moment may count as one.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Iterable, MutableSequence
from pathlib import Path
from typing import Any

from .api_keys import COMPUTE, METRICS, SCOPES, ApiKey, digest_of, read_keys
from .file_stamps import Stamp, stamp_of
from .refusals import Refusal

logger = logging.getLogger(__name__)

#: Maximum bytes of the file.
_MOST_BYTES = 2 << 20


#: Keys that there is room for in shared memory, including those that were used before and are gone.
#: Later ones are limited by each process alone.
_SLOTS = 4096

#: Seconds in which the requests of a minute flow in again.
_MINUTE = 60.0

#: The cells of a key: the time at which none of its requests of a minute are used any more, then
#: for each web process the number of its open requests.
_UNUSED_AT, _OPEN = 0, 1


def cells_needed(processes: int) -> int:
    """Numbers in an array for ``SharedCells``."""
    return _SLOTS * (1 + _OPEN + processes)


class SharedCells:
    """Finds the cells of a key by its digest. For one web process.

    A slot is a number made of the digest, then the key's cells. All processes read the same file,
    so they look for the same slots in the same order. Only if they claim one for two keys at the
    same moment do these keys share it, until the service ends.

    Args:
        array: ``multiprocessing.RawArray("d", cells_needed(processes))``, which no process has used
            before the first one.
        number: of this process. Its open requests are none: an earlier process of that number died.
            So whoever sees it die makes one as well; there may be no later process.
    """

    def __init__(self, array: Any, number: int, processes: int) -> None:
        self.number = number
        self._width = 1 + _OPEN + processes
        self._cells = memoryview(array).cast("B").cast("d")
        self._own: dict[bytes, MutableSequence[float]] = {}  # of keys without a slot
        for slot in range(_SLOTS):
            self._cells[slot * self._width + 1 + _OPEN + number] = 0.0

    def of(self, digest: bytes) -> MutableSequence[float]:
        """The cells of a key: always the same, also if the key was away."""
        name = float(1 + int.from_bytes(digest[:6]))  # exact, and never 0
        first = int.from_bytes(digest[6:10])
        for step in range(_SLOTS):
            at = (first + step) % _SLOTS * self._width
            if self._cells[at] == 0.0:
                self._cells[at] = name
            if self._cells[at] == name:
                own: Any = self._cells[at + 1 : at + self._width]
                return own  # type: ignore[no-any-return]
        return self._own.setdefault(digest, [0.0] * (self._width - 1))


class KeyHolder:
    """Who has sent a request.

    Args:
        key: its key.
        tenant: for the fair queue; empty for none.
        cells: what is used of the key's limits; None without limits.
        number: of this web process.
    """

    def __init__(
        self,
        key: ApiKey,
        tenant: str,
        cells: MutableSequence[float] | None = None,
        number: int = 0,
    ) -> None:
        self.key = key
        self.tenant = tenant
        self._cells = cells
        self._own = _OPEN + number

    def enter(self) -> None:
        """Count a request as open. Who is admitted has to ``leave``.

        Raises:
            Refusal: 429, the key's limits are reached.
        """
        shortage = None if self._cells is None else self.admit(time.monotonic())
        if shortage is not None:
            limit, seconds = shortage
            raise Refusal(
                429,
                f"the API key {self.key.name!r} has reached its limit {limit}; retry in {seconds} "
                "s",
                code="rate_limit_exceeded",
                retry_after=seconds,
            )

    def admit(self, now: float) -> tuple[str, int] | None:
        """Count a request as open; else the limit that is reached, and seconds until it may be.

        The rate is a bucket with the requests of a minute. Each request moves the time forward at
        which the bucket is full again.

        Args:
            now: seconds of a monotonic clock that all web processes share.
        """
        key, cells = self.key, self._cells
        assert cells is not None
        if key.concurrency is not None and sum(cells[_OPEN:]) >= key.concurrency:
            return f"concurrency = {key.concurrency}", 1
        if key.requests_per_minute is not None:
            unused_at = max(cells[_UNUSED_AT], now) + _MINUTE / key.requests_per_minute
            late = unused_at - now - _MINUTE
            if late > 1e-6:  # the sum of many shares of a minute is not exact
                limit = f"requests-per-minute = {key.requests_per_minute}"
                return limit, max(1, math.ceil(late))
            cells[_UNUSED_AT] = unused_at
        cells[self._own] += 1
        return None

    def leave(self) -> None:
        """The request is over."""
        if self._cells is not None:
            self._cells[self._own] -= 1


#: The caller of a service without keys: everybody may do everything.
ANYBODY = KeyHolder(ApiKey("", frozenset(SCOPES)), "")


class Keyring:
    """Checks the keys of requests. Belongs to one event loop.

    Args:
        keys: of --api-key. They have all scopes but admin, and no limits.
        path: of the file; None for none.
        cells: where limits are counted; None for this process alone.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        path: Path | None = None,
        cells: SharedCells | None = None,
    ) -> None:
        self._path = path
        if cells is None:
            cells = SharedCells(array("d", bytes(8 * cells_needed(1))), 0, 1)
        self._cells = cells
        scopes = frozenset((COMPUTE, METRICS))
        is_one = len(keys) == 1 and path is None
        self._given: dict[bytes, KeyHolder] = {}
        for number, key in enumerate(keys, 1):
            name = f"key {number}"
            caller = KeyHolder(ApiKey(name, scopes), "" if is_one else name)
            self._given.setdefault(digest_of(key.encode()), caller)
        self._callers = self._given
        self._stamp: Stamp | None = None
        self.look()

    def authorize(self, headers: Iterable[tuple[bytes, bytes]], scope: str | None) -> KeyHolder:
        """Who has sent a request.

        Args:
            headers: of the request, with names in lower case.
            scope: what the key must be for; None for any key.

        Raises:
            Refusal: 401, no valid key, as X-API-Key or bearer token; 403, the key is not for that.
        """
        own = bearers = b""
        for name, value in headers:
            if name == b"x-api-key":
                own = value.strip()
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                bearers = value[7:].strip()
        given = own or bearers
        caller = self._callers.get(digest_of(given)) if given else None
        if caller is None:
            raise _unauthorized("wrong API key" if given else "missing API key")
        key = caller.key
        if key.expires is not None and time.time() >= key.expires:
            raise _unauthorized("this API key has expired", key.name)
        if scope is not None and scope not in key.scopes:
            scopes = ", ".join(sorted(key.scopes))
            raise Refusal(
                403,
                f"the API key {key.name!r} does not have the scope {scope}, which this request "
                f"needs; it has {scopes}. The operator can add it in the file of --api-key-file",
                code="insufficient_scope",
                key=key.name,
            )
        return caller

    def look(self) -> None:
        """Read the file if it has changed. Logs what is wrong with it."""
        path = self._path
        if path is None:
            return
        stamp: Stamp = ()
        try:
            stamp = stamp_of(path)
            if stamp == self._stamp:
                return
            keys = load_keys(path)
        except (OSError, ValueError) as error:
            if stamp != self._stamp:  # once for each change
                logger.error("--api-key-file %s: %s; the keys read last stay valid", path, error)
        else:
            if self._stamp is not None:
                logger.info("--api-key-file %s has changed: keys: %d", path, len(keys))
            self._take(keys)
        self._stamp = stamp

    def _take(self, keys: dict[bytes, ApiKey]) -> None:
        """Replace the keys of the file. What a key has used of its limits stays used.

        That holds for a key that was away, too, as all are while a file is written in place.
        """
        cells = self._cells
        self._callers = self._given | {
            digest: KeyHolder(
                key, key.name, cells.of(digest) if key.has_limits else None, cells.number
            )
            for digest, key in keys.items()
        }


def load_keys(path: Path) -> dict[bytes, ApiKey]:
    """Read a file of keys.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not valid.
    """
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    try:
        return read_keys(content.decode())
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8") from None


def _unauthorized(problem: str, key: str = "") -> Refusal:
    return Refusal(
        401,
        f"{problem}; send the service's key in the header Authorization: Bearer KEY",
        code="invalid_api_key",
        key=key,
        more=((b"www-authenticate", b"Bearer"),),
    )
