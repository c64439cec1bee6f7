"""What ``make bench-http`` measures: ourselves, and others at their best settings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from harness import (
    ENVIRONMENT,
    OURS,
    ROOT,
    THEIRS,
    install_original,
    install_rival,
    rival,
    version_of,
)
from http_load import Running, free_port, running

__all__ = ["CASES", "SYSTEMS", "Case", "Settings", "System"]

#: The options of one adapter, by name.
Settings = Mapping[str, str]

_SENTENCE = "twinkle twinkle [MASK] star."
_RIVALS = ROOT / "benchmarks" / "rivals"


@dataclass(frozen=True)
class Case:
    """A model, and how many ask at a time.

    Attributes:
        model: of ``simulated.py``.
        own: what the model takes for a request that is alone, seconds.
    """

    name: str
    model: str
    connections: int
    own: float = 0.0


GPU, ONE, ECHO = CASES = (
    Case("simulated GPU, 128 connections", "SimulatedGPU", 128),
    Case("simulated GPU, one connection", "SimulatedGPU", 1, own=5.1e-3),
    Case("echo, 128 connections", "Echo", 128),
)


@dataclass(frozen=True)
class System:
    """A server of models.

    Attributes:
        key: for the command line.
        title: for tables.
        command: what starts it; the adapter's options follow.
        path: where it is asked.
        asked: the field of a request that the input is in.
        answer: makes what it answers to it.
        best: for each case the settings that ``--sweep`` found to be the best ones.
        sweep: what it looks at: the values of each option.
        install: makes what it needs, once.
        environment: in which it runs.
    """

    key: str
    title: str
    command: Callable[[str, int], list[str]]
    path: str = "/predict"
    asked: str = "inputs"
    answer: Callable[[str], Any] = lambda text: text
    best: Mapping[str, Settings] = field(default_factory=dict)
    sweep: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    install: Callable[[], None] = lambda: None
    environment: Mapping[str, str] = field(default_factory=lambda: ENVIRONMENT)

    def running(self, case: Case, settings: Settings) -> AbstractContextManager[Running]:
        """The service of a case's model; raises RunFailed if it does not start."""
        port = free_port()
        options = [part for name, value in settings.items() for part in (f"--{name}", value)]
        body = json.dumps({self.asked: _SENTENCE}).encode()
        return running(
            [*self.command(case.model, port), *options],
            port,
            self.path,
            body,
            self.answer(_SENTENCE),
            self.environment,
        )

    def grid(self) -> list[Settings]:
        """Every combination that the sweep looks at."""
        values = itertools.product(*self.sweep.values())
        return [dict(zip(self.sweep, each, strict=True)) for each in values]


def _ours(server: str) -> Callable[[str, int], list[str]]:
    def command(model: str, port: int) -> list[str]:
        options = ["--port", str(port)]
        if server != "uvicorn":
            options += ["--server", server]
        return [OURS, "-m", "service_streamer", "serve", f"simulated:{model}", *options]

    return command


def _adapter(python: str, script: str, *more: str) -> Callable[[str, int], list[str]]:
    def command(model: str, port: int) -> list[str]:
        return [python, str(_RIVALS / script), "--model", model, "--port", str(port), *more]

    return command


#: The models are the same ones for all, and ``simulated.py`` needs our package for their base. Not
#: for the original, which is a package of that name.
_WITH_OURS = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{ENVIRONMENT['PYTHONPATH']}"}

SYSTEMS = (
    System("uvicorn", "serve", _ours("uvicorn")),
    System("granian", "serve --server granian", _ours("granian")),
    System(
        "mosec",
        f"mosec {version_of('mosec')}",
        _adapter(
            rival("mosec"), "mosec_service.py", "--address", "127.0.0.1", "--log-level", "error"
        ),
        path="/inference",
        answer=lambda text: {"outputs": text},
        # With one connection every wait is added to each answer; with many, all settings are within
        # a tenth of each other for the GPU, and 0 and 1 ms are the same for echo.
        best={
            GPU.name: {"wait": "5", "json": "msgspec"},
            ONE.name: {"wait": "0", "json": "json"},
            ECHO.name: {"wait": "0", "json": "msgspec"},
        },
        sweep={"wait": ("0", "1", "5", "10"), "json": ("json", "msgspec")},
        install=partial(install_rival, "mosec"),
        environment=_WITH_OURS,
    ),
    System(
        "litserve",
        f"LitServe {version_of('litserve')}",
        _adapter(rival("litserve"), "litserve_service.py"),
        asked="input",
        answer=lambda text: {"output": text},
        # Two processes that speak HTTP are up to a third better than one; waits and queues matter
        # less than the noise, but for one connection, to which every wait is added.
        best={
            GPU.name: {"wait": "0", "api-servers": "2", "queue": "fast"},
            ONE.name: {"wait": "1", "api-servers": "1", "queue": "default"},
            ECHO.name: {"wait": "1", "api-servers": "2", "queue": "default"},
        },
        sweep={
            "wait": ("0", "1", "5", "10"),
            "api-servers": ("1", "2"),
            "queue": ("default", "fast"),
        },
        install=partial(install_rival, "litserve"),
        environment=_WITH_OURS,
    ),
    System(
        "original",
        "original 0.1.2 (Flask, gevent)",
        _adapter(THEIRS, "original_json.py"),
        best={
            GPU.name: {"wait": "100"},
            ONE.name: {"wait": "1"},
            ECHO.name: {"wait": "5"},
        },
        sweep={"wait": ("1", "5", "10", "100")},
        install=install_original,
    ),
)
