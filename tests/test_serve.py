"""``service-streamer serve`` over HTTP: the service in a process of its own, real requests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from resource import RLIMIT_NOFILE, prlimit
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cases import long_cases
from http_in_process import post
from http_stub import Answer, HTTPStub
from serve_process import (
    ROOT,
    GatedServing,
    Serving,
    error,
    figures_in,
    run,
    started,
    table,
    until,
    workers,
)
from service_streamer import Reason, __version__
from service_streamer.redis.local import LocalRedis

pytestmark = pytest.mark.xdist_group("serve")

OBEDIENT = "served_models:Obedient"
PACKAGE = ROOT / "service_streamer"


#: A model of its own, with short limits.
service = started(OBEDIENT, "--max-body", "64k", "--max-pending", "64")
#: With keys, headers for priority and tenant, and errors that are shown.
keyed = started(
    OBEDIENT, "--api-key", "one", "--api-key", "two", "--debug", "--max-pending", "8",
    "--max-body", "9M", "--priority-header", "X-Rank", "--tenant-header", "X-User",
)  # fmt: skip


#: Of a model whose inputs have a cost.
LENGTH = "served_models:Sized.length"


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatedServing]:
    """Models with other options each. Most wait at the gate."""
    folder = tmp_path_factory.mktemp("several")
    (folder / "service.toml").write_text(
        table("narrow", OBEDIENT, "batch-size = 1\nmax-pending = 1\n")
        + table("wide", OBEDIENT, "batch-size = 8\n")
        + table("brief", OBEDIENT, "timeout = 0.5\n")
        + table("cached", OBEDIENT, "deduplicate = true\ncache-size = 10\ncache-ttl = 1000\n")
        + table("sized", "served_models:Sized", f'length = "{LENGTH}"\nmax-batch-cost = 8\n')
        + table("plain", "served_models:Sized")
    )
    with GatedServing(folder, "--config", str(folder / "service.toml")) as service:
        yield service


@pytest.fixture
def models(several: GatedServing) -> GatedServing:
    """The same; nothing of earlier tests is at the gate or in the record."""
    several.reset()
    return several


# -- predict


def test_predict_answers_one_input_and_several(service: Serving) -> None:
    assert service.predict("a").json() == "a"
    assert service.predict(["a", {"b": [1, None]}, 2.5]).json() == ["a", {"b": [1, None]}, 2.5]
    assert service.predict([]).json() == []
    assert service.predict([[1, 2]]).json() == [[1, 2]]
    assert service.predict("nan").json() is None


def test_requests_at_the_same_time_are_computed_together(models: GatedServing) -> None:
    wide = models.of("wide")
    with ThreadPoolExecutor(9) as threads:
        first = threads.submit(wide.predict, "first")
        models.gate.await_arrival()
        others = [threads.submit(wide.predict, number) for number in range(8)]
        until(lambda: wide.queue()["in_flight"] == 9)
        models.gate.let_through(2)
        assert first.result().json() == "first"
        assert [each.result().json() for each in others] == [*range(8)]
    one, all_others = models.computed()
    assert (one, sorted(all_others)) == (["first"], [*range(8)])


MASKED = {"inputs": "a [MASK]"}


def test_a_byte_order_mark_and_null_parameters_are_as_if_they_were_not_there(
    infilling: Serving,
) -> None:
    marked = b"\xef\xbb\xbf" + json.dumps(MASKED).encode()
    for path in ("/predict", "/"):
        expected = infilling.post(path, MASKED).json()
        assert len(expected) == 5
        for body in (MASKED | {"parameters": None}, marked):
            assert infilling.post(path, body).json() == expected


@pytest.mark.parametrize(
    ("body", "code", "param", "word"),
    [
        ({"inputs": "no mask"}, "invalid_value", "inputs", "[MASK]"),
        ({"inputs": 3}, "invalid_type", "inputs", "int"),
        ({"inputs": ["a [MASK]", 3]}, "invalid_type", "inputs[1]", "int"),
        ({"inputs": ""}, "invalid_value", "inputs", "empty"),
        ({}, "missing_required_parameter", "inputs", "`inputs`"),
        (MASKED | {"parameters": {"top_k": "x"}}, "invalid_value", "parameters.top_k", "'x'"),
        (MASKED | {"parameters": {"topk": 1}}, "invalid_value", "parameters.topk", "top_k"),
        (MASKED | {"parameters": 3}, "invalid_type", "parameters", "int"),
        (MASKED | {"more": 3}, "unknown_parameter", "more", "`more`"),
        ([], "invalid_type", None, "array"),
        (b"", "invalid_json", None, "empty"),
        (b"{", "invalid_json", None, "JSON"),
        (b'{"inputs": "\xff"}', "invalid_json", None, "UTF-8"),
        (b'{"inputs": "\\ud83d"}', "invalid_json", None, "lone surrogate"),
        (b'{"inputs": ["\\ud83d\\n", "b"]}', "invalid_json", None, "lone surrogate"),
        (b'{"inputs": "\\ud83d', "invalid_json", None, "truncated"),
        (b'{"input": "\\\\ud83d "}', "unknown_parameter", "input", "`inputs`"),
        (2 * b"\xef\xbb\xbf" + b'{"inputs": "a [MASK]"}', "invalid_json", None, "byte 0"),
        (b'{"inputs": NaN}', "invalid_json", None, "byte 11"),
        (
            b'{"inputs": "a", "parameters": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
            "invalid_json", None, "nested",
        ),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_wrong_request_is_refused_with_the_reason(
    infilling: Serving, body: Any, code: str, param: str | None, word: str
) -> None:
    told = error(infilling.post("/predict", body), 400 if code == "invalid_json" else 422)
    assert (told["type"], told["code"], told["param"]) == ("invalid_request_error", code, param)
    assert word in told["message"]
    assert "Traceback" not in told["message"]


# -- errors of models


def test_invalid_input_is_a_422(service: Serving) -> None:
    told = error(service.predict(["a", "invalid"]), 422)
    assert told["param"] == "inputs"
    assert told["message"] == "inputs: must not be 'invalid'; send another word"
    # Also where its text is no Unicode:
    assert error(service.predict("surrogate in words"), 422)["message"] == "inputs: \\ud83d"
    assert error(service.predict("surrogate in a field"), 422)["param"] == "inputs[\\ud83d]"
    told = error(service.post("/predict", {"inputs": 1, "parameters": {"top_k": 1}}), 422)
    assert told["param"] == "parameters", "of a model that takes none"


@pytest.mark.parametrize(
    "what",
    [
        "raise", "value error", "timeout error", "unicode error", "recursion error", "overloaded",
        "predict timeout", "object", "surrogate",
    ],
)  # fmt: skip
def test_unexpected_error_is_shown_in_the_log_only(service: Serving, what: str) -> None:
    response = service.predict(what)
    told = error(response, 500)
    assert "12345" not in response.text
    assert "Traceback" not in response.text
    assert told["id"] in told["message"]
    until(lambda: f"request {told['id']} failed" in service.log())
    assert service.predict("a").json() == "a"


@pytest.mark.parametrize("depth", [500, 700, 900, 1100, 5000])
def test_deeply_nested_input_is_answered_or_refused(service: Serving, depth: int) -> None:
    response = service.post("/predict", b'{"inputs": ' + b"[" * depth + b"]" * depth + b"}")
    assert response.status_code == 200 or error(response, 400)


def test_errors_are_shown_with_debug(keyed: Serving) -> None:
    assert "the password is 12345" in error(keyed.predict("raise", x_api_key="one"), 500)["message"]


# -- limits


def test_too_large_body_is_refused_before_it_has_come(service: Serving) -> None:
    told = error(service.predict("x" * (64 << 10)), 413)
    assert ("65536" in told["message"], told["code"]) == (True, "request_too_large")
    assert service.predict("x" * (63 << 10)).json() == "x" * (63 << 10)
    size = 64 << 20
    assert error(service.post("/predict", b" " * size), 413)
    chunks = (b" " * (1 << 20) for _ in range(64))
    assert error(service.client.post("/predict", content=chunks), 413)
    assert "64" in error(service.predict([0] * 65), 413)["message"], "more than the queue holds"
    assert service.predict([0] * 64).json() == [0] * 64
    # Without a byte of it: the answer does not wait for the body.
    with service.connect() as sock:
        sock.sendall(b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_refused_body_is_not_kept(keyed: Serving) -> None:
    """Until the collector of cycles comes, that is: large bodies would add up."""
    body = b'{"inputs": [0,0,0,0,0,0,0,0,0,' + b" " * (8 << 20) + b"0]}"
    for _ in range(3):
        error(keyed.post("/predict", body, x_api_key="one"), 413)
    before = keyed.resident()
    for _ in range(20):
        error(keyed.post("/predict", body, x_api_key="one"), 413)
    assert keyed.resident() < before + (40 << 20)


@contextlib.contextmanager
def occupied(models: GatedServing) -> Iterator[GatedServing]:
    """The model "narrow", which computes one input, and has been sent another one ahead.

    At the end of the block they are answered.
    """
    narrow = models.of("narrow")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(narrow.predict, 0)
        models.gate.await_arrival()
        ahead = threads.submit(narrow.predict, 1)
        until(lambda: narrow.queue()["in_flight"] == 2)
        try:
            yield narrow
        finally:
            models.gate.let_through(2)
        assert [first.result().json(), ahead.result().json()] == [0, 1]


def test_input_is_not_computed_after_its_deadline(models: GatedServing) -> None:
    with occupied(models) as narrow:
        late(narrow.predict(2, X_Request_Timeout="0.01"))
    models.gate.let_through(1)
    assert narrow.predict(3).json() == 3
    assert models.computed() == [[0], [1], [3]]


def test_timeout_of_a_model_ends_its_requests(models: GatedServing) -> None:
    late(models.of("brief").predict(1))


def late(response: httpx.Response) -> None:
    """504; or 408, if this process was held up between head and body."""
    status = 408 if response.status_code == 408 else 504
    said = error(response, status)
    assert said["type"] == "timeout"
    assert "s, set by --timeout" in said["message"]


@pytest.mark.parametrize("value", ["abc", "0", "-1", "nan", "1e99"])
def test_wrong_deadline_is_refused(service: Serving, value: str) -> None:
    assert error(service.predict(1, X_Request_Timeout=value), 422)["param"] == "X-Request-Timeout"


# -- callers who behave oddly


def test_input_is_not_computed_when_its_client_has_left(models: GatedServing) -> None:
    before = models.of("narrow").stats()["totals"]["disconnected"]
    with occupied(models) as narrow:
        with models.connect() as leaving:
            leaving.sendall(post(b'{"inputs": "leaves"}', path=b"/models/narrow/predict"))
            until(lambda: narrow.queue()["pending"] == 1)
        until(lambda: narrow.stats()["totals"]["disconnected"] == before + 1)
        assert narrow.queue()["pending"] == 0
    assert models.computed() == [[0], [1]]


# -- keys


def test_request_needs_one_of_the_keys(keyed: Serving) -> None:
    error(keyed.predict(1), 401)
    assert keyed.predict(1, x_api_key="two").json() == 1


# -- who goes first, and what it costs


def test_headers_have_the_priority_and_the_tenant(keyed: Serving) -> None:
    wrong = keyed.predict(1, X_Rank="high", X_User="somebody", x_api_key="one")
    assert error(wrong, 422)["param"] == "X-Rank"
    document = keyed.client.get("/openapi.json").json()
    parameters = document["paths"]["/predict"]["post"]["parameters"]
    assert [each["name"] for each in parameters][2:] == ["X-Rank", "X-User"]


def test_web_process_asks_for_the_cost_of_an_input(models: GatedServing) -> None:
    sized, plain = models.of("sized"), models.of("plain")
    models.gate.let_through(9)
    assert sized.predict(["a", "bcd", "x" * 100]).json() == ["a", "bcd", "x" * 100]
    assert "length" in error(sized.predict(3), 422)["message"]
    assert plain.predict(3).json() == 3
    assert models.log().count(f"(--length {LENGTH})") == 1, "advice for the one without"


def test_input_that_is_sent_again_is_computed_once(models: GatedServing) -> None:
    cached = models.of("cached")
    models.gate.let_through(9)
    assert cached.predict(["a", "a"]).json() == ["a", "a"]
    assert cached.predict("a").json() == "a"
    assert models.computed() == [["a"]]


# -- how it stands


def test_health_and_info(infilling: Serving) -> None:
    assert infilling.client.get("/health/live").json() == {"status": "live"}
    assert infilling.client.get("/health/ready").json()["status"] == "ready"
    info = infilling.client.get("/info").json()
    assert info["task"] == "fill-mask"
    assert info["model"] == "text_infilling"
    assert info["mask_token"] == "[MASK]"
    assert info["version"] == __version__
    assert info["endpoints"] == ["/predict", "/", "/tokenize", "/decode", "/detokenize"]
    models = infilling.client.get("/v1/models").json()
    assert [each["id"] for each in models["data"]] == ["text_infilling"]
    assert "serving text_infilling (fill-mask) on http://127.0.0.1:" in infilling.line
    assert "), in float32 (as saved)" in infilling.line
    assert (info["dtype"], info["dtype_reason"]) == ("float32", "as saved")


@pytest.mark.parametrize("more", [(), *long_cases(("--web-workers", "2"))])
def test_service_is_not_ready_before_its_model_is(tmp_path: Path, more: tuple[str, ...]) -> None:
    port = str(LocalRedis().port)  # one that is free
    arguments = ("served_models:Late", "--port", port, *more)
    with GatedServing(tmp_path, *arguments, ready=False) as service:
        service.url = f"http://127.0.0.1:{port}"
        service.gate.await_arrival()
        until(lambda: answers(service, "/health/live"))
        assert service.client.get("/health/ready").json()["status"] == "starting"
        assert service.ready() == 503
        if more:
            assert service.terminate() == 0  # without waiting for the model
            return
        assert error(service.predict(1), 503)["type"] == "unavailable"
        assert service.client.get("/info").json()["ready"] is False
        service.gate.let_through()
        until(lambda: service.ready() == 200)
        assert service.predict(1).json() == 1


def answers(service: Serving, path: str) -> bool:
    try:
        return service.client.get(path).status_code == 200
    except httpx.TransportError:
        return False


def test_page_is_found_when_the_name_of_its_model_has_a_colon(service: Serving) -> None:
    """What is before the colon could be a scheme."""
    page = service.client.get(f"/models/{OBEDIENT}", follow_redirects=True)
    assert (page.status_code, page.url.path) == (200, f"/models/{OBEDIENT}/")


def test_metrics_have_requests_batches_and_workers(service: Serving) -> None:
    service.predict(["a", "b"])
    service.predict("invalid")
    response = service.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'service_streamer_ready{model="served_models:Obedient"} 1.0' in response.text
    values = figures_in(response.text)
    assert values['requests_total{path="/predict",status="200"}'] >= 1
    assert values['rejections_total{reason="invalid"}'] >= 1
    assert values['batch_size_bucket{le="2.0"}'] >= 1
    assert values['request_duration_seconds_count{path="/predict"}'] >= 1
    for name in ("queue_duration", "batch_duration", "inference_duration"):
        assert values[f"{name}_seconds_count"] >= 1
    assert values['workers{state="idle"}'] + values['workers{state="busy"}'] == 1
    reasons = [name for name in values if name.startswith("batches_cut_total{reason=")]
    assert len(reasons) == len(Reason), "also those that none was cut for"
    assert sum(map(values.__getitem__, reasons)) >= 1
    for stage in ("preprocess", "forward", "postprocess"):  # the names of a model's methods
        assert values[f'stage_seconds_total{{stage="{stage}"}}'] > 0
    assert values["ready"] == 1
    assert "process_resident_memory_bytes" in values


def test_answer_tells_where_its_time_went(service: Serving) -> None:
    told = service.predict("a").headers["server-timing"]
    spent = dict(part.split(";dur=") for part in told.split(", "))
    assert list(spent) == ["queued", "sent", "computed", "returned"]
    assert all(float(duration) >= 0 for duration in spent.values())
    assert "server-timing" not in service.predict([]).headers, "nothing was computed"
    assert "server-timing" not in service.predict("invalid").headers


def test_stats_and_events_tell_the_same(service: Serving) -> None:
    service.predict("a")
    with service.client.stream("GET", "/events") as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        data = (line[6:] for line in events.iter_lines() if line.startswith("data: "))
        first, second = json.loads(next(data)), json.loads(next(data))
    stats = service.stats()
    assert first.keys() == second.keys() == stats.keys()
    assert stats["ready"] is True
    assert stats["totals"]["answered"] >= 1
    assert stats["latency"].keys() == {"p50", "p90", "p99"}
    assert sum(each["count"] for each in stats["batch_sizes"]) >= 1
    assert sum(stats["reasons"].values()) >= 1
    assert stats["explanation"][0].startswith("Recently: ")
    assert [worker["state"] for worker in stats["workers"]] == ["idle"]


def test_log_says_what_to_do_when_no_file_can_be_opened() -> None:
    with Serving("served_models:double") as service, service.connect() as kept:
        kept.sendall(post(b'{"inputs": 1}', path=b"/predict"))
        assert kept.recv(4096).startswith(b"HTTP/1.1 200")
        pid = service.process.pid
        limits = prlimit(pid, RLIMIT_NOFILE)
        prlimit(pid, RLIMIT_NOFILE, (3, limits[1]))
        until(lambda: "ulimit -n" in service.log())
        kept.sendall(post(b'{"inputs": 2}', path=b"/predict"))
        assert kept.recv(4096).startswith(b"HTTP/1.1 200")
        prlimit(pid, RLIMIT_NOFILE, limits)
        assert service.answer(3) == 6
        assert service.log().count("ulimit -n") == 1


# -- the end


@pytest.mark.parametrize("number", [signal.SIGTERM, *long_cases(signal.SIGINT)])
def test_signal_to_all_processes_drains_and_ends(tmp_path: Path, number: signal.Signals) -> None:
    """Of a terminal, or of systemd. The worker leaves it to its parent."""
    with (
        GatedServing(tmp_path, OBEDIENT, "--web-workers", "2") as service,
        ThreadPoolExecutor(1) as threads,
    ):
        service.await_web_processes(2)
        assert " INFO worker 0 is ready\n" in service.log(), "the only model is not named"
        pids = [*service.children(), *service.pool()]
        assert len(pids) >= 4  # two of them, the pool and its worker
        open_ = threads.submit(service.predict, 1)
        service.gate.await_arrival()
        os.killpg(service.process.pid, number)
        until(lambda: "1 request still open" in service.log())
        for asks in (signal.SIGHUP, signal.SIGUSR1):
            service.process.send_signal(asks)
        until(lambda: "SIGUSR1: " in service.log())
        service.gate.let_through()
        assert open_.result().json() == 1
        assert open_.result().headers["connection"] == "close"
        assert service.process.wait() == 0
        assert "SIGHUP: " not in service.log(), "no worker is replaced any more"
        assert "POST /predict" not in service.log(), "nothing is logged of requests"
        assert "started again" not in service.log()
        assert "is restarted" not in service.log()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


#: The command line as the first process of a container, whose children orphans become.
FIRST = """
import ctypes, os, service_streamer.serve.cli.main as cli
first, getpid, PR_SET_CHILD_SUBREAPER = os.getpid(), os.getpid, 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
os.getpid = lambda: 1 if getpid() == first else getpid()
cli.main()
"""


@pytest.mark.long
def test_orphans_are_reaped_when_the_service_is_the_first_process() -> None:
    first = (sys.executable, "-c", FIRST, "serve", "--port", "0")
    with Serving("preprocess_models:Pads", "--preprocess-workers", "1", program=first) as service:
        [[_, orphan]] = service.predict(["a"]).json()
        [pid] = service.children()
        for worker in workers(pid):
            os.kill(worker, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{orphan}").exists())
        assert service.answer(["b"])[0][0] == "b"
        assert service.terminate() == 0
    with Serving("served_models:double", program=first) as service:
        [pid] = service.children()
        os.kill(pid, signal.SIGKILL)
        assert service.process.wait() == 128 + signal.SIGKILL


# -- the command line


@pytest.mark.parametrize("more", [(), *long_cases(("--web-workers", "2"))])
def test_traceback_of_a_model_that_cannot_be_loaded_is_shown_once(more: tuple[str, ...]) -> None:
    """Its traceback is there once, without our frames."""
    done = run("serve", "served_models:Failing", "--port", "0", *more)
    assert done.returncode == 3
    assert "could not load the model: OSError: the weights are not there" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "tried again" not in done.stderr, "the service ends"
    assert 'in init_model\n    raise OSError("the weights are not there")\n' in done.stderr
    assert f"{PACKAGE}{os.sep}" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "the model could not be loaded, so the service ends" in last
    assert ("see the error above" in last) == (not more)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["no_such_module:Model"], 3, "no_such_module"),
        (["served_models:Sized", "--length", "no_such_module:x"], 2, "no_such_mod"),
        (["served_models:Sized", "--length", "served_models:x"], 2, "--length"),
    ],
)
def test_name_that_cannot_be_imported_is_named(arguments: list[str], code: int, word: str) -> None:
    done = run("serve", *arguments, "--port", "0")
    assert done.returncode == code, done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_taken_port_is_named(service: Serving) -> None:
    port = str(httpx.URL(service.url).port)
    done = run("serve", "served_models:double", "--port", port)
    assert done.returncode == 4
    assert f"cannot listen at 127.0.0.1:{port}" in done.stderr


def test_info_names_versions_and_devices() -> None:
    done = run("info")
    assert done.returncode == 0
    for name in ("service_streamer", "python", "torch", "transformers", "cores", "device"):
        assert any(line.startswith(name) for line in done.stdout.splitlines()), name


# -- other ways to run it


def test_opentelemetry_has_spans_of_request_call_and_batch() -> None:
    """A request, its call and its batch, at a collector that this test is."""
    by_name: dict[str, Any] = {}

    def collect(_: str, body: bytes) -> Answer:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                by_name.update((span.name, span) for span in scope.spans)
        return 200, {}, b""

    with HTTPStub(collect) as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "10"}
        with Serving("served_models:double", "--opentelemetry", **env) as service:
            assert service.predict(2).json() == 4
            assert service.terminate() == 0  # which sends the rest
    request = by_name["POST /predict"]
    assert by_name["service_streamer.call"].parent_span_id == request.span_id
    assert by_name["service_streamer.batch"].links[0].trace_id == request.trace_id


def test_service_answers_over_redis(redis_server: str, prefix: str) -> None:
    redis = ("--redis", redis_server, "--prefix", prefix)
    with Serving(OBEDIENT, *redis, role="worker") as host, Serving(*redis) as service:
        assert service.predict(["a", 1]).json() == ["a", 1]
        stream = service.post("/predict", {"inputs": "a", "stream": True})
        assert stream.text == 'data: {"output":"a"}\n\ndata: [DONE]\n\n', "a model without steps"
        error(service.predict("invalid"), 422)
        error(service.predict("raise"), 500)
        until(lambda: service.ready() == 200)  # hosts are looked for now and then
        connected = {"state": "connected", "hosts": 1, "queued": 0}
        until(lambda: service.stats()["redis"] == connected)
        assert service.stats()["workers"] is None
        assert figures_in(service.client.get("/metrics").text)["redis_connected"] == 1
        assert service.terminate() == 0
        assert host.terminate() == 0


@pytest.mark.long
def test_another_secret_is_told_by_readiness_and_heals() -> None:
    port, secret = str(LocalRedis().port), "a secret of sixteen bytes"
    with (
        LocalRedis() as server,
        Serving("--redis", server.url, "--secret", secret, "--port", port, ready=False) as service,
    ):
        service.url = f"http://127.0.0.1:{port}"
        redis = ("served_models:double", "--redis", server.url)
        with Serving(*redis, "--secret", secret[::-1], role="worker"):
            until(lambda: "could not read this call" in service.log())
            until(lambda: "the signature is wrong" in service.client.get("/health/ready").text)
            assert service.ready() == 503
        with Serving(*redis, "--secret", secret, role="worker"):
            until(lambda: service.ready() == 200)
