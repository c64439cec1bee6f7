"""Options are declared once. Signatures agree with that; docstrings and pages are made of it."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

import service_streamer
from command_line import launched
from service_streamer.options.table import (
    RayStreamerOptions,
    RedisStreamerOptions,
    RedisWorkerOptions,
    StreamerOptions,
)
from service_streamer.serve.cli.main import ServeOptions
from web_application import WebApplication

CONSTRUCTORS = {
    "ThreadedStreamer": StreamerOptions,
    "Streamer": StreamerOptions,
    "RayStreamer": RayStreamerOptions,
    "RedisStreamer": RedisStreamerOptions,
    "RedisWorker": RedisWorkerOptions,
}

#: Arguments that are no options: what is served.
MODELS = {"predict_function", "predict_function_or_model", "model_class"}


@pytest.fixture(params=CONSTRUCTORS)
def constructor(request: pytest.FixtureRequest) -> Any:
    if request.param == "RayStreamer":
        pytest.importorskip("ray")
    return getattr(service_streamer, request.param)


def test_signature_has_the_declared_defaults(constructor: Any) -> None:
    options = CONSTRUCTORS[constructor.__name__]
    declared = {each.name: each.default for each in dataclasses.fields(options)}
    for name, parameter in inspect.signature(constructor).parameters.items():
        if name == "worker_timeout":
            assert (repr(parameter.default), declared[name]) == ("WORKER_TIMEOUT", 20.0)
        elif name not in MODELS:
            assert parameter.default == declared[name], name


def test_docstring_says_what_each_argument_does(constructor: Any) -> None:
    text = inspect.getdoc(constructor) or ""
    _, _, rest = text.partition("\nArgs:\n")
    entries, _, errors = rest.partition("\n\nRaises:\n")
    lines = [line for line in entries.splitlines() if not line.startswith(" " * 8)]
    names = [line.strip().partition(": ")[0] for line in lines]
    assert names == [*inspect.signature(constructor).parameters]
    assert "TypeError" in errors


def test_no_repr_shows_a_password_or_key() -> None:
    given: dict[str, Any] = {
        "secret": "quite a long secret", "api_keys": ("key",), "redis_broker": "redis://:pw@h"
    }  # fmt: skip
    shown = repr(ServeOptions(**given))
    assert not [name for name in given if f"{name}=" in shown]
    with WebApplication(api_keys=("key",)) as application:
        assert "'key'" not in repr(application.service.options)


@pytest.mark.parametrize("value", ['"auto"', '" auto"', '["auto"]'])
def test_devices_of_a_file_may_be_auto(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    path = tmp_path / "service.toml"
    path.write_text(f"[serve]\nmodel = 'm:M'\ndevices = {value}\n")
    assert launched(monkeypatch, "serve", "--config", str(path)).options.cuda_devices == "auto"
