"""How a service answers: what its web tier needs to know, whoever computes."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["HEADERS", "ServiceOptions"]

#: The headers of a request that are always read. A lookup of each header's name costs less than
#: comparing it with all of them.
HEADERS = (b"content-length", b"content-type", b"x-request-id", b"x-request-timeout")


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Checked by the command line, which is where they come from.

    Attributes:
        model: what is served, as users read it; None if the worker hosts are to say.
        timeout: how long a request may take, seconds; callers may ask for less.
        max_body: the longest body of a request, bytes.
        max_pending: the most inputs that may wait; None sets no bound.
        batch_size: the most inputs of one batch; None if that is the worker hosts' affair.
        api_keys: any of them lets a request in; none lets everybody in. Each is a tenant.
        priority_header: which header says a request's priority, in small letters; empty for none.
        tenant_header: the same for its tenant, who comes before that of the key.
        max_pixels: of the images of a request, all together, decoded.
        max_large_pixels: of the large images of all requests that are open; None sets no bound.
        max_audio_seconds: of the sounds of a request.
        max_characters: of the texts of a request, each time that the model reads them.
        max_tokens: that a request may have generated.
        write_timeout: how long a client may leave an answer unread, seconds.
        max_unread: how much all clients may leave unread at a time, bytes.
        allowed_hosts: the hosts that requests may name, in small letters, without ports; ``*.a.b``
            stands for every host below a.b. None names all.
        is_traced: whether OpenTelemetry gets spans.
        debug: whether answers show what went wrong inside.
        headers_read: the headers of a request that mean something, in small letters.
    """

    model: str | None
    timeout: float = 30.0
    max_body: int = 16 << 20
    max_pending: int | None = None
    batch_size: int | None = None
    api_keys: tuple[str, ...] = ()
    priority_header: bytes = b""
    tenant_header: bytes = b""
    max_pixels: int = 64_000_000
    max_large_pixels: int | None = None
    max_audio_seconds: float = 600.0
    max_characters: int = 1_000_000
    max_tokens: int = 16_384
    write_timeout: float = 30.0
    max_unread: int = 256 << 20
    allowed_hosts: tuple[str, ...] = ()
    is_traced: bool = False
    debug: bool = False
    headers_read: frozenset[bytes] = field(init=False)

    def __post_init__(self) -> None:
        names = {*HEADERS, self.priority_header, self.tenant_header} - {b""}
        object.__setattr__(self, "headers_read", frozenset(names))

    @property
    def knows_callers(self) -> bool:
        """Whether callers may say who goes first: strangers could outrank all others."""
        return bool(self.api_keys or self.priority_header or self.tenant_header)
