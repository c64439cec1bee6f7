"""Which endpoint a POST is for: the operations of all models, by their targets."""

from __future__ import annotations

from urllib.parse import quote, unquote

from ..v2.infer_answer import VERSION
from .endpoint import Endpoint
from .models import Models
from .operations import INFER, OPERATIONS
from .service import Service

#: Below it each model has all paths of a service of its own.
PREFIX = "/models/"

#: Below it the Open Inference Protocol names a model, and perhaps a version.
TENSORS = "/v2/models/"

_PREFIX, _TENSORS = PREFIX.encode(), TENSORS.encode()

_VERSIONED = f"/versions/{VERSION}"


def model_and_place(models: Models, path: str) -> tuple[Service, str] | None:
    """The model of a path below ``TENSORS``, and what follows it and its version.

    Returns:
        None if there is no such model or version.
    """
    found = models.split(path[len(TENSORS) :])
    if found is None:
        return None
    service, rest = found
    if rest.startswith("/versions/"):
        if rest != _VERSIONED and not rest.startswith(f"{_VERSIONED}/"):
            return None
        rest = rest[len(_VERSIONED) :]
    return service, rest


class Routes:
    """The endpoints of the models of one web process."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._endpoints: dict[Service, dict[bytes, Endpoint]] = {}
        self._at_root: dict[bytes, Endpoint] = {}
        self._of_tensors: dict[bytes, Endpoint] = {}
        self._infers: dict[Service, Endpoint] = {}
        self._number = -1

    def find(self, target: bytes) -> Endpoint | None:
        """The endpoint of a target; None if it is that of no operation."""
        models = self._models
        if self._number != models.number:
            self._renew()
        endpoint = self._at_root.get(target)
        if endpoint is None and target.startswith(_PREFIX):
            found = models.split(target[len(_PREFIX) :].decode("utf-8", "replace"))
            if found is not None:
                service, path = found
                endpoint = self._endpoints[service].get(path.encode() or b"/")
        if endpoint is None and target.startswith(_TENSORS):
            endpoint = self._of_tensors.get(target) or self._infer(target)
        return endpoint

    def _infer(self, target: bytes) -> Endpoint | None:
        """The endpoint for a target that is written in an unusual way, or has a query."""
        path = unquote(target.partition(b"?")[0].decode("utf-8", "replace"))
        found = model_and_place(self._models, path)
        return self._infers[found[0]] if found is not None and found[1] == "/infer" else None

    def _renew(self) -> None:
        models = self._models
        self._endpoints = {
            service: {op.path.encode(): Endpoint(service, op) for op in OPERATIONS}
            for service in models
        }
        default = models.default
        self._at_root = {} if default is None else {**self._endpoints[default]}
        self._at_root |= {
            op.path.encode(): Endpoint(models.first, op, models)
            for op in OPERATIONS
            if op.is_openais and models.are_named
        }
        self._infers = {service: Endpoint(service, INFER) for service in models}
        self._of_tensors = {
            f"{TENSORS}{name}{version}/infer".encode(): endpoint
            for service, endpoint in self._infers.items()
            for name in (service.model, quote(service.model), quote(service.model, safe=""))
            for version in ("", _VERSIONED)
        }
        self._number = models.number
