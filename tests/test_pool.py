"""A pool that several streamers and processes share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from fault_processes import outcome

import models
import pools
from conftest import await_that
from pools import ask_pool, await_end, command, greeting, pool_names, pool_pid
from service_streamer import (
    Overloaded,
    PoolMismatch,
    Streamer,
    StreamerBroken,
    StreamerClosed,
    StreamerError,
    ThreadedStreamer,
    WorkerStartError,
)
from service_streamer.pool.pool_protocol import REFUSED, times
from service_streamer.testing import Gate

US = os.geteuid()

Shared = Callable[..., Streamer]


def test_all_who_name_it_have_the_same_workers_and_counts(shared: Shared) -> None:
    one = shared(models.process_ids, shared="a", worker_num=1)
    other = shared(models.process_ids, shared="a", worker_num=1, wait_for_worker_ready=True)
    assert one.predict([1]) == other.predict([2]) != [os.getpid()]
    assert one.stats().answered == other.stats().answered == 2
    assert one.workers() == other.workers()
    assert one.metrics.sizes.count == 2
    assert "batch" in one.explain()
    third = shared(models.process_ids, shared="b")
    assert third.predict([1]) != one.predict([1])


def test_calls_of_several_clients_share_a_batch(shared: Shared, gate: Gate) -> None:
    clients = [shared(models.gated(gate), 64, shared="a") for _ in range(3)]
    first = clients[0].submit([0])
    gate.await_arrival()
    futures = [client.submit([n]) for n, client in enumerate(clients)]
    await_that(lambda: clients[0].stats().pending == 3)
    gate.let_through(20)
    first.result()
    for future in futures:
        future.result()
    assert clients[0].stats().answered == 4
    assert clients[0].metrics.sizes.count == 2


def test_other_options_are_refused_with_what_differs(shared: Shared) -> None:
    shared(models.double, shared="a", worker_num=1).wait_ready()
    other = shared(models.double, shared="a", worker_num=2, batch_size=8)
    with pytest.raises(PoolMismatch, match="batch_size is 64 there and 8 here; worker_num is"):
        other.predict([1])
    with pytest.raises(PoolMismatch, match="pool replace a"):
        other.wait_ready()
    with pytest.raises(PoolMismatch, match=r"model is models\.double there and models\.echo here"):
        shared(models.echo, shared="a").predict([1])
    fingerprint = ask_pool("a", "status")["fingerprint"]
    ours = fingerprint["service_streamer"]
    for changed, refusal in (
        ({"service_streamer": "0.1"}, [f"service_streamer is {ours} there and 0.1 here"]),
        ({"new": "2"}, ["new is unknown there and 2 here"]),
        ({"worker_num": "2", "new": "3"}, ["worker_num is 1 there and 2 here",
                                           "new is unknown there and 3 here"]),
    ):  # fmt: skip
        with greeting("a", fingerprint | changed) as peer:
            peer.begun()
            assert peer.receive() == (REFUSED, refusal)
    del fingerprint["batch_size"]
    with greeting("a", fingerprint) as peer:
        peer.begun()
        assert peer.receive() == (REFUSED, ["batch_size is 64 there and unknown here"])


def test_a_client_of_another_protocol_is_refused_and_a_command_is_answered(shared: Shared) -> None:
    """So ``pool replace`` of a new version ends the pool of an older one."""
    shared(models.double, shared="a").predict([1])
    fingerprint = ask_pool("a", "status")["fingerprint"]
    with greeting("a", fingerprint, protocol=2) as peer:
        peer.begun()
        assert peer.receive() == (REFUSED, ["the protocol is 4 there and 2 here"])
    with greeting("a", protocol=2) as peer:
        peer.begun()
        assert peer.ask("status")["fingerprint"] == fingerprint


def test_a_client_that_was_refused_is_served_once_the_other_pool_is_gone(shared: Shared) -> None:
    first = shared(models.double, shared="a")
    first.predict([1])
    other = shared(models.echo, shared="a")
    with pytest.raises(PoolMismatch):
        other.predict([1])
    first.close()

    # The old pool has the name until its process has ended.
    def is_served() -> bool:
        try:
            return other.predict(["x"]) == ["x"]
        except PoolMismatch:
            return False

    await_that(is_served)


def test_the_pool_is_nobody_s_child_and_has_neither_our_files_nor_our_blocked_signals(
    shared: Shared,
) -> None:
    streamer = shared(models.process_ids, shared="a", worker_num=1)
    with open(__file__) as file, blocked(signal.SIGTERM):
        os.set_inheritable(file.fileno(), True)
        [worker] = streamer.predict([1])
        pid = pool_pid()
        proc = Path(f"/proc/{pid}")
        assert proc.joinpath("cmdline").read_bytes().rstrip(b"\0") == b"service-streamer pool a"
        fields = proc.joinpath("stat").read_text().rpartition(")")[2].split()
        parent, session = int(fields[1]), int(fields[3])
        assert parent != os.getpid()
        assert session != os.getsid(0)
        theirs = set()
        for each in proc.joinpath("fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # of the question just now
                theirs.add(os.readlink(each))
        assert os.path.realpath(__file__) not in theirs
        assert "torch" not in proc.joinpath("maps").read_text()
        ignored = signals(f"/proc/{pid}", "SigIgn")
        assert (signal.SIGHUP in ignored) == (signal.SIGHUP in signals("/proc/self", "SigIgn"))
        for process in (pid, worker):
            for thread in Path(f"/proc/{process}/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    assert signal.SIGTERM not in signals(thread, "SigBlk")


@contextlib.contextmanager
def blocked(number: int) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signals(task: Path | str, kind: str) -> set[int]:
    """Those that a thread or a process ignores or blocks."""
    found = re.search(rf"{kind}:\s*(\w+)", Path(task, "status").read_text())
    assert found is not None
    return {number for number in range(1, 65) if int(found[1], 16) >> (number - 1) & 1}


def test_questions_concern_the_whole_pool_and_others_hear_of_new_workers(shared: Shared) -> None:
    one, other = (shared(models.process_ids, shared="a") for _ in range(2))
    client = one.pool_client
    assert client is not None
    assert client.pool_pid is None or client.pool_pid != os.getpid()
    before = one.predict([1])
    assert client.pool_pid == pool_pid()
    heard = threading.Event()
    one.backend.when_workers_change(heard.set)
    other.restart_workers()
    assert heard.wait(60)
    assert one.predict([1]) != before
    other.scale(2)
    one.wait_ready()
    assert len(one.workers()) == 2


def test_a_model_that_cannot_be_loaded_is_told_with_its_cause(shared: Shared) -> None:
    streamer = shared(models.BrokenInit)
    with pytest.raises(WorkerStartError) as caught:
        streamer.wait_ready()
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert caught.value.__cause__.__cause__ is not None  # the worker's traceback
    with pytest.raises(WorkerStartError):
        shared(models.BrokenInit, shared="b", wait_for_worker_ready=True)


def test_the_bound_of_what_waits_is_the_pool_s_and_a_client_that_leaves_withdraws_its_calls(
    shared: Shared, gate: Gate
) -> None:
    one, other = (shared(models.gated(gate), 1, shared="a", max_pending=2) for _ in range(2))
    futures = [one.submit([0])]
    gate.await_arrival()
    futures += [one.submit([n]) for n in (1, 2)]  # one of which is sent ahead
    last = other.submit([3])
    await_that(lambda: one.stats().pending == 2)
    with pytest.raises(Overloaded, match="max_pending of 2"):
        other.predict([4])
    one.close(drain=False)
    for future in futures:
        assert isinstance(future.exception(), StreamerClosed)
    await_that(lambda: other.stats().pending == 1)
    gate.let_through(20)
    last.result()


def test_lengths_are_asked_for_in_the_client(shared: Shared) -> None:
    seen: list[Any] = []

    def length(item: str) -> int:
        seen.append(item)
        return len(item)

    streamer = shared(models.echo, length=length, max_batch_cost=6)
    assert streamer.predict(["aaa", "bbb", "ccc"]) == ["aaa", "bbb", "ccc"]
    assert sorted(seen) == ["aaa", "bbb", "ccc"]
    assert streamer.metrics.sizes.count == 2


def test_a_question_of_a_streamer_that_another_thread_closes_fails(shared: Shared) -> None:
    streamer = shared(models.double)
    client: Any = streamer.backend
    check = client.check_not_in_callback
    client.check_not_in_callback = lambda: (streamer.close(), check())  # after it has begun to ask
    with pytest.raises(StreamerClosed):
        streamer.wait_ready(1)


def test_names_models_and_options_that_cannot_be_shared_are_refused(shared: Shared) -> None:
    names: list[Any] = ["", ".", "..", "a/b", "a b", "-a", "a" * 65, "ü", "a\n", 5]
    for name in names:
        with pytest.raises((TypeError, ValueError), match="shared"):
            Streamer(models.double, shared=name)
    with pytest.raises(TypeError, match="ThreadedStreamer has no shared"):
        ThreadedStreamer(models.double, shared="a")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match='use "spawn"'):
        shared(models.double, mp_start_method="fork")
    with pytest.raises(TypeError, match="define the function"):
        shared(lambda batch: batch)


def test_options_of_the_application_s_own_types_are_plain_in_the_pool(shared: Shared) -> None:
    class Own(str):
        """The pool cannot import it: it is local to a function."""

    streamer = shared(
        models.double, shared="a", tenant_weights={Own("paying"): 2}, cuda_devices=[Own("cpu")]
    )
    assert streamer.predict([1], tenant=Own("paying")) == [2]


# -- large payloads


def test_large_items_and_results_are_right_and_may_be_kept(shared: Shared) -> None:
    one, other = (shared(models.shapes, shared="a", shared_memory_limit=8 << 20) for _ in "ab")
    kept = []
    for n in range(1, 30):
        items = [numpy.full(20_000 + each, n + each, dtype="f4") for each in range(3)]
        for streamer in (one, other):
            for item, (shape, total, twice) in zip(items, streamer.predict(items), strict=True):
                assert shape == item.shape
                assert total == item.sum()
                assert (twice == 2 * item).all()
                kept.append((item, twice))
                twice += 0  # it may be written to
    assert all((twice == 2 * item).all() for item, twice in kept)


def test_large_items_are_read_again_by_the_next_pool(shared: Shared) -> None:
    streamer = shared(models.shapes, shared="a")
    item = numpy.arange(100_000, dtype="f4")
    streamer.predict([item])
    for _ in range(2):
        pid = pool_pid()
        os.kill(pid, signal.SIGSTOP)
        futures = [streamer.submit([item + n]) for n in range(3)]
        os.kill(pid, signal.SIGKILL)
        for n, future in enumerate(futures):
            ((_, _, twice),) = future.result()
            assert (twice == 2 * (item + n)).all()


# -- the command line


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's runtime directory."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("value", ["", "relative", "missing", "open"])
def test_commands_use_a_directory_of_the_user_s_own_without_a_private_runtime_directory(
    value: str, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runtime / "open").mkdir()
    (runtime / "open").chmod(0o755)
    monkeypatch.chdir(runtime)
    variable = "open" if value == "relative" else value and str(runtime / value)
    monkeypatch.setenv("XDG_RUNTIME_DIR", variable)
    said = command("status", "nobody", code=1)
    assert f"there is no pool 'nobody' in /tmp/service-streamer-{US}; " in said


def test_commands_refuse_a_directory_that_others_may_have_made(runtime: Path) -> None:
    path = runtime / "service-streamer"

    def assert_refused(why: str) -> None:
        for arguments in (("list",), ("status", "a")):
            assert f"{path} for shared pools {why}" in command(*arguments, code=1)

    (runtime / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(runtime / "elsewhere")
    assert_refused("is a symbolic link")
    path.unlink()
    path.touch(0o600)
    assert_refused("is no directory")
    path.unlink()
    path.mkdir()
    path.chmod(0o770)
    assert_refused("may be entered by other users")


def test_commands_refuse_a_directory_of_another_user(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = 1_000_000 + os.getpid()
    path = Path(f"/tmp/service-streamer-{other}")
    monkeypatch.setattr(os, "geteuid", lambda: other)
    path.mkdir(mode=0o700)
    try:
        assert f"{path} for shared pools belongs to another user" in command("list", code=1)
    finally:
        path.rmdir()


def test_commands_make_a_private_directory_and_refuse_a_path_that_no_socket_may_have(
    runtime: Path,
) -> None:
    for _ in range(2):
        assert command("list") == f"there are no pools in {runtime}/service-streamer\n"
        assert (runtime / "service-streamer").stat().st_mode & 0o777 == 0o700
    room = 107 - len(f"{runtime}/service-streamer/.sock")
    assert "there is no pool" in command("status", "a" * room, code=1)
    assert "has 108 bytes" in command("status", "a" * (room + 1), code=1)


def test_a_command_says_that_a_pool_does_not_answer(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "visit", 0.01)
    pools.folder().mkdir(mode=0o700)
    path = pools.folder() / "a.sock"
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as first:
        full.bind(str(path))
        full.listen(0)
        first.connect(str(path))
        assert "did not answer within 0.01 s" in command("status", "a", code=1)
    path.unlink()


def test_a_pool_keeps_its_name_whoever_removes_its_files(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    lock = pools.folder() / "a.lock"

    def remove_first(descriptor: int, how: int) -> None:
        """As a pool that ends just then."""
        monkeypatch.setattr("fcntl.flock", flock)
        lock.unlink()
        flock(descriptor, how)

    monkeypatch.setattr("fcntl.flock", remove_first)
    first = shared(models.double, shared="a")
    assert first.predict([1]) == [2]
    old = pool_pid()
    lock.unlink()  # as a cleaner of old files does
    assert pool_names() == ["a"]
    lock.touch()  # which no process has locked
    assert pool_names() == ["a"]
    for each in pools.folder().iterdir():
        each.unlink()
    second = shared(models.double, shared="a")
    assert second.predict([1]) == [2]
    new = pool_pid()
    assert new != old
    first.close()
    assert await_end(old)
    assert pool_names() == ["a"]
    assert sorted(os.listdir(pools.folder())) == ["a.lock", "a.log", "a.sock"]
    assert pool_pid() == new


def test_the_commands_list_and_show_pools(shared: Shared) -> None:
    assert "there are no pools in" in command("list")
    streamers = [shared(models.double, shared=name) for name in ("b", "a", "a")]
    for streamer in streamers:
        streamer.predict([1])
    first, second = command("list").splitlines()
    assert re.fullmatch(r"a +process \d+, running, 2 clients, up \d+ s", first)
    assert re.fullmatch(r"b +process \d+, running, 1 client, up \d+ s", second)
    shown = command("status", "a")
    for line in (
        r"process +\d+, up \d+ s", r"worker 0 +idle", r"model +models\.double", r"batch_size +64",
        rf"client {os.getpid()} +0 open calls of .+",
    ):  # fmt: skip
        assert re.search(f"^{line}$", shown, re.MULTILINE), (line, shown)
    # Also by a process with many files.
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files[0], 1200), files[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, files)
        for _ in range(1024):
            stack.callback(os.close, os.dup(0))
        assert ask_pool("a", "status")["state"] == "running"


def test_a_pool_is_told_to_end(shared: Shared, gate: Gate) -> None:
    streamer = shared(models.gated(gate), shared="a", retry=False)
    future = streamer.submit([1])
    gate.await_arrival()
    assert "still finishes its calls after 0.1 s" in command("stop", "a", "--timeout=0.1", code=1)
    late = streamer.submit([2])  # for the next pool
    gate.let_through(2)
    future.result()
    gate.await_arrival()
    late.result()
    # Longer than the system waits at once:
    assert command("stop", "a", "--timeout=1e9") == "the pool 'a' has ended\n"
    assert "there are no pools in" in command("list")
    future = streamer.submit([3])
    gate.await_arrival()
    assert command("stop", "a", "--now") == "the pool 'a' has ended\n"
    assert isinstance(future.exception(), StreamerClosed)


def test_a_pool_that_is_not_there_is_said_not_to_be_and_files_of_others_are_left_out(
    shared: Shared,
) -> None:
    for what in ("status", "stop", "replace"):
        assert "there is no pool 'nobody'" in command(what, "nobody", code=1)
        assert "NAME" in command(what, "../a", code=2)
    pools.folder().mkdir(mode=0o700, exist_ok=True)
    strange = [pools.folder() / name for name in ("a b.sock", ".lock", "b.txt", "b c.lock")]
    for file in strange:
        file.touch()
    assert pool_names() == []
    for file in strange:
        file.unlink()


@pytest.mark.parametrize("free", range(4))
def test_a_client_without_free_descriptors_says_so_and_goes_on_when_there_are(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    are_gone, start = threading.Event(), threading.Thread.start

    def start_late(thread: threading.Thread) -> None:  # that of the client
        run = thread.run
        thread.run = lambda: are_gone.wait() and run()  # type: ignore[method-assign,func-returns-value]
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_late)
        streamer = shared(models.double, shared="a")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, limits[1]))
    try:
        are_gone.set()
        with pytest.raises(StreamerError, match=r"neither reached nor started.*ulimit -n"):
            streamer.predict([1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    def is_served() -> bool:  # when its thread has tried again
        with contextlib.suppress(StreamerError):
            return streamer.predict([1]) == [2]
        return False

    await_that(is_served)


# -- several processes


def test_the_master_of_uwsgi_elects_no_pool_before_it_forks(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = types.ModuleType("uwsgi")
    master.worker_id = lambda: 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "uwsgi", master)
    streamer = shared(models.double, shared="a")
    assert "new" in repr(streamer)
    assert os.listdir(pools.folder()) == []
    assert streamer.predict([1]) == [2]


@pytest.fixture
def program(tmp_path: Path, shared: Shared) -> Callable[[str], str]:
    """Runs a program, and returns what it prints."""

    def run(source: str) -> str:
        code, out, err = outcome(source, tmp_path)
        assert code == 0, out + err
        assert "Traceback" not in err
        return out

    return run


def test_forked_children_have_connections_of_their_own(program: Callable[[str], str]) -> None:
    out = program("""
        import os, signal, time
        import models
        from pools import ask_pool
        from service_streamer import Streamer, StreamerForked

        def clients():
            return sorted(pid for pid, _ in ask_pool("a", "status")["clients"])

        if __name__ == "__main__":
            streamer = Streamer(models.process_ids, shared="a", linger=0, deduplicate=True)
            (worker,) = streamer.predict([1])
            pool = ask_pool("a", "status")["pid"]
            for n in range(3):
                os.kill(pool, signal.SIGSTOP)
                pending = streamer.submit([3 + n])
                if not os.fork():
                    try:
                        pending.result()
                    except StreamerForked:
                        print("forked", flush=True)
                    os.kill(pool, signal.SIGCONT)
                    assert streamer.predict([n]) == [worker]
                    while clients() != sorted([os.getppid(), os.getpid()]):
                        time.sleep(0.01)  # until it has seen the end of the child before
                    streamer.close()
                    os._exit(0)
                assert os.wait()[1] == 0
            assert pending.result() == [worker]
            streamer.close()
            print("done")
    """)
    assert out == "forked\n" * 3 + "done\n"


def test_a_closed_streamer_is_closed_in_forked_children(program: Callable[[str], str]) -> None:
    out = program("""
        import os
        import models
        from service_streamer import Streamer, StreamerClosed

        def refuse():
            raise OSError("no descriptor is left")

        if __name__ == "__main__":
            closed, broken, other = (
                Streamer(models.double, shared=name, linger=0) for name in ("a", "b", "c")
            )
            closed.close()
            broken._make_client = refuse  # none of the others is without a client for that
            if not os.fork():
                try:
                    closed.predict([1])
                except StreamerClosed:
                    print("closed", other.predict([1]), flush=True)
                os._exit(0)
            os.wait()
            for each in (broken, other):
                each.close()
    """)
    assert out == "closed [2]\n"


def test_a_child_that_lives_on_does_not_keep_what_its_parent_had(
    program: Callable[[str], str],
) -> None:
    out = program("""
        import os, time
        import models
        from pools import ask_pool
        from service_streamer import Streamer

        if __name__ == "__main__":
            streamer = Streamer(models.process_ids, shared="a", linger=60)
            readable, writable = os.pipe()
            if not os.fork():  # at once: an election may be under way
                (worker,) = streamer.predict([0])
                os.read(readable, 1)
                while len(ask_pool("a", "status")["clients"]) > 1:
                    time.sleep(0.01)
                streamer.close()
                print("alone", flush=True)
                ask_pool("a", "stop", True)
                os._exit(0)
            streamer.predict([1])
            os.close(readable)
            if not os.fork():
                os._exit(0)
            os.wait()
            streamer.close(drain=False)
            os.write(writable, b"x")
            os.wait()
    """)
    assert out == "alone\n"


def test_a_model_of_the_main_module_is_found_by_the_workers(program: Callable[[str], str]) -> None:
    out = program("""
        import os, sys
        from service_streamer import ManagedModel, Streamer

        class Item:
            def __init__(self, n): self.n = n

        class Model(ManagedModel):
            def init_model(self, factor): self.factor = factor
            def predict(self, batch): return [Item(self.factor * item.n) for item in batch]

        if __name__ == "__main__":
            with Streamer(Model, shared="a", linger=0, model_init_args=[3]) as streamer:
                print(streamer.predict([Item(2)])[0].n, "torch" in sys.modules)
    """)
    assert out == "6 False\n"


# -- its log


def send_nonsense(name: str) -> None:
    """Have the pool log a line."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(pools.folder() / f"{name}.sock"))
        connection.settimeout(20)
        connection.sendall(b"x" * 100)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(100):  # until the pool has logged it, and closed it
                pass


def test_a_file_has_the_log_and_what_workers_print_also_after_it_was_renamed(
    shared: Shared, tmp_path: Path
) -> None:
    path, old = tmp_path / "pool.log", tmp_path / "pool.log.1"
    path.write_text("what was there\n")
    streamer = shared(models.loud, shared="a", pool_log=str(path))
    streamer.predict([3])
    send_nonsense("a")
    text = path.read_text()
    assert text.startswith("what was there\nworker...\n")
    assert re.search(r"^\S+ \S+ pool a: WARNING: .* cannot be read", text, re.MULTILINE)
    for change in (lambda: path.rename(old), path.unlink):
        change()
        send_nonsense("a")
        assert "that cannot be read" in path.read_text()
    assert old.read_text() == text
    assert "Traceback" in text
    assert streamer.predict([5]) == [5]


def test_a_pool_has_its_log_in_its_directory_if_no_other_is_named(shared: Shared) -> None:
    path = pools.folder() / "a.log"
    streamer = shared(models.loud, shared="a")
    streamer.predict([3])
    assert path.read_text() == "worker...\n"
    path.unlink()
    send_nonsense("a")
    assert "that cannot be read" in path.read_text()
    quiet = shared(models.double, shared="b")
    quiet.predict([1])
    for each in (streamer, quiet):
        each.close()
    await_that(lambda: pool_names() == [])
    assert os.listdir(pools.folder()) == ["a.log"], "that of the other one is empty"


def fail() -> None:
    """In the pool's process."""
    raise FileNotFoundError("no room for the model")


def test_the_log_has_what_the_process_of_a_pool_prints_at_its_end(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service_streamer.pool.pool_protocol.preparation", fail)
    path = tmp_path / "pool.log"
    streamer = shared(models.double, shared="a", pool_log=path)
    with pytest.raises(StreamerBroken, match="no room for the model"):
        streamer.predict([1])
    await_that(lambda: "FileNotFoundError: no room for the model\n" in path.read_text())


def test_a_file_that_cannot_be_written_is_refused(shared: Shared, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pool_log"):
        shared(models.double, pool_log=tmp_path / "none" / "pool.log")
    path = tmp_path / "pool.log"
    path.symlink_to(tmp_path / "none" / "pool.log")
    with pytest.raises(ValueError, match=r"pool_log: .*pool\.log cannot be written to: No such"):
        shared(models.double, pool_log=path)


def test_a_file_that_can_be_written_no_more_is_said_to_be(shared: Shared, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    streamer = shared(models.double, shared="a", pool_log=folder / "pool.log")
    streamer.predict([1])
    (folder / "pool.log").unlink()
    folder.rmdir()
    send_nonsense("a")
    assert streamer.predict([2]) == [4]
    os.kill(pool_pid(), signal.SIGKILL)
    with pytest.raises(StreamerBroken, match=r"the pool has no log: .* see pool_log"):
        streamer.predict([3])
    folder.mkdir()
    assert streamer.predict([4]) == [8]
