"""Paths besides the operations that need a key: who may ask for them."""

from __future__ import annotations

from starlette.requests import Request

from .asgi import exchange_of
from .refusals import Refusal
from .service import Service


def check_caller(service: Service, path: str, scope: str | None, request: Request) -> None:
    """Check the key of a request, and have the access log name it.

    Args:
        path: as metrics have it.
        scope: that the key must have; None for any.

    Raises:
        Refusal: the key is missing or wrong, or has another scope.
    """
    exchange = exchange_of(request.scope)
    try:
        holder = service.authorize(request.scope["headers"], scope)
    except Refusal as refused:
        service.requests.refused(path, refused.status, refused.reason)
        if exchange is not None:
            exchange.key = refused.key
        raise
    if exchange is not None:
        exchange.key = holder.key.name
