"""How a service answers: what its web tier needs to know, whoever computes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ServiceOptions"]


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
        write_timeout: how long a client may leave an answer unread, seconds.
        max_unread: how much all clients may leave unread at a time, bytes.
        is_traced: whether OpenTelemetry gets spans.
        debug: whether answers show what went wrong inside.
    """

    model: str | None
    timeout: float = 30.0
    max_body: int = 16 << 20
    max_pending: int | None = None
    batch_size: int | None = None
    api_keys: tuple[str, ...] = ()
    priority_header: bytes = b""
    tenant_header: bytes = b""
    write_timeout: float = 30.0
    max_unread: int = 256 << 20
    is_traced: bool = False
    debug: bool = False

    @property
    def knows_callers(self) -> bool:
        """Whether callers may say who goes first: strangers could outrank all others."""
        return bool(self.api_keys or self.priority_header or self.tenant_header)
