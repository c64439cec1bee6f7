"""What a service says of a model that has not answered yet, and why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from service_streamer import (
    InvalidInput,
    Overloaded,
    PredictTimeout,
    StreamerBroken,
    WorkerStartError,
)
from service_streamer.errors import (
    BadMessage,
    BrokerUnavailable,
    PoolMismatch,
    RemoteTraceback,
)
from service_streamer.redis.redis_stats import RedisStreamerStats
from service_streamer.serve.hosted_model import OpenedModel
from service_streamer.serve.http import service as module
from service_streamer.serve.http.admission import ServiceOptions
from service_streamer.serve.http.service import Service
from service_streamer.serve.running import _Running

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


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ASK_AGAIN", 0.0)


def standing(streamer: Broker, turns: int = 20) -> tuple[tuple[str, str], Service]:
    async def main() -> tuple[tuple[str, str], Service]:
        service = Service(streamer, ServiceOptions(model=None))  # type: ignore[arg-type]
        service.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        found = service.standing()
        service.stop()
        return found, service

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("streamer", "says"),
    [
        (Broker([], state="disconnected"), "Redis cannot be reached"),
        (Broker([], hosts=0), "there is no worker host"),
        (Broker([]), "1 worker host has not answered yet: the model is loading"),
        (Broker([], hosts=2), "2 worker hosts have not answered"),
        (Broker([BadMessage("differ"), Overloaded("256 wait")]), "do not answer: 256 wait"),
        (Broker([Overloaded("256 wait")]), "do not answer: 256 wait"),
    ],
)
def test_why_nobody_answers(streamer: Broker, says: str) -> None:
    (state, text), service = standing(streamer)
    assert state == "starting"
    assert says in text
    assert not service.is_known


def test_sides_that_cannot_read_each_other() -> None:
    (state, text), service = standing(Broker([Overloaded("a"), BadMessage("the secrets differ")]))
    assert (state, text) == ("failing", "the secrets differ")
    assert not service.is_known


def test_what_hosts_announce_is_not_asked_for() -> None:
    streamer = Broker([], announced=OURS)
    (state, _), service = standing(streamer)
    assert (state, service.model, streamer.asked) == ("ready", "a", 0)
    streamer.announced = {**OURS, "model": "b"}
    assert service.model == "a", "until it is refreshed"


def test_another_description_is_taken_over_when_hosts_announce_it() -> None:
    """After a restart the hosts announce it later than the web processes refresh."""
    streamer = Broker([], announced=OURS)

    async def main() -> list[str]:
        service = Service(streamer, ServiceOptions(model=None))  # type: ignore[arg-type]
        service.start()
        await asyncio.sleep(0)
        names = [service.model]
        for announced in ({**OURS, "model": "b"}, None, {}):
            streamer.announced = announced
            streamer.callback()
            await asyncio.sleep(0)
            names.append(service.model)
        service.stop()
        return names

    assert asyncio.run(main()) == ["a", "b", "b", "b"]
    assert not streamer.asked


def test_a_host_is_asked_only_when_it_is_there() -> None:
    streamer = Broker([OURS], hosts=0)
    (state, _), service = standing(streamer)
    assert (state, service.is_known, streamer.asked) == ("starting", False, 0)


@pytest.mark.parametrize(
    "error", [BadMessage("the signatures differ"), BrokerUnavailable("lost"), Overloaded("full")]
)
def test_it_asks_again(error: Exception) -> None:
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


LATE = PredictTimeout("the pool did not answer within 5 s")


@pytest.mark.parametrize(
    ("answers", "says", "logged"),
    [
        ([], "the model is loading", 0),
        ([None], "the model is loading", 0),
        ([LATE, None], "the model is loading", 1),
        ([LATE, LATE], "the workers cannot be asked for the model: the pool did not answer", 1),
        # The parent ends the service, and says why.
        ([WorkerStartError("no weights")], "no weights", 0),
    ],
)
def test_why_a_shared_pool_has_not_answered(
    answers: list[Any],
    says: str,
    logged: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "view_of", lambda _: Shared(*answers))
    (state, text), service = standing(Broker([]))
    assert state == "starting"
    assert says in text
    assert len(caplog.records) == logged
    assert not service.is_known


def test_a_process_that_the_pool_refuses_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "view_of", lambda _: Shared(PoolMismatch("code is a here")))
    (state, text), _ = standing(Broker([]))
    assert (state, text) == ("broken", "the model is not running: code is a here")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("what is this?"),
        remote(BadMessage("the model's")),
        remote(InvalidInput("no")),
        remote(StreamerBroken("the model's own")),
    ],
)
def test_a_model_that_does_not_know_the_question_is_served(error: Exception) -> None:
    (state, _), service = standing(Broker([error]))
    assert (state, dict(service.description)) == ("ready", {})


def test_a_report_that_fails_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("no figures")

    async def main() -> None:
        nothing: Any = None
        options = ServiceOptions(model=None)
        opened = [OpenedModel(nothing, options)]
        running = _Running(nothing, opened, *[nothing] * 4)
        task = asyncio.create_task(fail())
        await asyncio.wait([task])
        running._reported(task)

    caplog.set_level("INFO")
    asyncio.run(main())
    assert "the report failed: ValueError('no figures')" in caplog.text
