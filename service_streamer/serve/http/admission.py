"""Options of the web service, and admission: limits on the cost of requests, and on their bodies.

A batch takes as long as its costliest inputs, and other callers wait for it. So a request is
measured before it joins a batch: decoded pixels, seconds of sound, characters, generated tokens.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...options.table import WebOptions
from ...pipelines.sizes import Sizes, sizes_of
from .refusals import Refusal

logger = logging.getLogger(__name__)

#: Headers that are always read. Looking up a name costs less than comparing it with all of them.
HEADERS = (
    b"content-encoding", b"content-length", b"content-type", b"transfer-encoding",
    b"x-request-timeout",
)  # fmt: skip


@dataclass(frozen=True)
class ServiceOptions(WebOptions):
    """The options of one web process, with what follows from them.

    Attributes:
        model: name of the model for users; None takes it from the worker hosts.
        max_pending: maximum number of queued inputs; None sets no limit.
        batch_size: maximum number of inputs per batch; None if the worker hosts decide.
        max_large_pixels: maximum pixels of large images in all open requests; None sets no limit.
        max_bodies: maximum bytes of the bodies of all open requests; None sets no limit.
        headers_read: lower-case names of all headers that are read.
    """

    model: str | None
    max_pending: int | None = None
    batch_size: int | None = None
    max_large_pixels: int | None = None
    max_bodies: int | None = None
    headers_read: frozenset[bytes] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        names = {*HEADERS, self.priority_header, self.tenant_header} - {b""}
        object.__setattr__(self, "headers_read", frozenset(names))

    @property
    def knows_callers(self) -> bool:
        """Whether requests may be reordered: unknown clients could outrank all others."""
        return bool(self.needs_key or self.priority_header or self.tenant_header)

    @property
    def needs_key(self) -> bool:
        """Whether requests need an API key."""
        return bool(self.api_keys) or self.api_key_file is not None


class Bodies:
    """The bodies of all open requests of a web process. Belongs to one event loop.

    Attributes:
        held: their bytes, those that have arrived.
    """

    def __init__(self) -> None:
        self.held = 0
        self._full_at = 0  # the limit that was reached, as the log says; 0 for none

    def check(self, size: int, most: int | None) -> None:
        """Refuse more bytes if there is no room for them.

        Args:
            size: bytes that have arrived, or are about to.
            most: maximum of all bodies together; None for no limit.

        Raises:
            Refusal: 503.
        """
        if most is None or self.held + size <= most:
            return
        if not self._full_at:
            self._full_at = most
            logger.warning(
                "the bodies of all open requests have %d MB, and this web process takes at most %d "
                "MB: others get 503. The limit is a quarter of the memory, shared by the web "
                "processes; more memory or a lower --max-body admits more requests",
                self.held >> 20, most >> 20,
            )  # fmt: skip
        raise Refusal(
            503,
            "overloaded",
            "the service holds too many request bodies; retry soon, or send a smaller body",
            reason="overloaded",
            code="overloaded",
            retry_after=1,
        )

    def release(self, size: int) -> None:
        """A request with so many bytes is over."""
        self.held -= size
        if self.held < self._full_at // 2:
            self._full_at = 0


class Admission:
    """Refuses requests that cost too much. Belongs to one event loop.

    Attributes:
        large: pixels of all admitted large images.
    """

    def __init__(self, options: ServiceOptions) -> None:
        self._options = options
        self.large = 0

    def check(self, description: Mapping[str, Any], items: Iterable[Any]) -> int:
        """Pixels of a request's large images, for ``holding``.

        Args:
            description: the model's description; the inputs of a user's own model are not measured.

        Raises:
            Refusal: 413, the request costs too much; 503, all large images together do.
        """
        sizes = sizes_of(description.get("task"), items)
        if sizes is None:
            return 0
        self._check_request(sizes)
        longest = description.get("max_sound_seconds")
        if longest is not None and sizes.longest > longest:
            raise _too_much(
                "longest sound", math.ceil(sizes.longest), "seconds", longest,
                "--max-batch-seconds", "send it in parts",
            )  # fmt: skip
        most = self._options.max_large_pixels
        if sizes.large and most is not None and self.large + sizes.large > most:
            raise Refusal(
                503,
                "overloaded",
                "large images of other requests are being decoded; retry soon, or send smaller "
                "images",
                reason="overloaded",
                code="overloaded",
                retry_after=2,
            )
        return sizes.large

    @contextlib.contextmanager
    def holding(self, large: int) -> Iterator[None]:
        """Count a request's large images while it is computed."""
        self.large += large
        try:
            yield
        finally:
            self.large -= large

    def _check_request(self, sizes: Sizes) -> None:
        options = self._options
        if sizes.characters > options.max_characters:
            raise _too_much(
                "texts", sizes.characters, "characters", options.max_characters,
                "--max-characters", "send fewer or shorter ones at once",
            )  # fmt: skip
        if sizes.tokens > options.max_tokens:
            raise _too_much(
                "answers", sizes.tokens, "tokens", options.max_tokens, "--max-tokens",
                "send fewer prompts at once, or lower n or max_new_tokens",
            )  # fmt: skip
        if sizes.pixels > options.max_pixels:
            raise _too_much(
                "images", sizes.pixels, "pixels", options.max_pixels, "--max-pixels",
                "send fewer or smaller ones at once",
            )  # fmt: skip
        if sizes.seconds > options.max_audio_seconds:
            raise _too_much(
                "sounds", round(sizes.seconds), "seconds", options.max_audio_seconds,
                "--max-audio-seconds", "send fewer or shorter ones at once",
            )  # fmt: skip


def _too_much(what: str, count: int, unit: str, limit: float, option: str, advice: str) -> Refusal:
    verb = {"answers": "may have", "longest sound": "has"}.get(what, "have")
    total = "" if verb == "has" else " in total"
    return Refusal(
        413,
        "invalid_request_error",
        f"the {what} of this request {verb} {count:,} {unit}{total}, but the service's limit "
        f"is {limit:,.0f} ({option}); {advice}",
        reason="too_large",
        code="request_too_costly",
    )
