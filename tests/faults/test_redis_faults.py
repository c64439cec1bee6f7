"""Redis, worker hosts and clients that die, freeze and come back: real ones, by real signals."""

from __future__ import annotations

import collections
import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_processes import Program, recorded

from cases import long_cases
from serve_process import until
from service_streamer import BrokerUnavailable, Future, PredictTimeout, RedisStreamer, WorkerLost
from service_streamer.redis.local import LocalRedis
from service_streamer.testing import Gate

#: Seconds without a sign of life after which others claim what a host holds.
CLAIM_TIMEOUT = 0.75

#: A host with this batch size and one worker claims exactly twice as many calls of one item.
BATCH = 2
HELD = 2 * BATCH


class Tally:
    """Calls of one number each, and how often each of them has ended."""

    def __init__(self) -> None:
        self.futures: dict[int, Future] = {}
        self._ends: collections.Counter[int] = collections.Counter()
        self._changed = threading.Condition()

    def submit(self, streamer: RedisStreamer, numbers: Iterable[int]) -> list[Future]:
        futures = []
        for number in numbers:
            future = self.futures[number] = streamer.submit([number])
            future.add_done_callback(functools.partial(self._ended, number))
            futures.append(future)
        return futures

    def _ended(self, number: int, _: Any) -> None:
        with self._changed:
            self._ends[number] += 1
            self._changed.notify_all()

    def await_ends(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._ends) >= count)

    def assert_served(self) -> None:
        """Block until all have ended; each once, and with the result that is its own."""
        assert self.results() == {number: [2 * number] for number in self.futures}

    def results(self) -> dict[int, Any]:
        """Block until all have ended; their results or the types of their errors."""
        self.await_ends(len(self.futures))
        assert self._ends == dict.fromkeys(self.futures, 1)
        return {
            number: type(future.exception()) if future.exception() else future.result()
            for number, future in self.futures.items()
        }


class Site:
    """All that a test has on one Redis, under a prefix of its own.

    Attributes:
        record: where the models write what they compute.
    """

    def __init__(self, server: LocalRedis, folder: Path) -> None:
        self.server = server
        self.record = folder / "record"
        self._folder = folder
        self.prefix = folder.name
        self._hosts: list[Program] = []
        self._streamers: list[RedisStreamer] = []
        self._closing: list[Callable[[], None]] = []

    def gate(self) -> Gate:
        gate = Gate(self._folder / f"gate {len(self._closing)}")
        self._closing.append(gate.close)
        return gate

    def host(self, gate: Gate | None = None, **options: Any) -> Program:
        """One that has loaded its model; told what to wait at if it is to wait in the model."""
        [host] = self.hosts(1, gate, **options)
        return host

    def hosts(self, count: int, gate: Gate | None = None, **options: Any) -> list[Program]:
        arguments = [str(self.record), *([] if gate is None else [str(gate.__getstate__())])]
        options = {
            "redis_broker": self.server.url, "prefix": self.prefix, "batch_size": BATCH,
            "claim_timeout": CLAIM_TIMEOUT, "model_init_args": arguments, **options,
        }  # fmt: skip
        hosts = []
        for _ in range(count):
            hosts.append(Program("host", options))
            self._closing.append(hosts[-1].close)
        self._hosts += hosts
        for host in hosts:
            host.await_ready()
        return hosts

    def busy_host(self, **options: Any) -> tuple[Program, Gate, Tally]:
        """One whose worker is at the gate, and that holds all it has room for of ten calls."""
        gate, tally = self.gate(), Tally()
        host = self.host(gate, **options)
        tally.submit(self.streamer(), range(10))
        gate.await_arrival()
        until(lambda: host.stats()["held"] == HELD)
        return host, gate, tally

    def streamer(self, **options: Any) -> RedisStreamer:
        options = {"redis_broker": self.server.url, "prefix": self.prefix, **options}
        streamer = RedisStreamer(worker_timeout=None, **options)
        self._closing.append(functools.partial(streamer.close, drain=False))
        self._streamers.append(streamer)
        return streamer

    def client(self, calls: int, **options: Any) -> Program:
        options = {"redis_broker": self.server.url, "prefix": self.prefix, **options}
        client = Program("client", {"calls": calls, **options})
        self._closing.append(client.close)
        client.await_ready()
        return client

    def keys(self, kind: str = "") -> list[bytes]:
        with redis.Redis.from_url(self.server.url) as client:
            return sorted(client.scan_iter(f"{{service_streamer:{self.prefix}}}:{kind}*", 1000))

    def call(self, *command: Any) -> Any:
        with redis.Redis.from_url(self.server.url) as client:
            return client.execute_command(*command)

    def calls_in_redis(self) -> int:
        return int(self.call("XLEN", f"{{service_streamer:{self.prefix}}}:calls"))

    def is_waited_for_calls(self) -> bool:
        """Whether a host reads, and nothing is there for it."""
        clients = self.call("CLIENT LIST")
        return any("b" in each["flags"] and each["cmd"] == "xreadgroup" for each in clients)

    def assert_leaves_nothing(self) -> None:
        """When all have parted, or died so long ago that they are forgotten."""
        living = [host for host in self._hosts if not host.is_over]
        until(lambda: len(self.keys("host:")) == len(living))
        for streamer in self._streamers:
            streamer.close(drain=False)
        for host in living:
            host.signal(signal.SIGTERM, alone=True)
            assert host.left()[0] == 0
        until(lambda: not self.keys())

    def close(self) -> None:
        for close in reversed(self._closing):
            close()


@pytest.fixture(scope="module")
def server() -> Iterator[LocalRedis]:
    """For most; tests that do something to it have one of their own."""
    with LocalRedis() as server:
        yield server


@pytest.fixture
def site(
    request: pytest.FixtureRequest, server: LocalRedis, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Site]:  # fmt: skip
    """Checks also that all parted without leaving anything, and that no thread met a bug."""
    site = Site(server, tmp_path)
    failed_before = request.session.testsfailed
    try:
        yield site
        if request.session.testsfailed == failed_before:
            site.assert_leaves_nothing()
    finally:
        site.close()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


# -- worker hosts that are killed


def test_calls_of_a_killed_host_are_computed_by_another(site: Site) -> None:
    doomed, _, tally = site.busy_host()
    heir = site.host()
    tally.await_ends(10 - HELD)
    doomed.kill()
    tally.assert_served()
    stats = until(lambda: (found := heir.stats())["held"] == 0 and found)
    assert stats["taken_over"] >= HELD
    assert set(recorded(site.record)) == set(range(10))


@pytest.mark.long
def test_calls_of_a_killed_host_fail_without_retry(site: Site) -> None:
    doomed, _, tally = site.busy_host(retry=False)
    begun = recorded(site.record)
    assert begun
    doomed.kill()
    site.host(retry=False)
    results = tally.results()
    lost = {number for number, result in results.items() if result is WorkerLost}
    assert lost == set(range(HELD))
    assert all(results[number] == [2 * number] for number in range(HELD, 10))
    computed = recorded(site.record)
    assert sorted(computed) == sorted(set(computed)), "computed twice"


@pytest.mark.long
def test_a_call_that_kills_its_hosts_is_given_up_after_max_attempts(site: Site) -> None:
    # So long that who has claimed the call has the time to die of it before the next one does.
    hosts = site.hosts(3, max_attempts=2, claim_timeout=2)
    streamer = site.streamer()
    deadly = streamer.submit(["kill host"])
    with pytest.raises(WorkerLost, match="2 worker hosts in a row"):
        deadly.result()
    assert sum(host.is_over for host in hosts) == 2
    assert recorded(site.record) == ["kill host"] * 2
    assert streamer.predict([1, 2]) == [2, 4]


@pytest.mark.long
def test_connections_that_a_host_lost_are_no_hosts_that_died(site: Site) -> None:
    gate = site.gate()
    doomed = site.host(gate, max_attempts=2)
    streamer = site.streamer()
    future = streamer.submit([1])
    gate.await_arrival()
    for _ in range(3):
        site.call("CLIENT", "KILL", "TYPE", "normal")
        until(site.is_waited_for_calls)
    assert doomed.stats()["held"] == 1
    doomed.kill()
    site.host(max_attempts=2)
    assert future.result() == [2]


@pytest.mark.parametrize(
    "alone", long_cases(False, True), ids=["with its workers", "without its workers"]
)
def test_a_host_that_was_frozen_answers_late_and_goes_on(site: Site, alone: bool) -> None:
    gate = site.gate()
    frozen = site.host(gate)
    streamer = site.streamer()
    tally = Tally()
    tally.submit(streamer, range(10))
    gate.await_arrival()
    until(lambda: frozen.stats()["held"] == HELD)
    frozen.signal(signal.SIGSTOP, alone=alone)
    if alone:
        gate.let_through(100)  # its workers compute all they have
    heir = site.host()
    tally.assert_served()
    assert heir.stats()["taken_over"] >= HELD
    if not alone:
        until(lambda: len(site.keys("host:")) == 1)  # by now it is taken for dead altogether
    frozen.signal(signal.SIGCONT, alone=alone)
    until(lambda: frozen.stats()["held"] == 0)
    # What it hears to be taken away while it is about to tell of it counts as late a moment later.
    until(lambda: (found := frozen.stats())["taken_away"] + found["late"] >= HELD)
    gate.let_through(100)  # its workers compute what is none of theirs any more

    heir.signal(signal.SIGTERM, alone=True)
    assert heir.left()[0] == 0
    later = Tally()
    later.submit(streamer, range(100, 100 + 3 * HELD))  # more than it had room for
    later.assert_served()
    tally.assert_served()


# -- worker hosts that are ended


def test_a_host_that_is_told_to_end_finishes_what_it_has_claimed(site: Site) -> None:
    leaving, gate, tally = site.busy_host()
    leaving.signal(signal.SIGTERM, alone=True)
    until(lambda: leaving.stats()["pool"]["state"] == "draining")
    gate.let_through(100)
    code, stats = leaving.left()
    assert code == 0
    assert (stats["claimed"], stats["held"], stats["handed_back"]) == (HELD, 0, 0)
    tally.await_ends(HELD)
    site.host()
    tally.assert_served()
    assert sorted(recorded(site.record)) == list(range(10))


@pytest.mark.long
def test_a_host_that_is_told_twice_to_end_hands_back_what_it_has_claimed(site: Site) -> None:
    leaving, _, tally = site.busy_host()
    leaving.signal(signal.SIGTERM, alone=True)
    until(lambda: leaving.stats()["pool"]["state"] == "draining")
    [told_at, _] = site.call("TIME")
    until(lambda: site.call("TIME")[0] > told_at + 1)  # within a second the two would count as one
    leaving.signal(signal.SIGTERM, alone=True)
    code, stats = leaving.left()
    assert code == 0
    assert (stats["claimed"], stats["handed_back"]) == (HELD, HELD)
    assert site.keys("host:") == []
    heir = site.host()
    tally.assert_served()
    assert heir.stats()["taken_over"] == 0, "they are as new"


@pytest.mark.parametrize("alone", [True, *long_cases(False)], ids=["alone", "with its workers"])
def test_a_host_that_is_told_to_end_under_load_loses_nothing(site: Site, alone: bool) -> None:
    hosts = site.hosts(2, batch_size=16)
    leaving, _ = hosts
    streamer = site.streamer()
    # However fast the other one is, both are at work.
    until(lambda: streamer.predict([0]) and all(host.stats()["claimed"] for host in hosts))
    tally = Tally()

    def call(thread: int) -> None:
        for start in range(thread, 2000, 400):
            wait(tally.submit(streamer, range(start, start + 400, 8)))

    with ThreadPoolExecutor(8) as pool:
        calling = [pool.submit(call, thread) for thread in range(8)]
        tally.await_ends(500)
        leaving.signal(signal.SIGTERM, alone=alone)
        code, _ = leaving.left()
        wait(calling)
    assert code == 0
    assert len(tally.futures) == 2000
    tally.assert_served()
    assert streamer.predict([2000]) == [4000]


# -- a client that is killed


def test_killed_client_leaves_nothing_and_disturbs_no_other(site: Site) -> None:
    gate = site.gate()
    host = site.host(gate)
    streamer = site.streamer()
    killed = site.client(HELD, reply_ttl=1)
    gate.await_arrival()
    until(lambda: host.stats()["held"] == HELD)
    killed.kill()
    future = streamer.submit([100])
    # The one that is left is not that of the killed one.
    until(lambda: [site.call("PTTL", key) > 1000 for key in site.keys("client:")] == [True])
    gate.let_through(100)
    assert future.result() == [200]
    stats = until(lambda: (found := host.stats())["held"] == 0 and found)
    assert stats["claimed"] == HELD + 1
    until(lambda: len(site.keys("replies:")) <= 1)
    assert site.calls_in_redis() == 0


# -- Redis, away


class TestOutage:
    @pytest.fixture
    def server(self) -> Iterator[LocalRedis]:
        """Not started, at an address where nobody listens."""
        server = LocalRedis(port=LocalRedis().port)
        yield server
        server.stop()

    def test_calls_fail_when_their_time_has_ended_and_all_goes_on_with_redis(
        self, server: LocalRedis, site: Site
    ) -> None:
        site.host()
        streamer = site.streamer()
        tally = Tally()
        tally.submit(streamer, range(10))  # these have time
        until(lambda: streamer.stats().state == "disconnected")
        with pytest.raises(BrokerUnavailable, match=str(server.port)):
            streamer.predict([1], timeout=0.1)
        late = streamer.submit([1], timeout=0.1)
        with pytest.raises(BrokerUnavailable, match=str(server.port)):
            late.result()
        with pytest.raises(BrokerUnavailable):
            streamer.wait_ready(timeout=0.1)
        stats = streamer.stats()
        assert (stats.state, stats.pending, stats.expired) == ("disconnected", 10, 2)
        server.start()
        tally.assert_served()
        assert streamer.predict([21]) == [42]
        until(lambda: streamer.stats().state == "connected")  # for both of its threads
        assert streamer.stats().outages == 1


class TestWrongPassword:
    @pytest.fixture
    def server(self) -> Iterator[LocalRedis]:
        with LocalRedis(password="right") as server:
            yield server

    def test_it_is_told_and_not_repeated_and_all_goes_on_once_it_is_right(
        self, server: LocalRedis, site: Site, caplog: pytest.LogCaptureFixture
    ) -> None:
        url = server.url.replace("right", "hunter2")
        host, streamer = site.host(redis_broker=url), site.streamer(redis_broker=url)
        future = streamer.submit([1])
        until(lambda: streamer.stats().state == "disconnected")
        with pytest.raises(BrokerUnavailable, match=r"(?i)password") as caught:
            streamer.predict([1], timeout=0.1)
        error = caught.value
        told = (str(error), str(error.__cause__), repr(streamer), caplog.text)
        assert not [text for text in told if "hunter2" in text]
        until(lambda: host.stats()["outages"] == 1)
        site.call("CONFIG", "SET", "requirepass", "hunter2")
        assert future.result() == [2]
        site.server = LocalRedis(port=server.port, password="hunter2")


class TestCrash:
    @pytest.fixture
    def server(self) -> Iterator[LocalRedis]:
        # Every write is in its file before it is acknowledged.
        with LocalRedis(append_only=True, options=("--appendfsync", "always")) as server:
            yield server

    @pytest.mark.long
    def test_ten_thousand_calls_are_neither_lost_nor_doubled(
        self, server: LocalRedis, site: Site
    ) -> None:
        hosts = site.hosts(2, batch_size=64, claim_timeout=5)
        tally = Tally()
        has_crashed = threading.Event()

        def call(client: int) -> None:
            streamer = site.streamer()
            for start in range(2_500 * client, 2_500 * (client + 1), 125):
                if len(tally.futures) > 7_500:
                    has_crashed.wait()  # so that it is in the midst
                wait(tally.submit(streamer, range(start, start + 125)))

        with ThreadPoolExecutor(4) as pool:
            calling = [pool.submit(call, client) for client in range(4)]
            for so_many in (2_000, 5_000):
                tally.await_ends(so_many)
                server.kill()
                server.start()
            has_crashed.set()
            for each in calling:
                each.result()
        assert len(tally.futures) == 10_000
        tally.assert_served()
        assert sum(host.stats()["outages"] for host in hosts) >= 1
        assert set(recorded(site.record)) == set(range(10_000))


class TestAnotherOne:
    @pytest.fixture
    def server(self) -> Iterator[LocalRedis]:
        with LocalRedis() as server:
            yield server

    def test_calls_wait_for_redis_and_are_computed_once(
        self, server: LocalRedis, site: Site
    ) -> None:
        site.host(claim_timeout=30)
        streamer = site.streamer()
        tally = Tally()
        tally.submit(streamer, range(10))
        tally.assert_served()
        server.pause()
        os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)
        tally.submit(streamer, range(10, 20))
        with pytest.raises((BrokerUnavailable, PredictTimeout)):
            streamer.predict([-1], timeout=0.1)
        assert streamer.stats().expired == 1
        # Both sides take the connection for dead, and make others that do not answer either.
        until(lambda: streamer.stats().state == "disconnected")
        with pytest.raises(BrokerUnavailable):
            streamer.predict([-1], timeout=0.1)
        server.resume()
        tally.submit(streamer, range(20, 30))
        tally.assert_served()
        computed = [number for number in recorded(site.record) if number >= 0]
        assert sorted(computed) == list(range(30))
        assert streamer.stats().outages == 1

    @pytest.mark.parametrize("how", long_cases("flushed", "killed"))
    def test_calls_that_redis_lost_fail_and_all_goes_on(
        self, server: LocalRedis, site: Site, how: str
    ) -> None:
        gate = site.gate()
        host = site.host(gate)
        streamer = site.streamer(answer_timeout=3)
        lost = [streamer.submit([number]) for number in range(10)]
        timed = streamer.submit([10], timeout=6)
        gate.await_arrival()
        until(lambda: host.stats()["held"] == HELD)
        until(lambda: site.calls_in_redis() == 11)
        if how == "flushed":
            site.call("FLUSHALL")
        else:
            server.kill()
            server.start()
        for future in [*lost, timed]:
            with pytest.raises(PredictTimeout):
                future.result()
        gate.let_through(100)
        tally = Tally()
        tally.submit(streamer, range(100, 100 + 3 * HELD))
        tally.assert_served()
        until(lambda: host.stats()["held"] == 0)
        until(lambda: (found := host.stats())["taken_away"] + found["late"] >= HELD)
        assert streamer.stats().pending == 0
