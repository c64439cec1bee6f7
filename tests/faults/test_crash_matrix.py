"""Where something goes wrong, crossed with how: the culprit has its error, nobody else notices."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fault_models import FAULTS, Faulty, FaultyOnDevice1, Hang, Mishap, culprit
from fault_processes import GONE, Watch, await_line, descendants, running

from cases import long_cases
from service_streamer import ModelError, Streamer, UnpicklableItem, WorkerLost, WorkerStartError
from service_streamer.testing import Gate


class Fails(NamedTuple):
    """The culprit's call fails, and its neighbours succeed.

    Attributes:
        error: its very class.
        match: in its text.
        cause: in the text of its cause, or of its cause's cause.
        restarts: how many workers had to be started again; of ``DEATHS`` it may be one less.
    """

    error: type[Exception]
    match: str
    cause: str = ""
    restarts: int = 0


#: It happens in the web process and ends that; then all the workers end.
DIES = "the web process dies"
#: It happens in the caller's own thread.
BLOCKS = "the caller waits for itself"

#: Of an item that kills among four: by halves with 4, 2 and 1. Where a death takes long, beside
#: a call of the model, the parts are smaller, and it is one less.
DEATHS = 3
FEWEST_DEATHS = 2
# One of two, of two attempts: each takes the batch_timeout and what it takes to end a worker.
HANGS = 2
# What was in a batch with which a GPU failed for good has two attempts in all.
ATTEMPTS = 2
# Tried three times, since several that load at the same time may run out of memory together.
STARTS = 2

KILLED = r"died: killed by SIGKILL \(perhaps out of memory"
CRASHED = r"died: killed by SIGSEGV \(a crash in native code\)"
GPU_FAILED = "ended itself, since its GPU failed .*: CUDA error: device-side assert triggered$"
HUNG = r"was killed: it was at one batch for more than batch_timeout of 4 s"
NOT_LOADED = "died before it had loaded its model: "
SLOW = r"was killed: it had not loaded its model within start_timeout of 15 s"
SENT = "item 0 of the batch, of type FailsToPickle, cannot be sent to a worker process "
ARRIVED = "the item cannot be unpickled in the worker: "
RETURNED = "the result, of type FailsToPickle, cannot be sent from the worker "
CAME_BACK = "a result cannot be unpickled in the web process: "
STANDS_IN = r"LockedMishap: holds a lock \(stands in for the worker's exception: it cannot be pick"

MATRIX: dict[str, dict[str, Any]] = {
    "pickle an item": {
        "raise": Fails(UnpicklableItem, SENT + r"\(Mishap: as asked\)"),
        "raise unpicklable": Fails(UnpicklableItem, SENT + r"\(LockedMishap: holds a lock\)"),
        "exit": Fails(UnpicklableItem, SENT + r"\(SystemExit: 5\)"),
        "kill": DIES,
        "segfault": DIES,
        "hang": BLOCKS,
        "GPU error": Fails(UnpicklableItem, SENT + r"\(AcceleratorError: CUDA error"),
    },
    "unpickle an item": {
        "raise": Fails(UnpicklableItem, ARRIVED + "Mishap: as asked", "in commit"),
        "raise unpicklable": Fails(UnpicklableItem, ARRIVED + "LockedMishap: holds", "in commit"),
        "exit": Fails(UnpicklableItem, ARRIVED + "SystemExit: 5", "in commit"),
        "kill": Fails(WorkerLost, KILLED, restarts=DEATHS),
        "segfault": Fails(WorkerLost, CRASHED, "in commit", DEATHS),
        "hang": Fails(WorkerLost, HUNG, "in commit", HANGS),
        "GPU error": Fails(WorkerLost, GPU_FAILED, restarts=ATTEMPTS),
    },
    "load the model": {
        "raise": Fails(WorkerStartError, "could not load the model: Mishap: as asked", "in commit"),
        "raise unpicklable": Fails(WorkerStartError, "load the model: LockedMishap: holds a lock"),
        "exit": Fails(WorkerStartError, NOT_LOADED + "it exited with code 5", restarts=STARTS),
        "kill": Fails(WorkerStartError, NOT_LOADED + "killed by SIGKILL", restarts=STARTS),
        "segfault": Fails(WorkerStartError, NOT_LOADED + "killed by SIGSEGV", "in commit", STARTS),
        "hang": Fails(WorkerStartError, SLOW, "in commit"),  # tried once, to be quick
        "GPU error": Fails(
            WorkerStartError, "could not load the model: AcceleratorError: CUDA error"
        ),
    },
    "predict": {
        "raise": Fails(Mishap, "^as asked$", "in commit"),
        "raise unpicklable": Fails(ModelError, STANDS_IN, "in commit"),
        "exit": Fails(WorkerLost, "died: it exited with code 5$", restarts=DEATHS),
        "kill": Fails(WorkerLost, KILLED, restarts=DEATHS),
        "segfault": Fails(WorkerLost, CRASHED, "in commit", DEATHS),
        "hang": Fails(WorkerLost, HUNG, "in commit", HANGS),
        "GPU error": Fails(WorkerLost, GPU_FAILED, restarts=ATTEMPTS),
    },
    "pickle a result": {
        "raise": Fails(ModelError, RETURNED + r"\(Mishap: as asked\)", "in commit"),
        "raise unpicklable": Fails(ModelError, RETURNED + r"\(LockedMishap: holds", "in commit"),
        "exit": Fails(ModelError, RETURNED + r"\(SystemExit: 5\)", "in commit"),
        "kill": Fails(WorkerLost, KILLED, restarts=DEATHS),
        "segfault": Fails(WorkerLost, CRASHED, "in commit", DEATHS),
        "hang": Fails(WorkerLost, HUNG, "in commit", HANGS),
        "GPU error": Fails(WorkerLost, GPU_FAILED, restarts=ATTEMPTS),
    },
    "unpickle a result": {
        "raise": Fails(ModelError, CAME_BACK + "Mishap: as asked"),
        "raise unpicklable": Fails(ModelError, CAME_BACK + "LockedMishap: holds a lock"),
        "exit": Fails(ModelError, CAME_BACK + "SystemExit: 5"),
        "kill": DIES,
        "segfault": DIES,
        "hang": BLOCKS,
        "GPU error": Fails(ModelError, CAME_BACK + "AcceleratorError: CUDA error"),
    },
}

SERVING = ("pickle an item", "unpickle an item", "predict", "pickle a result", "unpickle a result")

# Only for what hangs, and long: nobody else is to be killed for it, however busy the machine is.
BATCH_TIMEOUT = 4
START_TIMEOUT = 15

#: Forked workers are there at once.
both_methods = pytest.mark.parametrize("method", ["fork", *long_cases("spawn")])
#: Hangs take seconds: test_hangs.py has a short test.
LONG_HANGS = ("unpickle an item", "predict", "pickle a result", "load the model")


@pytest.fixture
def time_for_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hangs may write them down when the machine lets it."""
    monkeypatch.setattr("service_streamer.workers.process._STACKS_GRACE", 5.0)


def cells(
    stages: Sequence[str], belongs: Callable[[Any], bool] = lambda outcome: True
) -> pytest.MarkDecorator:
    """Parametrizes a test with the cells of these stages whose outcome belongs to it."""
    return pytest.mark.parametrize(
        ("stage", "fault", "expected"),
        [
            pytest.param(
                stage,
                fault,
                outcome,
                id=f"{stage}-{fault}",
                marks=pytest.mark.long if fault == "hang" and stage in LONG_HANGS else (),
            )
            for stage, fault in itertools.product(stages, FAULTS)
            if belongs(outcome := MATRIX[stage][fault])
        ],
    )


def check(error: BaseException | None, expected: Fails) -> None:
    """The error is the one that is expected, with the cause that is expected."""
    assert type(error) is expected.error
    with pytest.raises(expected.error, match=expected.match):
        raise error
    if expected.cause:
        cause = error.__cause__
        assert cause is not None
        assert expected.cause in f"{cause}{cause.__cause__}"


# -- while it serves


@both_methods
@cells(SERVING, lambda outcome: isinstance(outcome, Fails))
@pytest.mark.usefixtures("time_for_stacks")
def test_the_culprit_fails_and_those_in_the_same_batch_do_not(
    stage: str, fault: str, expected: Fails, method: str, gate: Gate
) -> None:
    # Two items are enough for those that hang, since each time takes seconds.
    size, attempts, limit = (2, 2, BATCH_TIMEOUT) if fault == "hang" else (4, 3, None)
    streamer = Streamer(
        Faulty, size, model_init_args=(gate,), mp_start_method=method,
        max_attempts=attempts, batch_timeout=limit,
    )  # fmt: skip
    with streamer:
        before = [streamer.submit([i]) for i in range(size // 2)]
        future = streamer.submit([culprit(stage, fault)])
        after = [streamer.submit([i]) for i in range(size // 2, size - 1)]
        gate.let_through(100)  # each worker that loads
        check(future.exception(), expected)
        assert results(before + after) == [[2 * i] for i in range(size - 1)]
        fewest = FEWEST_DEATHS if expected.restarts == DEATHS else expected.restarts
        assert fewest <= streamer.stats().restarts <= expected.restarts


def results(futures: Sequence[Future[list[Any]]]) -> list[list[Any]]:
    return [future.result() for future in futures]


@both_methods
@cells(SERVING, lambda outcome: outcome is DIES)
def test_workers_end_with_a_web_process_that_dies_of_its_own_items_and_results(
    stage: str, fault: str, expected: str, method: str, tmp_path: Path
) -> None:
    source = f"""
        import sys
        from fault_models import Faulty, culprit
        from service_streamer import Streamer
        from service_streamer.testing import Gate

        if __name__ == "__main__":
            gate = Gate({str(tmp_path / "gate")!r})
            gate.let_through(2)
            streamer = Streamer(
                Faulty, 8, worker_num=2, model_init_args=(gate,), mp_start_method={method!r}
            )
            streamer.wait_ready()
            print("ready", flush=True)
            sys.stdin.readline()
            streamer.predict([culprit({stage!r}, {fault!r})])
    """
    with running(source, tmp_path) as program:
        await_line(program, "ready")
        with Watch(descendants(program.pid)) as workers:
            program.communicate("go on\n")
            ended_by = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV}[fault]
            assert program.returncode == -ended_by
            assert workers.alive_after(GONE) == []


@both_methods
@cells(SERVING, lambda outcome: outcome is BLOCKS)
def test_a_caller_whose_own_item_or_result_hangs_holds_up_nobody_else(
    stage: str, fault: str, expected: str, method: str, gate: Gate
) -> None:
    outputs: list[str] = []
    gate.let_through()
    with Streamer(
        Faulty, 8, worker_timeout=None, model_init_args=(gate,), mp_start_method=method
    ) as streamer:
        thread = threading.Thread(
            target=lambda: outputs.extend(streamer.predict([culprit(stage, fault)]))
        )
        with Hang() as hang:
            thread.start()
            hang.has_begun.wait()
            assert streamer.predict([1, 2, 3]) == [2, 4, 6]
            assert streamer.submit([4]).result() == [8]
            assert outputs == []
        thread.join()
        assert outputs == [2 * "let go" if stage == "pickle an item" else "let go"]


# -- while it loads


@both_methods
@cells(["load the model"])
@pytest.mark.usefixtures("time_for_stacks", "eight_gpus")
def test_a_worker_that_does_not_load_is_reported_and_the_other_one_serves(
    request: pytest.FixtureRequest, stage: str, fault: str, expected: Fails, method: str
) -> None:
    hangs = fault == "hang"
    if hangs:
        request.getfixturevalue("no_quick_restarts")
    streamer = Streamer(
        FaultyOnDevice1, 8, worker_num=2, cuda_devices=(0, 1), worker_timeout=None,
        model_init_args=(fault,), mp_start_method=method,
        # Worker 0 has to make it in that time.
        start_timeout=START_TIMEOUT if hangs else None,
    )  # fmt: skip
    with streamer:
        meanwhile = [streamer.submit([i]) for i in range(20)]
        with pytest.raises(WorkerStartError) as caught:
            streamer.wait_ready()
        check(caught.value, expected)
        assert results(meanwhile) == [[0]] * 20
        assert streamer.predict([1, 2]) == [0, 0]
        assert streamer.stats().restarts == expected.restarts
        assert streamer.stats().workers["failed"] == 1
