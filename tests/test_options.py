"""Every option is declared once: constructors, docstrings, commands and pages agree with it."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import service_streamer
from service_streamer.options.table import GROUPS
from service_streamer.redis.wire import PoolOptions
from service_streamer.serve.cli.main import main
from web_application import WebApplication

ROOT = Path(__file__).parent.parent

#: Who has options: classes and commands.
CONSTRUCTORS = [front for front in GROUPS if front in service_streamer.__all__]
COMMANDS = [front for front in GROUPS if front in main.commands]

#: Arguments that are no options: what is served.
MODELS = {"self", "predict_function", "predict_function_or_model", "model_class"}


def table(front: str) -> dict[str, Any]:
    """The options that a class or a command has, as they are declared for it."""
    found: dict[str, Any] = {}
    for each in dataclasses.fields(GROUPS[front]):  # type: ignore[arg-type]
        option = each.metadata.get("option")
        if option is not None and front in option.fronts:
            found[each.name] = dataclasses.replace(option, name=each.name).on(front)
    return found


def test_all_groups_are_of_classes_or_commands() -> None:
    assert {*CONSTRUCTORS, *COMMANDS} == {*GROUPS}
    assert len(CONSTRUCTORS) == 5
    assert len(COMMANDS) == 3


def arguments(text: str) -> dict[str, str]:
    """What a docstring says of each argument."""
    block = re.search(r"\n    Args:\n(.*?)(?:\n\n    [A-Z]\w+:\n|\Z)", text, re.DOTALL)
    assert block is not None
    entries = re.split(r"\n(?= {8}\w)", "\n" + block[1].rstrip())
    found = {}
    for entry in entries[1:]:
        name, _, says = entry.strip().partition(":")
        found[name] = " ".join(says.split())
    return found


@pytest.mark.parametrize("front", CONSTRUCTORS)
def test_a_constructor_refuses_what_is_no_option(front: str) -> None:
    if front == "RayStreamer":
        pytest.importorskip("ray")
    model = () if front == "RedisStreamer" else (service_streamer.ManagedModel,)
    with pytest.raises(TypeError, match="nonsense"):
        getattr(service_streamer, front)(*model, nonsense=1)


@pytest.mark.parametrize("front", CONSTRUCTORS)
def test_a_constructor_has_the_options_of_the_table(front: str) -> None:
    if front == "RayStreamer":
        pytest.importorskip("ray")
    constructor: Any = getattr(service_streamer, front)
    parameters = inspect.signature(constructor.__init__).parameters
    defaults = {
        name: 20.0 if repr(each.default) == "WORKER_TIMEOUT" else each.default
        for name, each in parameters.items()
        if name not in MODELS and each.kind is not each.VAR_KEYWORD
    }
    known = {name: each.default for name, each in table(front).items()}
    if "pool" in parameters:  # the others are those of Streamer
        streamer = table("Streamer")
        others = {name: default for name, default in known.items() if name not in defaults}
        assert set(others) == set(PoolOptions.__annotations__)
        assert all(streamer[name].default == default for name, default in others.items())
        known = {name: default for name, default in known.items() if name in defaults}
    assert defaults == known


@pytest.mark.parametrize("front", CONSTRUCTORS)
def test_a_docstring_has_the_sentence_of_the_table(front: str) -> None:
    if front == "RayStreamer":
        pytest.importorskip("ray")
    constructor: Any = getattr(service_streamer, front)
    parameters = [*inspect.signature(constructor.__init__).parameters][1:]
    says = arguments(constructor.__doc__)
    assert [*says] == parameters
    known = table(front)
    for name, text in says.items():
        if name in known:
            assert text == known[name].help


@pytest.mark.parametrize("front", COMMANDS)
def test_a_command_has_the_options_of_the_table(front: str) -> None:
    params = {each.name: each for each in main.commands[front].params if each.name != "config"}
    known = {each.key.replace("-", "_"): each for each in table(front).values()}
    assert params.keys() == known.keys()
    for name, each in known.items():
        if name != "model":
            assert params[name].help.startswith(each.help)
            assert params[name].default == each.default


@pytest.mark.parametrize("front", GROUPS)
def test_an_option_is_declared_well(front: str) -> None:
    for each in table(front).values():
        assert re.fullmatch(r"[A-Z\"].*[^.]\.", each.help), each
        assert ". " not in each.help, f"{each.name}: one sentence"
        assert not each.more or each.more.endswith((".", "...")), each
        each.kind.check(each.name, each.default) if not each.several else None
        assert not set(each.at) - set(each.fronts), each


def test_the_reference_pages_are_what_the_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from reference_pages import pages

    for path, text in pages().items():
        assert path.read_text() == text, f"run {sys.executable} scripts/reference_pages.py"


def test_no_repr_shows_a_password_or_key() -> None:
    secrets = {
        "secret": "quite a long secret",
        "api_keys": ("key",),
        "redis_broker": "redis://:pw@h",
    }
    for front in COMMANDS:
        given = {name: value for name, value in secrets.items() if name in table(front)}
        shown = repr(GROUPS[front](**given))
        assert not [name for name in secrets if f"{name}=" in shown]
    with WebApplication(api_keys=("key",)) as application:
        assert "'key'" not in repr(application.service.options)


@pytest.mark.parametrize("value", ["auto", " auto", ["auto"]])
def test_devices_in_a_file_may_be_a_list_with_auto(value: object) -> None:
    assert table("serve")["cuda_devices"].written.parse(value) == "auto"
