"""What ``make bench-http`` measures: ourselves, and others at their best settings."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import ENVIRONMENT, OURS, ROOT, THEIRS, install_original
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


def _rival(name: str) -> str:
    return str(ROOT / ".rivals" / name / "bin" / "python")


def _adapter(python: str, script: str, *more: str) -> Callable[[str, int], list[str]]:
    def command(model: str, port: int) -> list[str]:
        return [python, str(_RIVALS / script), "--model", model, "--port", str(port), *more]

    return command


def _install(name: str) -> Callable[[], None]:
    """Makes a virtual environment of its own, with exactly what ``rivals/NAME.txt`` names."""

    def install() -> None:
        folder = ROOT / ".rivals" / name
        needed = _RIVALS / f"{name}.txt"
        stamp = folder / "complete"
        version = hashlib.sha256(needed.read_bytes()).hexdigest()
        if stamp.exists() and stamp.read_text() == version:
            return
        print(f"installing {name} into {folder.relative_to(ROOT)} ...", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        pip = [_rival(name), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", str(needed)], check=True)
        stamp.write_text(version)

    return install


def version_of(name: str) -> str:
    """Of a rival, as it is pinned."""
    lines = Path(_RIVALS / f"{name}.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}==")).partition("==")[2]


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
            _rival("mosec"), "mosec_service.py", "--address", "127.0.0.1", "--log-level", "error"
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
        install=_install("mosec"),
        environment=_WITH_OURS,
    ),
    System(
        "litserve",
        f"LitServe {version_of('litserve')}",
        _adapter(_rival("litserve"), "litserve_service.py"),
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
        install=_install("litserve"),
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
