"""What a service of many web processes would answer on more cores, by its processor time. Pure."""

from __future__ import annotations

__all__ = ["rates"]


def rates(cores: int, *, web: float, pool: float, worker: float, one: float) -> dict[str, float]:
    """Requests per second of as many web processes as there are cores left for.

    The pool and the worker have a core each. A process has one interpreter, so none takes more.

    Args:
        web, pool, worker: processor seconds of each request, of the processes of each kind.
        one: the same of a service's only web process.

    Returns:
        processes: web processes that are busy. paper: requests per second. times: as many as of
        one web process, which does not grow with the cores.
    """
    most = 1 / max(pool, worker, 1e-9)
    processes = min(cores - 2.0, most * web)
    rate = processes / web
    return {"processes": processes, "paper": rate, "to_single": rate * one}
