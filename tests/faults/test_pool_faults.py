"""A shared pool whose process, workers and clients are killed or stopped while others call."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_processes import GONE, Watch, await_line, descendants, running, workers

import models
from conftest import await_that
from service_streamer import PredictTimeout, Streamer
from service_streamer.errors import StreamerBroken, StreamerError
from service_streamer.pool.directory import paths_of, private_directory
from service_streamer.pool.pool_protocol import PROTOCOL, Hello, pack
from service_streamer.pool.visits import ask_pool, await_end, pool_names

Shared = Callable[..., Streamer]

#: Calls until it reads a line; then says how many it had answers to, and how many were lost.
CALLERS = """
    import itertools, sys, threading
    import pool_models
    from service_streamer import Streamer, WorkerLost

    answered, lost, lock = set(), set(), threading.Lock()
    is_over = threading.Event()

    def call(thread):
        for n in itertools.count(thread, 8):
            item = f"{name}-{n}"
            try:
                (result,) = streamer.predict([item])
                assert result == item.upper(), result
                with lock:
                    answered.add(item)
                    if len(answered) == 50:
                        print("under load", flush=True)
            except WorkerLost:
                lost.add(item)
            if is_over.is_set():
                return

    if __name__ == "__main__":
        name = sys.argv[1]
        streamer = Streamer(
            pool_models.Recorded, 8, shared="a", linger=0, worker_timeout=None,
            model_init_args=[sys.argv[2]], retry=sys.argv[3] == "True",
        )
        threads = [threading.Thread(target=call, args=[n]) for n in range(8)]
        for thread in threads:
            thread.start()
        sys.stdin.readline()
        before = len(answered)
        for _ in range(2):  # more of them, after what has happened meanwhile
            target = len(answered) + 50
            while len(answered) < target:
                threading.Event().wait(0.01)
        is_over.set()
        for thread in threads:
            thread.join()
        streamer.close()
        print("answers", *answered)
        print("lost", *lost)
        sys.stdout.flush()
"""


class Callers:
    """Processes that call a pool until they are told to end."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes
        for each in processes:
            await_line(each, "under load")

    def end(self) -> tuple[set[str], set[str]]:
        """What was answered and what was lost; of those that live."""
        found: dict[str, set[str]] = {"answers": set(), "lost": set()}
        alive = [each for each in self.processes if each.poll() is None]
        for each in alive:
            assert each.stdin is not None
            each.stdin.write("\n")
            each.stdin.flush()
        for each in alive:
            assert each.stdout is not None
            for line in each.stdout:
                what, *items = line.split()
                if what in found:
                    found[what] |= {*items}
            assert each.wait() == 0
        return found["answers"], found["lost"]


@pytest.fixture
def callers(tmp_path: Path, shared: Shared) -> Iterator[Callable[..., Callers]]:
    with contextlib.ExitStack() as stack:

        def start(count: int, *, retry: bool = True) -> Callers:
            started = []
            for n in range(count):
                folder = tmp_path / f"caller{n}"
                folder.mkdir()
                record = str(tmp_path / "record")
                arguments = [f"c{n}", record, str(retry)]
                started.append(stack.enter_context(running(CALLERS, folder, *arguments)))
            return Callers(started)

        yield start


def computed(folder: Path) -> Counter[str]:
    return Counter((folder / "record").read_text().split())


def pool() -> dict[str, Any]:
    status: dict[str, Any] = ask_pool("a", "status")
    return status


@pytest.mark.short_cases("all")
@pytest.mark.parametrize("victims", ["pool", "worker", "client", "all"])
def test_a_death_under_load_loses_no_call(
    victims: str, callers: Callable[..., Callers], tmp_path: Path
) -> None:
    calls = callers(3)
    pid = pool()["pid"]
    with Watch({pid, *descendants(pid)}) as family:
        if victims in ("worker", "all"):
            for worker in workers(pid):
                os.kill(worker, signal.SIGKILL)
        if victims in ("client", "all"):
            calls.processes[0].kill()
            calls.processes[0].wait()
        if victims in ("pool", "all"):
            os.kill(pid, signal.SIGKILL)
            assert family.alive_after(GONE) == []
        answered, lost = calls.end()
        assert not lost
        assert len(answered) >= 2 * 100
        assert answered <= computed(tmp_path).keys()
        assert family.alive_after(GONE) == []  # nobody is left


def test_without_retries_no_item_is_computed_twice(
    callers: Callable[..., Callers], tmp_path: Path
) -> None:
    calls = callers(3, retry=False)
    os.kill(pool()["pid"], signal.SIGKILL)
    answered, lost = calls.end()
    assert len(lost) <= 3 * 8
    assert not answered & lost
    counts = computed(tmp_path)
    assert max(counts.values()) == 1
    assert answered <= counts.keys()


@pytest.mark.long
def test_a_pool_that_is_told_to_end_loses_nothing_even_without_retries(
    callers: Callable[..., Callers], tmp_path: Path
) -> None:
    calls = callers(2, retry=False)
    pid = ask_pool("a", "stop", True)
    assert await_end(pid, GONE)
    answered, lost = calls.end()
    assert not lost
    counts = computed(tmp_path)
    assert max(counts.values()) == 1
    assert answered <= counts.keys()


def test_clients_go_on_with_a_pool_that_has_given_up_its_name(
    callers: Callable[..., Callers], shared: Shared
) -> None:
    calls = callers(2)
    old = ask_pool("a", "replace")
    other = shared(models.double, shared="a")  # other wishes: a new version, say
    assert other.predict([1]) == [2]
    assert pool()["pid"] != old
    answered, lost = calls.end()
    assert answered
    assert not lost
    assert await_end(old, GONE)
    assert other.predict([2]) == [4]


def test_who_came_while_a_pool_gave_up_its_name_finds_the_next_one(shared: Shared) -> None:
    """It is refused for no wishes that the next pool may have."""
    streamer = shared(models.double, shared="a")
    streamer.predict([1])
    paths = paths_of("a", private_directory(os.environ, os.geteuid()))
    frame = pack([(*Hello(PROTOCOL, "early", os.getpid(), {"model": "another"}, 0.0),)])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(paths.socket)
        old = ask_pool("a", "replace")
        await_that(lambda: not pool_names())
        connection.sendall(b"\0" + len(frame).to_bytes(8, "little") + frame)
        connection.settimeout(60)
        came = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert came in (b"", b"\0"), "no word, and no refusal, before the end"
    assert streamer.predict([2]) == [4]
    assert streamer.backend.pool_pid == old  # type: ignore[attr-defined]


def test_a_client_that_is_stopped_holds_up_nobody(shared: Shared, tmp_path: Path) -> None:
    source = """
        import pool_models
        from service_streamer import Streamer

        if __name__ == "__main__":
            streamer = Streamer(pool_models.large_or_small, 8, shared="a", linger=0)
            streamer.wait_ready()
            print("ready", flush=True)
            input()
            futures = [streamer.submit(["large"]) for _ in range(200)]
            print("sent", flush=True)
            input()
            assert all(len(future.result()[0]) == 100_000 for future in futures)
            streamer.close()
            print("done", flush=True)
    """
    with running(source, tmp_path) as program:
        import pool_models

        streamer = shared(pool_models.large_or_small, 8, shared="a")
        await_line(program, "ready")
        assert program.stdin is not None
        program.stdin.write("\n")
        program.stdin.flush()
        await_line(program, "sent")
        os.kill(program.pid, signal.SIGSTOP)
        try:
            await_that(lambda: streamer.stats().pending == 0)  # its answers wait in the pool
            for n in range(100):
                assert streamer.predict([f"small {n}"]) == [f"small {n}"]
        finally:
            os.kill(program.pid, signal.SIGCONT)
        program.stdin.write("\n")
        program.stdin.flush()
        await_line(program, "done")


def test_a_pool_that_is_stopped_lets_calls_time_out(shared: Shared) -> None:
    streamer = shared(models.double, shared="a", linger=0)
    streamer.predict([1])
    pid = pool()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(PredictTimeout, match=r"no result within 0\.1 s \(pool"):
            streamer.predict([2], timeout=0.1)
        future = streamer.submit([3], timeout=0.1)
        assert isinstance(future.exception(), PredictTimeout)
        waiting = streamer.submit([4])
        large = streamer.submit([b"x" * 10_000_000])  # more than the socket takes
    finally:
        os.kill(pid, signal.SIGCONT)
    assert waiting.result() == [8]
    assert len(large.result()[0]) == 20_000_000
    assert pool()["pid"] == pid


def test_a_pool_that_is_stopped_is_said_not_to_answer(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service_streamer.pool import pool_client

    monkeypatch.setattr(pool_client, "_PATIENCE", 0.1)
    streamer = shared(models.double, shared="a")
    streamer.predict([1])
    pid = pool()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(PredictTimeout, match=r"within 0\.1 s; is its process stopped\?"):
            streamer.stats()
    finally:
        os.kill(pid, signal.SIGCONT)


def test_nonsense_from_a_process_concerns_that_process_only(shared: Shared) -> None:
    streamer = shared(models.double, shared="a")
    streamer.predict([1])
    paths = paths_of("a", private_directory(os.environ, os.geteuid()))
    for nonsense in (b"x" * 100, b"\0" * 8, (5).to_bytes(8, "little") + b"hello", b""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(paths.socket)
            connection.sendall(nonsense)
    assert streamer.predict([2]) == [4]
    await_that(lambda: len(pool()["clients"]) == 1)


def test_the_directory_of_pools_is_made_again(shared: Shared) -> None:
    streamer = shared(models.double, shared="a")
    streamer.predict([1])
    pid = pool()["pid"]
    folder = Path(private_directory(os.environ, os.geteuid()))
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()
    os.kill(pid, signal.SIGKILL)
    assert streamer.predict([2]) == [4]
    pid = pool()["pid"]
    folder.parent.rename(f"{folder.parent}-moved")  # before: the next pool is started at once
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(StreamerBroken, match="is gone, and the one that it was in"):
        streamer.predict([3])
    Path(f"{folder.parent}-moved").rename(folder.parent)
    assert streamer.predict([4]) == [8]


def test_a_working_directory_that_was_removed(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "release"
    folder.mkdir()
    monkeypatch.chdir(folder)
    streamer = shared(models.process_ids, shared="a")
    (worker,) = streamer.predict([1])
    folder.rmdir()
    os.kill(worker, signal.SIGKILL)
    assert streamer.predict([2]) != [worker]  # the pool carries on
    os.kill(pool()["pid"], signal.SIGKILL)
    with pytest.raises(StreamerError, match="the working directory of this process was removed"):
        streamer.predict([3])
    os.chdir(tmp_path)
    assert streamer.predict([4])


def test_who_starts_while_a_pool_is_killed_again_and_again_is_served(shared: Shared) -> None:
    streamers = [shared(models.double, shared="a") for _ in range(4)]
    for n in range(4):
        futures = [streamer.submit([n]) for streamer in streamers]
        for future in futures:
            assert future.result() == [2 * n]
        os.kill(pool()["pid"], signal.SIGKILL)
    assert [streamer.predict([9]) for streamer in streamers] == [[18]] * 4
    assert len(pool()["clients"]) == 4


def test_a_process_that_cannot_be_started_is_told(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service_streamer.pool import client_loop, pool_process

    monkeypatch.setattr(client_loop, "_FAILING", 0.0)
    monkeypatch.setattr(pool_process, "_PROGRAM", "raise SystemExit(3)")
    streamer = shared(models.double, shared="a")
    with pytest.raises(StreamerBroken, match="has ended 5 times before it could serve"):
        streamer.predict([1])


_REFUSING = """\
import service_streamer.pool.pool_process as module
def refuse(*_): raise ConnectionError("no cluster\\n  at all")
module.PoolMemory = refuse
run_pool(file)
"""


def failing(counter: Path, *fails: str) -> str:
    """The program of a pool: the first of them do that at their start, the others serve."""
    from service_streamer.pool import pool_process

    does = f"""\
def fail(*_):
    with open({str(counter)!r}, "a") as file:
        file.write("x")
        if file.tell() <= {len(fails)}: exec({fails!r}[file.tell() - 1])
    return memory(*_)
import service_streamer.pool.pool_process as module
memory, module.PoolMemory = module.PoolMemory, fail
run_pool(file)
"""
    return pool_process._PROGRAM.replace("run_pool(file)\n", does)


_IS_AWAY = "raise ConnectionError('nobody there')"


def test_who_was_never_served_waits_a_little_for_the_other_side(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from service_streamer.pool import client_loop, pool_process

    monkeypatch.setattr(client_loop, "_LONGEST_AFTER_FAILURES", 0.01)
    program = failing(tmp_path / "starts", _IS_AWAY, _IS_AWAY)
    monkeypatch.setattr(pool_process, "_PROGRAM", program)
    assert shared(models.double, shared="a").predict([1]) == [2]


def test_what_does_not_pass_is_told_at_once(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from service_streamer.pool import pool_process

    program = failing(tmp_path / "starts", "raise ValueError('no address')")
    monkeypatch.setattr(pool_process, "_PROGRAM", program)
    streamer = shared(models.double, shared="a")
    says = "has ended before it could serve; ValueError: no address$"
    with pytest.raises(StreamerBroken, match=says):
        streamer.predict([1])


def test_a_reason_is_not_that_of_a_pool_before(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first says why, and those after it end without a word."""
    from service_streamer.pool import client_loop, pool_process

    monkeypatch.setattr(client_loop, "_FAILING", 0.0)
    monkeypatch.setattr(client_loop, "_LONGEST_AFTER_FAILURES", 0.01)
    streamer = shared(models.double, shared="a")
    assert streamer.predict([1]) == [2]
    program = failing(tmp_path / "starts", _IS_AWAY, *["os._exit(3)"] * 4)
    monkeypatch.setattr(pool_process, "_PROGRAM", program)
    os.kill(pool()["pid"], signal.SIGKILL)
    with pytest.raises(StreamerBroken, match=r"has ended 5 times .*; its log says why"):
        streamer.predict([1])


@pytest.mark.parametrize("has_served", [False, True])
def test_what_a_process_failed_of_is_told(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, has_served: bool
) -> None:
    from service_streamer.pool import client_loop, pool_process

    monkeypatch.setattr(client_loop, "_FAILING", 0.0)
    monkeypatch.setattr(client_loop, "_LONGEST_AFTER_FAILURES", 0.01)
    if has_served:
        streamer = shared(models.double, shared="a")
        assert streamer.predict([1]) == [2]
    whole = pool_process._PROGRAM
    with monkeypatch.context() as patch:
        patch.setattr(pool_process, "_PROGRAM", whole.replace("run_pool(file)\n", _REFUSING))
        if has_served:
            os.kill(pool()["pid"], signal.SIGKILL)
        else:  # which starts a pool at once
            streamer = shared(models.double, shared="a")
        says = "before it could serve; ConnectionError: no cluster at all$"
        with pytest.raises(StreamerBroken, match=says):
            streamer.predict([1])
    assert streamer.predict([2]) == [4]


def test_processes_that_are_killed_at_their_start_are_replaced(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service_streamer.pool import client_loop, pool_process

    monkeypatch.setattr(client_loop, "_FAILING", 300.0)
    counter = str(tmp_path / "starts")
    dies = f"""\
with open({counter!r}, "a") as file:
    if file.write("x") and file.tell() <= 6: raise SystemExit(3)
"""
    monkeypatch.setattr(pool_process, "_PROGRAM", dies + pool_process._PROGRAM)
    assert shared(models.double, shared="a").predict([1]) == [2]
    assert os.path.getsize(counter) == 7
