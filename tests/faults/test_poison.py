"""An item among others that kills each worker which computes it: it fails, and nothing else."""

from __future__ import annotations

import pytest
from fault_models import Faulty

from service_streamer import Streamer, WorkerLost
from service_streamer.testing import Gate

KILLER = ("predict", "kill")


def test_of_a_thousand_calls_only_the_poisonous_one_fails(gate: Gate) -> None:
    with Streamer(Faulty, 64, model_init_args=(gate,)) as streamer:
        futures = [streamer.submit([KILLER if i == 357 else i]) for i in range(1001)]
        gate.let_through(100)  # the workers to come as well
        with pytest.raises(WorkerLost):
            futures.pop(357).result()
        others = [i for i in range(1001) if i != 357]
        assert [future.result() for future in futures] == [[2 * i] for i in others]
        stats = streamer.stats()
    # By halves 7 workers die. To load this model takes longer than a few calls of it, so the parts
    # are smaller; one by one it takes 3: of the batch, and the attempts of the one that is alone.
    assert 3 <= stats.restarts <= 7
    assert stats.isolated == 1


def test_a_call_of_many_items_fails_for_one_of_them_and_its_neighbours_do_not(gate: Gate) -> None:
    calls = [[0, 1, 2], [3], [4, 5, KILLER, 6, 7, 8, 9, 10], [11], [12, 13]]
    with Streamer(Faulty, 15, model_init_args=(gate,)) as streamer:
        futures = [streamer.submit(call) for call in calls]
        gate.let_through(100)
        with pytest.raises(WorkerLost):
            futures.pop(2).result()
        assert [future.result() for future in futures] == [[0, 2, 4], [6], [22], [24, 26]]
        assert streamer.stats().isolated == 1
