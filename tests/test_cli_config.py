"""A TOML file and the environment are checked as the command line is; nothing gets lost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import error_of, invoke, launched
from service_streamer.pipelines.hub import HubModel
from service_streamer.serve.cli.main import ServeOptions
from service_streamer.serve.opening import pool_options


def error_of_file(path: Path, text: str) -> str:
    """The error of ``serve`` with this file, without the file's name, which it must have."""
    path.write_text(text)
    error = error_of("serve", "--config", str(path))
    assert str(path) in error
    return error.replace(str(path), "")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "service.toml"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("workers = [1, 2]", "list"),
        ("workers = true", "True"),
        ("workers = 1.5", "1.5"),
        ("workers = 0", "1:16"),
        ('workers = "many"', "'many'"),
        ("workers = {a = 1}", "table"),
        ("max-body = -5", "-5"),
        ("max-body = 0", "bytes"),
        ("max-body = 1.5", "1.5"),
        ('max-body = "much"', "'much'"),
        ("port = 70000", "65535"),
        ("timeout = 0", "seconds"),
        ("timeout = inf", "inf"),
        ("timeout = nan", "nan"),
        ("timeout = 1979-05-27", "date"),
        ("max-latency = -1", "-1"),
        ("max-batch-cost = nan", "nan"),
        ("cpu-threads = 0", "auto"),
        ("debug = 1", "true"),
        ('debug = "yes"', "'yes'"),
        ("host = 1", "string"),
        ("model = 3", "string"),
        ('dtype = "int3"', "bfloat16"),
        ("api-key = []", "empty"),
        ("api-key = [1]", "string"),
        ("api-key = 12345", "12345"),
        ('api-key = [["a"]]', "string"),
        ("devices = []", "empty"),
        ("devices = [true]", "True"),
        ("tenant-header = 'X Y'", "'X Y'"),
        ("secret = false", "string"),
        ("prot = 1", "port?"),
        ("API-KEY = 'a'", "api-key?"),
        ("zzz = 1", "max-body"),
        ("sweep = true", "[simulate]"),
        ("config = 'x'", "max-body"),
    ],
)
def test_line_of_a_file_is_checked_as_the_option_is(path: Path, line: str, word: str) -> None:
    error = error_of_file(path, f"[serve]\n{line}\n")
    assert "[serve]" in error
    assert line.partition(" =")[0] in error
    assert word in error


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[server]\napi-key = 'a'", "[serve]"),
        ("[workers]\nmodel = 'a'\n[serve]", "[worker]"),
        ("[nothing]\n[serve]", "[nothing]"),
        ("api-key = 'a'\n[serve]", "'api-key'"),
        ("zzz = 1", "'zzz'"),
        ("serve = 1", "table"),
        ("[[serve]]\nport = 1", "table"),
        ("", "[serve]"),
        ("[worker]\nworkers = 2", "[serve]"),
        ("[serve]\n[worker]\napi-key = 'a'", "[worker]"),
        ("[serve]\n[worker]\nworkers = true", "True"),
        ("[serve]\nmax-body = 5\nmax_body = 6", "max_body"),
        ("[serve", "read"),
        ("[serve]\nport = 1\nport = 2", "read"),
    ],
)
def test_file_is_refused_when_its_tables_are_invalid(path: Path, text: str, word: str) -> None:
    assert word in error_of_file(path, text)


def test_a_command_reads_its_own_table(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(
        '[serve]\nmodel = "m:M"\nport = "80"\napi-key = "one"\nmax_body = "1M"\ntimeout = 5\n'
        'debug = true\ndevices = [0, "1"]\nbatch-size = 5\n'
        "[worker]\nworkers = 2\ncpu-threads = 3\n[simulate]\nseconds = 1\n"
    )
    monkeypatch.setenv("SERVICE_STREAMER_BATCH_SIZE", "6")
    monkeypatch.setenv("SERVICE_STREAMER_TIMEOUT", "8")
    options = launched(monkeypatch, "serve", "--config", str(path), "--timeout", "9").options
    assert (options.model, options.port, options.api_keys) == ("m:M", 80, ("one",))
    assert (options.max_body, options.batch_size, options.debug) == (1 << 20, 6, True)
    assert options.timeout == 9, "the command line is above the environment, and that the file"
    assert [*map(str, options.cuda_devices)] == ["0", "1"]
    worker = launched(monkeypatch, "worker", "m:M", "--config", str(path)).options
    assert (worker.worker_num, worker.cpu_threads) == (2, 3)
    assert invoke("simulate", "--config", str(path), "--rate", "9").exit_code == 0


def test_file_is_refused_when_it_is_not_utf_8(path: Path) -> None:
    path.write_bytes(b"[serve]\nmodel = '\xff'")
    assert str(path) in error_of("serve", "--config", str(path))


# -- the environment


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("API_KEYS", "a", "API_KEY?"),
        ("APIKEY", "a", "API_KEY?"),
        ("REDIS_SECRET", "a secret of sixteen bytes", "SERVICE_STREAMER_SECRET?"),
        ("WORKER", "2", "WORKERS?"),
        ("API_KEY", "", "empty"),
        ("API_KEY", " \n", "empty"),
        ("SECRET", "", "empty"),
        ("CONFIG", "", "empty"),
        ("PORT", "tcp://10.0.0.1:80", "enableServiceLinks"),
        ("WORKERS", "0", "--workers"),
        ("MAX_BODY", "-5", "--max-body"),
    ],
)
def test_variables_are_checked_as_options_are(name: str, value: str, word: str) -> None:
    error = error_of("serve", **{name: value})
    assert f"SERVICE_STREAMER_{name}" in error
    assert word in error


def test_variable_is_named_when_no_command_knows_it() -> None:
    done = invoke(
        "serve", "--revision", " ", IMAGE="x", TIMEOUT="5", TASK="", SERVICE_HOST="10.0.0.1",
        SERVICE_PORT_HTTP="80", PORT_80_TCP_ADDR="10.0.0.1",
    )  # fmt: skip
    [warning] = [line for line in done.output.splitlines() if "no effect" in line]
    assert "SERVICE_STREAMER_IMAGE" in warning


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        *((["--api-key", key], "--api-key") for key in ("", " ", " a", "a\n")),
        (["./nowhere"], "'./nowhere'"),
        (["x" * 300], "no model"),
        (["a/model", "--revision", " "], "--revision"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--devices", "0,,1"], "--devices"),
        (["--host", ""], "--host"),
        (["--batch-timeout", "Auto"], "'Auto'"),
        (["--priority-header", "X Priority"], "'X Priority'"),
        (["--length", "served_models:size"], "--length"),
        (["served_models:double", "--task", "fill-mask"], "--task"),
        (["served_models:double", "--redis", "localhost:1"], "service-streamer worker"),
    ],
)
def test_argument_is_named_when_it_is_wrong(arguments: list[str], word: str) -> None:
    assert word in error_of("serve", *arguments)


# -- options without effect


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["serve", "--prefix", "a"], ["--prefix", "--redis"]),
        (["serve", "--secret", "a" * 16], ["--secret", "--redis"]),
        (["serve", "--redis", "h:1", "--workers", "2"], ["--workers", "--redis"]),
        (["serve", "--redis", "h:1", "--revision", "a"], ["--revision", "--redis"]),
        (["serve", "m:Model", "--dtype", "float16"], ["--dtype"]),
        (["worker", "m:Model", "--task", "fill-mask"], ["--task"]),
        (["serve", "--cache-ttl", "9"], ["--cache-ttl", "--cache-size"]),
        (["worker", "--host", "0.0.0.0"], ["--host", "--port"]),
        (["simulate", "--rate", "9", "--think-time", "1"], ["--think-time", "--closed-loop"]),
        (["simulate", "--rate", "9", "--speed", "2"], ["--speed", "--trace"]),
        (["simulate", "--sweep", "--fixed-wait", "1"], ["--fixed-wait", "--sweep"]),
    ],
)
def test_option_is_refused_when_it_has_no_effect(arguments: list[str], names: list[str]) -> None:
    error = error_of(*arguments)
    assert [name for name in names if name not in error] == []


@pytest.mark.parametrize("command", ["serve", "worker"])
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["gpt", "--task", "text-generation", "--max-batch-tokens", "9"], "--max-batch-cost"),
        (["gpt", "--task", "text-generation", "--compile"], "--compile"),
        (["bert", "--task", "ner", "--preprocess-workers", "2"], "token-classification"),
        (["--preprocess-workers", "2"], "fill-mask"),
        (["bert", "--task", "nonsense"], "'nonsense'"),
        (["bert", "--devices", "cpu", "--quantization", "bitsandbytes-8bit"], "GPU"),
        (["bert", "--devices", "cpu", "--attention", "flash_attention_2"], "GPU"),
        (["bert", "--devices-per-worker", "2"], "--devices-per-worker"),
        (["m:Model", "--devices", "0,1,2", "--devices-per-worker", "2"], "--devices-per-worker"),
    ],
)
def test_option_is_refused_before_a_worker_starts_when_task_or_devices_do_not_suit_it(
    monkeypatch: pytest.MonkeyPatch, command: str, arguments: list[str], word: str
) -> None:
    monkeypatch.setenv("SERVICE_STREAMER_GPU_COUNT", "1")
    assert word in error_of(command, *arguments)


def test_task_of_the_hub_is_checked_when_no_task_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    found = HubModel("bert", "main", "c" * 40, task="ner")
    monkeypatch.setattr("service_streamer.pipelines.hub.resolve", lambda *_: found)
    options = ServeOptions(model="bert", preprocess_workers=2)
    with pytest.raises(ValueError, match="--preprocess-workers"):
        pool_options(options)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "--workers 8"),
        ({"worker_num": 2, "devices_per_worker": 2}, "--workers 4"),
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


def test_missing_package_is_named_before_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    done = invoke("serve", "bert", "--quantization", "torchao-int8")
    assert done.exit_code == 5, done.output
    assert "pip install torchao" in done.output


def test_option_of_a_file_is_refused_when_it_has_no_effect(path: Path) -> None:
    path.write_text("[serve]\nprefix = 'a'\n")
    assert "--prefix" in error_of("serve", "--config", str(path))


def test_variable_without_effect_is_a_warning() -> None:
    done = invoke("serve", "--revision", " ", PREFIX="a")
    warning, _, error = done.output.partition("Error: ")
    assert "--prefix" in warning
    assert "--revision" in error
