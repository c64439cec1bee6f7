"""How errors travel: as themselves, one instance for each caller, with their traceback."""

from __future__ import annotations

import models
from service_streamer import ModelError
from service_streamer.workers.protocol import Failure


def caught(error: BaseException) -> Failure:
    try:
        raise error
    except BaseException as raised:
        return Failure.caught(raised)


def test_a_remote_traceback_is_not_lost_when_an_error_of_ours_is_copied() -> None:
    outer = ModelError("outer")
    outer.__cause__ = ValueError("inner")
    error = Failure(outer).exception()
    assert error is not outer
    assert isinstance(error.__cause__, ValueError)


def test_without_a_copy_the_callers_share() -> None:
    failure = caught(models.OddError("odd", "ly"))
    assert isinstance(failure.exception(), models.OddError)
    assert failure.exception() is failure.exception()


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_a_summary_never_raises() -> None:
    assert Failure(UnprintableError()).text == "UnprintableError: its text cannot be made"
    assert Failure(ValueError()).text == "ValueError"
