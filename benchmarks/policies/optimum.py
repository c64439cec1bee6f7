"""The least mean latency that any policy of one worker can have under Poisson arrivals.

The semi-Markov decision process of Xu, Zhou and Niu (arXiv 2301.12865 and 2501.02181), with the
weight of power 0. The state is how many jobs wait when the worker is free. To wait for the next
arrival takes 1 / rate on average, and a batch of b takes its duration. The cost is the number of
jobs in the service, so the least average of it, divided by the rate, is the least mean latency
(Little's law).

The paper cuts the queue off at some length, puts the rest into one state, and lets that state cost
more ("abstract cost"), so that a shorter queue is enough. So does this. But its values are found by
improving a policy (Howard) and not by relative value iteration: with 64 sizes of batches, whose
durations differ by much, that takes a handful of linear equations instead of thousands of rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Optimum", "optimum"]

#: Of arrivals in one batch: more are less likely than this.
_LEAST = 1e-12


class Optimum(NamedTuple):
    """The best policy.

    Attributes:
        mean: its mean latency, seconds.
        sizes: how many to cut, by how many wait; 0 to wait for the next arrival.
    """

    mean: float
    sizes: list[int]


def optimum(
    duration: Callable[[int], float],
    rate: float,
    *,
    batch_size: int = 64,
    states: int = 320,
    abstract_cost: float | None = None,
) -> Optimum:
    """Solve the decision process.

    Args:
        duration: of a batch of so many items, seconds; increasing.
        rate: arrivals per second; below what the worker can compute.
        batch_size: the most items of a batch.
        states: the longest queue that is told from longer ones. At loads near 1 more are needed.
        abstract_cost: jobs that the queue counts besides when it is longer; ``batch_size`` if None.

    Raises:
        ValueError: the rate is more than the worker can compute.
    """
    if rate >= max(size / duration(size) for size in range(1, batch_size + 1)):
        raise ValueError(f"a worker cannot compute {rate:g} items per second")
    beyond = batch_size if abstract_cost is None else abstract_cost
    waiting = np.arange(states + 1, dtype=float)
    held = waiting.copy()
    held[-1] += beyond
    # Of each action and state: expected cost, duration, and where it leads.
    costs = np.full((batch_size + 1, states + 1), math.inf)
    times = np.ones((batch_size + 1, states + 1))
    leads = np.zeros((batch_size + 1, states + 1, states + 1))
    costs[0], times[0] = held / rate, 1 / rate
    for state in range(states + 1):
        leads[0, state, min(state + 1, states)] = 1.0
    for size in range(1, batch_size + 1):
        took = duration(size)
        costs[size, size:] = held[size:] * took + rate * took * took / 2
        times[size] = took
        chances = _poisson(rate * took, states)
        for state in range(size, states + 1):
            left = state - size
            row: Any = leads[size, state]
            row[left:] = chances[: states + 1 - left]
            row[states] += 1.0 - chances[: states + 1 - left].sum()
    policy = np.minimum(np.arange(states + 1), batch_size)  # what waits, at once
    every = np.arange(states + 1)
    while True:
        # values + average * time = cost + leads @ values, and values[0] = 0
        system = np.eye(states + 1) - leads[policy, every]
        system[:, 0] = times[policy, every]
        solution = np.linalg.solve(system, costs[policy, every])
        average, values = float(solution[0]), solution.copy()
        values[0] = 0.0
        # Values differ from state to state as fast as batches are short, so per second.
        better = (costs - average * times + leads @ values - values) / times
        best = better.argmin(axis=0)
        gains = better[policy, every] - better[best, every]
        improved = np.where(gains > 1e-9, best, policy)
        if (improved == policy).all():
            return Optimum(average / rate, [int(size) for size in policy])
        policy = improved


def _poisson(mean: float, most: int) -> Any:
    """The chances of 0 to ``most`` arrivals."""
    counts = np.arange(most + 1)
    logs = counts * math.log(mean) - mean - np.array([math.lgamma(count + 1) for count in counts])
    chances = np.exp(logs)
    chances[chances < _LEAST] = 0.0
    return chances
