"""What those are told of whom it is not known whether they are at fault: nothing of the others."""

from __future__ import annotations

import pytest

from service_streamer import ModelError, PredictTimeout, SharedBatchError, WorkerLost
from service_streamer.engine.build import EXPIRED_SUSPECT, not_blamed, of_shared_call
from service_streamer.serve.http.refusals import refusal
from service_streamer.workers.protocol import Failure


def raised(text: str) -> Failure:
    """As it comes from a worker."""
    try:
        raise ValueError(text)
    except ValueError as error:
        return Failure.caught(error)


@pytest.mark.parametrize("text", ["", "secret", "secret: of : several", "secret\nlines"])
def test_the_kind_of_the_exception_is_told_and_not_its_text(text: str) -> None:
    for failure in (not_blamed(raised(text), False), of_shared_call(raised(text))):
        error = failure.exception()
        assert isinstance(error, SharedBatchError)
        assert isinstance(error, ModelError)
        assert "ValueError" in str(error)
        assert "secret" not in str(error)
        assert "lines" not in str(error)
        assert error.__cause__ is None
        assert error.__context__ is None
        assert failure.remote_traceback is None


def test_of_a_worker_that_died_it_is_told_how() -> None:
    lost = Failure(WorkerLost("worker 0 (pid 7) died: killed by SIGSEGV"))
    error = not_blamed(lost, True).exception()
    assert isinstance(error, WorkerLost)
    assert str(error).startswith("worker 0 (pid 7) died: killed by SIGSEGV; ")
    assert "may not be" in str(error)


def test_an_innocent_request_is_asked_to_try_again() -> None:
    error = not_blamed(raised("secret"), False).exception()
    assert isinstance(error, SharedBatchError)
    told = refusal(error, debug=False)
    assert told.status == 503
    assert (b"retry-after", b"1") in told.headers
    assert b"shared with other requests" in told.body
    assert b"ValueError" not in told.body


def test_whose_time_ends_among_suspects_is_told_why() -> None:
    error = EXPIRED_SUSPECT.exception()
    assert isinstance(error, PredictTimeout)
    assert "worker died" in str(error)
