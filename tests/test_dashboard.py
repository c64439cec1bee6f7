"""Live figures for several viewers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from service_streamer.serve.http import dashboard as module
from service_streamer.serve.http.dashboard import Dashboard
from service_streamer.serve.http.request_figures import RequestFigures, Requests


class Slow(Dashboard):
    """Has to ask other processes, which answer when ``asked`` is set."""

    def __init__(self) -> None:
        service: Any = SimpleNamespace(is_draining=False, pause=self._pause)
        super().__init__(service)
        self.asked, self.looks = asyncio.Event(), 0
        self.drained = asyncio.Event()

    async def _pause(self, _: float) -> None:
        await self.drained.wait()

    async def _look(self) -> Requests:
        self.looks += 1
        await self.asked.wait()
        return Requests(float(self.looks), {})

    def _figures(self, requests: Requests, *_: Any) -> Any:
        return {"look": requests.time}

    def drain(self) -> None:
        self._service.is_draining = True
        self.drained.set()


def test_viewers_that_come_at_once_share_the_snapshots() -> None:
    async def main() -> None:
        dashboard = Slow()

        async def view() -> list[bytes]:
            return [each async for each in dashboard.events()]

        viewers = [asyncio.create_task(view()) for _ in range(8)]
        for _ in range(8):  # more steps than each of them has before it waits
            await asyncio.sleep(0)
        assert dashboard.looks == 1
        dashboard.asked.set()
        for _ in range(8):
            await asyncio.sleep(0)
        dashboard.drain()
        snapshots = [b'event: snapshot\ndata: {"look":%d.0}\n\n' % look for look in (1, 2)]
        for seen in await asyncio.gather(*viewers):
            assert seen == [b"retry: 2000\n\n", *snapshots]
        assert dashboard.looks == 2

    asyncio.run(main())


def test_viewers_do_not_wait_for_a_snapshot_that_fails() -> None:
    class Broken(Slow):
        async def _look(self) -> Requests:
            raise ValueError("it failed")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        seen = [each async for each in Broken().events()]
        assert seen == [b"retry: 2000\n\n", b""]

    asyncio.run(main())


def figures(pid: int, answered: int) -> RequestFigures:
    return RequestFigures(pid, 1000.0, {200: answered}, {}, 0, 0, 0, [answered], 1.0)


def test_a_model_that_another_process_has_replaced_has_begun_anew() -> None:
    """It is the same process, but its figures are those of the new model."""
    before = Requests(0.0, {1: figures(7, 1000)})
    now = Requests(1.0, {1: msgspec.structs.replace(figures(7, 5), uptime=0.5)})
    assert now.rate(before) == 5
    assert now.latencies(before).count == 5


def test_a_process_that_misses_an_answer_has_not_begun_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter(({1: 1000}, {}, {1: 1010}))

    async def others(_: bytes) -> dict[int, bytes]:
        return {number: figures(2, n).encoded() for number, n in next(answers).items()}

    async def renew() -> None: ...

    async def main() -> None:
        siblings = SimpleNamespace(number=0, others=others)
        service: Any = SimpleNamespace(model="a", siblings=siblings, renew=renew)
        monkeypatch.setattr(module, "requests_of", lambda _: figures(1, 0))
        dashboard = Dashboard(service)
        seen = [await dashboard._look() for _ in range(3)]
        assert [each.total() for each in seen] == [1000, 1000, 1010]
        assert [each.answering for each in seen] == [2, 1, 2]
        assert seen[2].latencies(seen[1]).count == 10

    asyncio.run(main())
