"""What a service says of a model that has not answered yet, and why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import service_streamer.serve.http.service as module
from http_in_process import pass_time, run, settled
from service_streamer import (
    BadMessage,
    BrokerUnavailable,
    InvalidInput,
    Overloaded,
    PoolMismatch,
    PredictTimeout,
    RedisStreamerStats,
    StreamerBroken,
    WorkerStartError,
)
from service_streamer.serve.http.service import RemoteTraceback, Service, ServiceOptions

OURS = {"operations": ["predict"], "model": "a"}


class Broker:
    """A streamer over Redis that answers as it is told."""

    def __init__(
        self,
        answers: list[Any],
        *,
        state: str = "connected",
        hosts: int = 1,
        announced: dict[str, Any] | None = None,
    ) -> None:
        self.answers = answers
        self.asked = 0
        self.state, self.hosts = state, hosts
        self.announced = announced
        self.backend: Any = self

    def model_description(self) -> dict[str, Any] | None:
        return self.announced

    def when_workers_change(self, callback: Callable[[], None]) -> None:
        self.callback = callback

    async def apredict(self, batch: list[Any], timeout: float | None) -> list[Any]:
        self.asked += 1
        answer = self.answers.pop(0) if self.answers else await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return [answer]

    def stats(self) -> RedisStreamerStats:
        return RedisStreamerStats(self.state, 0, 0, self.hosts, 0, 0, 0, 0)


def remote(error: Exception) -> Exception:
    """As a model on a worker host has raised it."""
    error.__cause__ = RemoteTraceback("Traceback ...")
    return error


def standing(streamer: Broker, *, debug: bool = False) -> tuple[tuple[str, str], Service]:
    """How a service stands when it has asked again, several times if it has to."""

    async def main() -> tuple[tuple[str, str], Service]:
        options = ServiceOptions(model=None, debug=debug)
        service = Service(streamer, options)  # type: ignore[arg-type]
        service.start()
        for _ in range(3):
            await settled()
            await pass_time(1.0)
        found = service.standing()
        service.stop()
        return found, service

    return run(main())


@pytest.mark.parametrize(
    ("streamer", "expected", "says"),
    [
        (Broker([], state="disconnected"), "starting", "Redis cannot be reached"),
        (Broker([OURS], hosts=0), "starting", "there is no worker host"),  # which is not asked
        (Broker([]), "starting", "1 worker host has not answered yet: the model is loading, or "),
        (Broker([], hosts=2), "starting", "2 worker hosts have not answered"),
        (Broker([BadMessage("a"), Overloaded("b")]), "starting", "do not answer; the service's"),
        (Broker([Overloaded("a")]), "starting", "do not answer; the service's log says why"),
        (Broker([Overloaded("a"), BadMessage("secrets differ")]), "failing", "secrets differ"),
    ],
)
def test_standing_says_why_no_host_answers(streamer: Broker, expected: str, says: str) -> None:
    (state, text), service = standing(streamer)
    assert state == expected
    assert says in text
    assert not service.is_known


def test_error_of_hosts_is_shown_to_the_operator_only(caplog: pytest.LogCaptureFixture) -> None:
    (_, text), _ = standing(Broker([Overloaded("256 wait")]))
    assert "256" not in text
    assert "the worker hosts do not answer: 256 wait" in caplog.text
    (_, text), _ = standing(Broker([Overloaded("256 wait")]), debug=True)
    assert text == "the worker hosts do not answer: 256 wait"


def test_description_is_not_asked_for_when_hosts_announce_it() -> None:
    streamer = Broker([], announced=OURS)
    (state, _), service = standing(streamer)
    assert (state, service.model, streamer.asked) == ("ready", "a", 0)
    streamer.announced = {**OURS, "model": "b"}
    assert service.model == "a", "until it is refreshed"


def names(streamer: Broker, *announced: Any) -> list[str]:
    """Those of the model, at first and after each change that its workers tell."""

    async def main() -> list[str]:
        service = Service(streamer, ServiceOptions(model=None))  # type: ignore[arg-type]
        service.start()
        await settled()
        found = [service.model]
        for streamer.announced in announced:
            streamer.callback()
            await settled()
            found.append(service.model)
        service.stop()
        return found

    return run(main())


def test_description_is_taken_over_when_hosts_announce_another() -> None:
    """After a restart the hosts announce it later than the web processes refresh."""
    streamer = Broker([], announced=OURS)
    assert names(streamer, {**OURS, "model": "b"}, None, {}) == ["a", "b", "b", "b"]
    assert not streamer.asked


@pytest.mark.parametrize(
    "error", [BadMessage("the signatures differ"), BrokerUnavailable("lost"), Overloaded("full")]
)
def test_description_is_asked_for_again_after_an_error(error: Exception) -> None:
    streamer = Broker([error, error, OURS])
    (state, _), service = standing(streamer)
    assert (state, service.model, streamer.asked) == ("ready", "a", 3)


class Shared:
    """What is known of a shared pool that answers as it is told."""

    is_shared, has_steps = True, None

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]

    async def description(self) -> Any:
        answer = self.answers.pop(0) if self.answers else await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


def share_pool(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
    """Have services take a ``Broker`` for a streamer over a pool that answers so."""
    monkeypatch.setattr(module, "PoolStreamer", Broker)
    monkeypatch.setattr(module, "PoolView", lambda _: Shared(*answers))


LATE = PredictTimeout("the pool did not answer within 5 s")


ASKING = "the workers cannot be asked for the model"
SECRET = "the service's log says why"


@pytest.mark.parametrize(
    ("answers", "debug", "expected", "logged"),
    [
        ([], True, ("starting", "the model is loading"), 0),
        ([None], True, ("starting", "the model is loading"), 0),
        ([LATE, None], True, ("starting", "the model is loading"), 1),
        ([LATE, LATE], True, ("starting", f"{ASKING}: {LATE}"), 1),
        # The parent ends the service, and says why.
        ([WorkerStartError("no file")], True, ("starting", f"{ASKING}: no file"), 0),
        ([WorkerStartError("no file")], False, ("starting", f"{ASKING}; {SECRET}"), 0),
        ([PoolMismatch("a is here")], True, ("broken", "the model is not running: a is here"), 0),
        ([PoolMismatch("a is here")], False, ("broken", f"the model is not running; {SECRET}"), 0),
    ],
)
def test_standing_says_why_a_shared_pool_has_not_answered(
    answers: list[Any],
    debug: bool,
    expected: tuple[str, str],
    logged: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    share_pool(monkeypatch, *answers)
    found, service = standing(Broker([]), debug=debug)
    assert found == expected
    assert len([each for each in caplog.records if each.levelname != "ERROR"]) == logged
    assert not service.is_known


@pytest.mark.parametrize(
    "error",
    [
        ValueError("what is this?"),
        remote(BadMessage("the model's")),
        remote(InvalidInput("no")),
        remote(StreamerBroken("the model's own")),
    ],
)
def test_model_is_served_when_it_cannot_describe_itself(error: Exception) -> None:
    (state, _), service = standing(Broker([error]))
    assert (state, dict(service.description)) == ("ready", {})


def test_failure_to_take_over_a_description_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    share_pool(monkeypatch, OURS, ValueError("a bug"))
    assert names(Broker([]), None) == ["a", "a"]
    assert "model a: reading its new description failed" in caplog.text
    assert "ValueError: a bug" in caplog.text
