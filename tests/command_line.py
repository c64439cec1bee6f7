"""The command line in this process: what it refuses, and what it would serve."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from click.testing import CliRunner, Result

import service_streamer.serve.cli.main as cli
from service_streamer.serve.cli.main import ServeOptions

#: How much longer than --timeout a service may take to end: 10 s for its web processes, then 5 s
#: for its workers.
END_SECONDS = 15.0


def invoke(*arguments: str, **variables: str) -> Result:
    """Run a command; ``variables`` are those of SERVICE_STREAMER_.

    It neither takes this process's signals nor changes where modules are found.
    """
    env = {f"SERVICE_STREAMER_{name}": value for name, value in variables.items()}
    with mock.patch.object(cli, "hold_signals"), mock.patch.object(sys, "path", [*sys.path]):
        done = CliRunner().invoke(cli.main, arguments, env=env, terminal_width=1000)
    assert "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def error_of(*arguments: str, **variables: str) -> str:
    """Why a command line is refused, without the lines about usage. Nothing is ever served."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("run_service", "run_host"):
            patch.setattr(cli, name, lambda *_: pytest.fail("the command line is not refused"))
        patch.setattr(cli, "hold_signals", lambda: None)
        done = invoke(*arguments, **variables)
    assert done.exit_code == 2, done.output
    return done.output.partition("Error: ")[2].strip()


class Launched(NamedTuple):
    """A service, or a worker host, that a command line would run.

    Attributes:
        configuration: the models of a service.
        options: of the service, or the worker host.
        result: of the command.
    """

    configuration: Any
    options: Any
    result: Result

    @property
    def models(self) -> Sequence[Any]:
        """Each has a name and its options."""
        models: Sequence[Any] = self.configuration.models
        return models


def launched(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, failure: Exception | None = None
) -> Launched:
    """What a command line would serve. It ends as if that had ended.

    Args:
        failure: why no model could be loaded.
    """
    taken: list[Any] = []

    def run_service(configuration: Any, options: ServeOptions) -> Exception | None:
        taken.extend((configuration, options))
        return failure

    def run_host(options: Any) -> None:
        taken.extend((None, options))

    monkeypatch.setattr(cli, "run_service", run_service)
    monkeypatch.setattr(cli, "run_host", run_host)
    # Of the whole process:
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(logging, "captureWarnings", lambda _: None)
    done = invoke(*arguments)
    assert taken, done.output
    return Launched(*taken, done)


def have_cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let this process use so many, without the quota of a container."""
    read = Path.read_text

    def read_text(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.is_relative_to("/sys/fs/cgroup"):
            raise FileNotFoundError(path)
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(count), raising=False)
