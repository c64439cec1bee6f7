"""Random walks through the public API, over real threads, processes, pools and Redis.

What a walk does is drawn from its seed before it begins, so the same seed gives the same list of
actions. When what happens is up to the machine: a fault may need the walk to be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import random
import secrets
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import CancelledError, wait
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from leavings import leavings
from service_streamer import (
    Overloaded,
    PredictTimeout,
    RedisStreamer,
    RedisWorker,
    SharedBatchError,
    Streamer,
    StreamerClosed,
    StreamerForked,
    ThreadedStreamer,
    TooLate,
    WorkerLost,
)

from .interrupts import Interrupted, interrupted_at
from .models import STEPS, Steps, length, model
from .world import Fault

Action = tuple[Any, ...]

KINDS = ("thread", "steps_thread", "process", "steps_process", "shared", "redis")

#: The alarm: what a call, a thread or a process gets to end, seconds.
PATIENCE = 120.0

#: Who accepts a call elsewhere learns of a refusal later, from the future.
_IS_FAR = frozenset({"shared", "redis"})


# -- what to do


def make(kind: str, seed: int) -> tuple[dict[str, Any], list[Action]]:
    """The options of a streamer of this kind, and what to do with it."""
    rng = random.Random(f"{kind} {seed}")
    pick = rng.choice
    is_process = kind not in ("thread", "steps_thread")
    options: dict[str, Any] = {
        "batch_size": pick([1, 2, 8]),
        "max_latency": pick([0.0, 0.01]),
        "retry": rng.random() < 0.8,
    }
    if rng.random() < 0.4:
        options["max_pending"] = pick([8, 60])
    if rng.random() < 0.3 and kind != "redis":
        options["length"] = length
    if rng.random() < 0.2:
        options["deduplicate"] = True
    if is_process:
        options["worker_num"] = pick([1, 2])
    names = [name for name, kinds in _WEIGHTS.items() if kinds is None or kind in kinds]
    if rng.random() < 0.5:  # a few of them, which lead deeper
        names = [name for name in names if name == "submit" or rng.random() < 0.4]
    actions: list[Action] = []
    for _ in range(pick([4, 8, 16])):
        name = pick(names)
        actions.append((name, *_NUMBERS[name](rng)))
    actions.append(
        pick([("finish",), ("finish",), ("close", False), ("close", False), ("close", True, 0.05),
              ("forget",)])
    )  # fmt: skip
    if actions[-1][0] == "close":
        actions.insert(-1, ("submit", pick([1, 6]), 1, "long", None, 0, ""))
    return options, actions


def _submit(rng: random.Random) -> tuple[Any, ...]:
    how: tuple[Any, ...] = (None, 0, "")
    if rng.random() < 0.4:
        how = (
            rng.choice([None, 0.02, 0.3, 30.0]), rng.choice([0, 1, -1]), rng.choice(["", "a", "b"])
        )  # fmt: skip
    kind = rng.choice(["ok", "ok", "ok", "slow", "bad"])
    return (rng.choice([1, 5, 40]), rng.choice([1, 1, 3, 10]), kind, *how)


_PROCESSES = frozenset({"process", "steps_process", "shared", "redis"})
_OWN = frozenset({"process", "steps_process"})

#: For which kinds each action is; None for all.
_WEIGHTS: dict[str, frozenset[str] | None] = {
    "submit": None, "streams": None, "predict": None, "tasks": None, "overload": None,
    "cancel": None, "collect": None, "interrupts": None, "fork": None, "wait": None,
    "kill": _PROCESSES, "restart": _OWN, "scale": _OWN,
}  # fmt: skip

_NUMBERS: dict[str, Callable[[random.Random], tuple[Any, ...]]] = {
    "submit": _submit,
    "streams": lambda rng: (
        rng.choice([1, 5, 20]), rng.choice(["read", "part", "drop", "cycle", "close", "keep"]),
        rng.choice([None, None, 0.01, 30.0]), rng.choice([1, 1024]),
    ),
    "predict": lambda rng: (rng.choice([1, 4, 12]), rng.choice([1, 5]), rng.choice([None, 0.01])),
    "tasks": lambda rng: (rng.choice([1, 8]), rng.random() < 0.5),
    "overload": lambda rng: (rng.choice([20, 60]), rng.choice([0.005, 0.05])),
    "cancel": lambda rng: (rng.choice([1, 10]),),
    "collect": lambda rng: (),
    "interrupts": lambda rng: (rng.choice([5, 30]),),
    "fork": lambda rng: (),
    "wait": lambda rng: (),
    "kill": lambda rng: (),
    "restart": lambda rng: (rng.choice([True, False, "auto"]),),
    "scale": lambda rng: (rng.choice([1, 2, (1, 2)]),),
}  # fmt: skip


# -- doing it


def walk(kind: str, seed: int, *, redis: str = "") -> str | None:
    """Do what this seed says.

    Args:
        redis: the URL of one, for the kind "redis".

    Returns:
        What was wrong, with the options and the actions, or None.
    """
    options, actions = make(kind, seed)
    resource_tracker.ensure_running()  # of the standard library; it stays
    before = leavings()
    threshold = gc.get_threshold()
    gc.set_threshold(50)  # so that finalizers run in the middle of anything
    fault = ""
    try:
        _Walk(kind, seed, options, redis).run(actions)
        _until("something is left", lambda: not leavings() - before, lambda: leavings() - before)
    except Fault as error:
        fault = str(error)
    except Exception as error:
        fault = repr(error)
    finally:
        gc.set_threshold(*threshold)
    if not fault:
        return None
    listing = "".join(f"\n      {action}" for action in actions)
    return f"{fault}\n    {kind}, seed {seed}, {options}{listing}"


class _Known:
    """A call that was accepted."""

    def __init__(self, items: list[str], timeout: float | None) -> None:
        self.items, self.timeout = items, timeout
        self.future: Any = None
        self.ends = 0


class _Walk:
    def __init__(self, kind: str, seed: int, options: dict[str, Any], redis: str) -> None:
        self.kind, self.options = kind, options
        self.rng = random.Random(f"{kind} {seed} as it goes")
        self.calls: list[_Known] = []
        self.kept: list[Any] = []  # streams
        self.count = self.interrupted = 0
        self.has_killed = self.is_closed = False
        self.pids: set[int] = set()
        self.faults: list[str] = []  # of other threads
        self.host: RedisWorker | None = None
        self.streamer: Any = self._build(redis)

    def _build(self, redis: str) -> Any:
        options = {"worker_timeout": PATIENCE, **self.options}
        computes: Any = Steps if self.kind.startswith("steps") else model
        if self.kind in ("thread", "steps_thread"):
            return ThreadedStreamer(computes, **options)
        if self.kind == "shared":
            name = f"walk-{os.getpid()}-{secrets.token_hex(3)}"
            return Streamer(computes, shared=name, linger=0.1, **options)
        if self.kind != "redis":
            return Streamer(computes, **options)
        of_host = ("batch_size", "max_latency", "retry", "worker_num")
        place: dict[str, Any] = {
            "redis_broker": redis, "prefix": f"walk-{os.getpid()}-{secrets.token_hex(3)}"
        }  # fmt: skip
        self.host = RedisWorker(computes, **place, **{name: options.pop(name) for name in of_host})
        self.host.start()
        return RedisStreamer(**place, **options)

    def run(self, actions: list[Action]) -> None:
        try:
            for name, *numbers in actions:
                getattr(self, f"_{name}")(*numbers)
                if self.faults:
                    raise Fault(self.faults[0])
        finally:
            self.kept.clear()
            streamer, self.streamer = self.streamer, None
            if streamer is not None:
                streamer.close(drain=False)
            if self.host is not None:
                self.host.close(drain=False)

    # Callers.

    def _items(self, size: int, kind: str) -> list[str]:
        self.count += size
        items = [f"ok:{self.count - i}" for i in range(size)]
        items[0] = f"{kind}:{self.count}"
        return items

    def _begin(self, items: list[str], timeout: float | None, **options: Any) -> None:
        known = _Known(items, timeout)
        try:
            known.future = self.streamer.submit(items, timeout, **options)
        except (Overloaded, PredictTimeout) as error:
            self._refused(error, timeout)
            return
        self.calls.append(known)
        if len(self.calls) % 2:
            known.future.add_done_callback(lambda _: setattr(known, "ends", known.ends + 1))

    def _refused(self, error: Exception, timeout: float | None) -> None:
        if isinstance(error, PredictTimeout):
            if timeout is None:
                raise Fault(f"a call without a timeout was refused for its time: {error}")
        elif "max_pending" not in self.options:
            raise Fault(f"refused without max_pending: {error}")

    def _submit(
        self, calls: int, size: int, kind: str, timeout: float | None, priority: int, tenant: str
    ) -> None:
        for _ in range(calls):
            self._begin(self._items(size, kind), timeout, priority=priority, tenant=tenant)

    def _overload(self, calls: int, timeout: float) -> None:
        """More than can be computed, and calls and streams that have no time to wait for it."""
        for _ in range(calls):
            self._begin(self._items(1, "slow"), None)
        until = time.monotonic() + 0.4
        while time.monotonic() < until and not all(each.future.done() for each in self.calls):
            self._begin(self._items(1, "slow"), None)  # so that some always wait
            time.sleep(0.005)
        for turn in range(20):
            if turn % 2:
                self._begin(self._items(1, "ok"), timeout)
            else:
                self._streams(1, "drop", timeout, 1024)

    def _streams(self, streams: int, how: str, timeout: float | None, most: int) -> None:
        for _ in range(streams):
            items = self._items(1, "ok")
            if how == "keep" and len(self.kept) + 1 >= self.options["batch_size"]:
                most = sys.maxsize  # an item that rests keeps its place, so one is left for others
            try:
                stream = self.streamer.stream(items[0], timeout, max_buffered=most)
            except (Overloaded, PredictTimeout) as error:
                self._refused(error, timeout)
                continue
            known = _Known(items, timeout)
            if how == "read":
                self._read(stream, known)
            elif how == "part":
                self._read(stream, known, 1)
            elif how == "cycle":
                cycle = [stream]
                cycle.append(cycle)  # type: ignore[arg-type]
                del cycle
            elif how == "close":
                stream.close()
            elif how == "keep":
                self.kept.append((stream, known))
            del stream

    def _read(self, stream: Any, known: _Known, most: int = sys.maxsize) -> None:
        outputs: list[str] = []
        try:
            for output in stream:
                outputs.append(output)
                if len(outputs) == most:
                    return
        except Exception as error:
            self._check_error(known, error)
        else:
            self._check_outputs(known.items[0], outputs)

    def _predict(self, threads: int, calls: int, timeout: float | None) -> None:
        items = [[self._items(2, "ok") for _ in range(calls)] for _ in range(threads)]

        def ask(batches: list[list[str]]) -> None:
            for batch in batches:
                known = _Known(batch, timeout)
                try:
                    more = {} if timeout is None else {"timeout": timeout}
                    self._check_results(known, self.streamer.predict(batch, **more))
                except Overloaded as error:
                    self._noted(self._refused, error, timeout)
                except Exception as error:
                    self._noted(self._check_error, known, error)

        callers = [threading.Thread(target=ask, args=(each,), daemon=True) for each in items]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(PATIENCE)
            if caller.is_alive():
                raise Fault(_with_stacks("a predict does not return"))

    def _noted(self, check: Callable[..., None], *arguments: Any) -> None:
        try:
            check(*arguments)
        except Fault as fault:
            self.faults.append(str(fault))

    def _tasks(self, tasks: int, is_cancelled: bool) -> None:
        async def ask() -> None:
            batches = [self._items(2, "slow") for _ in range(tasks)]
            asked = [asyncio.create_task(self.streamer.apredict(batch)) for batch in batches]
            await asyncio.sleep(0.002)
            if is_cancelled:
                for task in asked[::2]:
                    task.cancel()
            results = await asyncio.wait_for(
                asyncio.gather(*asked, return_exceptions=True), PATIENCE
            )
            for batch, result in zip(batches, results, strict=True):
                known = _Known(batch, None)
                if isinstance(result, Overloaded):
                    self._refused(result, None)
                elif isinstance(result, BaseException):
                    if not (is_cancelled and isinstance(result, asyncio.CancelledError)):
                        self._check_error(known, result)
                else:
                    self._check_results(known, result)

        asyncio.run(ask())

    def _cancel(self, most: int) -> None:
        for known in self.rng.sample(self.calls, min(most, len(self.calls))):
            known.future.cancel()

    def _collect(self) -> None:
        gc.collect()

    def _interrupts(self, times: int) -> None:
        """A signal handler raises somewhere in a few calls."""
        for _ in range(times):
            place = self.rng.randrange(600)
            with contextlib.suppress(Interrupted), interrupted_at(place) as has_come:
                for _ in range(4):
                    self._begin(self._items(1, "ok"), None)
            self.interrupted += has_come.is_set()
            self._wait()

    def _fork(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # with threads: that is what is tried
            child = os.fork()
        if not child:
            code = 1
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(60)
                # A shared pool has a client for each process. Over Redis it depends on whether the
                # streamer was used before.
                try:
                    future = self.streamer.submit(["ok:0"])
                    code = 0 if self.kind in _IS_FAR and future.result() else 2
                except StreamerForked:
                    code = 3 if self.kind == "shared" else 0
                except Overloaded:
                    code = 0 if self.kind in _IS_FAR else 4
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code:
            raise Fault(f"a forked child ended with {code}")

    # Their owner.

    def _kill(self) -> None:
        """End a worker that has computed something, as the kernel does without memory."""
        self._begin(self._items(1, "ok"), None)
        self._wait()
        pids = [pid for pid in sorted(self.pids) if _is_worker(pid)]
        if pids:
            self.has_killed = True
            self._submit(5, 2, "slow", None, 0, "")
            os.kill(self.rng.choice(pids), signal.SIGKILL)

    def _restart(self, overlap: Any) -> None:
        self.streamer.restart_workers(PATIENCE, overlap=overlap)

    def _scale(self, workers: Any) -> None:
        self.streamer.scale(workers)

    # The end, and what must hold.

    def _wait(self) -> None:
        """Until all that was accepted has ended."""
        left = wait([known.future for known in self.calls], timeout=PATIENCE).not_done
        if left:
            text = f"{len(left)} of {len(self.calls)} accepted calls do not end: {self.streamer!r}"
            raise Fault(_with_stacks(text))
        for known in self.calls:
            self._check_end(known)
        self.calls.clear()

    def _check_end(self, known: _Known) -> None:
        try:
            results = known.future.result()
        except CancelledError:
            return
        except Exception as error:
            self._check_error(known, error)
        else:
            self._check_results(known, results)
        if known.ends > 1:
            raise Fault(f"{known.items} ended {known.ends} times")

    def _check_results(self, known: _Known, results: list[Any]) -> None:
        if len(results) != len(known.items):
            raise Fault(f"{known.items} have {len(results)} results")
        for item, result in zip(known.items, results, strict=True):
            self._check_outputs(item, result if isinstance(result, list) else [result])

    def _check_outputs(self, item: str, outputs: list[str]) -> None:
        made = [output.partition("@") for output in outputs]
        if self.kind.startswith("steps"):
            expected = [f"{item}.{at}" for at in range(STEPS)]
        else:
            expected = [item]
        if [name for name, _, _ in made] != expected:
            raise Fault(f"{item} has the outputs {outputs}")
        self.pids |= {int(pid) for _, _, pid in made}

    def _check_error(self, known: _Known, error: BaseException) -> None:
        is_right = {
            PredictTimeout: known.timeout is not None,
            TooLate: known.timeout is not None,
            StreamerClosed: self.is_closed,
            # An interrupt in the middle of a message to a process ends that process.
            WorkerLost: self.has_killed or self.interrupted > 0,
            Overloaded: self.kind in _IS_FAR and "max_pending" in self.options,
            SharedBatchError: not self.options["retry"],
            ValueError: any(item.startswith("bad") for item in known.items),
        }.get(type(error), False)
        if not is_right:
            raise Fault(f"{known.items}, with timeout {known.timeout}, failed with {error!r}")

    def _finish(self) -> None:
        """Everything ends, and a fresh call is answered."""
        for stream, known in self.kept:
            self._read(stream, known)
        self.kept.clear()
        self._wait()
        gc.collect()
        self._check_counts()
        self._begin(self._items(1, "ok"), None)
        if not self.calls:
            raise Fault("a fresh call was refused")
        self._wait()
        self._check_counts()
        self._close(True)

    def _close(self, drain: bool, timeout: float | None = None) -> None:
        self.is_closed = True
        self.streamer.close(drain, timeout)
        for stream, known in self.kept:
            self._read(stream, known)
        self.kept.clear()
        self._wait()
        if self.kind != "shared":  # nobody is left to ask
            self._check_counts()
        try:
            self.streamer.submit(["ok:0"])
        except StreamerClosed:
            return
        raise Fault("a closed streamer accepts calls")

    def _forget(self) -> None:
        """Nothing refers to it any more: it drains, and ends."""
        self.kept.clear()
        self.streamer = None
        gc.collect()
        left = wait([known.future for known in self.calls], timeout=PATIENCE).not_done
        if left:
            raise Fault(_with_stacks(f"{len(left)} accepted calls of a forgotten one do not end"))

    def _check_counts(self) -> None:
        """Nothing waits or runs, and each call that was accepted has ended in one way."""

        def stats() -> Any:
            return self.host.stats().pool if self.host is not None else self.streamer.stats()

        def are_zero() -> bool:
            now = stats()
            return not (now.pending or now.in_flight or now.batches_in_flight)

        _until("not all counts are zero", are_zero, stats)
        if self.host is not None:
            _until("calls are pending", lambda: not self.streamer.stats().pending, stats)
        now = stats()
        ended = now.answered + now.failed + now.cancelled + now.expired
        if now.accepted != ended:  # what was refused is counted apart
            raise Fault(
                f"{now.accepted} calls were accepted, and {ended} have ended; "
                f"{self.interrupted} were interrupted: {now}"
            )


def _until(what: str, holds: Callable[[], bool], shows: Callable[[], Any]) -> None:
    over = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > over:
            raise Fault(_with_stacks(f"{what}: {shows()}"))
        gc.collect()
        time.sleep(0.005)


def _with_stacks(text: str) -> str:
    sys.stderr.write(f"\n{text}\n")
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    return text


def _is_worker(pid: int) -> bool:
    """Whether it is a process below this one, and not this one."""
    if pid == os.getpid():
        return False
    with contextlib.suppress(OSError, ValueError):
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return status[0] != "Z"
    return False
