"""A TOML file and the environment are checked as the command line is; nothing gets lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from service_streamer.options.table import ServeOptions
from service_streamer.pipelines.hub import HubModel
from service_streamer.serve.cli.config import check_environment, read_defaults
from service_streamer.serve.cli.main import main
from service_streamer.serve.opening import pool_options

COMMANDS = {name: main.commands[name] for name in ("serve", "worker", "simulate")}


def refused(path: Path, text: str, command: str = "serve") -> str:
    """What the command line says to a file: an error, in a sentence."""
    path.write_text(text)
    done = CliRunner().invoke(main, [command, "--config", str(path)], terminal_width=1000)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    return done.output


def error_of(output: str) -> str:
    """The sentence, without the lines about usage and the names of all options."""
    sentence = output.partition("Error: ")[2]
    return re.sub("there are allowed-host, .*", "there are ...", sentence)


def defaults(path: Path, text: str, command: str = "serve") -> Any:
    path.write_text(text)
    context = click.Context(COMMANDS[command], info_name=command)
    return read_defaults(path, command, COMMANDS, context)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "service.toml"


@pytest.mark.parametrize(
    "line",
    [
        "workers = [1, 2]",
        "workers = true",
        "workers = 1.5",
        "workers = 0",
        'workers = "many"',
        "workers = {a = 1}",
        "max-body = -5",
        "max-body = 0",
        "max-body = 1.5",
        'max-body = "much"',
        "port = 70000",
        "timeout = 0",
        "timeout = inf",
        "timeout = nan",
        "timeout = 1979-05-27",
        "max-latency = -1",
        "max-batch-cost = nan",
        "cpu-threads = 0",
        "debug = 1",
        'debug = "yes"',
        "host = 1",
        "model = 3",
        'dtype = "int3"',
        "api-key = []",
        "api-key = [1]",
        "api-key = 12345",
        'api-key = [["a"]]',
        "devices = []",
        "devices = [true]",
        "tenant-header = 'X Y'",
        "secret = false",
        "max-body = 5\nmax_body = 6",
        "prot = 1",
        "apikey = 'a'",
        "API-KEY = 'a'",
        "zzz = 1",
        "sweep = true",
        "config = 'x'",
    ],
)
def test_a_line_is_checked_as_the_option_is(
    path: Path, line: str, wording: Callable[..., None]
) -> None:
    wording(error_of(refused(path, f"[serve]\n{line}\n")))


@pytest.mark.parametrize(
    "text",
    [
        "[server]\napi-key = 'a'",
        "[workers]\nmodel = 'a'\n[serve]",
        "[nothing]\n[serve]",
        "api-key = 'a'\n[serve]",
        "zzz = 1",
        "serve = 1",
        "[[serve]]\nport = 1",
        "",
        "[worker]\nworkers = 2",
        "[serve]\n[worker]\napi-key = 'a'",
        "[serve]\n[worker]\nworkers = true",
        "[serve",
        "[serve]\nport = 1\nport = 2",
    ],
)
def test_a_table_that_no_command_reads_is_refused(
    path: Path, text: str, wording: Callable[..., None]
) -> None:
    wording(error_of(refused(path, text)))


def test_the_tables_of_other_commands_may_be_there(path: Path) -> None:
    text = (
        '[serve]\nmodel = "m"\nport = "80"\napi-key = "one"\nmax_body = "1M"\ntimeout = 5\n'
        'debug = true\ndevices = [0, "1"]\n[worker]\nworkers = 2\ncpu-threads = 3\n[simulate]\n'
    )
    assert defaults(path, text) == {
        "model": "m", "port": "80", "api_key": ["one"], "max_body": "1M", "timeout": 5,
        "debug": True, "devices": [0, "1"],
    }  # fmt: skip
    assert defaults(path, text, "worker") == {"workers": 2, "cpu_threads": 3}
    assert defaults(path, text, "simulate") == {}


def test_a_file_that_is_not_utf_8(path: Path) -> None:
    path.write_bytes(b"[serve]\nmodel = '\xff'")
    done = CliRunner().invoke(main, ["serve", "--config", str(path)], terminal_width=1000)
    assert (done.exit_code, "cannot be read" in done.output) == (2, True)


# -- the environment


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ("API_KEYS", "a"),
        ("APIKEY", "a"),
        ("REDIS_SECRET", "a secret of sixteen bytes"),
        ("WORKER", "2"),
        ("API_KEY", ""),
        ("API_KEY", " \n"),
        ("SECRET", ""),
        ("CONFIG", ""),
        ("PORT", "tcp://10.0.0.1:80"),
        ("WORKERS", "0"),
        ("MAX_BODY", "-5"),
    ],
)  # fmt: skip
def test_a_variable_is_checked_too(name: str, value: str, wording: Callable[..., None]) -> None:
    env = {f"SERVICE_STREAMER_{name}": value}
    done = CliRunner().invoke(main, ["serve"], env=env, terminal_width=1000)
    assert done.exit_code == 2, done.output
    wording(error_of(done.output))


def test_a_variable_that_no_command_knows_is_named() -> None:
    environment = {
        "SERVICE_STREAMER_IMAGE": "x", "SERVICE_STREAMER_TIMEOUT": "5", "PATH": "",
        "SERVICE_STREAMER_TASK": "", "SERVICE_STREAMER_SERVICE_HOST": "10.0.0.1",
        "SERVICE_STREAMER_SERVICE_PORT_HTTP": "80", "SERVICE_STREAMER_PORT_80_TCP_ADDR": "10.0.0.1",
    }  # fmt: skip
    [warning] = check_environment(environment, main.commands)
    assert (
        warning
        == "the environment has SERVICE_STREAMER_IMAGE, which is not an option; it has no effect"
    )


@pytest.mark.parametrize("key", ["", " ", " a", "a\n"])
def test_a_key_that_nobody_can_send_is_refused(key: str) -> None:
    done = CliRunner().invoke(main, ["serve", "--api-key", key], terminal_width=1000)
    assert done.exit_code == 2
    assert "--api-key" in done.output


# -- options without effect


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--prefix", "a"], "--prefix has no effect without --redis"),
        (["serve", "--secret", "a" * 16], "--secret has no effect without --redis"),
        (["serve", "--redis", "h:1", "--workers", "2"], "--workers has no effect with --redis"),
        (["serve", "--redis", "h:1", "--revision", "a"], "--revision has no effect with --redis"),
        (
            ["serve", "m:Model", "--dtype", "float16"],
            "--dtype has no effect on a model of your",
        ),
        (["worker", "m:Model", "--task", "fill-mask"], "--task has no effect on a model of your"),
        (["serve", "--cache-ttl", "9"], "--cache-ttl is of no use without a cache; set --cache-si"),
        (["worker", "--host", "0.0.0.0"], "--host has no effect without --port"),
        (["simulate", "--rate", "9", "--think-time", "1"], "no effect without --closed-loop"),
        (["simulate", "--rate", "9", "--speed", "2"], "--speed has no effect without --trace"),
        (["simulate", "--sweep", "--fixed-wait", "1"], "--fixed-wait has no effect with --sweep"),
    ],
)
def test_an_option_without_effect_is_refused(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(main, arguments, terminal_width=1000)
    assert done.exit_code == 2, done.output
    assert says in done.output


@pytest.mark.parametrize("command", ["serve", "worker"])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["gpt", "--task", "text-generation", "--max-batch-tokens", "9"],
            "or set --max-batch-cost",
        ),
        (["gpt", "--task", "text-generation", "--compile"], "leave --compile out"),
        (["bert", "--task", "ner", "--preprocess-workers", "2"], "texts of token-classification"),
        (["--preprocess-workers", "2"], "texts of fill-mask are tokenized"),
        (["bert", "--task", "nonsense"], "unknown task 'nonsense'; must be one of audio"),
        (["bert", "--devices", "cpu", "--quantization", "bitsandbytes-8bit"], "needs a GPU; on a"),
        (
            ["bert", "--devices", "cpu", "--attention", "flash_attention_2"],
            "needs a GPU; use 'sdpa'",
        ),
        (["bert", "--devices-per-worker", "2"], "--devices-per-worker=2 needs 2 GPUs for each wor"),
        (
            ["m:Model", "--devices", "0,1,2", "--devices-per-worker", "2"],
            "--devices-per-worker=2 mu",
        ),
    ],
)
def test_what_does_not_suit_the_task_or_the_devices_is_refused_before_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch, command: str, arguments: list[str], says: str
) -> None:
    monkeypatch.setenv("SERVICE_STREAMER_GPU_COUNT", "1")
    done = CliRunner().invoke(main, [command, *arguments], terminal_width=1000)
    assert done.exit_code == 2, done.output
    assert says in done.output


def test_a_task_that_the_hub_names_is_heeded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found = HubModel("bert", "main", "c" * 40, task="ner")
    monkeypatch.setattr("service_streamer.pipelines.hub.resolve", lambda *_: found)
    options = ServeOptions(model="bert", preprocess_workers=2)
    with pytest.raises(ValueError, match="--preprocess-workers is for images and sounds"):
        pool_options(options)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "8 GPUs are visible, and 1 worker will use 1 of them; --workers 8 uses all"),
        ({"worker_num": 2, "devices_per_worker": 2}, "2 workers will use 4 of them; --workers 4"),
        ({"worker_num": 8}, None),
        ({"worker_num": 16}, None),
        ({"cuda_devices": (0,)}, None),
        ({"model": "m:Model"}, None),
    ],
)
def test_gpus_that_no_worker_uses_are_named(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given: dict[str, Any],
    says: str | None,
) -> None:
    """A single worker is the default; a model of one's own may use all that it sees."""
    monkeypatch.setenv("SERVICE_STREAMER_GPU_COUNT", "8")
    pool_options(ServeOptions(**{"cuda_devices": "auto", **given}))
    assert len(caplog.messages) == (says is not None)
    assert (says or "") in caplog.text


def test_a_package_that_is_missing_is_named_before_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service_streamer.pipelines.quantization.is_installed", lambda _: False)
    done = CliRunner().invoke(main, ["serve", "bert", "--quantization", "torchao-int8"])
    assert done.exit_code == 5, done.output
    assert "pip install torchao" in done.output


def test_an_option_without_effect_in_a_file_is_refused(path: Path) -> None:
    assert "--prefix has no effect without --redis" in refused(path, "[serve]\nprefix = 'a'\n")


def test_a_variable_without_effect_is_a_warning() -> None:
    env = {"SERVICE_STREAMER_PREFIX": "a"}
    done = CliRunner().invoke(main, ["serve", "--revision", " "], env=env, terminal_width=1000)
    assert "--prefix has no effect without --redis" in done.output
    assert "--revision is empty" in done.output
