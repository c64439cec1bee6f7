"""An engine that has failed: its worker host hands back, its service ends, with an error each."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_redis_faults import HELD, Site, Tally, server, site  # noqa: F401  # fixtures

from serve_process import ROOT, Serving
from service_streamer import StreamerBroken
from service_streamer.redis.redis_worker import RedisWorker


def test_a_host_whose_engine_fails_hands_back_and_ends_with_an_error(
    site: Site,  # noqa: F811
) -> None:
    # So long that no other host takes over what this one would hold: it has to hand it back.
    gate = site.gate()
    failing = site.host(gate, breaks=True, claim_timeout=600)
    tally = Tally()
    tally.submit(site.streamer(), range(10))
    gate.await_arrival()
    assert failing.stats()["held"] <= HELD
    # When its first batch comes back
    gate.let_through(10)
    assert failing.await_end() == 1
    assert not any(future.done() for future in tally.futures.values())
    # Then another one computes all that it had claimed
    site.host()
    tally.assert_served()


def test_a_healthy_host_beside_it_gets_all_that_it_had_claimed(
    site: Site,  # noqa: F811
) -> None:
    failing = site.host(breaks=True, claim_timeout=600)
    site.host(claim_timeout=600)
    tally = Tally()
    tally.submit(site.streamer(), range(100))
    tally.assert_served()
    assert failing.await_end() == 1


def test_a_host_claims_nothing_once_its_engine_has_failed(
    site: Site,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    with RedisWorker("redis_processes:Recording", redis_broker=site.server.url, prefix=site.prefix,
                     model_init_args=(str(site.record),)) as worker:  # fmt: skip
        worker.wait_ready()
        assert worker._pool is not None
        assert worker._host is not None
        engine = worker._pool.engine
        engine._core.batcher._cutter.deadline = None  # type: ignore[assignment]  # the loop trips over it
        engine._transport.wakeup()
        engine._loop.thread.join()
        assert isinstance(worker._host.failure, StreamerBroken)
        worker._host._claiming.join()
        assert "the streamer failed; this is a bug in it" in caplog.text
        assert "has stopped serving: the streamer failed: TypeError" in caplog.text
        caplog.clear()  # of what the fixture would not have


#: As a bug in the engine would: with the first batch.
BREAKS = """
from service_streamer.batching import batcher

def breaks(self, report, now):
    raise RuntimeError("a bug")

batcher.Batcher.batch_returned = breaks
"""


def test_a_service_whose_engine_fails_ends_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAKS)
    path = f"{tmp_path}:{ROOT}:{ROOT / 'tests'}"
    with Serving("models:double", PYTHONPATH=path) as service:
        assert service.post("/predict", {"inputs": 2}).status_code >= 500
        assert service.process.wait() == 3
        assert "the service ends, since its streamer failed" in service.log()
