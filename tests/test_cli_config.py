"""A TOML file and the environment are checked as the command line is; nothing gets lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from service_streamer.serve.cli.config import check_environment, read_defaults
from service_streamer.serve.cli.main import main

COMMANDS = {name: main.commands[name] for name in ("serve", "worker", "simulate")}


def refused(path: Path, text: str, command: str = "serve") -> str:
    """What the command line says to a file: an error, in a sentence."""
    path.write_text(text)
    done = CliRunner().invoke(main, [command, "--config", str(path)], terminal_width=1000)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    return done.output


def defaults(path: Path, text: str, command: str = "serve") -> Any:
    path.write_text(text)
    context = click.Context(COMMANDS[command], info_name=command)
    return read_defaults(path, command, COMMANDS, context)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "service.toml"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("workers = [1, 2]", "workers: must be a whole number"),
        ("workers = true", "workers: must be a whole number; not true or false"),
        ("workers = 1.5", "workers: must be a whole number; not a number (1.5)"),
        ("workers = 0", "workers: must be a whole number of at least 1; not 0"),
        ('workers = "many"', "workers: must be a whole number of at least 1; not 'many'"),
        ("workers = {a = 1}", "workers: must be a whole number; not a table"),
        ("max-body = -5", "max-body: must be a number of bytes above 0"),
        ("max-body = 0", "max-body: must be a number of bytes above 0"),
        ("max-body = 1.5", "max-body: must be a string or a whole number"),
        ('max-body = "much"', "such as 16777216, 512k, 16M or 1G; not 'much'"),
        ("port = 70000", "port: must be a whole number from 0 to 65535; not 70000"),
        ("timeout = 0", "timeout: must be a number of seconds above 0; not 0"),
        ("timeout = inf", "timeout: must be a number of seconds above 0; not inf"),
        ("timeout = 1979-05-27", "timeout: must be a number; not a"),
        ("max-latency = -1", "max-latency: must be a number of seconds of at least 0; not -1"),
        (
            "max-batch-cost = nan",
            "max-batch-cost: must be a finite number above 0; not nan",
        ),
        (
            "cpu-threads = 0",
            "cpu-threads: must be a whole number of at least 1, auto or",
        ),
        ("debug = 1", "debug: must be true or false; not a whole number (1)"),
        ('debug = "yes"', "debug: must be true or false; not a string ('yes')"),
        ("host = 1", "host: must be a string; not a whole number (1)"),
        ("model = 3", "model: must be a string; not a whole number (3)"),
        ('dtype = "int3"', "dtype: must be one of auto, float32"),
        ("api-key = []", "api-key: the list is empty"),
        ("api-key = [1]", "api-key: must be a string, or a list of such; not a whole number"),
        ("api-key = 12345", "api-key: must be a string, or a list of such; not a whole number"),
        ('api-key = [["a"]]', "api-key: must be a string, or a list of such; not a list"),
        ("devices = []", "devices: the list is empty"),
        ("devices = [true]", "devices: must be"),
        (
            "tenant-header = 'X Y'",
            "tenant-header: must be the name of a header",
        ),
        ("secret = false", "secret: must be a string; not true or false"),
        ("max-body = 5\nmax_body = 6", "max_body: is set twice"),
        ("prot = 1", "'prot', which is not an option of serve; did you mean port?"),
        ("apikey = 'a'", "'apikey', which is not an option of serve; did you mean api-key?"),
        ("API-KEY = 'a'", "did you mean api-key?"),
        ("zzz = 1", "'zzz', which is not an option of serve; there are allowed-host, api-key, "),
        ("sweep = true", "it is one of simulate: write it below [simulate]"),
        ("config = 'x'", "'config', which is not an option"),
    ],
)
def test_a_line_is_checked_as_the_option_is(path: Path, line: str, says: str) -> None:
    output = refused(path, f"[serve]\n{line}\n")
    assert f"{path}: [serve] " in output
    assert says in output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[server]\napi-key = 'a'",
            "[server] belongs to no command; did you mean [serve]?",
        ),
        ("[workers]\nmodel = 'a'\n[serve]", "did you mean [worker]?"),
        ("[nothing]\n[serve]", "[nothing] belongs to no command; there are [serve], "),
        ("api-key = 'a'\n[serve]", "'api-key' must be in a table: write it below a line [serve]"),
        ("zzz = 1", "'zzz' must be in a table: write it below a line [serve]"),
        ("serve = 1", "[serve] must be a table"),
        ("[[serve]]\nport = 1", "[serve] must be a table"),
        ("", "there is no table [serve]"),
        ("[worker]\nworkers = 2", "there is no table [serve]"),
        (
            "[serve]\n[worker]\napi-key = 'a'",
            "[worker] has 'api-key', which is not an option of worker",
        ),
        ("[serve]\n[worker]\napi-key = 'a'", "it is one of serve: write it below [serve]"),
        ("[serve]\n[worker]\nworkers = true", "[worker] workers: must be"),
        ("[serve", "cannot be read"),
        ("[serve]\nport = 1\nport = 2", "cannot be read"),
    ],
)
def test_a_table_that_no_command_reads_is_refused(path: Path, text: str, says: str) -> None:
    assert says in refused(path, text)


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
    ("name", "value", "says"),
    [
        ("API_KEYS", "a", "SERVICE_STREAMER_API_KEYS is not an option; did you mean"),
        ("APIKEY", "a", "did you mean SERVICE_STREAMER_API_KEY?"),
        ("WORKER", "2", "did you mean SERVICE_STREAMER_WORKERS?"),
        ("API_KEY", "", "SERVICE_STREAMER_API_KEY is empty"),
        ("API_KEY", " \n", "SERVICE_STREAMER_API_KEY is empty"),
        ("SECRET", "", "SERVICE_STREAMER_SECRET is empty"),
        ("CONFIG", "", "SERVICE_STREAMER_CONFIG is empty"),
        ("PORT", "tcp://10.0.0.1:80", "enableServiceLinks: false"),
        ("WORKERS", "0", "must be a whole number of at least 1; not '0'"),
        ("MAX_BODY", "-5", "or 1G; not '-5'"),
    ],
)  # fmt: skip
def test_a_variable_is_checked_too(name: str, value: str, says: str) -> None:
    env = {f"SERVICE_STREAMER_{name}": value}
    done = CliRunner().invoke(main, ["serve"], env=env, terminal_width=1000)
    assert done.exit_code == 2, done.output
    assert says in done.output


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
        (["serve", "--server", "granian", "--max-unread", "1M"], "--max-unread has no effect with"),
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


def test_an_option_without_effect_in_a_file_is_refused(path: Path) -> None:
    assert "--prefix has no effect without --redis" in refused(path, "[serve]\nprefix = 'a'\n")


def test_a_variable_without_effect_is_a_warning() -> None:
    env = {"SERVICE_STREAMER_PREFIX": "a"}
    done = CliRunner().invoke(main, ["serve", "--revision", " "], env=env, terminal_width=1000)
    assert "--prefix has no effect without --redis" in done.output
    assert "--revision is empty" in done.output
