"""The parts of a shared pool that can be looked at alone: files, election, wishes, open calls."""

from __future__ import annotations

import contextlib
import errno
import importlib
import math
import os
import pickle
import re
import resource
import selectors
import socket
import subprocess
import sys
import threading
import types
import weakref
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import models
from conftest import await_that
from service_streamer.errors import Overloaded, StreamerBroken
from service_streamer.observe.record import ORDINARY, Call
from service_streamer.options.table import StreamerOptions
from service_streamer.pool import pool_acceptor
from service_streamer.pool.canonical import canonical
from service_streamer.pool.client_loop import ClientDoorbell
from service_streamer.pool.client_memory import first_sent, first_taken
from service_streamer.pool.client_requests import ClientRequests
from service_streamer.pool.directory import names_in, paths_of, private_directory
from service_streamer.pool.election import Leadership, elected, is_led, listening
from service_streamer.pool.linger import FIRST, Linger
from service_streamer.pool.outbox import Outbox, user_of
from service_streamer.pool.pool_acceptor import turn_away
from service_streamer.pool.pool_calls import PoolBook, PoolCall, PoolCalls
from service_streamer.pool.pool_link import PoolLink
from service_streamer.pool.pool_memory import PoolMemory
from service_streamer.pool.pool_protocol import (
    FAILED,
    FRAME_MESSAGES,
    FRAME_SIZE,
    HOLD_STREAM,
    WITHDRAW,
    Unserved,
    unpack,
)
from service_streamer.pool.resumable import ResumableInflow
from service_streamer.pool.sessions import PoolReply, Session
from service_streamer.pool.visits import ask_pool, await_end
from service_streamer.pool.wishes import differences, wishes_of
from service_streamer.remote.call_book import CallBook
from service_streamer.workers.protocol import FrameReader

US = os.geteuid()


# -- the directory


def test_the_directory_is_in_the_user_s_runtime_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    found = private_directory({"XDG_RUNTIME_DIR": str(tmp_path)}, US, fallback="/nowhere")
    assert found == str(tmp_path / "service-streamer")
    assert Path(found).stat().st_mode & 0o777 == 0o700
    assert private_directory({"XDG_RUNTIME_DIR": str(tmp_path)}, US) == found  # again


@pytest.mark.parametrize("runtime", ["", "relative", "missing", "open"])
def test_without_one_it_is_of_the_user_s_own(runtime: str, tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o755)
    environment = {"XDG_RUNTIME_DIR": str(tmp_path / runtime) if runtime else runtime}
    if runtime == "relative":
        environment = {"XDG_RUNTIME_DIR": "open"}
    found = private_directory(environment, US, fallback=str(tmp_path))
    assert found == str(tmp_path / f"service-streamer-{US}")


@pytest.mark.parametrize("trap", ["link", "file", "open", "foreign"])
def test_a_directory_that_others_may_have_made_is_refused(trap: str, tmp_path: Path) -> None:
    path, user = tmp_path / f"service-streamer-{US}", US
    if trap == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "elsewhere")
    elif trap == "file":
        path.touch(0o600)
    else:
        path.mkdir(mode=0o700)
        if trap == "open":
            path.chmod(0o770)
        else:
            user = US + 1
            path.rename(tmp_path / f"service-streamer-{user}")
    with pytest.raises(PermissionError, match="for shared pools"):
        private_directory({}, user, fallback=str(tmp_path))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "-a", "a" * 65, "ä", "a\n"])
def test_a_name_is_one_of_a_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shared"):
        paths_of(name, str(tmp_path))


def test_a_path_that_no_socket_may_have_is_refused() -> None:
    assert paths_of("a", "/" + 99 * "x").socket.endswith("/a.sock")
    with pytest.raises(ValueError, match="108 bytes, and that of a socket at most 107"):
        paths_of("ab", "/" + 99 * "x")


# -- the election


def test_the_lock_has_one_holder_and_goes_with_the_descriptor(tmp_path: Path) -> None:
    paths = paths_of("a", str(tmp_path))
    lock = elected(paths)
    assert lock is not None
    assert elected(paths) is None
    holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
                              pass_fds=[lock])  # fmt: skip
    os.close(lock)
    assert elected(paths) is None  # it is the other process's now
    assert is_led(paths)
    holder.kill()
    holder.communicate()
    assert not is_led(paths)  # the kernel has released it
    assert names_in(str(tmp_path)) == []
    assert os.listdir(tmp_path) == []


def test_who_resigns_lets_the_next_one_make_files_of_its_own(tmp_path: Path) -> None:
    paths = paths_of("a", str(tmp_path))
    first = elected(paths)
    assert first is not None
    leadership = Leadership(first, paths)
    with listening(paths):
        leadership.resign()
        second = elected(paths)
        assert second is not None
        with listening(paths):  # though the old one is still open
            leadership.resign()  # once is enough: the files are not ours any more
            assert names_in(str(tmp_path)) == ["a"]
    os.close(second)


def test_files_of_others_are_no_pools(tmp_path: Path) -> None:
    for name in ("a.lock", "a.sock", "b c.lock", ".lock", "a.txt"):
        (tmp_path / name).touch()
    assert names_in(str(tmp_path)) == ["a"]


def test_a_process_is_awaited_for_a_very_long_time() -> None:
    """Longer than the system waits at once."""
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        assert await_end(process.pid, 1e9)


def test_a_pool_that_accepts_nobody_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    paths = paths_of("a", private_directory(os.environ, US))
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as first:
        full.bind(paths.socket)
        full.listen(0)
        first.connect(paths.socket)
        with pytest.raises(StreamerBroken, match=r"did not answer within 0\.01 s"):
            ask_pool("a", "status", patience=0.01)


def test_who_resigns_leaves_the_files_of_another_pool(tmp_path: Path) -> None:
    paths = paths_of("a", str(tmp_path))
    first = elected(paths)
    assert first is not None
    os.unlink(paths.lock)  # as a cleaner of old files does
    second = elected(paths)
    assert second is not None
    with listening(paths):
        Leadership(first, paths).resign()
        assert sorted(os.listdir(tmp_path)) == ["a.lock", "a.sock"]
    os.close(second)


def test_a_lock_file_that_was_just_removed_elects_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = paths_of("a", str(tmp_path))
    flock = __import__("fcntl").flock
    removed = []

    def remove_first(descriptor: int, how: int) -> None:
        if not removed:
            removed.append(paths.lock)
            os.unlink(paths.lock)
        flock(descriptor, how)

    monkeypatch.setattr("fcntl.flock", remove_first)
    lock = elected(paths)
    assert lock is not None
    assert os.fstat(lock).st_ino == os.stat(paths.lock).st_ino
    os.close(lock)


# -- wishes


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, "a", None], (1, "a", None)),
        ({"a": 1, "b": [2.5]}, {"b": (2.5,), "a": 1}),
        ({"x", "y", "z"}, frozenset("zyx")),
        (models.double, models.double),
        (Path("a/b"), Path("a") / "b"),
        (models.Multiplier, models.Multiplier),
    ],
)
def test_equal_values_are_equal_in_words(one: Any, other: Any) -> None:
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, "1"),
        (1, 1.5),
        ([1], [2]),
        ({"a": 1}, {"a": 2}),
        (models.double, models.echo),
        ([], None),
        (re.compile("a"), re.compile("b")),
    ],
)
def test_other_values_are_others_in_words(one: Any, other: Any) -> None:
    assert canonical(one) != canonical(other)


class Settings:
    """What a user may hand to a model."""

    def __init__(self, *words: str, **more: Any) -> None:
        self.words = {*words}
        self.own = self  # a circle
        self.more = more


@pytest.mark.long  # imports torch
def test_an_object_is_known_by_what_it_has() -> None:
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")

    def settings(*words: str, number: float = 1.0) -> Settings:
        module = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(module.weight, number)
        torch.nn.init.zeros_(module.bias)
        return Settings(
            *words,
            module=module,
            tensors=[torch.tensor(number), torch.ones(3, dtype=torch.bfloat16)],
            array=numpy.arange(6.0).reshape(2, 3).T,
            objects=numpy.array([{"a", "b"}, None]),
            lock=threading.Lock(),
        )

    assert canonical(settings("a", "b")) == canonical(settings("b", "a"))
    assert len({canonical(settings("a")), canonical(settings("b"))}) == 2
    assert canonical(settings(number=2)) != canonical(settings(number=3))
    assert canonical(numpy.zeros((2, 3))) != canonical(numpy.zeros((3, 2)))


def test_parts_that_many_others_have_are_looked_at_once() -> None:
    def doubled(depth: int) -> Any:
        return [] if not depth else [part := doubled(depth - 1), part]

    assert canonical(doubled(100)) == canonical(doubled(100)) != canonical(doubled(99))


def test_an_object_has_the_same_words_in_every_process() -> None:
    program = (
        "import types; from service_streamer.pool.canonical import canonical; "
        "print(canonical(types.SimpleNamespace(words={'the', 'a', 'of', 'an', 'in'})))"
    )
    found = {
        subprocess.check_output(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}
        )
        for seed in "123"
    }
    assert len(found) == 1


def wishes(model: Any = models.double, version: str = "1", **options: Any) -> dict[str, str]:
    return wishes_of(model, StreamerOptions(**options), version)


def test_what_differs_is_named_with_both_values() -> None:
    assert differences(wishes(), wishes()) == []
    assert differences(wishes(worker_num=2), wishes(worker_num=4)) == [
        "worker_num is 2 there and 4 here"
    ]
    assert differences(wishes(version="1"), wishes(version="2")) == [
        "service_streamer is 1 there and 2 here"
    ]
    assert differences({"old": "1"}, {"new": "2"}) == [
        "new is unknown there and 2 here", "old is 1 there and unknown here"
    ]  # fmt: skip
    found = differences(wishes(models.double), wishes(models.echo))
    assert found == ["model is models.double there and models.echo here"]


def test_what_may_be_secret_or_is_long_is_known_by_a_digest() -> None:
    token = {"token": "hf_secret"}
    assert differences(wishes(model_init_kwargs=token), wishes(model_init_kwargs=token)) == []
    [found] = differences(wishes(), wishes(model_init_kwargs=token))
    assert re.fullmatch(r"model_init_kwargs is \S+ there and \(digest \w{12}\) here", found)
    assert "digest" in wishes(model_init_args=("hf_secret",))["model_init_args"]
    tenants = {f"tenant {number}": 1.0 for number in range(1000)}
    assert len(wishes(tenant_weights=tenants)["tenant_weights"]) < 30


def test_what_concerns_the_caller_only_may_differ(tmp_path: Path) -> None:
    own = wishes(
        worker_timeout=1, trace=tmp_path / "trace", deduplicate=True, linger=3, shared="a",
        wait_for_worker_ready=True,
    )  # fmt: skip
    assert differences(wishes(), own) == []


def test_another_content_of_the_model_s_file_is_another_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "a_model").mkdir()
    file = tmp_path / "a_model" / "parts.py"
    file.write_text("class Model: pass")
    before = wishes("a_model.parts:Model")
    assert "a_model" not in sys.modules
    assert before == wishes("a_model.parts:Model")
    file.write_text("class Model: other = True")
    (found,) = differences(before, wishes("a_model.parts:Model"))
    assert found.startswith(f"code is {file} ")
    assert wishes("nowhere:Model")["code"] == "unknown"


def test_a_model_in_an_archive_is_known_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[str] = []
    for number in (1, 1, 2):
        path = tmp_path / f"{len(codes)}" / "models.zip"
        path.parent.mkdir()
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("zipped_model.py", f"def model(batch): return {number}")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(path), *sys.path])
            patch.delitem(sys.modules, "zipped_model", raising=False)
            codes.append(wishes(importlib.import_module("zipped_model").model)["code"].split()[-1])
    sys.modules.pop("zipped_model")
    assert codes[0] == codes[1] != codes[2]


_TYPED = """
FACTOR = {factor}
def scaled(item): return FACTOR * item
class Base:
    def helper(self, batch, start={start}): return [scaled(each) + start for each in batch]
class Model(Base):
    def predict(self, batch): return self.helper(batch)
"""


def typed(monkeypatch: pytest.MonkeyPatch, **values: int) -> str:
    """The code of a model in a main module without a file, as a notebook has it."""
    main = types.ModuleType("__main__")
    main.__file__ = "<stdin>"
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(_TYPED.format(**{"factor": 2, "start": 0} | values), vars(main))
    return wishes(main.Model)["code"]


def test_a_model_that_was_typed_is_known_by_its_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    same, again = typed(monkeypatch), typed(monkeypatch)
    assert same == again
    assert len({same, typed(monkeypatch, factor=3), typed(monkeypatch, start=1)}) == 3


def test_a_model_that_a_function_has_made_is_known_by_its_variables() -> None:
    def made(factor: int) -> Any:
        return lambda batch: [factor * each for each in batch]

    assert wishes(made(2)) == wishes(made(2))
    (found,) = differences(wishes(made(2)), wishes(made(3)))
    assert found.startswith("code is ")


# -- when it ends


def test_a_pool_ends_so_long_after_its_last_client() -> None:
    linger = Linger(100.0)
    assert linger.ends_at == 100.0 + FIRST
    linger.joined(5.0)
    linger.joined(2.0)
    linger.left(110.0)
    assert linger.ends_at == math.inf
    linger.left(120.0)
    assert linger.ends_at == 125.0  # the longest that a client has wished
    linger.joined(0.0)
    assert linger.ends_at == math.inf


def test_a_pool_that_has_retired_ends_with_its_last_client_or_at_its_bound() -> None:
    linger = Linger(100.0)
    linger.retired(101.0, math.inf)
    assert linger.ends_at == 101.0  # nobody has come
    linger.joined(5.0)  # its connection was accepted before
    assert linger.ends_at == math.inf
    linger.joined(5.0)
    linger.retired(110.0, 45.0)
    assert linger.ends_at == 155.0
    linger.retired(111.0, math.inf)
    linger.left(120.0)
    assert linger.ends_at == 155.0
    assert linger.has_clients
    linger.left(121.0)
    assert linger.ends_at == 121.0
    assert not linger.has_clients


# -- open calls


class Sink(list[tuple[Any, ...]]):
    """Sends at once, unless it is stopped."""

    def __init__(self) -> None:
        self.waiting: dict[int, Callable[[], object] | None] = {}
        self.is_stopped = False

    def put(
        self, message: tuple[Any, ...], size: int = 0, on_sent: Callable[[], object] | None = None
    ) -> int:
        self.append(message)
        self.waiting[len(self)] = on_sent
        if not self.is_stopped:
            self.go_on()
        return len(self)

    def take_back(self, key: int) -> bool:
        return self.waiting.pop(key, self) is not self

    def go_on(self) -> None:
        while self.waiting:
            on_sent = self.waiting.pop(min(self.waiting))
            if on_sent is not None:
                on_sent()


def pool_call(number: int, mark: bytes = b"", leases: Sequence[Any] = ()) -> PoolCall:
    return PoolCall(number, (number,), 0, None, math.inf, types.SimpleNamespace(), mark, leases)


def opened(*marks: bytes) -> tuple[PoolCalls, Sink, list[PoolCall]]:
    """Calls 1, 2, ... that a pool was sent."""
    calls, sink = PoolCalls(), Sink()
    calls.connected(sink)
    made = [pool_call(number, mark) for number, mark in enumerate(marks, 1)]
    for each in made:
        calls.add(each)
    return calls, sink, made


@pytest.mark.parametrize(
    ("read", "may_rerun", "lost"),
    [
        (None, True, [3]),
        (None, False, [1, 2, 3]),
        (0, False, []),
        (2, False, [1, 2]),
        (3, True, [3]),
    ],
)
def test_what_a_lost_pool_may_have_computed(
    read: int | None, may_rerun: bool, lost: list[int]
) -> None:
    calls, _, made = opened(b"", b"s", b"s")
    assert made[2].inflow is not None
    made[2].inflow.handed_out = 1
    calls.read = read
    found = calls.disconnected(may_rerun=may_rerun)
    assert [each.number for each in found] == lost
    assert all(each.is_over and not each.sent for each in found)
    calls.add(pool_call(4))
    calls.connected(sink := Sink())
    assert sink == [(number,) for number in (1, 2, 3, 4) if number not in lost]


@pytest.mark.parametrize(
    ("kept", "resumes", "goes_on"),
    [([b"x"], True, True), ([b"x"], None, True), ([b"x"], False, False), (None, True, False)],
)
def test_a_stream_goes_on_after_the_outputs_that_were_kept(
    kept: list[bytes] | None, resumes: bool | None, goes_on: bool
) -> None:
    calls, sink = PoolCalls(), Sink()
    calls.resumes = resumes
    stream = PoolCall(1, (1, [b"item"], None, None, None, []), 4, None, math.inf, None, b"s")
    stream.inflow = inflow = ResumableInflow()
    calls.add(stream)
    calls.connected(sink)
    inflow.came([b"x"])
    if kept is None:
        inflow.kept = None
    for outputs in ([b"x"], [b"x", b"y"]):
        assert (calls.disconnected(may_rerun=True) == []) == goes_on
        calls.connected(sink := Sink())
        if not goes_on:
            assert sink == []
            return
        assert sink == [(1, [b"item"], None, None, None, outputs)]
        inflow.came([b"y"])


def test_what_a_client_has_said_counts_also_if_it_has_left() -> None:
    ours, theirs = socket.socketpair()
    first_sent(theirs, None)
    frames = [b"hello"]
    Outbox(theirs.fileno(), lambda: frames.pop() if frames else b"").write()
    theirs.close()
    ours.setblocking(False)
    session = Session(ours, 1, None, set(), lambda: None)  # type: ignore[arg-type]
    session.begin(PoolMemory(0))
    assert [*map(bytes, session.reader.read())] == [b"hello"]
    session.close()


def test_what_a_pool_that_parts_did_not_read_goes_to_the_next_one_in_order() -> None:
    calls, sink, _ = opened(b"", b"")
    calls.read = 1
    calls.add(pool_call(3))
    assert sink == [(1,), (2,)]
    assert calls.answered(1) is not None
    assert calls.disconnected(may_rerun=False) == []
    calls.connected(sink := Sink())
    assert sink == [(2,), (3,)]


def test_a_stream_that_rests_does_so_at_the_next_pool() -> None:
    calls, sink, (stream,) = opened(b"s")
    assert stream.inflow is not None
    stream.inflow.is_held = True
    calls.hold(stream, is_held=True)
    assert sink == [(1,), (HOLD_STREAM, 1)]
    calls.disconnected(may_rerun=True)
    calls.hold(stream, is_held=True)
    calls.connected(sink := Sink())
    assert sink == [(1,), (HOLD_STREAM, 1)]


def test_who_gives_up_tells_the_pool_that_has_the_call() -> None:
    calls, sink, (first, second) = opened(b"", b"")
    assert calls.give_up(first)
    assert not calls.give_up(first)
    assert sink[-1] == (WITHDRAW, 1)
    calls.disconnected(may_rerun=True)
    assert calls.give_up(second)
    assert len(sink) == 3
    calls.connected(sink := Sink())
    assert sink == []
    assert len(calls) == 0


def test_a_call_that_was_not_sent_yet_is_taken_back() -> None:
    calls, sink, made = opened(b"")
    sink.is_stopped = True
    made += [pool_call(number, leases=[Token()]) for number in (2, 3, 4)]
    for each in made[1:]:
        calls.add(each)
    lease = weakref.ref(made[1].leases[0])
    assert calls.give_up(made[1])
    assert lease() is None
    assert [*sink.waiting] == [3, 4]  # no word about it is needed
    sink.waiting.pop(4)  # the pool has come to an end before it
    sink.go_on()
    assert [each.position for each in made] == [1, 0, 2, 0]
    calls.read = 2  # the first one and the third
    assert calls.disconnected(may_rerun=False) == [made[0], made[2]]
    calls.connected(sink := Sink())
    assert sink == [(4,)]


def test_large_items_are_kept_until_the_pool_says_that_nobody_reads_them() -> None:
    calls, sink = PoolCalls(), Sink()
    leases = [Token() for _ in range(4)]
    alive = [weakref.ref(each) for each in leases]
    made = [pool_call(n, leases=[lease]) for n, lease in enumerate(leases, 1)]
    leases.clear()
    calls.add(made[3])
    assert calls.give_up(made[3])  # nobody has read of it
    assert [each() is not None for each in alive] == [True, True, True, False]
    calls.connected(sink)
    for each in made[:3]:
        calls.add(each)
    assert calls.give_up(made[0])
    assert calls.answered(2) is not None
    assert all(each() is not None for each in alive[:3])
    calls.freed([1, 2, 9])
    assert [each() is not None for each in alive] == [False, False, True, False]
    calls.freed([3])  # before its answer has come: the next pool may have to read them
    assert alive[2]() is not None
    calls.disconnected(may_rerun=True)
    calls.connected(sink)
    assert calls.answered(3) is not None
    assert alive[2]() is not None
    calls.disconnected(may_rerun=True)
    assert alive[2]() is None


class Token:
    """A lease: it may be referenced weakly."""


# -- what waits for room


@pytest.mark.parametrize(
    ("max_pending", "is_connected", "accepted", "why"),
    [
        (2, False, 2, "2 calls of this process wait until the pool is there"),
        (2, True, 5, "5 calls of this process have no answer from the pool"),
        (None, False, 9, None),
        (None, True, 9, None),
    ],
)
def test_calls_wait_within_the_bound_though_no_pool_refuses_them(
    max_pending: int | None, is_connected: bool, accepted: int, why: str | None
) -> None:
    book = PoolBook(max_pending, 3)
    if is_connected:
        book.calls.connected(Sink())
    calls = [pool_call(n) for n in range(9)]
    for call in calls[:accepted]:
        book.open(call)
    if why is not None:
        with pytest.raises(Overloaded, match=f"{why}, and max_pending is 2; retry later"):
            book.open(calls[accepted])
        book.give_up(calls[0], "cancelled")
        book.open(calls[accepted])


def test_calls_that_a_lost_pool_had_wait_also_beyond_the_bound() -> None:
    book, sink = PoolBook(2, 3), Sink()
    book.calls.connected(sink)
    for n in range(5):
        book.open(pool_call(n))
    assert book.calls.disconnected(may_rerun=True) == []
    with pytest.raises(Overloaded):
        book.open(pool_call(5))
    assert len(book.calls) == 5


def test_frames_come_whole_and_in_order_from_a_reader_that_is_slow() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        frames = [bytes([n]) * size for n, size in enumerate([3, 400_000, 5, 300_000, 7])]
        waiting = [*frames]
        outbox = Outbox(ours.fileno(), lambda: waiting.pop(0) if waiting else b"")
        reader = FrameReader(theirs.fileno())
        assert not outbox.write()
        assert outbox.has_rest
        found: list[bytes] = []
        while len(found) < len(frames):
            found += map(bytes, reader.read())
            outbox.write()
        assert found == frames
        assert outbox.write()
        assert not outbox.has_rest
        waiting.append(b"late")
        outbox.close()
        assert outbox.write()
        with pytest.raises(BlockingIOError):
            reader.read()


def test_the_kernel_tells_who_is_at_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert user_of(ours) == (os.getpid(), US)


# -- answers of the pool


class Engine:
    """Notes which streams rest. Before the first one does, "meanwhile" is called."""

    def __init__(self) -> None:
        self.held: list[tuple[int, bool]] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def hold(self, call: Call, *, is_held: bool) -> None:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        call.is_held = is_held
        self.held.append((call.reply.number, is_held))

    def withdraw(self, call: Call) -> None:
        pass


@pytest.fixture
def session() -> Iterator[tuple[Session, Any, socket.socket]]:
    """With its engine and its client."""
    ours, client = socket.socketpair()
    ours.setblocking(False)
    client.setblocking(False)
    engine: Any = Engine()
    with client:
        made = Session(ours, 0, engine, set(), lambda: None)
        yield made, engine, client
        made.close()


def stream_of(session: Session, number: int) -> PoolReply:
    reply = PoolReply(session, number)
    call = Call([b""], reply, None, ORDINARY, is_watched=False, more=False, is_stream=True)
    reply.call = session.calls[number] = call
    return reply


def test_streams_rest_while_their_client_is_behind_also_those_that_begin_then(
    session: tuple[Session, Engine, socket.socket],
) -> None:
    behind, engine, client = session
    first = stream_of(behind, 1)
    for _ in range(5000):
        first.put_part(b"output")
    assert engine.held == [(1, True)]
    stream_of(behind, 2).put_part(b"output")
    stream_of(behind, 3).put_part(b"output")
    behind.hold(3, is_held=True)  # by its consumer
    behind.hold(2, is_held=True)
    behind.hold(2, is_held=False)  # which does not go on yet
    assert [each for each in engine.held if each[1]][1:3] == [(2, True), (3, True)]
    assert (2, False) not in engine.held
    while not behind.send():
        with contextlib.suppress(BlockingIOError):
            client.recv(1 << 20)
    assert [each for each in engine.held if not each[1]] == [(1, False), (2, False)]


def test_a_call_whose_items_cannot_be_read_fails_alone(
    session: tuple[Session, Engine, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, engine, client = session

    def taken(number: int, payloads: Any) -> Any:
        if number == 1:
            raise MemoryError("no room")
        return payloads

    monkeypatch.setattr(ours, "taken", taken)
    submitted: list[int] = []
    submit = lambda call: submitted.append(call.reply.number)  # noqa: E731
    monkeypatch.setattr(engine, "submit", submit, raising=False)
    monkeypatch.setattr(engine, "flush", lambda: None, raising=False)
    no_answers: Any = None
    requests = ClientRequests(engine, no_answers, no_answers)  # type: ignore[arg-type]
    requests.take([(ours, [(1, b"item", None), (2, b"item", None)])])
    assert submitted == [2]
    ours.send()
    ((number, failure, _),) = pickle.loads(memoryview(client.recv(1 << 16))[8:])
    assert number == 1
    assert isinstance(failure.exception(), MemoryError)


def test_a_stream_does_not_rest_if_its_client_catches_up_just_then(
    session: tuple[Session, Engine, socket.socket],
) -> None:
    behind, engine, _ = session
    sender = threading.Thread(target=behind.send)

    def send_all() -> None:
        sender.start()
        await_that(lambda: not behind._answers)

    engine.meanwhile = send_all
    stream = stream_of(behind, 1)
    while not engine.held:
        stream.put_part(b"output")
    sender.join()
    assert engine.held[-1] == (1, False)


def test_a_descriptor_that_this_process_cannot_have_is_not_taken_for_none() -> None:
    ours, theirs = socket.socketpair()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ours, theirs:
        first_sent(theirs, theirs.fileno())
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                first_taken(ours)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# -- a pool that could not be built


def test_who_is_turned_away_cannot_come_to_the_same_pool_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count as one more pool that could not serve."""
    address, again = str(tmp_path / "socket"), []

    def told(*_: Any) -> None:
        with socket.socket(socket.AF_UNIX) as next_one:
            again.append(next_one.connect_ex(address))

    monkeypatch.setattr(pool_acceptor, "first_sent", told)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        turn_away(listener, Unserved("no room", False))
        [frame] = FrameReader(client.fileno()).read()
        assert unpack(frame) == [(FAILED, "no room", False)]
    assert again == [errno.ECONNREFUSED]


# -- the client's thread


def test_the_last_call_that_is_given_up_wakes_the_thread_of_a_forgotten_client() -> None:
    book = CallBook(PoolCalls(), 8)
    bell = book.doorbell = ClientDoorbell(book)
    wakes: list[bool] = []
    bell.opened = types.SimpleNamespace(wake=lambda: wakes.append(book.is_abandoned))  # type: ignore[assignment]
    bell.link = types.SimpleNamespace(write=lambda: None)  # type: ignore[assignment]
    book.calls.connected(Sink())
    for is_abandoned in (False, True):
        book.is_abandoned = is_abandoned
        call = pool_call(1)
        book.open(call)
        assert book.give_up(call, "cancelled")
    assert wakes == [True]


# -- the client's connection


class CountedWakes:
    """What a link needs of ``Opened``: a selector, and wakes that a pipe keeps."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.wakes = 0
        self._reader, self._writer = socket.socketpair()
        self.selector.register(self._reader, selectors.EVENT_READ)

    def wake(self) -> None:
        self.wakes += 1
        self._writer.send(b"\0")

    def calm(self) -> None:
        self._reader.recv(1)

    def close(self) -> None:
        self.selector.close()
        self._reader.close()
        self._writer.close()


def test_many_frames_go_with_one_wake_of_the_reading_thread() -> None:
    ours, pool = socket.socketpair()
    ours.setblocking(False)
    opened: Any = CountedWakes()
    link = PoolLink("a", ours, opened)
    with pool, contextlib.closing(opened):
        for turn in range(2):  # what comes after it has written wakes it again
            for _ in range(5):
                link.put((1, b"item"))
                link.write_soon()
            assert opened.wakes == turn + 1
            assert link.read() == []
            assert received(pool) == [[(1, b"item")] * 5]
        link.close()


def test_a_frame_has_all_messages_that_wait_but_few_that_are_large() -> None:
    ours, pool = socket.socketpair()
    ours.setblocking(False)
    opened: Any = CountedWakes()
    link = PoolLink("a", ours, opened)
    with pool, contextlib.closing(opened):
        for number, size in enumerate([1, FRAME_SIZE, 1, 1]):
            link.put((number,), size)
        link.write()
        assert received(pool) == [[(0,), (1,)], [(2,), (3,)]]
        for number in range(FRAME_MESSAGES + 1):
            link.put((number,))
        link.write()
        assert [*map(len, received(pool))] == [FRAME_MESSAGES, 1]
        link.close()


def test_what_is_taken_back_is_not_sent() -> None:
    ours, pool = socket.socketpair()
    ours.setblocking(False)
    opened: Any = CountedWakes()
    link = PoolLink("a", ours, opened)
    sent: list[int] = []
    with pool, contextlib.closing(opened):
        keys = [
            link.put((number,), 0, lambda number=number: sent.append(number)) for number in range(3)
        ]  # type: ignore[misc]
        assert link.take_back(keys[1])
        assert not link.take_back(keys[1])
        link.write()
        assert received(pool) == [[(0,), (2,)]]
        assert sent == [0, 2]
        assert not link.take_back(keys[0])
        link.close()


def received(connection: socket.socket) -> list[Any]:
    return [pickle.loads(frame) for frame in FrameReader(connection.fileno()).read()]


def test_annotations_that_somebody_has_asked_for_are_no_other_code() -> None:
    # Python 3.14 keeps them in the class then: of two processes, one may have asked.
    before, later = (wishes(type("Model", (), {"__module__": "nowhere"})) for _ in range(2))
    assert differences(before, later) == []
    asked = {"__annotate_func__": len, "__annotations_cache__": {"width": int}}
    assert differences(before, wishes(type("Model", (), {"__module__": "nowhere", **asked}))) == []
    other = wishes(type("Model", (), {"__module__": "nowhere", "width": 3}))
    assert differences(before, other) != []
