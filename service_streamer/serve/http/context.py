"""What an operation sees of the service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

from ...errors import InvalidInput
from .events import Form
from .exchange import Headers
from .json_bodies import JSONAnswer
from .refusals import Refusal
from .streaming import EventStream

#: A model's description, see ``pipelines.PipelineModel``; empty for models without one.
Description = Mapping[str, Any]


class BinaryAnswer(NamedTuple):
    """An answer that is not JSON.

    Attributes:
        headers: with Content-Type.
    """

    body: bytes
    headers: Headers


class Context(Protocol):
    """An operation's view of the service and the request."""

    @property
    def description(self) -> Description:
        """The model's description."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def has_steps(self) -> bool:
        """Whether the model is one of steps, whose outputs come one by one."""

    @property
    def content_type(self) -> bytes:
        """The header Content-Type; empty if missing."""

    def header(self, name: bytes) -> bytes:
        """Another header, of a name in lower case; empty if missing."""

    def hasten(self, timeout: float | None, priority: int) -> None:
        """What the body says of the call: seconds until the result is due, and a priority."""

    def check_count(self, count: int) -> None:
        """Raises Refusal if the queue can never hold this many inputs."""

    def compute(self, items: list[Any]) -> Awaitable[list[Any]]:
        """Compute items in batches with other callers' items."""

    async def answer(self, make: Callable[[], Any], size: int = 0) -> JSONAnswer:
        """The answer in JSON, of what was computed last.

        Args:
            make: makes it, in a thread if it is large.
            size: bytes of its numbers, if that is known here.
        """

    async def stream(self, item: Any, form: Form, *others: Any) -> EventStream:
        """Compute an item; its outputs are sent as they come. Returns with the first of them.

        Args:
            others: more items. The form then gets the outputs of all of them as ``Numbered``.
        """


def check_streams(context: Context) -> None:
    if not context.has_steps:
        raise unsupported("stream")


def invalid(param: str, text: str, code: str = "invalid_value") -> Refusal:
    return Refusal(
        422, "invalid_request_error", f"{param}: {text}", reason="invalid", param=param, code=code
    )


def unsupported(param: str, text: str = "is not supported; leave it out") -> Refusal:
    return invalid(param, text, "unsupported_parameter")


def renamed(error: InvalidInput, names: Mapping[str, str]) -> InvalidInput:
    """The same error with the field's name in the request."""
    field, colon, text = str(error).partition(":")
    name, bracket, rest = field.partition("[")  # of a message of a chat
    return InvalidInput(names.get(name, name) + bracket + rest + colon + text)
