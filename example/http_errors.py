"""What an error is over HTTP, for every web framework of the examples: a status and a text.

Texts are public. What else went wrong is nobody's business but the operator's: it goes to the log.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from service_streamer import (
    BrokerUnavailable,
    InternalError,
    InvalidInput,
    Overloaded,
    PredictTimeout,
    StreamerBroken,
    StreamerClosed,
    StreamerError,
    TooLate,
    WorkerLost,
    WorkerStartError,
    WorkerStartTimeout,
)

if TYPE_CHECKING:
    from service_streamer import RedisStreamer, Streamer, ThreadedStreamer

logger = logging.getLogger(__name__)

#: Items that may wait: 16 full batches. Those that came after them would wait for seconds; they are
#: refused at once instead (503), so that the others keep their latency.
MAX_PENDING = 1024

#: The most that a client may send, in bytes: a text with the room to be told that it is too long.
MAX_BODY = 100_000

#: Error -> status and public text (None: its own).
ERRORS: dict[type, tuple[int, str | None]] = {
    InvalidInput: (422, None),
    Overloaded: (503, "too many requests are waiting, please try again"),
    TooLate: (503, "the request cannot be computed in its time, please try again, or send less"),
    PredictTimeout: (504, "the model took too long"),
    StreamerClosed: (503, "the service is stopping"),
    StreamerBroken: (503, "the model is not running"),
    BrokerUnavailable: (503, "the model cannot be reached"),
    WorkerStartTimeout: (503, "the model is being loaded"),
    WorkerStartError: (503, "the model could not be loaded"),
    WorkerLost: (500, "the model's process died of this request"),
    InternalError: (500, "internal error"),  # a bug in service_streamer; the log says more
    Exception: (500, "internal error"),
}


class Answer(NamedTuple):
    """What to answer with instead of a result."""

    status: int
    text: str
    headers: dict[str, str]


def answer_to(error: Exception, path: str, *, is_logged: bool = False) -> Answer:
    """Returns the answer to a request that failed, and logs what its user is not told.

    Args:
        path: of the request.
        is_logged: whether the web server logs errors of which the status is 500.
    """
    status, text = next(ERRORS[kind] for kind in type(error).__mro__ if kind in ERRORS)
    if status == 500 and not is_logged:
        logger.error("%s failed", path, exc_info=error)
    elif status > 500:
        logger.warning("%s failed: %s: %s", path, type(error).__name__, error)
    headers = {"Retry-After": "1"} if status == 503 else {}
    return Answer(status, text or str(error), headers)


def health(streamer: RedisStreamer | Streamer | ThreadedStreamer) -> tuple[int, dict[str, str]]:
    """Returns the status, and what to say, to those who ask if every worker takes requests."""
    try:
        streamer.wait_ready(0)
    except WorkerStartTimeout:
        return 503, {"status": "starting"}
    except StreamerClosed:
        return 503, {"status": "stopping"}
    except StreamerError:  # the log says what
        return 503, {"status": "broken"}
    return 200, {"status": "ready"}
