"""A worker that breaks the protocol is ended for it, and nobody else notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from protocol_models import Forks, breaches

from cases import long_cases
from service_streamer import Streamer, WorkerLost

both_methods = pytest.mark.parametrize("method", ["spawn", *long_cases("fork")])

BREACHES = {
    # By itself it is right, so it is the worker's own answer that is one too many.
    "answers twice": "it answered batch 0, which it does not hold",
    "answers what it does not hold": "it answered batch 1000000, which it does not hold",
    "answers with an id that is none": "its answer cannot be read (TypeError: unhashable",
    "answers with too few results": "it answered a batch of 1 with 0 results",
    "answers with too many results": "it answered a batch of 1 with 2 results",
    "sends outputs of what it does not hold": f"it sent an output of batch 1{'0' * 39}, which",
    "unknown kind": "its answer cannot be read (TypeError: ",
    "another version": "its messages have version 10, and this process reads version 9; restart",
    "no message": "its answer cannot be read (ValueError: not enough values to unpack",
    "no tuple": "its answer cannot be read (TypeError: ",
    "no pickle": "its answer cannot be read (UnpicklingError: ",
    "no frame": "its answer cannot be read (",
}


def test_a_breach_of_the_protocol_is_the_death_of_its_worker_alone() -> None:
    options: dict[str, Any] = {"max_attempts": 2, "mp_start_method": "fork"}
    with Streamer(breaches, 2, worker_num=2, worker_timeout=None, **options) as streamer:
        for breach in BREACHES:
            before = streamer.stats().restarts
            if breach == "answers twice":
                # Its callers have their answer, and the worker dies of the second.
                assert streamer.predict([breach]) == [None]
            else:
                with pytest.raises(WorkerLost) as caught:
                    streamer.predict([breach])
                assert f"was killed: it broke the protocol: {BREACHES[breach]}" in str(caught.value)
            assert streamer.predict([1, 2, 3, 4, 5, 6]) == [2, 4, 6, 8, 10, 12]
            streamer.wait_ready()
            restarts = streamer.stats().restarts - before
            assert restarts == (1 if breach == "answers twice" else 2), breach
            assert streamer.stats().state == "running"


@both_methods
def test_a_fork_that_comes_back_from_the_model_ends_and_answers_nothing(
    method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with Streamer(Forks, 4, worker_timeout=None, mp_start_method=method) as streamer:
        for how, status in (("returns", 70), ("raises", 70), ("exits", 7)):
            assert streamer.predict([1, how]) == [2, status]
            assert streamer.predict([3]) == [6]
            assert streamer.predict(["child"]) == [True], "the worker's own children live"
            said = "has forked returned from the model, and ends" in capfd.readouterr().err
            assert said == (how != "exits")
        assert streamer.stats().restarts == 0
        assert streamer.stats().failed == 0


@both_methods
@pytest.mark.parametrize("how", ["returns", "raises", "exits"])
def test_a_fork_that_comes_back_from_loading_ends_as_well(
    how: str, method: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"model_init_args": (str(tmp_path), how)}
    with Streamer(Forks, 4, worker_timeout=None, mp_start_method=method, **options) as streamer:
        streamer.wait_ready()
        assert (tmp_path / "forked").read_text() == how
        assert streamer.predict([1, 2]) == [2, 4]
        assert streamer.stats().restarts == 0
