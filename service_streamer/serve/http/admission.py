"""Options of the web service, and admission: limits on the cost of requests, and on their bodies.

A batch takes as long as its costliest inputs, and other callers wait for it. So a request is
measured before it joins a batch: decoded pixels, seconds of sound, characters, generated tokens.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...pipelines.sizes import Sizes, sizes_of
from .json_bodies import LargeAnswer
from .refusals import Refusal
from .web_options import WebOptions

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


class ByteBudget:
    """Bytes that all open requests of a web process take. Belongs to one event loop.

    Args:
        warning: for the log when there is no room for more, of the MB that are taken and may be.
        refusal: what clients are told.

    Attributes:
        size: how many are taken.
    """

    def __init__(self, warning: str, refusal: str) -> None:
        self.size = 0
        self._warning = warning
        self._refusal = refusal
        self._full_at = 0  # the limit that was reached, as the log says; 0 for none

    def check(self, size: int, most: int | None) -> None:
        """Refuse more bytes if there is no room for them.

        Args:
            size: bytes that have arrived, or are about to.
            most: maximum of all together; None for no limit.

        Raises:
            Refusal: 503.
        """
        if most is None or self.size + size <= most:
            return
        if not self._full_at:
            self._full_at = most
            logger.warning(self._warning, self.size >> 20, most >> 20)
        raise Refusal(
            503,
            self._refusal,
            kind="overloaded",
            reason="overloaded",
            code="overloaded",
            retry_after=1,
        )

    def take(self, size: int, most: int | None) -> None:
        """The same, and count them until they are given back. Raises Refusal."""
        self.check(size, most)
        self.size += size

    def give_back(self, size: int) -> None:
        """So many bytes of a request are gone."""
        self.size -= size
        if self.size < self._full_at // 2:
            self._full_at = 0


class ByteBudgets(NamedTuple):
    """Of the bodies of a web process's open requests, and of their answers that are not sent.

    Attributes:
        senders: of the large answers that are being sent.
    """

    bodies: ByteBudget
    answers: ByteBudget
    senders: set[LargeAnswer]


def make_budgets() -> ByteBudgets:
    return ByteBudgets(
        ByteBudget(
            "the bodies of all open requests have %d MB, and this web process takes at most %d "
            "MB: others get 503. The limit is a quarter of the memory, shared by the web "
            "processes; more memory or a lower --max-body admits more requests",
            "the service holds too many request bodies; retry soon, or send a smaller body",
        ),
        ByteBudget(
            "the answers that are computed or sent take %d MB, and in this web process they may "
            "take %d MB: other large ones get 503, and the connection of a slow reader is closed. "
            "A higher --max-answers admits more, if there is memory",
            "the service holds too many large answers; retry soon, or send fewer or shorter inputs "
            "at once",
        ),
        set(),
    )


class Admission:
    """Refuses requests that cost too much; has large images wait. Belongs to one event loop.

    Attributes:
        large: pixels of the large images that are decoded, or about to be.
    """

    def __init__(self, options: ServiceOptions) -> None:
        self._options = options
        self.large = 0
        self._waiting: dict[asyncio.Future[None], int] = {}  # their pixels, in the order of arrival
        self._done = self._seconds = self._at = 0.0  # pixels done while others waited, and how long

    def check(self, description: Mapping[str, Any], items: Iterable[Any]) -> Sizes:
        """Sizes of a request, of which ``large`` is for ``enter``.

        Args:
            description: the model's description; the inputs of a user's own model are not measured.

        Raises:
            Refusal: 413.
        """
        sizes = sizes_of(description, items)
        if sizes is None:
            return Sizes()
        self._check_request(sizes)
        longest = description.get("max_sound_seconds")
        if longest is not None and sizes.longest > longest:
            raise _too_much(
                "longest sound", math.ceil(sizes.longest), "seconds", longest,
                "--max-batch-seconds", "send it in parts",
            )  # fmt: skip
        return sizes

    def enter(self, large: int, left: float) -> asyncio.Future[None]:
        """A request's large images are to be decoded; the request has to ``leave``.

        Args:
            large: their pixels.
            left: how long the request may take, seconds.

        Returns:
            What is done when their turn has come: at once, if there is room.

        Raises:
            Refusal: 503, their turn will probably come too late.
        """
        turn = asyncio.get_running_loop().create_future()
        if not large or (not self._waiting and self._has_room(large)):
            self.large += large
            turn.set_result(None)
            return turn
        self._pass_time()
        ahead, most = large + sum(self._waiting.values()), self._options.max_large_pixels or 0
        if self._done >= most and ahead * self._seconds > left * self._done:
            raise Refusal(
                503,
                "too many large images wait to be decoded; retry later, or send smaller images",
                kind="overloaded",
                reason="overloaded",
                code="overloaded",
                retry_after=2,
            )
        self._waiting[turn] = large
        return turn

    def leave(self, large: int, turn: asyncio.Future[None], *, is_done: bool) -> None:
        """The images of a request are done, or not wanted any more."""
        if self._waiting and is_done:
            self._done += large
        self._pass_time()
        self._waiting.pop(turn, None)
        if turn.done() and not turn.cancelled():
            self.large -= large
        for first, size in [*self._waiting.items()]:
            if first.done():  # cancelled, and about to leave
                continue
            if not self._has_room(size):
                break
            del self._waiting[first]
            self.large += size
            first.set_result(None)

    def _pass_time(self) -> None:
        """Count the time in which some wait: only then it is known how fast it goes."""
        now = asyncio.get_running_loop().time()
        if self._waiting:
            self._seconds += now - self._at
        self._at = now
        if self._done > 2 * (self._options.max_large_pixels or 0):  # long ago counts less
            self._done, self._seconds = self._done / 2, self._seconds / 2

    def _has_room(self, large: int) -> bool:
        most = self._options.max_large_pixels
        return most is None or self.large + large <= most

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


def answer_too_large(size: int, most: int) -> Refusal:
    """The answer to a request whose answer is too large, or would be.

    Args:
        size: bytes.
        most: maximum.
    """
    return Refusal(
        413,
        f"the answer of this request would take {size >> 20:,} MB, and the service holds "
        f"{most >> 20:,} MB of all answers at most (--max-answers); send fewer or shorter inputs "
        "at once",
        code="request_too_costly",
    )


def _too_much(what: str, count: int, unit: str, limit: float, option: str, advice: str) -> Refusal:
    verb = {"answers": "may have", "longest sound": "has"}.get(what, "have")
    total = "" if verb == "has" else " in total"
    return Refusal(
        413,
        f"the {what} of this request {verb} {count:,} {unit}{total}, but the service's limit "
        f"is {limit:,.0f} ({option}); {advice}",
        code="request_too_costly",
    )
