"""Addresses of clusters: whether two name the same one, and whether anything answers there."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path

#: How long the head may take to accept a connection, seconds.
_PATIENCE = 10.0


def is_same(address: str, other: str) -> bool:
    """Whether two addresses of the form ``host:port`` name the same head.

    Names are looked up. All addresses of this machine are one, as 127.0.0.1 and that of its node.
    """
    if address == other:
        return True
    first, second = _split(address), _split(other)
    if first is None or second is None or first[1] != second[1]:
        return False
    ours, theirs = _resolved(first[0]), _resolved(second[0])
    return not ours.isdisjoint(theirs) or (_is_here(ours) and _is_here(theirs))


def look_for(address: str, *, advice: str = "") -> None:
    """Find out whether anything answers, if that is the address of a head. Blocks for 10 s at most.

    Raises:
        ConnectionError: nothing does. Ray would say so after some minutes.
    """
    split = _split(address)
    if split is None:
        return
    try:
        socket.create_connection(split, _PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(
            f"there is no Ray cluster at {address!r} ({error}); "
            + (
                advice
                or "the address is that of the head's GCS, whose port is 6379 unless ray start was "
                "given another one"
            )
        ) from error


def last_started() -> tuple[str, Path] | None:
    """The cluster that ``ray start`` has started last on this machine, and the file that says so.

    It is what ``ray.init`` connects to without an address. The file may be older than the last
    start of this machine.
    """
    folder = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    file = Path(folder) / "ray" / "ray_current_cluster"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text().strip(), file
    return None


def _split(address: str) -> tuple[str, int] | None:
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else None


def _resolved(host: str) -> set[tuple[int, str]]:
    """Families and addresses; none if the name is not known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return set()
    return {(family, str(address[0])) for family, _, _, _, address in found}


def _is_here(addresses: set[tuple[int, str]]) -> bool:
    """Whether one of them is this machine's: what it sends there comes from that address itself."""
    for family, address in addresses:
        if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return True
        # Not by binding a socket to it: a kernel may allow that for any address (as HAProxy wants).
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # which sends nothing
            if probe.getsockname()[0] == address:
                return True
    return False
