"""The headers that the service reads (keys, timeouts, priorities), and Server-Timing."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable

from ...observe.record import Timing
from ...options.checks import LONGEST_TENANT, check_priority
from .refusals import Refusal

__all__ = [
    "check_key",
    "find_request_id",
    "is_allowed_host",
    "read_priority",
    "read_request_id",
    "read_seconds",
    "read_tenant",
    "timing_header",
]

#: Request ids appear in logs and answers: printable ASCII without spaces.
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")

#: See https://www.w3.org/TR/server-timing/; in milliseconds.
_TIMING = b"queued;dur=%.3f, sent;dur=%.3f, computed;dur=%.3f, returned;dur=%.3f"


def check_key(allowed: tuple[str, ...], headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The tenant's name of the request's key; empty with a single key. Takes constant time.

    The name does not reveal the key, and is the same in all web processes.

    Raises:
        Refusal: the request has no allowed key, as X-API-Key or bearer token.
    """
    own = bearers = b""
    for name, value in headers:
        if name == b"x-api-key":
            own = value.strip()
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            bearers = value[7:].strip()
    given = own or bearers
    # Compare all keys, so that the time reveals nothing.
    fits = [hmac.compare_digest(given, key.encode()) for key in allowed]
    if not any(fits):
        problem = "wrong API key" if given else "missing API key"
        raise Refusal(
            401,
            "authentication_error",
            f"{problem}; send the service's key in the header Authorization: Bearer KEY",
            reason="unauthorized",
            code="invalid_api_key",
            more=((b"www-authenticate", b"Bearer"),),
        )
    return f"key {1 + fits.index(True)}" if len(allowed) > 1 else ""


def read_seconds(value: bytes) -> float:
    """Read X-Request-Timeout. Raises Refusal."""
    try:
        seconds = float(value)
        if not 0 < seconds <= 1e9:
            raise ValueError
    except ValueError:
        wanted = "a number of seconds above 0"
        raise _bad_header(b"X-Request-Timeout", wanted, value) from None
    return seconds


def read_priority(name: bytes, value: bytes) -> int:
    """Read a priority from a header. Raises Refusal."""
    try:
        return check_priority(int(value))
    except ValueError:
        wanted = "a whole number; higher numbers go first"
        raise _bad_header(name.title(), wanted, value) from None


def read_tenant(name: bytes, value: bytes) -> str:
    """Read a tenant from a header. Raises Refusal."""
    if len(value) > LONGEST_TENANT:
        raise _bad_header(name.title(), f"at most {LONGEST_TENANT} characters", value)
    return value.decode("latin-1")


def read_request_id(value: bytes) -> str | None:
    """Read X-Request-ID; None if it is not safe to repeat."""
    return value.decode() if _REQUEST_ID.fullmatch(value) else None


def find_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Find X-Request-ID among a request's headers; None if missing or unsafe."""
    for name, value in headers:
        if name == b"x-request-id":
            return read_request_id(value)
    return None


def is_allowed_host(allowed: tuple[str, ...], headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the header Host is in ``ServiceOptions.allowed_hosts``."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) != 1:
        return False
    host = hosts[0].decode("latin-1").lower()
    host = re.sub(r":\d*$", "", host).rstrip(".").strip("[]")
    return any(
        host.endswith(each[1:]) and host != each[1:] if each.startswith("*.") else host == each
        for each in allowed
    )


def _bad_header(name: bytes, wanted: str, value: bytes) -> Refusal:
    shown, named = value[:40].decode("latin-1"), name.decode()
    return Refusal(
        422,
        "invalid_request_error",
        f"{named}: must be {wanted}, not {shown!r}",
        reason="invalid",
        param=named,
        code="invalid_value",
    )


def timing_header(timing: Timing) -> tuple[bytes, bytes]:
    """Server-Timing: where the request's time went. Browsers show it."""
    queued, sent, computed, returned = timing
    values = (1e3 * queued, 1e3 * sent, 1e3 * computed, 1e3 * returned)
    return b"server-timing", _TIMING % values
