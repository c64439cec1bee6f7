"""The Open Inference Protocol over gRPC: ``serve --grpc-port`` and the clients of others."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import trustme

import tensor_clients
from serve_process import ROOT, Serving, environment, run, until
from service_streamer import InvalidInput
from service_streamer.serve.http.refusals import refusal
from service_streamer.serve.http.tls import PASSWORD
from service_streamer.serve.rpc import inference_service
from service_streamer.serve.rpc.inference_messages import ModelInferRequest
from service_streamer.serve.rpc.message_tensors import read_message
from service_streamer.testing import Gate
from tensor_clients import run_client
from test_tls import Files

TWICE = "tensor_models:twice"
OBEDIENT = "served_models:Obedient"


def rpc(service: Serving) -> str:
    """The address for gRPC."""
    found = re.search(r"gRPC on (\S+:\d+)", service.line)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    arguments = ("--grpc-port", "0", "--max-body", "1M", "--max-pending", "256")
    with Serving(TWICE, *arguments) as service:
        yield service


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Callable[..., tuple[Serving, Gate]]]:
    """Services whose model waits for the test; what they compute is in ``tmp_path / "record"``."""
    gate = Gate(tmp_path / "gate")
    made: list[Serving] = []

    def make(*arguments: str) -> tuple[Serving, Gate]:
        env = {"TEST_GATE": str(gate.__getstate__()), "TEST_RECORD": str(tmp_path / "record")}
        made.append(Serving(OBEDIENT, "--grpc-port", "0", *arguments, **env))
        return made[-1], gate

    yield make
    for service in made:
        service.close()
    gate.close()


@pytest.mark.parametrize("client", ["grpc", "grpc_aio", "contents"])
def test_clients(service: Serving, client: str) -> None:
    run_client(client, rpc(service), TWICE)


def test_our_messages_are_tritons() -> None:
    assert run_client("descriptors") == "7\n"


def test_health_and_reflection(service: Serving) -> None:
    told = run_client("health", rpc(service), "", "inference.GRPCInferenceService").splitlines()
    assert told == [
        "SERVING",
        "SERVING",
        "grpc.health.v1.Health grpc.reflection.v1alpha.ServerReflection "
        "inference.GRPCInferenceService",
        "inference 15",
    ]


def test_metrics_count_calls_as_paths(service: Serving) -> None:
    run_client("call", rpc(service), TWICE, "a")
    run_client("call", rpc(service), "other", "a")
    path = 'path="/inference.GRPCInferenceService/ModelInfer"'
    lines = [line for line in service.client.get("/metrics").text.splitlines() if path in line]
    assert any('status="200"' in line for line in lines)
    assert any('status="404"' in line for line in lines)


def test_a_model_of_steps_sends_each_output() -> None:
    with Serving("tensor_models:Counting", "--grpc-port", "0") as service:
        assert run_client("steps", rpc(service), "tensor_models:Counting") == "1 2 3\n"


def test_bodies_over_http_may_be_larger_than_messages() -> None:
    with Serving(TWICE, "--grpc-port", "0", "--max-body", "3G") as service:
        assert run_client("call", rpc(service), TWICE, "a") == "aa\n"


def test_keys() -> None:
    with Serving(TWICE, "--grpc-port", "0", "--api-key", "secret") as service:
        address = rpc(service)
        assert run_client("call", address, TWICE, "a").startswith("UNAUTHENTICATED missing API key")
        other = run_client("call", address, "other", "a")
        assert other.startswith("UNAUTHENTICATED missing API key"), "nor does it tell which it has"
        wrong = run_client("call", address, TWICE, "a", "60", "wrong")
        assert wrong.startswith("UNAUTHENTICATED wrong API key")
        assert run_client("call", address, TWICE, "a", "60", "secret") == "aa\n"
        assert run_client("health", address, "").startswith("SERVING")


def test_a_key_is_checked_before_a_message_comes() -> None:
    with Serving(TWICE, "--grpc-port", "0", "--api-key", "secret") as service:
        refused = run_client("unsent", rpc(service), TWICE, "wrong")
        assert refused == 3 * "UNAUTHENTICATED\n"


def limited(tmp_path: Path, limits: str) -> tuple[str, str]:
    """The options for a key "secret" with limits."""
    keys = tmp_path / "keys.toml"
    hashed = hashlib.sha256(b"secret").hexdigest()
    keys.write_text(f'[a]\nhash = "sha256:{hashed}"\n{limits}')
    keys.chmod(0o600)
    return "--api-key-file", str(keys)


def test_limits_of_a_key(tmp_path: Path) -> None:
    keys = limited(tmp_path, "requests-per-minute = 2\nconcurrency = 1\n")
    with Serving(TWICE, "--grpc-port", "0", *keys) as service:
        for expected in ("aa\n", "aa\n"):  # of which each frees its place
            assert run_client("call", rpc(service), TWICE, "a", "60", "secret") == expected
        refused = run_client("call", rpc(service), TWICE, "a", "60", "secret")
        assert refused.startswith("RESOURCE_EXHAUSTED the API key 'a' has reached its limit")


def test_a_stream_begins_no_more_than_its_key_may_have_open(tmp_path: Path) -> None:
    with Serving(TWICE, "--grpc-port", "0", *limited(tmp_path, "concurrency = 2\n")) as service:
        assert run_client("crowd", rpc(service), TWICE, "200", "secret") == "200 \n"


def test_any_key_asks_how_a_model_stands_and_that_is_no_request(tmp_path: Path) -> None:
    keys = limited(tmp_path, 'requests-per-minute = 1\nscopes = ["metrics"]\n')
    with Serving(TWICE, "--grpc-port", "0", *keys) as service:
        assert run_client("told", rpc(service), TWICE, "secret") == "True 1\n"
        assert run_client("told", rpc(service), TWICE, "wrong") == "UNAUTHENTICATED\n"
        assert run_client("told", rpc(service), "other", "wrong") == "UNAUTHENTICATED\n"


def test_a_key_pays_for_the_outputs_of_its_streams(tmp_path: Path) -> None:
    model, keys = "tensor_models:Counting", limited(tmp_path, "tokens-per-minute = 5\n")
    with Serving(model, "--grpc-port", "0", *keys) as service:
        assert run_client("outputs", rpc(service), model, "9", "secret") == "9\n"
        refused = run_client("outputs", rpc(service), model, "9", "secret")
        assert refused.startswith("0 the API key 'a' has reached its limit tokens-per-minute = 5")


def test_a_key_pays_for_a_call_that_is_cancelled(
    gated: Callable[..., tuple[Serving, Gate]], tmp_path: Path
) -> None:
    limits = 'tokens-per-minute = 1\nscopes = ["compute", "metrics"]\n'
    service, gate = gated(*limited(tmp_path, limits))
    service.client.headers["x-api-key"] = "secret"
    address = rpc(service)
    with subprocess.Popen(
        [sys.executable, tensor_clients.__file__, "leave", address, OBEDIENT, "a" * 40, "secret"],
        stdin=subprocess.PIPE, text=True, env=environment(), cwd=ROOT,
    ) as leaving:  # fmt: skip
        gate.await_arrival()
        leaving.communicate("\n")
    until(lambda: service.stats()["totals"]["disconnected"] == 1)
    gate.let_through(10)
    refused = run_client("call", address, OBEDIENT, "a", "60", "secret")
    assert "has reached its limit tokens-per-minute = 1" in refused


def test_calls_over_tls(tmp_path: Path) -> None:
    files = Files(tmp_path)
    with Serving(TWICE, "--grpc-port", "0", *files.arguments) as service:
        authority = str(files.authority)
        assert run_client("secure_call", rpc(service), TWICE, authority) == "aa\n"
        assert run_client("call", rpc(service), TWICE, "a").startswith("UNAVAILABLE")
        files.ca = trustme.CA()  # with a renewed certificate of another authority
        files.issue("second.test")
        files.ca.cert_pem.write_to_path(files.authority)
        assert run_client("secure_call", rpc(service), TWICE, authority) == "aa\n"


def test_calls_with_a_clients_certificate(tmp_path: Path) -> None:
    files = Files(tmp_path)
    mutual = ("--ssl-ca-certs", str(files.authority))
    with Serving(TWICE, "--grpc-port", "0", *files.arguments, *mutual) as service:
        call = ("secure_call", rpc(service), TWICE, str(files.authority))
        assert run_client(*call) == "UNAVAILABLE\n"
        assert run_client(*call, str(files.client), str(files.client)) == "aa\n"


def test_grpc_takes_no_encrypted_key(tmp_path: Path) -> None:
    files = Files(tmp_path)
    arguments = (TWICE, "--grpc-port", "0", "--port", "0", *files.arguments)
    done = run("serve", *arguments, **{PASSWORD: "a password"})
    assert done.returncode == 2
    assert "gRPC cannot read an encrypted key" in done.stderr


def test_a_models_errors(gated: Callable[..., tuple[Serving, Gate]]) -> None:
    service, gate = gated()
    gate.let_through(10)
    wrong = run_client("call", rpc(service), OBEDIENT, "invalid")
    assert wrong == "INVALID_ARGUMENT inputs: must not be 'invalid'; send another word\n"
    failed = run_client("call", rpc(service), OBEDIENT, "raise")
    assert failed.startswith("INTERNAL the model failed on this request")
    assert "12345" not in failed


def test_overload_and_who_goes_away(
    gated: Callable[..., tuple[Serving, Gate]], tmp_path: Path
) -> None:
    service, gate = gated("--batch-size", "1", "--max-pending", "1")
    address = rpc(service)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(run_client, "call", address, OBEDIENT, "first")
        gate.await_arrival()
        ahead = threads.submit(service.predict, 1)  # is sent ahead
        until(lambda: service.stats()["queue"]["in_flight"] == 2)
        with subprocess.Popen(
            [sys.executable, tensor_clients.__file__, "leave", address, OBEDIENT, "leaves"],
            stdin=subprocess.PIPE, text=True, env=environment(), cwd=ROOT,
        ) as leaving:  # fmt: skip
            until(lambda: service.stats()["queue"]["pending"] == 1)
            refused = run_client("call", address, OBEDIENT, "too much")
            assert refused == "RESOURCE_EXHAUSTED the service is overloaded; retry soon\n"
            leaving.communicate("\n")
        until(lambda: service.stats()["totals"]["disconnected"] == 1)
        until(lambda: service.stats()["queue"]["pending"] == 0)
        gate.let_through(2)
        assert first.result() == "first\n"
        assert ahead.result().json() == 1
    assert "leaves" not in (tmp_path / "record").read_text()


def test_a_stream_that_is_cancelled_lets_go_of_all_its_requests(
    gated: Callable[..., tuple[Serving, Gate]],
) -> None:
    service, gate = gated("--batch-size", "1")
    with subprocess.Popen(
        [sys.executable, tensor_clients.__file__, "flood", rpc(service), OBEDIENT],
        stdin=subprocess.PIPE, text=True, env=environment(), cwd=ROOT,
    ) as flooding:  # fmt: skip
        gate.await_arrival()
        until(lambda: service.stats()["queue"]["pending"] >= 50)
        flooding.communicate("\n")
    until(lambda: service.stats()["queue"]["pending"] == 0)
    gate.let_through(10)
    os.kill(service.process.pid, signal.SIGTERM)
    assert service.process.wait() == 0
    assert "cut off" not in service.log()
    assert "Traceback" not in service.log()


def test_who_leaves_within_a_large_answer_is_no_error_of_ours() -> None:
    text = "x" * 100_000  # 32 of them are more than a client takes that does not read
    with Serving(TWICE, "--grpc-port", "0") as service:
        with subprocess.Popen(
            [sys.executable, tensor_clients.__file__, "flood", rpc(service), TWICE, text, "32"],
            stdin=subprocess.PIPE, text=True, env=environment(), cwd=ROOT,
        ) as leaving:  # fmt: skip
            until(lambda: service.stats()["totals"]["answered"] == 32)
            leaving.communicate("\n")
        assert service.terminate() == 0
        assert "Traceback" not in service.log()


def test_the_clients_deadline(gated: Callable[..., tuple[Serving, Gate]], tmp_path: Path) -> None:
    service, gate = gated("--batch-size", "1")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(service.predict, 0)
        gate.await_arrival()
        ahead = threads.submit(service.predict, 1)
        until(lambda: service.stats()["queue"]["in_flight"] == 2)
        late = run_client("call", rpc(service), OBEDIENT, "late", "0.2")
        assert late.startswith("DEADLINE_EXCEEDED")
        until(lambda: service.stats()["queue"]["pending"] == 0)
        gate.let_through(2)
        assert [first.result().json(), ahead.result().json()] == [0, 1]
    assert "late" not in (tmp_path / "record").read_text()


def test_a_signal_drains(gated: Callable[..., tuple[Serving, Gate]]) -> None:
    service, gate = gated()
    address = rpc(service)
    with (
        ThreadPoolExecutor(1) as threads,
        subprocess.Popen(
            [sys.executable, tensor_clients.__file__, "watch_health", address],
            stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT,
        ) as watching,
    ):  # fmt: skip
        assert watching.stdout is not None
        while watching.stdout.readline() != "SERVING\n":
            """It was asked before the model was ready."""
        open_ = threads.submit(run_client, "call", address, OBEDIENT, "open")
        gate.await_arrival()
        os.kill(service.process.pid, signal.SIGTERM)
        assert watching.stdout.readline() == "NOT_SERVING\n"
        late = run_client("call", address, OBEDIENT, "late")
        assert late == "UNAVAILABLE the service is stopping\n"
        gate.let_through(1)
        assert open_.result() == "open\n"
        assert service.process.wait() == 0
    assert "Traceback" not in service.log()


def test_several_web_processes_share_the_port() -> None:
    with Serving(TWICE, "--grpc-port", "0", "--web-workers", "2") as service:
        service.await_web_processes(2)
        run_client("grpc_aio", rpc(service), TWICE)


def test_a_port_that_is_taken(service: Serving) -> None:
    port = rpc(service).rpartition(":")[2]
    done = run("serve", TWICE, "--port", "0", "--grpc-port", port)
    assert done.returncode == 4
    assert "choose another --host or --grpc-port" in done.stderr


@pytest.mark.parametrize("part", ["inputs", "outputs", "parameters"])
def test_a_message_of_very_many_parts_is_refused_before_they_are_read(part: str) -> None:
    """A message of 11 MB has room for 600,000 tensors, which took 13 s of the event loop."""
    message = ModelInferRequest()
    for number in range(1025):
        if part == "inputs":
            message.inputs.add(name=f"{number}", datatype="BOOL", shape=[1])
            message.raw_input_contents.append(b"\1")
        elif part == "outputs":
            message.outputs.add(name=f"{number}")
        else:
            message.parameters[f"{number}"].bool_param = True
    with pytest.raises(InvalidInput, match=f"^{part}: has 1025 .* may have 1024$"):
        read_message(message)


def numbers_message(values: Any) -> Any:
    message = ModelInferRequest()
    given = message.inputs.add(name="x", datatype="INT8", shape=[len(values)])
    given.contents.int_contents.extend(values)
    return message


def test_numbers_are_read_in_pieces() -> None:
    values = np.arange(70_000) % 100
    [read] = read_message(numbers_message(values)).inputs
    assert read.values.dtype == np.int8
    np.testing.assert_array_equal(read.values, values)
    values[-1] = 128
    with pytest.raises(InvalidInput, match="out of the range of INT8"):
        read_message(numbers_message(values))


@pytest.mark.parametrize(("size", "is_in_loop"), [(70_000, True), (300_000, False)])
def test_many_numbers_are_read_in_a_thread(
    size: int, is_in_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def read(message: Any) -> Any:
        threads.append(threading.get_ident())
        return read_message(message)

    monkeypatch.setattr(inference_service, "read_message", read)
    backend = SimpleNamespace(check_room=lambda: None)
    service: Any = SimpleNamespace(
        is_draining=False, is_known=True, offers=lambda _: True, backend=backend
    )
    message = numbers_message([1] * size)
    asyncio.run(inference_service._ready_request(service, message, message.ByteSize()))
    assert [each == threading.get_ident() for each in threads] == [is_in_loop]


@pytest.mark.parametrize("letter", ["a", "%", "\n", "字", "😀"])
def test_an_errors_text_fits_into_a_header(letter: str) -> None:
    """Longer ones were RESOURCE_EXHAUSTED to clients, which means overload."""
    shortened = inference_service.shortened(letter * 9000)
    assert 5900 < len(quote(shortened, safe=" ")) <= 6000
    assert inference_service.shortened(letter * 100) == letter * 100


def test_an_error_has_a_text() -> None:
    """A message of a stream without one is no error."""
    assert str(refusal(InvalidInput(""), debug=False))
