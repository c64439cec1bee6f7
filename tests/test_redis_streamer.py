"""What holds over Redis: where it differs from a pool of one's own, and what only is there.

The rest of what a RedisStreamer promises is in the suites that take the ``build`` fixture.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
import redis.asyncio
from fault_processes import running

import models
from cases import long_cases
from conftest import PATIENCE, await_that, rewrite_call
from redis_peers import Keys
from service_streamer import (
    Future,
    Overloaded,
    PredictTimeout,
    RedisStreamer,
    RedisStreamerStats,
    RedisWorker,
    StreamerClosed,
    StreamerError,
    UnpicklableItem,
    WorkerStartError,
    WorkerStartTimeout,
)
from service_streamer.engine.engine import Engine
from service_streamer.redis.local import LocalRedis
from service_streamer.testing import Gate

SECRET = "of sixteen bytes or more"
#: In a URL it has to be quoted.
PASSWORD = "p@ss:/#?w%rd"

Host = Callable[..., RedisWorker]
Client = Callable[..., RedisStreamer]
Run = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def run_program(
    tmp_path: Path, redis_server: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Runs a program, which is told URL and prefix; returns its exit status and what it printed."""
    monkeypatch.setenv("PYTHONWARNINGS", "error::ResourceWarning")

    def run_program(source: str) -> tuple[int, str, str]:
        with running(source, tmp_path, redis_server, prefix) as program:
            out, err = program.communicate()
            return program.returncode, out, err

    return run_program


# -- many clients, many hosts


def test_prefixes_keep_models_apart(host: Host, client: Client, prefix: str) -> None:
    # One of which is the start of the other
    host(models.double, prefix=f"{prefix}:a")
    host(models.echo, prefix=f"{prefix}:a:b")
    one, two = client(prefix=f"{prefix}:a"), client(prefix=f"{prefix}:a:b")
    futures = [(one.submit([i]), two.submit([i])) for i in range(50)]
    assert [(a.result(), b.result()) for a, b in futures] == [([2 * i], [i]) for i in range(50)]
    with pytest.raises(WorkerStartTimeout, match=r"0\.01 s"):
        client().wait_ready(0.01)


def test_the_order_of_a_call_travels_in_its_message(
    host: Host, client: Client, monkeypatch: pytest.MonkeyPatch, ask: redis.Redis, keys: Keys
) -> None:
    """Not beside it: so whoever can write to Redis, and has not the secret, cannot change it."""
    told: list[tuple[int, str, bool]] = []
    submit = Engine.submit

    def watched_submit(engine: Engine, call: Any) -> None:
        told.append(call.options[:3])
        submit(engine, call)

    monkeypatch.setattr(Engine, "submit", watched_submit)
    streamer = client(secret=SECRET)
    first = streamer.submit([0], tenant="gold", priority=-1)
    rewrite_call(ask, keys, lambda fields: {"d": fields[b"d"], "m": fields[b"m"]})
    host(models.echo, secret=SECRET)
    assert first.result() == [0]
    assert streamer.predict([1]) == [1]
    assert streamer.predict([2], priority=-3, tenant="Zoë") == [2]
    assert streamer.predict([3], timeout=PATIENCE) == [3]
    assert streamer.submit([4], timeout=PATIENCE, priority=1).result() == [4]
    assert asyncio.run(streamer.apredict([5], tenant="b")) == [5]
    assert told == [
        (-1, "gold", False), (0, "", False), (-3, "Zoë", False), (0, "", True), (1, "", True),
        (0, "b", False),
    ]  # fmt: skip


def test_call_of_many_items_is_one_message_each_way(
    host: Host, client: Client, gate: Gate, ask: redis.Redis, keys: Keys
) -> None:
    host(models.Gated, 64, model_init_args=(gate,))
    streamer = client()
    future = streamer.submit(list(range(1000)))
    gate.await_arrival()
    assert ask.xlen(keys.calls) == 1
    gate.let_through(100)  # sixteen full batches, or some more to learn which size is best
    assert len(future.result()) == 1000
    [replies] = ask.keys(keys.replies("*"))
    [(_, fields)] = ask.xrange(replies)
    assert list(fields) == [b"r"]
    assert ask.xlen(keys.calls) == 0


# -- where it is


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[LocalRedis]:
    """A Redis with a password that has to be quoted, and a socket in the file system."""
    options = ("--unixsocket", str(tmp_path / "socket"))
    with LocalRedis(tmp_path / "redis", password=PASSWORD, options=options) as server:
        yield server


def test_forms_of_an_address(guarded: LocalRedis, tmp_path: Path) -> None:
    password = quote(PASSWORD, safe="")
    addresses = [
        f"redis://:{password}@localhost:{guarded.port}/3",
        f"redis://default:{password}@127.0.0.1:{guarded.port}/3",
        f"unix://:{password}@{tmp_path / 'socket'}?db=3",
    ]
    with redis.Redis(port=guarded.port, password=PASSWORD, db=3, client_name="mine") as own:
        with RedisWorker(models.double, redis_broker=own):
            # The connections of a client of one's own are used, and stay.
            with RedisStreamer(own, worker_timeout=PATIENCE) as streamer:
                assert streamer.predict([1]) == [2]
                assert {each["name"] for each in own.client_list()} == {"mine"}
            for address in addresses:
                with (
                    RedisStreamer(address, worker_timeout=PATIENCE) as streamer,
                    RedisStreamer(address, "nobody serves it") as lonely,
                ):
                    assert streamer.predict([1]) == [2]
                    with pytest.raises(PredictTimeout) as late:
                        lonely.predict([1], timeout=0.01)
                    for text in (repr(streamer), str(late.value)):
                        assert password not in text
                        assert PASSWORD not in text
        assert own.keys() == []


def test_host_and_port_are_enough(
    host: Host, client: Client, redis_server: str, ask: redis.Redis
) -> None:
    if ask.connection_pool.connection_kwargs.get("password") or "unix" in redis_server:
        pytest.skip("the Redis of REDIS_URL cannot be addressed so")
    settings = ask.connection_pool.connection_kwargs
    address = f"{settings['host']}:{settings['port']}"
    host(models.double, redis_broker=address)
    assert client(redis_broker=address).predict([1]) == [2]


@pytest.mark.parametrize(
    "broker",
    [
        redis.Redis(decode_responses=True), "redis://localhost:6379?decode_responses=true",
        "", "localhost", "localhost:", "localhost:port", ":6379", "local host:6379",
        "localhost:6379/0", "http://localhost:6379", "user:hunter2@localhost:6379",
        "redis://user:hunter2@localhost:port", "redis://user:hunter2@localhost:6379/?db=one",
        # What a password has to be quoted for, in a URL
        "redis://user:hunter2/x@localhost:6379", "redis://user:hunter2#x@localhost:6379",
        "redis://user:hunter2?x@localhost:6379", "redis://user:[hunter2@localhost:6379",
        b"redis://user:hunter2@localhost:6379", {"host": "localhost", "password": "hunter2"},
        6379, None, redis.asyncio.Redis(host="hunter2"),
    ],
)  # fmt: skip
def test_bad_address_is_refused_and_no_password_repeated(broker: Any) -> None:
    for build in BUILDS.values():
        with pytest.raises((ValueError, TypeError), match="redis_broker") as caught:
            build(redis_broker=broker)
        told: BaseException | None = caught.value
        is_asynchronous = isinstance(broker, redis.asyncio.Redis)
        assert ("synchronous redis.Redis client; not redis.asyncio" in str(told)) == is_asynchronous
        while told is not None:  # a log shows the causes, too
            assert "hunter2" not in str(told)
            told = told.__cause__ or (None if told.__suppress_context__ else told.__context__)


# -- what travels


def test_host_that_cannot_load_its_model_raises_and_the_client_waits(
    host: Host, client: Client
) -> None:
    worker = host(models.NamesNoErrors)
    with pytest.raises(WorkerStartError, match="out_of_memory_errors"):
        worker.wait_ready()
    with pytest.raises(WorkerStartError, match="out_of_memory_errors"):
        worker.run_forever()
    # Another host may come, so to the client there is none yet.
    streamer = client()
    with pytest.raises(WorkerStartTimeout):
        streamer.wait_ready(0)
    future = streamer.submit([1])
    host(models.double)
    assert future.result() == [2]


class Custom:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


def test_unpicklable_or_too_large_item_fails_its_own_call_only(host: Host, client: Client) -> None:
    host(models.echo, max_message_bytes=20_000)
    small, streamer = client(max_message_bytes=10_000), client()
    with pytest.raises(UnpicklableItem, match="max_message_bytes"):
        small.predict(["x" * 20_000])
    assert small.predict(["x" * 9_000]) == ["x" * 9_000]
    for item in (lambda: None, Custom(1), {len}, [[Custom(1)]]):
        before = streamer.submit([1])
        future = streamer.submit([1, item])
        after = streamer.submit([2])
        assert isinstance(future.exception(), UnpicklableItem)
        for use in (streamer.predict, lambda batch: asyncio.run(streamer.apredict(batch))):
            with pytest.raises(UnpicklableItem, match="item 1"):
                use([1, item])
        assert (before.result(), after.result()) == ([1], [2])
    assert streamer.stats().pending == 0


BUILDS: dict[str, Any] = {
    "streamer": RedisStreamer, "worker": functools.partial(RedisWorker, models.echo)
}  # fmt: skip


@pytest.mark.parametrize(
    ("option", "value", "error", "builds"),
    [
        *(("prefix", bad, ValueError, "both") for bad in ("a{b", "a}b", "a\0b")),
        *(("prefix", bad, TypeError, "both") for bad in (5, None)),
        ("serializer", "pickle", ValueError, "both"),  # without a secret
        ("serializer", "json", ValueError, "both"),
        ("secret", "hunter2", ValueError, "both"), ("secret", b"", ValueError, "both"),
        ("secret", ["hunter2"] * 2, TypeError, "both"),
        ("max_message_bytes", 10, ValueError, "both"), ("reply_ttl", 0, ValueError, "both"),
        ("worker_timeout", 0, ValueError, "streamer"), ("max_pending", 0, ValueError, "streamer"),
        ("max_pending", None, TypeError, "streamer"),
        ("error_types", KeyError, TypeError, "streamer"),
        ("error_types", [int], TypeError, "streamer"), ("drain_timeout", 0, ValueError, "streamer"),
        ("drain_timeout", float("nan"), ValueError, "streamer"),
        ("drain_timeout", "soon", TypeError, "streamer"),
        ("claim_timeout", 0, ValueError, "worker"), ("model_name", 5, TypeError, "worker"),
        # which only the streamer has
        ("max_pending", 5, TypeError, "worker"),
        ("worker_timeout", 5, TypeError, "worker"), ("error_types", (), TypeError, "worker"),
    ],
)  # fmt: skip
def test_option_with_a_bad_value_is_refused_by_its_name_and_no_secret_repeated(
    option: str, value: Any, error: type[Exception], builds: str
) -> None:
    for name, build in BUILDS.items():
        if builds in (name, "both"):
            with pytest.raises(error, match=option) as caught:
                build(**{option: value})
            assert "hunter2" not in str(caught.value)


# -- room


def test_call_beyond_max_pending_is_refused(
    host: Host, client: Client, gate: Gate, ask: redis.Redis, keys: Keys
) -> None:
    host(models.Gated, 1, model_init_args=(gate,))
    streamer, other = client(max_pending=3), client(max_pending=3)
    futures = [streamer.submit([i, i]) for i in range(3)]
    gate.await_arrival()
    await_that(lambda: ask.xlen(keys.calls) == 3)
    # By the number of its own calls it is refused at once ...
    for call in (
        lambda: streamer.submit([3]),
        lambda: streamer.predict([3]),
        lambda: asyncio.run(streamer.apredict([3])),
    ):
        with pytest.raises(Overloaded, match="process"):
            call()
    assert streamer.stats().rejected == 3
    # ... and by that of all clients when Redis is asked.
    error = other.submit([4]).exception()
    assert isinstance(error, Overloaded)
    assert "clients" in str(error)
    with pytest.raises(Overloaded, match="clients"):
        other.predict([4])
    with pytest.raises(Overloaded, match="clients"):
        asyncio.run(other.apredict([4]))
    assert other.stats().rejected == 3
    assert other.stats().pending == 0
    gate.let_through(7)
    assert [future.result() for future in futures] == [[1, 1]] * 3
    assert other.predict([5]) == [1]


# -- time


@pytest.fixture
def busy(host: Host, gate: Gate) -> RedisWorker:
    """A host whose worker is at the gate, and that has claimed all that it has room for: two.

    By a short claim_timeout it soon looks whether they are still its own.
    """
    return host(models.Gated, 1, model_init_args=(gate,), claim_timeout=1)


def fill(streamer: RedisStreamer, worker: RedisWorker, gate: Gate) -> list[Future]:
    futures = [streamer.submit(["being computed"]), streamer.submit(["claimed"])]
    gate.await_arrival()
    await_that(lambda: worker.stats().held == 2)  # type: ignore[union-attr]
    return futures


def test_predict_times_out_and_leaves_nothing_behind(
    busy: RedisWorker, client: Client, gate: Gate, ask: redis.Redis, keys: Keys
) -> None:
    streamer = client(worker_timeout=0.005)
    futures = fill(streamer, busy, gate)
    for _ in range(30):
        with pytest.raises(PredictTimeout, match=r"0\.005 s.*pending 2"):
            streamer.predict(["late"])
    with pytest.raises(PredictTimeout, match=r"0\.01 s"):
        asyncio.run(streamer.apredict(["late"], timeout=0.01))
    with pytest.raises(PredictTimeout, match=r"0\.01 s"):
        streamer.submit(["late"], timeout=0.01).result()
    assert streamer.stats().expired == 32
    assert streamer.stats().pending == 2
    await_that(lambda: ask.xlen(keys.calls) == 2)
    gate.let_through(2)
    assert [future.result() for future in futures] == [[1], [1]]
    assert busy.stats().claimed == 2  # type: ignore[union-attr]


def test_call_that_expires_at_a_host_is_not_computed(
    host: Host, client: Client, gate: Gate, ask: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    # Without retries no batch waits at the worker behind another.
    worker = host(models.Diary, 1, retry=False, model_init_args=(gate, tmp_path / "diary"))
    streamer, hasty = client(), client()
    worker.wait_ready()
    first = streamer.submit(["first"])
    gate.await_arrival()
    late = hasty.submit(["late"], timeout=0.2)
    await_that(lambda: worker.stats().held == 2 or late.done())  # type: ignore[union-attr]
    assert isinstance(late.exception(), PredictTimeout)
    hasty.close()  # from now on it is in Redis only if the host has claimed it
    await_that(lambda: ask.xlen(keys.calls) == 1)
    await_that(lambda: worker.stats().held == 1)  # type: ignore[union-attr]
    gate.let_through(2)
    assert first.result() == ["first"]
    assert streamer.predict(["last"]) == ["last"]
    assert (tmp_path / "diary").read_text() == "first\nlast\n"


# -- giving up


def test_cancel_withdraws_what_no_host_has_claimed(
    busy: RedisWorker, client: Client, gate: Gate, ask: redis.Redis, keys: Keys
) -> None:
    streamer = client()
    futures = fill(streamer, busy, gate)
    waiting = streamer.submit(["waiting"])
    await_that(lambda: ask.xlen(keys.calls) == 3)
    assert waiting.cancel()
    assert waiting.cancel(), "and again"
    await_that(lambda: ask.xlen(keys.calls) == 2)

    async def main() -> None:
        task = asyncio.create_task(streamer.apredict(["waiting"]))
        while ask.xlen(keys.calls) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert streamer.stats().pending == 2

    asyncio.run(main())
    await_that(lambda: ask.xlen(keys.calls) == 2)
    assert streamer.stats().cancelled == 2
    gate.let_through(2)
    assert [future.result() for future in futures] == [[1], [1]]
    assert busy.stats().claimed == 2  # type: ignore[union-attr]


def test_a_claimed_call_may_be_cancelled_and_its_result_is_dropped(
    busy: RedisWorker, client: Client, gate: Gate, ask: redis.Redis, keys: Keys
) -> None:
    streamer = client()
    computed, claimed = fill(streamer, busy, gate)
    # Whether a host has claimed it the client does not know: so it never says that it runs.
    assert not computed.running()
    assert computed.cancel()
    assert claimed.cancel()
    assert streamer.stats().pending == 0
    await_that(lambda: busy.stats().held == 0)  # type: ignore[union-attr]
    gate.let_through(3)
    assert streamer.predict(["next"]) == [1]
    await_that(lambda: ask.xlen(keys.calls) == 0)
    assert computed.cancelled()
    assert not streamer.submit([]).cancel()


# -- callbacks, memory


def test_a_callback_may_raise_anything_and_predict_in_it_is_refused(
    host: Host, client: Client, gate: Gate
) -> None:
    # Of one item each, or a permit would be left over from a batch of two.
    host(models.Gated, model_init_args=(gate,), batch_size=1)
    streamer = client(worker_timeout=None)
    for error in (SystemExit, KeyboardInterrupt, asyncio.CancelledError):
        futures = [streamer.submit([i]) for i in range(4)]
        futures[1].add_done_callback(functools.partial(raise_it, error))
        gate.let_through(4)
        for future in futures:
            future.result()
    ours = threading.current_thread()
    threads: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def predict(_: Any) -> None:
        if threading.current_thread() is not ours:
            for use in (lambda: streamer.predict([1]), streamer.wait_ready):
                with pytest.raises(StreamerError, match="callback"):
                    use()
        threads.put(threading.current_thread())

    streamer.submit([0]).add_done_callback(predict)
    gate.let_through()
    assert threads.get() is not ours
    # In the thread that watches the time, too, if the callback is there before that has ended.
    for seconds in (0.1, 1, 10, 100):
        streamer.submit([0], timeout=seconds).add_done_callback(predict)
        if threads.get() is not ours:
            break
    else:
        pytest.fail("no callback was there in time")
    gate.let_through(9)


def raise_it(error: type[BaseException], _: Any) -> None:
    raise error


def test_a_finalizer_may_close_in_the_middle_of_a_call(client: Client) -> None:
    streamer = client()
    future = streamer.submit([1], timeout=PATIENCE)
    with streamer._client._timer.lock:  # as where the garbage collector interrupts a call
        streamer.close(drain=False)
    with pytest.raises(StreamerClosed):
        future.result()
    streamer.close()


def test_the_memory_of_a_finished_call_and_of_a_refused_item_is_freed(
    host: Host, client: Client
) -> None:
    host(models.echo)
    streamer, item = client(), Custom(1)
    gc.disable()  # it must not take the cycle collector
    try:
        future = streamer.submit([1])
        assert future.result() == [1]
        assert isinstance(streamer.submit([item]).exception(), UnpicklableItem)
        references = weakref.ref(future), weakref.ref(item)
        del future, item
        streamer.predict([1])  # the threads have let go of the former call by now
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


# -- being seen


def test_stats_and_repr_show_what_there_is(busy: RedisWorker, client: Client, gate: Gate) -> None:
    streamer = client()
    assert streamer.stats() == RedisStreamerStats(
        state="new", pending=0, queued=None, hosts=None, outages=0, expired=0, cancelled=0,
        rejected=0,
    )  # fmt: skip
    assert repr(streamer).endswith(" | new | pending 0>")
    busy.wait_ready()
    streamer.wait_ready()
    futures = fill(streamer, busy, gate)
    # What is held is with the pool a moment later.
    await_that(lambda: busy.stats().pool.batches_in_flight == 2)  # type: ignore[union-attr]
    held = busy.stats()
    assert held is not None
    assert (held.held, held.claimed, held.pool.batches_in_flight) == (2, 2, 2)
    assert "held 2 | claimed 2" in repr(busy)
    futures[1].cancel()  # which the host hears of now and then
    # The sender may have asked before the host was there, and have heard of that only now.
    await_that(lambda: streamer.stats().hosts == 1)
    stats = streamer.stats()
    assert (stats.state, stats.pending, stats.cancelled) == ("connected", 1, 1)
    assert stats.hosts == 1
    assert "connected | pending 1 | in Redis" in repr(streamer)
    assert repr(streamer).endswith("worker hosts 1 | cancelled 1>")
    gate.let_through(2)
    futures[0].result()
    streamer.close()
    assert streamer.stats().state == "closed"
    assert " | closed | pending 0" in repr(streamer)


# -- the end


def test_drain_ends_with_its_timeout(
    busy: RedisWorker, client: Client, gate: Gate, ask: redis.Redis, keys: Keys
) -> None:
    streamer = client()
    futures = [*fill(streamer, busy, gate), streamer.submit(["waiting"])]
    streamer.close(timeout=0.01)
    for future in futures:
        with pytest.raises(StreamerClosed):
            future.result()
    assert ask.keys(keys.client("*")) == ask.keys(keys.replies("*")) == []
    assert ask.xlen(keys.calls) == 0, "also what a host had claimed"
    await_that(lambda: busy.stats().held == 0)  # type: ignore[union-attr]
    gate.let_through(2)
    await_that(lambda: ask.xlen(keys.calls) == 0)


def test_drain_ends_at_a_close_without_drain(busy: RedisWorker, client: Client, gate: Gate) -> None:
    """And a block that raises does not drain."""
    streamer = client()
    futures = fill(streamer, busy, gate)
    closing = threading.Thread(target=streamer.close, daemon=True)
    closing.start()
    await_that(lambda: streamer.stats().state == "draining")
    with pytest.raises(StreamerClosed):
        streamer.submit(["more"])
    streamer.close(drain=False)
    for future in futures:
        with pytest.raises(StreamerClosed):
            future.result()
    closing.join()
    other = client()
    future = other.submit([1])
    other.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    with pytest.raises(StreamerClosed):
        future.result(0)
    gate.let_through(2)


def test_a_streamer_that_was_never_used_is_closed_at_once(client: Client) -> None:
    streamer = client()
    streamer.close()
    for use in (streamer.predict, streamer.submit, lambda _: streamer.wait_ready()):
        with pytest.raises(StreamerClosed):
            use([1])


def test_a_forgotten_streamer_finishes_its_calls_and_ends(
    host: Host, gate: Gate, redis_server: str, prefix: str, ask: redis.Redis, keys: Keys
) -> None:
    host(models.Gated, model_init_args=(gate,))
    others = {*threading.enumerate()}
    streamer = RedisStreamer(redis_server, prefix)
    future = streamer.submit([1])
    threads = {*threading.enumerate()} - others
    assert len(threads) == 2
    gate.await_arrival()
    assert ask.keys(keys.client("*"))
    reference = weakref.ref(streamer)
    del streamer
    gc.collect()
    assert reference() is None
    gate.let_through()
    assert future.result() == [1]
    for thread in threads:
        thread.join()
    assert ask.keys(keys.client("*")) == ask.keys(keys.replies("*")) == []


@pytest.mark.parametrize("first", ["client", "host"])
def test_call_that_is_handed_back_does_not_stay_when_its_client_leaves(
    busy: RedisWorker, client: Client, gate: Gate, ask: redis.Redis, prefix: str, first: str
) -> None:
    streamer = client()
    fill(streamer, busy, gate)
    for each in (streamer, busy) if first == "client" else (busy, streamer):
        each.close(drain=False)
    assert ask.keys(f"*{prefix}*") == []


# -- whole programs


def test_a_fork_before_the_first_call_works(run_program: Run, host: Host) -> None:
    """test_lifecycle.py has one after it."""
    host(models.echo)
    found = run_program("""
        import os, sys
        from service_streamer import RedisStreamer

        if __name__ == "__main__":
            streamer = RedisStreamer(sys.argv[1], sys.argv[2])
            children = []
            for number in range(3):
                child = os.fork()
                if not child:
                    with streamer:
                        same = streamer.predict([number]) == [number]
                    sys.exit(0 if same else 3)
                children.append(child)
            ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            print(ends, streamer.predict([1]))
            streamer.close()
    """)
    assert found == (0, "[0, 0, 0] [1]\n", "")


def test_the_repr_of_a_forked_worker_host_says_so(run_program: Run) -> None:
    found = run_program("""
        import os, sys
        import models
        from service_streamer import RedisWorker, StreamerForked

        if __name__ == "__main__":
            with RedisWorker(models.echo, redis_broker=sys.argv[1], prefix=sys.argv[2]) as worker:
                worker.wait_ready()
                child = os.fork()
                if not child:
                    print(worker, flush=True)
                    try:
                        worker.stats()
                    except StreamerForked:
                        os._exit(0)
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert found == (0, "<RedisWorker of another process>\n0\n", "")


@pytest.mark.parametrize("ending", ["sys.exit(0)", *long_cases("", "streamer = None")])
def test_the_interpreter_ends_with_calls_on_their_way(run_program: Run, ending: str) -> None:
    found = run_program(f"""
        import sys
        from service_streamer import RedisStreamer

        if __name__ == "__main__":
            streamer = RedisStreamer(sys.argv[1], sys.argv[2])
            futures = [streamer.submit([i]) for i in range(3)]
            {ending}
    """)
    assert found == (0, "", "")  # and the fixture sees that it has left nothing in Redis
