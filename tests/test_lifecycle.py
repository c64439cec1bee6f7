"""Whole programs: how they start, idle, fork, are killed and end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_processes import GONE, Watch, running

import models
from service_streamer import RedisWorker, Streamer, StreamerClosed, StreamerError, ThreadedStreamer
from service_streamer.testing import Gate

Start = Callable[..., subprocess.Popen[str]]


FLAGS = (
    *("-W", "error::ResourceWarning"),
    *("-W", "ignore:This process:DeprecationWarning"),  # of os.fork, from 3.12 on
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program from its source, with its output as text; kills it after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda source, *arguments: stack.enter_context(
            running(source, tmp_path, *arguments, flags=FLAGS)
        )


# -- the main module


def test_a_streamer_at_import_time_of_main_gives_one_clear_sentence(start: Start) -> None:
    program = start("""
        import models
        from service_streamer import Streamer

        model = models.Doubler(3)
        model.weights = bytes(1_000_000)  # more than a pipe holds
        streamer = Streamer(model.predict, worker_num=2)
        print(streamer.predict([1]))
    """)
    out, err = program.communicate()
    assert program.returncode == 1
    assert out == ""
    assert err.count("Traceback") == 1
    last = err.strip().splitlines()[-1]
    assert "build it under `if __name__ == '__main__':`" in last
    assert "WorkerStartError" in last.partition(":")[0]


def test_the_web_process_does_not_import_what_the_model_imports(start: Start) -> None:
    program = start("""
        import sys
        from service_streamer import Streamer

        if __name__ == "__main__":
            with Streamer("large_models:checksums", worker_timeout=None) as streamer:
                streamer.predict([b"1"])
                print(not {"large_models", "numpy"} & set(sys.modules))
    """)
    assert program.communicate() == ("True\n", "")


# -- fork


@pytest.mark.parametrize("kind", ["ThreadedStreamer", "Streamer", "RedisStreamer"])
def test_a_forked_child_is_told_at_once_and_its_end_hurts_nobody(
    start: Start, kind: str, redis_server: str, prefix: str, host: Callable[..., RedisWorker]
) -> None:
    of, place = "models.echo", tuple[str, ...]()
    if kind == "RedisStreamer":
        of, place = "*sys.argv[1:]", (redis_server, prefix)
        host(models.echo)
    source = f"""
        import asyncio, os, sys, threading
        import models
        from service_streamer import {kind}, Future, StreamerForked

        if __name__ == "__main__":
            streamer = {kind}({of})
            streamer.wait_ready()
            inherited = Future(streamer.backend)
            inside = streamer.backend  # its lock is held by another thread as the process forks
            lock = inside.lock if hasattr(inside, "lock") else inside._calls.lock
            held, forked = threading.Event(), threading.Event()

            def hold():
                with lock:
                    held.set()
                    forked.wait()

            holder = threading.Thread(target=hold)
            holder.start()
            held.wait()
            child = os.fork()
            if child:
                forked.set()
                holder.join()
            else:
                uses = [streamer.predict, streamer.submit, lambda batch: streamer.wait_ready(),
                        lambda batch: asyncio.run(streamer.apredict(batch)),
                        lambda batch: inherited.result(), lambda batch: inherited.exception(),
                        lambda batch: streamer.stats()]
                print(repr(streamer).partition(" ")[0], flush=True)
                for use in uses:
                    try:
                        use([1])
                    except StreamerForked as error:
                        print("build it after the fork" in str(error), flush=True)
                streamer.close()
                sys.exit(0)  # with everything that runs at exit
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            print(streamer.predict([1]))
            streamer.close()
    """
    out, err = start(source, *place).communicate()
    assert err == ""
    assert out == f"<{kind}\n" + "True\n" * 7 + "0\n[1]\n"


def test_a_forked_child_that_lives_on_does_not_keep_the_workers_alive(start: Start) -> None:
    program = start("""
        import os, signal
        import models
        from service_streamer import Streamer

        if __name__ == "__main__":
            streamer = Streamer(models.process_ids)
            worker = streamer.predict([1])[0]
            child = os.fork()
            if not child:
                os.read(0, 1)  # until the test closes our standard input
                os._exit(0)
            print(worker, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert program.stdout is not None
    with Watch({int(program.stdout.readline())}) as worker:
        assert worker.alive_after(GONE) == []


# -- ends


# -- pipes


@pytest.mark.usefixtures("eight_gpus")
def test_one_worker_that_does_not_read_does_not_hold_up_the_others(gate: Gate) -> None:
    with Streamer(
        models.GatedOnFirst,
        1,
        worker_num=2,
        cuda_devices=(0, 1),
        model_init_args=(gate,),
        shared_memory_limit=0,
    ) as streamer:
        streamer.wait_ready()
        payload = bytes(2_000_000)
        # One runs on worker 0 and waits at the gate. Up to three go ahead to it: they are decoded
        # meanwhile, which takes longer than this model does.
        futures = [streamer.submit([payload]) for _ in range(20)]
        gate.await_arrival()
        done = list(itertools.islice(concurrent.futures.as_completed(futures), 16))
        assert {future.result()[0] for future in done} == {1}
        gate.let_through()
        assert sum(future.result() == [0] for future in futures) in range(1, 5)


# -- idling


@pytest.mark.parametrize("kind", ["ThreadedStreamer", "Streamer"])
def test_an_idle_streamer_makes_no_wake_ups(start: Start, kind: str) -> None:
    program = start(f"""
        import models, os, pathlib, sys
        from service_streamer import {kind}

        def switches():
            pids = [os.getpid(), *map(int, sys.argv[1:])]
            return {{
                task.name: [line for line in (task / "status").read_text().splitlines()
                            if line.startswith("voluntary")]
                for pid in pids
                for task in pathlib.Path(f"/proc/{{pid}}/task").iterdir()
                if task.name != str(os.getpid())
            }}

        if __name__ == "__main__":
            with {kind}(models.process_ids) as streamer:
                sys.argv[1:] = [str(streamer.predict([1])[0])]
                before = switches()
                print(len(before) >= 2, flush=True)
                while sys.stdin.readline():
                    now = switches()
                    print(now == before, flush=True)
                    before = now
    """)
    assert program.stdin is not None
    assert program.stdout is not None
    assert program.stdout.readline() == "True\n"
    # That nothing happens can only be seen by letting time pass: once, when the workers have
    # settled, for which a busy machine may take longer.
    for _ in range(20):
        threading.Event().wait(0.5)
        program.stdin.write("\n")
        program.stdin.flush()
        if program.stdout.readline() == "True\n":
            break
    else:
        raise AssertionError("it never comes to rest")
    program.communicate()
    assert program.returncode == 0


def test_a_closed_streamer_is_closed_to_the_heir_of_its_threads_number() -> None:
    """Such a thread was taken for the streamer's own, which must not wait for itself."""
    streamer = ThreadedStreamer(models.double)
    number = streamer.engine.thread.ident
    streamer.close()
    raised: list[BaseException] = []
    heirs: list[int | None] = []

    def call() -> None:
        heirs.append(threading.get_ident())
        try:
            streamer.predict([1])
        except StreamerError as error:
            raised.append(error)

    for _ in range(50):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        if number in heirs:
            break
    assert {type(error) for error in raised} == {StreamerClosed}
