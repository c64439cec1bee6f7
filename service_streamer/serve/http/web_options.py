"""Options of the web service, whichever backend computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...options.table import WebOptions

__all__ = ["HEADERS", "ServiceOptions"]

#: Headers that are always read. Looking up a name costs less than comparing it with all of them.
HEADERS = (b"content-length", b"content-type", b"x-request-id", b"x-request-timeout")


@dataclass(frozen=True)
class ServiceOptions(WebOptions):
    """The options of one web process, with what follows from them.

    Attributes:
        model: name of the model for users; None takes it from the worker hosts.
        max_pending: maximum number of queued inputs; None sets no limit.
        batch_size: maximum number of inputs per batch; None if the worker hosts decide.
        max_large_pixels: maximum pixels of large images in all open requests; None sets no limit.
        headers_read: lower-case names of all headers that are read.
    """

    model: str | None
    max_pending: int | None = None
    batch_size: int | None = None
    max_large_pixels: int | None = None
    headers_read: frozenset[bytes] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        names = {*HEADERS, self.priority_header, self.tenant_header} - {b""}
        object.__setattr__(self, "headers_read", frozenset(names))

    @property
    def knows_callers(self) -> bool:
        """Whether requests may be reordered: unknown clients could outrank all others."""
        return bool(self.api_keys or self.priority_header or self.tenant_header)
