"""Options of the web service, whichever backend computes."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["HEADERS", "ServiceOptions"]

#: Headers that are always read. Looking up a name costs less than comparing it with all of them.
HEADERS = (b"content-length", b"content-type", b"x-request-id", b"x-request-timeout")


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Options of the web service. The command line checks them.

    Attributes:
        model: name of the model for users; None takes it from the worker hosts.
        timeout: seconds that a request may take; clients may ask for less.
        max_body: maximum bytes of a request's body.
        max_pending: maximum number of queued inputs; None sets no limit.
        batch_size: maximum number of inputs per batch; None if the worker hosts decide.
        api_keys: accepted API keys, each a tenant; empty accepts every request.
        priority_header: lower-case name of the header with the priority; empty for none.
        tenant_header: lower-case name of the header with the tenant; empty for none.
        max_pixels: maximum decoded pixels of a request's images.
        max_large_pixels: maximum pixels of large images in all open requests; None sets no limit.
        max_audio_seconds: maximum seconds of a request's sounds.
        max_characters: maximum characters of a request, times how often the model reads them.
        max_tokens: maximum generated tokens of a request.
        write_timeout: seconds that a client may leave an answer unread.
        max_unread: bytes that all clients together may leave unread.
        allowed_hosts: accepted hosts, lower-case, without ports; ``*.a.b`` matches every host below
            a.b. Empty accepts all.
        is_traced: whether to send spans to OpenTelemetry.
        debug: whether error answers show internal details.
        headers_read: lower-case names of all headers that are read.
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
        """Whether requests may be reordered: unknown clients could outrank all others."""
        return bool(self.api_keys or self.priority_header or self.tenant_header)
