"""Fixtures, and the guard that no test leaves a process, a thread or a descriptor behind."""

from __future__ import annotations

import builtins
import gc
import mmap
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import models
import service_streamer.service_streamer as names_of_0_1_2
from cases import long_cases
from leavings import leavings
from service_streamer import Streamer, ThreadedStreamer
from service_streamer.testing import Gate

if TYPE_CHECKING:  # at run time where they are used: workers import this file, too
    import redis

    from redis_peers import Keys, RawClient, Traffic
    from serve_process import Serving
    from service_streamer import RedisStreamer, RedisWorker
    from stub_engine import StubEngine

pytest.register_assert_rewrite("contract")

# Of the standard library's: one process and one pipe to it, for as long as this process lives.
resource_tracker.ensure_running()

_PRINT = print

AnyStreamer = "Streamer | ThreadedStreamer | RedisStreamer"

#: Exceptions of models, which a RedisStreamer raises as themselves when it knows them.
ERROR_TYPES = tuple(
    kind
    for kind in vars(models).values()
    if isinstance(kind, type) and issubclass(kind, BaseException)
)

#: How long ``predict`` waits where a test does not say, seconds: the alarm, which tells more, rings
#: before that.
PATIENCE = 600

#: What only the web server's side takes, and what both sides do.
_CLIENT_OPTIONS = {
    "worker_timeout", "max_pending", "error_types", "deduplicate", "cache_size", "cache_ttl",
}  # fmt: skip
_COMMON_OPTIONS = {"serializer", "secret", "max_message_bytes", "reply_ttl"}


@pytest.fixture(params=["thread", "process", *long_cases("shared"), "redis"])
def kind(request: pytest.FixtureRequest) -> str:
    """Runs the test on all kinds of workers; ``pool_only`` leaves out those beyond Redis.

    A shared pool is a process more to start. test_streamers.py has the short tests of it.
    """
    kind: str = request.param
    return kind


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """What fails here fails there: the same examples in every run, and the usual signals."""
    from hypothesis import settings

    settings.register_profile("same", derandomize=True)
    settings.register_profile("explore", print_blob=True)  # by --hypothesis-profile
    settings.load_profile("same")
    # Under nohup, or in the background of a script, what the tests start would ignore them as well.
    for number, handler in (
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGINT, signal.default_int_handler),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups of tests have an effect, or each process would start each shared server.

    pytest-xdist 3.8.0 writes the group into a field that pytest 9.2.0 does not read.
    """
    if not hasattr(config, "workerinput") or not config.getoption("loadgroup", False):
        return
    for item in items:
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise pytest.UsageError(
                f"pytest {pytest.__version__} does not keep groups of tests together;"
                " install the version that constraints.txt names"
            )


#: How many modules were imported when the garbage collector was last told of them.
_modules_frozen = 0


def _freeze_imports() -> None:
    """What was imported is no garbage: tests that collect it need not go through that.

    Nor is it among the objects that ``gc.get_objects`` gives.
    """
    global _modules_frozen
    if len(sys.modules) > _modules_frozen + 200:  # torch, transformers and the like
        _modules_frozen = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_collection_finish() -> None:
    _freeze_imports()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI, a test in ``integrations`` whose program is missing fails.

    Except for the long ones, which may need more than CI can have.
    """
    report = yield
    is_needed = "integrations" in item.path.parts and item.get_closest_marker("long") is None
    if report.skipped and is_needed and os.environ.get("CI"):
        reason: Any = report.longrepr
        report.outcome, report.longrepr = "failed", f"not skipped in CI: {reason[2]}"
    return report


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has as many, as far as the streamer is concerned; their UUIDs are unknown."""
    monkeypatch.setenv("SERVICE_STREAMER_GPU_COUNT", "8")
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libnvidia-ml.so.1."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the stub of NVML with")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parent / "stubs" / "nvml.c"
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return folder


def pool_only(reason: str) -> pytest.MarkDecorator:
    """The test does not hold over Redis: why. test_redis_streamer.py says what does."""
    return pytest.mark.parametrize("kind", ["thread", "process"])


@pytest.fixture
def build(kind: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Builds a streamer of the kind for a function, and closes it after the test.

    With "redis" there is a worker host for it, too: it gets the options of a pool.
    """
    built: list[Any] = []
    pool = ThreadedStreamer if kind == "thread" else Streamer
    url = prefix = ""
    if kind == "redis":
        url, prefix = request.getfixturevalue("redis_server"), request.getfixturevalue("prefix")
    pools = request.getfixturevalue("shared") if kind == "shared" else None

    def build(function: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("worker_timeout", PATIENCE)
        if kind == "redis":
            built.extend(over_redis(url, f"{prefix}-{len(built)}", function, *args, **kwargs))
        elif kind == "shared":
            built.append(pools(function, *args, **kwargs))
        else:
            built.append(pool(function, *args, **kwargs))
        return built[-1]

    yield build
    for streamer in reversed(built):
        streamer.close(drain=False)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Streamer]]:
    """Builds streamers that share pools, of a directory of this test's; closes them after it.

    Each has a pool of its own unless it is given the name of one.
    """
    from pools import pool_names, pool_pid
    from service_streamer.pool.pool_protocol import times

    # A pool that is there answers, however busy the machine is.
    for name in ("answer", "answer_at_start"):
        monkeypatch.setattr(times, name, PATIENCE)
    # Not in a deep folder: the path of a socket has a limit.
    runtime = Path(tempfile.mkdtemp(prefix="pools-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    built: list[Streamer] = []

    def shared(
        model: Any, *args: Any, kind: Callable[..., Streamer] = Streamer, **options: Any
    ) -> Streamer:
        options = {
            "shared": f"pool-{len(built)}",
            "linger": 0,
            "worker_timeout": PATIENCE,
        } | options
        built.append(kind(model, *args, **options))
        return built[-1]

    yield shared
    for streamer in reversed(built):
        streamer.close(drain=False)
    # Bounded: the alarm of a test that was too slow does not ring again.
    over = time.monotonic() + _MOMENT
    while (left := pool_names()) or any(each.suffix != ".log" for each in runtime.glob("*/*")):
        if time.monotonic() > over:
            for name in left:
                os.kill(pool_pid(name), signal.SIGKILL)
            pytest.fail(f"pools are left: {left}")
        time.sleep(0.01)
    shutil.rmtree(runtime)


def over_redis(
    url: str,
    prefix: str,
    model: Any,
    batch_size: int = 64,
    max_latency: float = 0.1,
    **options: Any,
) -> tuple[RedisWorker, RedisStreamer]:
    """A worker host that is started, and a streamer for it: each gets the options that it takes."""
    from service_streamer import RedisStreamer, RedisWorker

    common = {name: options.pop(name) for name in _COMMON_OPTIONS & options.keys()}
    client = {name: options.pop(name) for name in _CLIENT_OPTIONS & options.keys()}
    worker = RedisWorker(model, batch_size, max_latency, url, prefix, **options, **common)
    streamer = RedisStreamer(url, prefix, **{"error_types": ERROR_TYPES, **client, **common})
    worker.start()
    return worker, streamer


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """The URL of a Redis: that of the environment's REDIS_URL if it answers, or one of our own."""
    from service_streamer.redis.local import LocalRedis, answers

    url = os.environ.get("REDIS_URL")
    if url and answers(url):
        yield url
        return
    with LocalRedis() as server:
        yield server.url


@pytest.fixture(scope="session")
def infilling() -> Iterator[Serving]:
    """The service of the model that comes with the package."""
    from serve_process import Serving

    with Serving("--workers", "1") as service:
        yield service


@pytest.fixture
def ask(redis_server: str) -> Iterator[redis.Redis]:
    """A client to look into Redis with."""
    import redis

    with redis.Redis.from_url(redis_server) as client:
        yield client


@pytest.fixture
def prefix(ask: redis.Redis) -> Iterator[str]:
    """Of this test's keys, or the start of it: none may be left when all is closed."""
    prefix = f"test-{os.getpid()}-{secrets.token_hex(4)}"
    yield prefix
    left = sorted(ask.scan_iter(match=f"*{prefix}*", count=10_000))
    if left:  # or the next one that runs against this server would not know whose they are
        ask.delete(*left)
    assert left == []


@pytest.fixture
def host(redis_server: str, prefix: str) -> Iterator[Callable[..., RedisWorker]]:
    """Starts worker hosts for this test's prefix, and closes them after it."""
    from service_streamer import RedisWorker

    hosts: list[RedisWorker] = []

    def host(model: Any, batch_size: int = 64, **options: Any) -> RedisWorker:
        place = {"redis_broker": redis_server, "prefix": prefix}
        hosts.append(RedisWorker(model, batch_size, **{**place, **options}))
        hosts[-1].start()
        return hosts[-1]

    yield host
    for each in hosts:
        each.close(drain=False)


@pytest.fixture
def client(redis_server: str, prefix: str) -> Iterator[Callable[..., RedisStreamer]]:
    """Builds streamers for this test's prefix, and closes them after it."""
    from service_streamer import RedisStreamer

    clients: list[RedisStreamer] = []

    def client(**options: Any) -> RedisStreamer:
        place = {"redis_broker": redis_server, "prefix": prefix}
        clients.append(RedisStreamer(**{**place, "worker_timeout": PATIENCE, **options}))
        return clients[-1]

    yield client
    for each in clients:
        each.close(drain=False)


@pytest.fixture
def keys(prefix: str) -> Keys:
    from redis_peers import Keys

    return Keys(prefix)


@pytest.fixture
def traffic(prefix: str, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """What this process sends to Redis, and gets back."""
    from redis_peers import Traffic

    return Traffic(prefix, monkeypatch)


@pytest.fixture
def raw(ask: redis.Redis, prefix: str) -> Iterator[RawClient]:
    """A client whose messages the test writes and reads itself."""
    from redis_peers import RawClient

    raw = RawClient(ask, prefix)
    yield raw
    raw.close()


@pytest.fixture
def no_quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies without having had a batch has failed at once."""
    from service_streamer.supervision.supervisor import Supervisor

    monkeypatch.setattr(Supervisor, "max_restarts", 0)


@pytest.fixture
def no_forkserver_is_left() -> Iterator[None]:
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # meant to live as long as we


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


@pytest.fixture
def one() -> Iterator[StubEngine]:
    """An engine with one worker, which the test plays."""
    from stub_engine import StubEngine

    with StubEngine() as made:
        yield made


def await_that(holds: Callable[[], Any]) -> None:
    """Return when it does: for what no future and no gate tells."""
    while not holds():
        time.sleep(0.001)


def rewrite_call(
    ask: redis.Redis, keys: Keys, change: Callable[[dict[bytes, Any]], dict[Any, Any]]
) -> None:
    """Change the fields of the only call in Redis.

    It keeps its id: otherwise its client, which looks for old calls, may find it lost.
    """
    await_that(lambda: ask.xlen(keys.calls) == 1)
    [(id_, fields)] = ask.xrange(keys.calls)
    with ask.pipeline(transaction=True) as steps:
        steps.xdel(keys.calls, id_)
        steps.execute_command("XSETID", keys.calls, "0-1")  # so that the id may be used again
        steps.xadd(keys.calls, change(fields), id=id_)
        steps.execute()


#: What a thread or a process that is as good as gone may need to be so on a busy machine, seconds.
_MOMENT = 60.0


#: As the tests were started.
_SHOWN = {
    name: os.environ.get(name)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
}


@pytest.fixture(autouse=True)
def calls_have_patience() -> None:
    """The 20 s of the library may not be enough on a machine that runs something else as well."""
    names_of_0_1_2.WORKER_TIMEOUT = PATIENCE


@pytest.fixture(autouse=True)
def the_process_is_as_it_was() -> None:
    """Ray has its own way to print, and to end at a signal, in a process that has used it."""
    builtins.print = _PRINT
    if getattr(signal.getsignal(signal.SIGTERM), "__module__", "").startswith("ray."):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(scope="module", autouse=True)
def the_heap_is_small() -> Iterator[None]:
    yield
    _freeze_imports()


@pytest.fixture(autouse=True)
def torch_computes_in_one_thread() -> None:
    """Its threads wait for each other on the processors that the other tests compute on."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def the_gpus_are_in_sight() -> None:
    """A model that was built by hand for "cpu", perhaps for a whole module, has hidden them."""
    # Without monkeypatch, which would be undone last if every test began with it.
    for name, value in _SHOWN.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    # The server of the session is started before it is counted what there is: where a test names
    # it pytest does that, but not where it depends on a parameter.
    if hasattr(request.node, "callspec") and request.node.callspec.params.get("kind") == "redis":
        request.getfixturevalue("redis_server")
    before = leavings()
    yield
    left = leavings() - before
    over = time.monotonic() + _MOMENT
    looks = 0
    while left and time.monotonic() < over:
        if looks >= 5:  # else it may be about to end, and the collector takes long
            gc.collect()  # an exception's frames may have held a streamer
        time.sleep(0.005)
        looks += 1
        left = leavings() - before
    assert not left


# -- for the tests of shared memory


@pytest.fixture
def nothing_is_mapped() -> Iterator[None]:
    yield
    if "memfd:service_streamer" in (maps := Path("/proc/self/maps")).read_text():
        gc.collect()
        assert "memfd:service_streamer" not in maps.read_text()


@pytest.fixture(params=["private", "shared"])
def private(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "private")


@pytest.fixture
def without_pagemap(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it tells nothing."""
    monkeypatch.setattr(os, "pread", lambda *_: b"")


@pytest.fixture
def without_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers get no mapping. Writers do.

    Of the memory for items, which is made first, the first mapping is the writer's. Of that for
    results it is the reader's.
    """
    original, seen = mmap.mmap, list[int]()

    def limited(descriptor: int, *args: Any) -> mmap.mmap:
        inode = os.fstat(descriptor).st_ino
        is_first = inode not in seen
        seen.append(inode)
        if is_first != (inode == seen[0]):
            raise OSError(12, "Cannot allocate memory")
        return original(descriptor, *args)

    monkeypatch.setattr(mmap, "mmap", limited)
