"""What batching does to a load, in seconds instead of hours: the scheduler, simulated."""

from .simulator import Report, simulate
from .workload import (
    Arrival,
    Bursts,
    ClosedLoop,
    CostModel,
    LogNormal,
    Overheads,
    Phases,
    Poisson,
    Replay,
    read_trace,
)

__all__ = [
    "Arrival",
    "Bursts",
    "ClosedLoop",
    "CostModel",
    "LogNormal",
    "Overheads",
    "Phases",
    "Poisson",
    "Replay",
    "Report",
    "read_trace",
    "simulate",
]
