"""Under gevent's ``monkey.patch_all()``, in processes of their own: it cannot be undone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cases import long_cases

pytest.importorskip("gevent")

pytestmark = pytest.mark.long
TESTS = Path(__file__).parent

PATCHED = """
from gevent import monkey
if __name__ == "__main__":
    monkey.patch_all()
"""


def run_text(folder: Path, text: str, *arguments: str, **variables: str) -> str:
    """Run a program of this text, as a file, in a process that is patched."""
    program = folder / "program.py"
    program.write_text(PATCHED + textwrap.dedent(text))
    return run(str(program), *arguments, **variables)


def run(*arguments: str, **variables: str) -> str:
    process = subprocess.run(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", **variables},
        cwd=TESTS.parent,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout
    return process.stdout


@pytest.mark.timeout(1200)  # of all its tests: each of them has the usual alarm
@pytest.mark.parametrize(
    "suite", long_cases("compatibility", "streamers", "live", "single_flight", "streams")
)
def test_the_behaviour_suites_hold(redis_server: str, suite: str) -> None:
    file = f"tests/test_{suite}.py"
    assert " passed" in run("tests/run_under_gevent.py", file, REDIS_URL=redis_server)


OVER_REDIS = """
    import sys
    import gevent
    import models
    from service_streamer import PredictTimeout, RedisStreamer, RedisWorker

    if __name__ == "__main__":
        url, prefix = sys.argv[1:]
        with RedisStreamer(url, prefix, worker_timeout=None) as streamer:
            early = gevent.spawn(streamer.predict, [0])
            gevent.sleep(0)
            print(early.ready())
            try:
                streamer.predict([1], timeout=0.01)
            except PredictTimeout:
                print("late")
            with RedisWorker(models.double, redis_broker=url, prefix=prefix):
                print(early.get())
                jobs = [gevent.spawn(streamer.predict, [i]) for i in range(100)]
                print([job.get() for job in jobs] == [[2 * i] for i in range(100)])
"""


def test_greenlets_wait_side_by_side_for_hosts_beyond_redis(
    tmp_path: Path, redis_server: str, prefix: str
) -> None:
    assert run_text(tmp_path, OVER_REDIS, redis_server, prefix) == "False\nlate\n[0]\nTrue\n"


COLLECTED = """
    import gc, multiprocessing, os, subprocess
    import gevent
    import models
    from service_streamer import Streamer

    def serve():
        with Streamer(models.double) as streamer:
            streamer.predict([1])
        gc.collect()
        gevent.sleep(0.001)  # gevent's closes descriptors in the next turn of its loop
        return len(os.listdir("/proc/self/fd"))

    if __name__ == "__main__":
        subprocess.run(["true"])  # from now on gevent collects all children, and so the workers
        first = serve()
        print([serve() - first for _ in range(3)], multiprocessing.active_children())
"""


@pytest.mark.long
def test_workers_that_gevent_has_collected_leave_nothing(tmp_path: Path) -> None:
    assert run_text(tmp_path, COLLECTED) == "[0, 0, 0] []\n"


WAITING = """
    from gevent import monkey
    monkey.patch_all()  # in the worker too, which imports this module again

    import sys
    import gevent
    import models
    from service_streamer import Streamer
    from service_streamer.testing import Gate

    if __name__ == "__main__":
        gate = Gate(sys.argv[1])
        with Streamer(models.Gated, 1, model_init_args=(gate,)) as streamer:
            job = gevent.spawn(streamer.predict, ["slow"])
            streamer.wait_ready()
            while "in flight 1" not in repr(streamer):
                gevent.sleep(0)
            # The model computes: meanwhile other greenlets run, and their calls are accepted.
            others = [gevent.spawn(streamer.submit([i]).result) for i in range(3)]
            gevent.sleep(0)
            print(job.ready(), "pending 2" in repr(streamer))
            gate.let_through(4)
            print(job.get(), [other.get() for other in others])
            gate.close()
"""


def test_while_a_model_computes_other_greenlets_run(tmp_path: Path) -> None:
    said = run_text(tmp_path, WAITING, str(tmp_path / "gate"))
    assert said == "False True\n[1] [[1], [1], [1]]\n"


STREAMS = """
    import sys
    import gevent
    from service_streamer import Streamer, StreamerError
    from service_streamer.testing import Gate
    from stream_models import Countdown

    if __name__ == "__main__":
        gate = Gate(sys.argv[1])
        with Streamer(Countdown, 1, model_init_args=(gate,)) as streamer:
            stream = streamer.stream(2)
            for _ in range(2):
                with gevent.Timeout(0.001, False):
                    next(stream)
                print("still open")
            gate.let_through(2)
            print([*stream])
            forever = streamer.stream(10**9)
            job = gevent.spawn(next, forever)
            while not forever._outputs.seat.locked():
                gevent.sleep(0)
            job.kill()
            gate.let_through(3)
            try:
                next(forever)
            except StreamerError as error:
                print(error)
            print([*streamer.stream(2)])
        gate.close()
"""


def test_a_time_that_ends_leaves_a_stream_open_and_a_greenlet_that_is_killed_does_not(
    tmp_path: Path,
) -> None:
    still_open, closed = "still open\nstill open\n[1, 2]\n", "before its end\n[1, 2]\n"
    said = run_text(tmp_path, STREAMS, str(tmp_path / "gate"))
    assert said.startswith(still_open), said
    assert said.endswith(closed), said


FORK = """
    import models
    from service_streamer import Streamer

    try:
        Streamer(models.echo, mp_start_method="fork")
    except ValueError as error:
        print(error)
"""


def test_fork_is_refused(tmp_path: Path) -> None:
    assert 'use "spawn"' in run_text(tmp_path, FORK)


SHARED = """
    import os, signal
    import gevent
    import models
    from pools import pool_pid
    from service_streamer import Streamer

    if __name__ == "__main__":
        streamer = Streamer(models.double, shared="gevent", linger=0)
        jobs = [gevent.spawn(streamer.predict, [n]) for n in range(200)]
        gevent.joinall(jobs)
        assert [job.value for job in jobs] == [[2 * n] for n in range(200)]
        if not os.fork():
            assert streamer.predict([1]) == [2]
            streamer.close()
            os._exit(0)
        assert os.wait()[1] == 0
        os.kill(pool_pid("gevent"), signal.SIGKILL)
        assert streamer.submit([3]).result() == [6]
        streamer.close()
        print("done")
"""


def test_a_shared_pool(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert run_text(tmp_path, SHARED, XDG_RUNTIME_DIR=str(tmp_path)) == "done\n"


FORKED = """
    import os, signal, sys
    import gevent
    import models
    from gevent.event import Event
    from service_streamer import RedisStreamer, RedisWorker, Streamer

    def hold(future):
        answered.set()
        forked.wait()

    if __name__ == "__main__":
        kind, url, prefix = sys.argv[1:]
        if kind == "redis":
            host = RedisWorker(models.double, redis_broker=url, prefix=prefix)
            host.start()
            streamer = RedisStreamer(url, prefix)
        else:
            options = {"shared": prefix, "linger": 0} if kind == "shared" else {}
            streamer = Streamer(models.double, **options)
        answered, forked = Event(), Event()
        streamer.submit([1]).add_done_callback(hold)  # in the streamer's own greenlet
        answered.wait()
        child = os.fork()
        if not child:
            forked.set()
            gevent.sleep(60)  # meanwhile copies of greenlets go on, if they do
        forked.set()
        print([streamer.predict([n]) for n in range(9)])
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        streamer.close()
        if kind == "redis":
            host.close()
"""


@pytest.mark.usefixtures("shared")  # for its directory of pools
@pytest.mark.parametrize("kind", ["process", *long_cases("shared", "redis")])
def test_greenlets_of_a_streamer_that_a_fork_copies_say_nothing_and_take_no_answer(
    tmp_path: Path, redis_server: str, prefix: str, kind: str
) -> None:
    answers = [[2 * n] for n in range(9)]
    assert run_text(tmp_path, FORKED, kind, redis_server, prefix) == f"{answers}\n"
