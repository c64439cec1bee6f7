"""The Open Inference Protocol over gRPC: ``serve --grpc-port`` and the clients of others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import trustme
from tritonclient.grpc import service_pb2

import tensor_clients
from command_line import error_of
from serve_process import ROOT, GatedServing, Serving, environment, key_table, run, table, until
from service_streamer import InvalidInput
from service_streamer.serve.rpc.inference_service import ready_request, shortened
from tensor_clients import Clients, run_client
from test_tensors import Held
from test_tls import Files
from web_application import WebApplication

pytestmark = pytest.mark.xdist_group("rpc")

TWICE = "tensor_models:twice"
OBEDIENT = "served_models:Obedient"

#: What a client of HTTP/2 sends first, with empty settings; the kind of a frame that ends calls.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
GOAWAY = b"\7"


def rpc(service: Serving) -> str:
    """The address for gRPC."""
    found = re.search(r"gRPC on (\S+:\d+)", service.line)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatedServing]:
    """Three models; "obedient" waits at the gate, and at most one of its inputs is pending."""
    folder = tmp_path_factory.mktemp("rpc")
    (folder / "service.toml").write_text(
        table("twice", TWICE, "max-pending = 256\n")
        + table("counting", "stream_models:Countdown")
        + table("obedient", OBEDIENT, "batch-size = 1\nmax-pending = 1\n")
    )
    arguments = ("--config", str(folder / "service.toml"), "--grpc-port", "0", "--max-body", "1M")
    with GatedServing(folder, *arguments) as service:
        yield service


@pytest.fixture
def gated(service: GatedServing) -> GatedServing:
    """The model that waits at the gate, which is empty."""
    service.reset()
    return service.of("obedient")


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A service with keys, each of which is its own name.

    Bodies over HTTP may be larger than any message of gRPC.
    """
    keys = tmp_path_factory.mktemp("keyed") / "keys.toml"
    keys.touch(0o600)
    keys.write_text(
        key_table("secret", "secret")
        + key_table("slow", "slow", "requests-per-minute = 2\nconcurrency = 1")
        + key_table("narrow", "narrow", "concurrency = 2")
        + key_table("scraper", "scraper", "requests-per-minute = 1", ["metrics"])
    )
    arguments = ("--grpc-port", "0", "--max-body", "3G", "--api-key-file", str(keys))
    with Serving(TWICE, *arguments) as service:
        yield service


@pytest.fixture(scope="module", autouse=True)
def clients() -> Iterator[Clients]:
    """One process for all: each imports gRPC, numpy and Triton's client."""
    with contextlib.closing(Clients()) as clients:
        yield clients


def start_client(*arguments: str) -> subprocess.Popen[str]:
    """A client that goes on while the test does something else."""
    return subprocess.Popen(
        [sys.executable, tensor_clients.__file__, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT,
    )  # fmt: skip


@pytest.mark.parametrize("client", ["grpc", "grpc_aio", "contents"])
def test_clients(service: Serving, client: str, clients: Clients) -> None:
    clients.run(client, rpc(service), "twice")


def test_our_messages_are_tritons(service: Serving, clients: Clients) -> None:
    assert clients.run("descriptors", rpc(service)) == "9\n"


def test_health_and_reflection(service: Serving, clients: Clients) -> None:
    told = clients.run("health", rpc(service), "", "inference.GRPCInferenceService").splitlines()
    assert told == [
        "SERVING",
        "SERVING",
        "grpc.health.v1.Health grpc.reflection.v1alpha.ServerReflection "
        "inference.GRPCInferenceService",
        "inference 22",
    ]


def test_metrics_count_calls_as_paths(service: Serving, clients: Clients) -> None:
    clients.lines(*(("call", rpc(service), model, "a") for model in ("twice", "other")))
    path = 'path="/inference.GRPCInferenceService/ModelInfer"'
    lines = [line for line in service.client.get("/metrics").text.splitlines() if path in line]
    assert any('status="200"' in line for line in lines)
    assert any('status="404"' in line for line in lines)


def test_a_model_of_steps_sends_each_output(service: Serving, clients: Clients) -> None:
    assert clients.run("steps", rpc(service), "counting") == "1 2 3\n"


def test_calls_need_a_key(keyed: Serving, clients: Clients) -> None:
    call = ("call", rpc(keyed), TWICE, "a")
    none, other, wrong, right, health = clients.lines(
        call, ("call", rpc(keyed), "other", "a"), (*call, "60", "wrong"), (*call, "60", "secret"),
        ("health", rpc(keyed), ""),
    )[:5]  # fmt: skip
    assert none.startswith("UNAUTHENTICATED missing")
    assert other == none, "without a key nobody learns which models there are"
    assert wrong.startswith("UNAUTHENTICATED wrong")
    assert (right, health) == ("aa", "SERVING")


def test_calls_of_other_services_need_no_key(keyed: Serving, clients: Clients) -> None:
    """Older versions of grpcio ask our own service for the methods of health and reflection."""
    paths = ("inference.GRPCInferenceService/NoSuch", "grpc.health.v2.Health/Check",
             "inference.GRPCInferenceServices/ModelInfer")  # fmt: skip
    statuses = clients.lines(*(("foreign", rpc(keyed), f"/{path}") for path in paths))
    assert statuses == ["UNAUTHENTICATED", "UNIMPLEMENTED", "UNIMPLEMENTED"]


def test_a_key_is_checked_before_a_message_comes(keyed: Serving, clients: Clients) -> None:
    assert clients.run("unsent", rpc(keyed), TWICE, "wrong") == 3 * "UNAUTHENTICATED\n"


def test_a_call_is_refused_beyond_the_limits_of_its_key(keyed: Serving, clients: Clients) -> None:
    *answers, refused = clients.lines(*(3 * [("call", rpc(keyed), TWICE, "a", "60", "slow")]))
    assert answers == ["aa", "aa"]  # each of them frees its place
    assert refused.startswith("RESOURCE_EXHAUSTED")
    assert "'slow'" in refused


def test_a_stream_begins_no_more_than_its_key_may_open(keyed: Serving, clients: Clients) -> None:
    assert clients.run("crowd", rpc(keyed), TWICE, "200", "narrow") == "200 \n"


def test_questions_about_a_model_need_no_scope(keyed: Serving, clients: Clients) -> None:
    questions = ((TWICE, "scraper"), (TWICE, "wrong"), ("other", "wrong"))
    answers = clients.lines(*(("told", rpc(keyed), *each) for each in questions))
    assert answers == [f"True 1 {TWICE}", "UNAUTHENTICATED", "UNAUTHENTICATED"]


def test_a_call_ignores_headers_of_bodies(service: Serving, clients: Clients) -> None:
    assert clients.run("framed", rpc(service)).startswith("NOT_FOUND")


def test_calls_over_tls(tmp_path: Path, clients: Clients) -> None:
    files = Files(tmp_path)
    with Serving(TWICE, "--grpc-port", "0", *files.arguments) as service:
        authority = str(files.authority)
        assert clients.run("secure_call", rpc(service), TWICE, authority) == "aa\n"
        assert clients.run("call", rpc(service), TWICE, "a").startswith("UNAVAILABLE")
        files.ca = trustme.CA()  # with a renewed certificate of another authority
        files.issue("second.test")
        files.ca.cert_pem.write_to_path(files.authority)
        assert clients.run("secure_call", rpc(service), TWICE, authority) == "aa\n"


def test_calls_with_a_clients_certificate(tmp_path: Path, clients: Clients) -> None:
    files = Files(tmp_path)
    mutual = ("--ssl-ca-certs", str(files.authority))
    with Serving(TWICE, "--grpc-port", "0", *files.arguments, *mutual) as service:
        call = ("secure_call", rpc(service), TWICE, str(files.authority))
        assert clients.run(*call) == "UNAVAILABLE\n"
        assert clients.run(*call, str(files.client), str(files.client)) == "aa\n"


def test_an_encrypted_key_is_refused_with_grpc(tmp_path: Path) -> None:
    arguments = (TWICE, "--grpc-port", "0", *Files(tmp_path).arguments)
    assert "encrypted" in error_of("serve", *arguments, SSL_KEYFILE_PASSWORD="a password")


def test_errors_of_a_model_have_their_status(gated: GatedServing, clients: Clients) -> None:
    gated.gate.let_through(2)
    texts = ("invalid", "raise")
    wrong, failed = clients.lines(*(("call", rpc(gated), "obedient", text) for text in texts))
    assert wrong == "INVALID_ARGUMENT inputs: must not be 'invalid'; send another word"
    assert failed.startswith("INTERNAL")
    assert "12345" not in failed


def test_a_call_that_waits_is_not_computed_if_its_client_leaves_or_its_deadline_passes(
    gated: GatedServing, clients: Clients
) -> None:
    """And a call is refused at once while another one waits: so much is the service's limit."""
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(run_client, "call", rpc(gated), "obedient", "first")
        gated.gate.await_arrival()
        ahead = threads.submit(gated.predict, 1)  # is sent ahead
        until(lambda: gated.queue()["in_flight"] == 2)
        late = clients.run("call", rpc(gated), "obedient", "late", "0.2")
        assert late.startswith("DEADLINE_EXCEEDED")
        until(lambda: gated.queue()["pending"] == 0)
        before = gated.stats()["totals"]["disconnected"]
        with start_client("leave", rpc(gated), "obedient", "leaves") as leaving:
            until(lambda: gated.queue()["pending"] == 1)
            refused = clients.run("call", rpc(gated), "obedient", "too much")
            assert refused.startswith("RESOURCE_EXHAUSTED")
            assert "overloaded" in refused
            leaving.communicate("\n")
        until(lambda: gated.stats()["totals"]["disconnected"] > before)
        until(lambda: gated.queue()["pending"] == 0)
        gated.gate.let_through(2)
        assert first.result() == "first\n"
        assert ahead.result().json() == 1
    assert gated.computed() == [["first"], [1]]


@pytest.mark.long
def test_streams_that_are_cancelled_free_their_requests_and_are_no_errors(tmp_path: Path) -> None:
    """One while its requests are pending, one that reads none of its large answers."""
    with GatedServing(tmp_path, OBEDIENT, "--grpc-port", "0", "--batch-size", "1") as service:
        flood = ("flood", rpc(service), OBEDIENT)
        with start_client(*flood) as pending:
            service.gate.await_arrival()
            until(lambda: service.queue()["pending"] >= 50)
            pending.communicate("\n")
        until(lambda: service.queue()["pending"] == 0)
        service.reset()
        before = service.stats()["totals"]["answered"]
        service.gate.let_through(64)
        with start_client(*flood, "x" * 100_000, "64") as unread:
            until(lambda: service.stats()["totals"]["answered"] == before + 64)
            unread.communicate("\n")
        assert service.terminate() == 0
        assert "cut off" not in service.log()
        assert "Traceback" not in service.log()


def test_open_calls_are_answered_at_the_end(tmp_path: Path, clients: Clients) -> None:
    with GatedServing(tmp_path, OBEDIENT, "--grpc-port", "0") as service:
        call = ("call", rpc(service), OBEDIENT)
        with (
            ThreadPoolExecutor(1) as threads,
            start_client("watch_health", rpc(service)) as watching,
            socket.create_connection(rpc(service).split(":")) as idle,  # type: ignore[arg-type]
        ):
            idle.sendall(PREFACE)
            assert watching.stdout is not None
            while watching.stdout.readline() != "SERVING\n":
                """It was asked before the model was ready."""
            open_ = threads.submit(run_client, *call, "open")
            service.gate.await_arrival()
            os.kill(service.process.pid, signal.SIGTERM)
            assert watching.stdout.readline() == "NOT_SERVING\n"
            with idle.makefile("rb") as frames:
                while (head := frames.read(9))[3:4] != GOAWAY:
                    assert head, "the connection ended without it"
                    frames.read(int.from_bytes(head[:3]))
            assert clients.run(*call, "late").startswith("UNAVAILABLE")
            service.gate.let_through(1)
            assert open_.result() == "open\n"
            assert service.process.wait() == 0
        assert "Traceback" not in service.log()


def test_several_web_processes_share_the_port(clients: Clients) -> None:
    with Serving(TWICE, "--grpc-port", "0", "--web-workers", "2") as service:
        service.await_web_processes(2)
        clients.run("grpc_aio", rpc(service), TWICE)


def test_a_port_that_is_taken(service: Serving) -> None:
    port = rpc(service).rpartition(":")[2]
    done = run("serve", TWICE, "--port", "0", "--grpc-port", port)
    assert done.returncode == 4
    assert "--grpc-port" in done.stderr


def test_a_message_of_very_many_parts_is_refused(service: Serving, clients: Clients) -> None:
    """A message of 11 MB has room for 600,000 tensors, which took 13 s of the event loop.

    Outputs and parameters are counted by the same function: test_tensors.py has them.
    """
    said = clients.run("many_parts", rpc(service), "twice")
    assert said.startswith("INVALID_ARGUMENT inputs")
    assert "1024" in said


@pytest.mark.parametrize(("size", "is_in_loop"), [(70_000, True), (300_000, False)])
def test_many_numbers_are_read_in_a_thread(size: int, is_in_loop: bool) -> None:
    backend = SimpleNamespace(check_room=lambda: None)
    service: Any = SimpleNamespace(
        is_draining=False, is_known=True, offers=lambda _: True, backend=backend
    )
    message = service_pb2.ModelInferRequest()
    values = np.arange(size) % 50
    given = message.inputs.add(name="x", datatype="INT8", shape=[size])
    given.contents.int_contents.extend(values.tolist())

    async def read() -> Any:
        executor = Held()
        asyncio.get_running_loop().set_default_executor(executor)
        reading = asyncio.ensure_future(ready_request(service, message, message.ByteSize()))
        await asyncio.sleep(0)
        assert bool(executor.held) != is_in_loop
        executor.let_go()
        request = await reading
        executor.shutdown()
        return request

    [found] = asyncio.run(read()).inputs
    assert (found.values == values).all()
    given.contents.int_contents[-1] = 128
    with pytest.raises(InvalidInput, match="INT8"):
        asyncio.run(read())


@pytest.mark.parametrize("letter", ["a", "%", "\n", "字", "😀"])
def test_an_errors_text_fits_into_a_header(letter: str) -> None:
    """Longer ones were RESOURCE_EXHAUSTED to clients, which means overload."""
    assert 5900 < len(quote(shortened(letter * 9000), safe=" ")) <= 6000
    assert shortened(letter * 100) == letter * 100


def test_an_error_of_a_model_without_words_has_a_text() -> None:
    """A message of a stream without one is no error."""

    def refuse(_: list[Any]) -> list[Any]:
        raise InvalidInput("")

    with WebApplication(refuse) as application:
        response = application.post("/predict", {"inputs": 1})
    assert response.status_code == 422
    assert response.json()["error"]["message"]
