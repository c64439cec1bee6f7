"""How processes end: by Ctrl-C in the midst of ``close``, and after errors of megabytes."""

from __future__ import annotations

import _thread
import asyncio
import queue
import threading
from pathlib import Path

import pytest
from fault_processes import outcome

import service_streamer.engine.threads as threads
from service_streamer import ModelError, Streamer, StreamerClosed
from service_streamer.workers.protocol import Failure

# -- Ctrl-C


@pytest.mark.parametrize("where", ["while it drains", "while the workers end"])
def test_ctrl_c_during_close_ends_the_program_without_another_error(
    where: str, tmp_path: Path
) -> None:
    source = f"""
        import os, signal, threading, time
        from service_streamer import Streamer

        def slow_to_end(batch):
            import multiprocessing.util
            # Ends some time after it was asked to.
            multiprocessing.util.Finalize(None, time.sleep, args=(0.3,), exitpriority=1)
            return batch

        def hang(batch):
            threading.Event().wait()

        if __name__ == "__main__":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            streamer = Streamer(
                hang if {where!r} == "while it drains" else slow_to_end, 1, worker_num=2
            )
            streamer.wait_ready()
            futures = [streamer.submit([1]) for _ in range(2)]
            if {where!r} != "while it drains":
                [future.result() for future in futures]

            def interrupt():
                wanted = "draining" if {where!r} == "while it drains" else "closed"
                while streamer.stats().state != wanted:
                    time.sleep(0.001)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

            threading.Thread(target=interrupt, daemon=True).start()
            try:
                streamer.close()
            except KeyboardInterrupt:
                print("interrupted", flush=True)
    """
    code, out, err = outcome(source, tmp_path)
    assert (code, out) == (0, "interrupted\n")
    assert "Traceback" not in err


def test_a_second_ctrl_c_at_the_exit_of_the_interpreter_says_nothing(tmp_path: Path) -> None:
    source = """
        import os, signal, threading, time
        from service_streamer import Streamer

        def hang(batch):
            threading.Event().wait()

        def interrupt():
            while streamer.stats().state != "closed":  # the exit has begun to end the workers
                time.sleep(0.001)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        if __name__ == "__main__":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            streamer = Streamer(hang)
            streamer.wait_ready()
            future = streamer.submit([1])
            threading.Thread(target=interrupt, daemon=True).start()
    """
    code, out, err = outcome(source, tmp_path)
    assert (code, out) == (0, "")
    assert "Traceback" not in err


@pytest.mark.parametrize("kind", ["ThreadedStreamer", "Streamer"])
def test_daemon_threads_that_wait_at_the_exit_print_no_tracebacks(
    tmp_path: Path, kind: str
) -> None:
    """As those that wait for a queue do not. Nobody waits for them, and callbacks go on."""
    source = f"""
        import threading
        from service_streamer import {kind}
        import service_streamer.engine.threads as threads
        from stream_models import Countdown

        def read():
            for output in streamer.stream(10**9, timeout=None):
                begun.release()

        def predict():
            streamer.predict([10**9], timeout=None)

        if __name__ == "__main__":
            threads.LONGEST_EXIT = 3600.0  # whoever waits for such a thread would never end
            begun = threading.Semaphore(0)
            streamer = {kind}(Countdown, 8)
            future = streamer.submit([10**9])
            future.add_done_callback(lambda done: print(type(done.exception()).__name__))
            for doing in (read, predict):
                threading.Thread(target=doing, daemon=True).start()
            begun.acquire()
            while streamer.stats().accepted < 3:
                threading.Event().wait(0.001)
            print("the end")
    """
    assert outcome(source, tmp_path) == (0, "the end\nStreamerClosed\n", "")


@pytest.mark.parametrize("where", ["a loop", "a thread that Python has not started", "later"])
def test_what_others_wait_for_is_not_held_up_at_the_exit(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "LONGEST_EXIT", 3600.0)
    # Another has waited as long as all of them may.
    monkeypatch.setattr(threads, "exit_waits_until", [0.0] if where == "later" else [])
    failure = threads.AtExit(StreamerClosed("the end"))
    raised: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def take() -> None:
        error = failure.exception()
        if where == "a thread that Python has not started":  # it would be listed for ever
            del threading._active[_thread.get_ident()]  # type: ignore[attr-defined]
        raised.put(error)

    async def take_in_a_loop() -> None:
        take()

    if where == "a thread that Python has not started":
        _thread.start_new_thread(take, ())
    elif where == "later":
        threading.Thread(target=take, daemon=True).start()
    else:
        coroutine = take_in_a_loop()
        threading.Thread(target=asyncio.run, args=(coroutine,), daemon=True).start()
    assert isinstance(raised.get(timeout=60), StreamerClosed)


def test_who_waits_for_workers_at_the_exit_holds_up_nothing(tmp_path: Path) -> None:
    """Its error is raised under the engine's lock."""
    source = """
        import atexit, contextlib, threading

        atexit.register(lambda: print(streamer.stats().state))  # runs after ours

        from service_streamer import ManagedModel, Streamer, StreamerClosed
        import service_streamer.engine.threads as threads

        class Loads(ManagedModel):
            def init_model(self):
                threading.Event().wait()

            def predict(self, batch):
                return batch

        def wait():
            with contextlib.suppress(StreamerClosed):
                streamer.wait_ready()

        if __name__ == "__main__":
            threads.LONGEST_EXIT = 3600.0
            streamer = Streamer(Loads)
            threading.Thread(target=wait, daemon=True).start()
            while not streamer.engine.changed._waiters:
                threading.Event().wait(0.001)
    """
    code, out, err = outcome(source, tmp_path)
    assert (code, out) == (0, "closed\n")
    assert "Traceback" not in err


def test_nor_do_those_that_wait_for_hosts_beyond_redis(
    tmp_path: Path, redis_server: str, prefix: str
) -> None:
    source = f"""
        import threading
        from service_streamer import RedisStreamer
        import service_streamer.engine.threads as ours

        if __name__ == "__main__":
            ours.LONGEST_EXIT = 3600.0
            streamer = RedisStreamer({redis_server!r}, {prefix!r}, worker_timeout=None)
            threads = [
                threading.Thread(target=streamer.predict, args=([1],), daemon=True),
                threading.Thread(target=lambda: next(streamer.stream(1)), daemon=True),
            ]
            for thread in threads:
                thread.start()
            while streamer.stats().pending < 2:
                threading.Event().wait(0.001)
    """
    assert outcome(source, tmp_path) == (0, "", "")


# -- errors of megabytes

LONG = 4 << 20


def raise_long_text(batch: list[int]) -> None:
    raise ValueError("x" * LONG)


def raise_large_argument(batch: list[int]) -> None:
    raise UnicodeDecodeError("utf8", b"x" * LONG, 0, 1, "bad byte")


@pytest.mark.parametrize("model", [raise_long_text, raise_large_argument])
def test_an_exception_of_megabytes_is_replaced_by_a_short_one(model: object) -> None:
    match = "more than 1048576 bytes"
    streamer = Streamer(model, worker_timeout=None)  # type: ignore[arg-type]
    with streamer, pytest.raises(ModelError, match=match) as caught:
        streamer.predict([1])
    assert len(str(caught.value)) < 20_000
    trace = str(caught.value.__cause__)
    assert f"in {model.__name__}" in trace  # type: ignore[attr-defined]
    assert len(trace) < 40_000


def test_a_summary_says_how_much_it_leaves_out() -> None:
    text = Failure(ValueError("x" * 20_000)).text
    assert text.startswith("ValueError: xxx")
    assert text.endswith("x... (3616 more characters)")


def caught(error: BaseException) -> str:
    try:
        raise error
    except BaseException as raised:
        cause = Failure.caught(raised).exception().__cause__
        assert type(cause).__name__ == "RemoteTraceback"
        return cause.text  # type: ignore[attr-defined]


def test_a_traceback_keeps_its_causes_when_their_texts_are_cut() -> None:
    long = KeyError("y" * 40_000)
    error = ValueError("outer")
    error.__cause__ = long
    long.__context__ = error  # a cycle is no reason to hang
    text = caught(error)
    assert text.index("KeyError: 'yyy") < text.index("direct cause") < text.index("ValueError: ou")
    assert "more characters)" in text
    assert len(text) < 40_000


def test_groups_and_notes_of_megabytes_are_cut() -> None:
    group = BaseExceptionGroup("several", [ValueError("z" * LONG)])
    assert len(caught(group)) < 40_000
    noted = ValueError("short")
    noted.add_note("z" * LONG)
    assert len(caught(noted)) < 40_000
    noted.__notes__ = [5]  # type: ignore[list-item]
    assert "ValueError: short" in caught(noted)


# -- a fork in a callback


def test_a_fork_in_a_callback_is_blamed_on_the_fork(tmp_path: Path) -> None:
    source = """
        import os, sys, threading
        from service_streamer import StreamerForked, ThreadedStreamer

        def fork(future):
            child = os.fork()
            if not child:
                for use in (streamer.predict, lambda batch: streamer.wait_ready()):
                    try:
                        use([1])
                    except StreamerForked:
                        print("forked", flush=True)
                os._exit(0)
            os.waitpid(child, 0)
            done.set()

        if __name__ == "__main__":
            done = threading.Event()
            streamer = ThreadedStreamer(lambda batch: batch)
            streamer.submit([1]).add_done_callback(fork)
            done.wait()
            streamer.close()
    """
    assert outcome(source, tmp_path) == (0, "forked\nforked\n", "")
