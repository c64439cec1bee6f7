"""The API keys of a service: those of --api-key, and those of a file that may change.

A file that cannot be read, or is not valid, changes nothing: the keys that were read last stay, and
the log says why once.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Iterable
from pathlib import Path

from .api_keys import COMPUTE, METRICS, SCOPES, ApiKey, digest_of, read_keys
from .file_stamps import Stamp, stamp_of
from .quotas import Quota
from .refusals import Refusal
from .shared_cells import SharedCells, cells_needed

logger = logging.getLogger(__name__)

#: Maximum bytes of the file.
_MOST_BYTES = 2 << 20


class KeyHolder:
    """Who has sent a request.

    Args:
        key: its key.
        tenant: for the fair queue; empty for none.
        quota: the key's limits; None without limits.
    """

    __slots__ = ("key", "quota", "tenant")

    def __init__(self, key: ApiKey, tenant: str, quota: Quota | None = None) -> None:
        self.key = key
        self.tenant = tenant
        self.quota = quota

    def enter(self) -> None:
        """Count a request as open. Who is admitted has to ``leave``.

        Raises:
            Refusal: 429, the key's limits are reached.
        """
        if self.quota is None:
            return
        short = self.quota.enter(time.monotonic())
        if short is not None:
            raise Refusal(
                429,
                "rate_limit_error",
                f"the API key {self.key.name!r} has reached its limit {short.limit}; retry in "
                f"{short.seconds} s",
                reason="rate_limited",
                code="rate_limit_exceeded",
                retry_after=short.seconds,
            )

    def leave(self) -> None:
        """The request is over."""
        if self.quota is not None:
            self.quota.leave()


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
                "permission_error",
                f"the API key {key.name!r} does not have the scope {scope}, which this request "
                f"needs; it has {scopes}. The operator can add it in the file of --api-key-file",
                reason="forbidden",
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
        callers = dict(self._given)
        for digest, key in keys.items():
            before = self._callers.get(digest)
            quota = None
            if key.has_limits:
                known = None if before is None else before.quota
                quota = self._new_quota(digest, key) if known is None else known.renewed(key)
            callers[digest] = KeyHolder(key, key.name, quota)
        self._callers = callers

    def _new_quota(self, digest: bytes, key: ApiKey) -> Quota:
        return Quota(key, self._cells.of(digest), self._cells.number)


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
        "authentication_error",
        f"{problem}; send the service's key in the header Authorization: Bearer KEY",
        reason="unauthorized",
        code="invalid_api_key",
        key=key,
        more=((b"www-authenticate", b"Bearer"),),
    )
