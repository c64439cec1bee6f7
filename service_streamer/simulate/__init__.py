"""What batching does to a load, in seconds instead of hours: the scheduler, simulated."""

from .loads import Arrival, Bursts, ClosedLoop, Phases, Poisson, Replay, read_trace
from .model_cost import CostModel, LogNormal, Observed, Overheads
from .simulator import Report, simulate

__all__ = [
    "Arrival",
    "Bursts",
    "ClosedLoop",
    "CostModel",
    "LogNormal",
    "Observed",
    "Overheads",
    "Phases",
    "Poisson",
    "Replay",
    "Report",
    "read_trace",
    "simulate",
]
