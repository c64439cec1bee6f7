"""What batching does to a load, in seconds instead of hours: the scheduler, simulated."""

from .loads import Arrival, Bursts, ClosedLoop, Phases, Poisson, Replay
from .model_cost import CostModel, LogNormal, Observed, Overheads
from .report import Report
from .simulator import simulate
from .traces import read_trace

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
