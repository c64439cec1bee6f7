"""Clients of the Open Inference Protocol that others have written; each in a process of its own.

They leave threads and descriptors behind, which the tests' guard would take for ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from serve_process import ROOT, environment

ARRAY = np.arange(12, dtype=np.float32).reshape(2, 2, 3)


def run_client(name: str, *arguments: str) -> str:
    """Run a client in a process of its own; returns what it printed."""
    with contextlib.closing(Clients()) as clients:
        return clients.run(name, *arguments)


def run_clients(*calls: tuple[str, ...]) -> None:
    """Run clients one after the other in one process."""
    with contextlib.closing(Clients()) as clients:
        clients.lines(*calls)


class Clients:
    """A process that runs one client after another."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment(), cwd=ROOT,
        )  # fmt: skip

    def run(self, name: str, *arguments: str) -> str:
        """What it printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        said, failed = json.loads(self._process.stdout.readline())
        assert not failed, failed
        return str(said)

    def lines(self, *calls: tuple[str, ...]) -> list[str]:
        """All lines that these printed."""
        return [line for call in calls for line in self.run(*call).splitlines()]

    def close(self) -> None:
        self._process.communicate()


def numbers(client: Any, array: Any = ARRAY, datatype: str = "FP32", **options: Any) -> Any:
    """An input with an array."""
    given = client.InferInput("x", [*array.shape], datatype)
    given.set_data_from_numpy(array, **options)
    return given


def words(client: Any, *texts: str, **options: Any) -> Any:
    return numbers(client, np.array(texts, object), "BYTES", **options)


def refused(status: str, text: str, call: Any, *arguments: Any, **options: Any) -> None:
    """A call fails with this status."""
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException, match=text) as raised:
        call(*arguments, **options)
    assert raised.value.status().removeprefix("StatusCode.") == status


def http(address: str, model: str) -> None:
    import tritonclient.http as client

    with client.InferenceServerClient(address, network_timeout=60) as server:
        assert server.is_server_live()
        assert server.is_server_ready()
        assert server.is_model_ready(model)
        assert server.is_model_ready(model, "1")
        assert not server.is_model_ready("no such model")
        assert not server.is_model_ready(model, "2")
        assert server.get_server_metadata()["name"] == "service_streamer"
        assert server.get_model_metadata(model)["versions"] == ["1"]
        for is_binary in (True, False):
            result = server.infer(
                model, [numbers(client, binary_data=is_binary)], request_id="an id"
            )
            np.testing.assert_array_equal(result.as_numpy("output"), 2 * ARRAY)
            assert result.get_response()["id"] == "an id"
            wanted = [client.InferRequestedOutput("output", binary_data=is_binary)]
            given = [words(client, "a", "ü", binary_data=is_binary)]
            result = server.infer(model, given, outputs=wanted, model_version="1")
            assert result.as_numpy("output").tolist() in (["aa", "üü"], [b"aa", "üü".encode()])
        waiting = server.async_infer(model, [numbers(client)])
        np.testing.assert_array_equal(waiting.get_result().as_numpy("output"), 2 * ARRAY)
        given = [numbers(client)]
        refused("404", "no model 'other'", server.infer, "other", given)
        for coding in ("gzip", "deflate"):
            result = server.infer(
                model, given, request_compression_algorithm=coding,
                response_compression_algorithm=coding,
            )  # fmt: skip
            np.testing.assert_array_equal(result.as_numpy("output"), 2 * ARRAY)


def repository(address: str, key: str) -> None:
    """Load and unload the second of two models."""
    import tritonclient.http as client

    headers = {"authorization": f"Bearer {key}"}
    with client.InferenceServerClient(address, network_timeout=240) as server:

        def ready() -> list[str]:
            index = server.get_model_repository_index(headers=headers)
            return [each["name"] for each in index if each["state"] == "READY"]

        say(*ready())
        server.unload_model("b", headers=headers)
        say(*ready(), server.is_model_ready("b", headers=headers))
        server.load_model("b", headers=headers)
        say(*ready(), server.is_model_ready("b", headers=headers))
        assert "model_repository" in server.get_server_metadata()["extensions"]


def secure_call(address: str, model: str, authority: str, *certificate: str) -> None:
    """One call over TLS, with the files of a client's key and certificate if they are given."""
    import tritonclient.grpc as client
    from tritonclient.utils import InferenceServerException

    chain, key = certificate if certificate else (None, None)
    with client.InferenceServerClient(
        address, ssl=True, root_certificates=authority, private_key=key, certificate_chain=chain
    ) as server:
        try:
            result = server.infer(model, [words(client, "a")], client_timeout=60)
        except InferenceServerException as error:
            say(error.status().removeprefix("StatusCode."))
        else:
            say(result.as_numpy("output").tolist()[0].decode())


async def in_tasks(server: Any, client: Any, model: str, count: int) -> None:
    """So many calls at once."""
    async with server:
        assert await server.is_server_ready()
        assert await server.is_model_ready(model)
        results = await asyncio.gather(
            *(server.infer(model, [numbers(client, ARRAY + number)]) for number in range(count))
        )
        for number, result in enumerate(results):
            np.testing.assert_array_equal(result.as_numpy("output"), 2 * (ARRAY + number))


async def http_aio(address: str, model: str) -> None:
    import tritonclient.http.aio as client

    await in_tasks(client.InferenceServerClient(address), client, model, 20)


async def grpc_aio(address: str, model: str) -> None:
    import tritonclient.grpc.aio as client

    await in_tasks(client.InferenceServerClient(address), client, model, 50)


# -- gRPC


@contextlib.contextmanager
def inference(address: str) -> Iterator[Any]:
    """The service's methods."""
    import grpc
    from tritonclient.grpc import service_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@contextlib.contextmanager
def failures_said() -> Iterator[None]:
    """Print the status of a call that fails."""
    import grpc

    try:
        yield
    except grpc.RpcError as error:
        say(error.code().name)


def with_key(key: str) -> list[tuple[str, str]]:
    """The metadata of a call."""
    return [("authorization", f"Bearer {key}")] if key else []


def infer(address: str, message: Any, **options: Any) -> Any:
    """The answer; or None, and the status is printed with its text."""
    import grpc

    with inference(address) as service:
        try:
            return service.ModelInfer(message, **options)
        except grpc.RpcError as error:
            say(error.code().name, error.details())


def words_message(model: str, text: str) -> Any:
    """A request with a text."""
    from tritonclient.grpc import service_pb2

    asked = service_pb2.ModelInferRequest(model_name=model)
    given = asked.inputs.add(name="x", datatype="BYTES", shape=[1])
    given.contents.bytes_contents.append(text.encode())
    return asked


def grpc(address: str, model: str) -> None:
    import tritonclient.grpc as client

    with client.InferenceServerClient(address) as server:
        assert server.is_server_live()
        assert server.is_server_ready()
        assert server.is_model_ready(model)
        told = server.get_server_metadata()
        assert told.name == "service_streamer"
        known = ["binary_tensor_data", "model_configuration", "parameters"]
        assert [*told.extensions] == known, "no model_repository"
        assert [*server.get_model_metadata(model, "1").versions] == ["1"]
        config = server.get_model_config(model, "1", as_json=True)["config"]
        assert config == {
            "name": model, "platform": "python", "backend": "python", "max_batch_size": 64
        }  # fmt: skip
        index = server.get_model_repository_index().models
        assert (model, "1", "READY") in [(each.name, each.version, each.state) for each in index]
        for more in ({}, {"compression_algorithm": "gzip"}):
            result = server.infer(model, [numbers(client)], request_id="an id", **more)
            np.testing.assert_array_equal(result.as_numpy("output"), 2 * ARRAY)
            assert result.get_response().id == "an id"
        wanted = [client.InferRequestedOutput("output")]
        result = server.infer(model, [words(client, "a", "ü")], outputs=wanted)
        assert result.as_numpy("output").tolist() == [b"aa", "üü".encode()]
        given = [numbers(client)]
        refused("NOT_FOUND", "no model 'other'", server.is_model_ready, "other")
        refused("NOT_FOUND", "no model 'other'", server.infer, "other", given)
        refused("NOT_FOUND", "no model 'other'", server.get_model_config, "other")
        refused("NOT_FOUND", "version 1 only", server.infer, model, given, "3")
        invalid, late = "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"
        refused(invalid, "'sequence_id' is not", server.infer, model, given, sequence_id=3)
        refused(late, "timeout of 1e-06 s, set by --timeout", server.infer, model, given, timeout=1)
        large, many = ([numbers(client, np.ones(count, "f4"))] for count in (1 << 20, 257))
        refused("RESOURCE_EXHAUSTED", "larger than max", server.infer, model, large)
        says = "257 inputs exceed the queue's limit of 256"
        refused(invalid, says, server.infer, model, many)
        refused("UNIMPLEMENTED", "", server.get_inference_statistics)
        stream(client, server, model)


def stream(client: Any, server: Any, model: str) -> None:
    """Requests of one stream are answered in their order, and a wrong one by an error."""
    answers: queue.Queue[Any] = queue.Queue()
    server.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(100):
        server.async_stream_infer(model, [numbers(client, ARRAY + number)], request_id=str(number))
    server.async_stream_infer("other", [numbers(client)])
    server.async_stream_infer(
        model, [numbers(client)], request_id="last", enable_empty_final_response=True
    )
    for number in range(100):
        result, error = answers.get(timeout=60)
        assert error is None
        assert result.get_response().id == str(number)
        np.testing.assert_array_equal(result.as_numpy("output"), 2 * (ARRAY + number))
    _, error = answers.get(timeout=60)
    assert "no model 'other'" in str(error)
    result, _ = answers.get(timeout=60)
    assert result.get_response().parameters["triton_final_response"].bool_param
    server.stop_stream()


def contents(address: str, model: str) -> None:
    """Tensors in typed contents, as kserve's client sends them."""
    import grpc
    from tritonclient.grpc import service_pb2

    with inference(address) as service:
        for datatype, field, value in (
            ("BOOL", "bool_contents", True), ("INT8", "int_contents", 3),
            ("INT64", "int64_contents", 3), ("UINT16", "uint_contents", 3),
            ("UINT64", "uint64_contents", 3), ("FP32", "fp32_contents", 1.5),
            ("FP64", "fp64_contents", 1.5), ("BYTES", "bytes_contents", b"a"),
        ):  # fmt: skip
            asked = service_pb2.ModelInferRequest(model_name=model)
            given = asked.inputs.add(name="x", datatype=datatype, shape=[2])
            getattr(given.contents, field).extend([value, value])
            answer = service.ModelInfer(asked)
            assert [*answer.outputs[0].shape] == [2]
            assert len(answer.raw_output_contents) == 1
            given.shape[0] = 3
            with pytest.raises(grpc.RpcError, match="its 2 elements are not the 3") as raised:
                service.ModelInfer(asked)
            assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with grpc.insecure_channel(address) as channel:
        raw = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError, match=r"no inference\.ModelInferRequest"):
            raw(b"\xff\xff")


def call(address: str, model: str, text: str, seconds: str = "240", key: str = "") -> None:
    """Send a text; print the answer, or the status."""
    asked = words_message(model, text)
    answer = infer(address, asked, timeout=float(seconds), metadata=with_key(key))
    if answer is not None:
        say(answer.raw_output_contents[0][4:].decode())


def told(address: str, model: str, key: str) -> None:
    """Whether the model is ready, its versions, and all models; or the status."""
    from tritonclient.grpc import service_pb2

    options = {"metadata": with_key(key)}
    with inference(address) as service, failures_said():
        ready = service.ModelReady(service_pb2.ModelReadyRequest(name=model), **options)
        asked = service_pb2.ModelMetadataRequest(name=model)
        versions = service.ModelMetadata(asked, **options).versions
        index = service.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True), **options)
        say(ready.ready, *versions, *(each.name for each in index.models))


def leave(address: str, model: str, text: str) -> None:
    """Send a text and cancel the call when told to."""

    with inference(address) as service:
        asked = words_message(model, text)
        call = service.ModelInfer.future(asked)
        sys.stdin.readline()
        call.cancel()
        call.exception() if not call.cancelled() else None


def steps(address: str, model: str) -> None:
    """A message for each output of a model of steps."""
    import tritonclient.grpc as client

    answers: queue.Queue[Any] = queue.Queue()
    with client.InferenceServerClient(address) as server:
        server.start_stream(lambda result, error: answers.put((result, error)))
        given = numbers(client, np.array([3]), "INT64")
        server.async_stream_infer(model, [given], enable_empty_final_response=True)
        found = []
        while True:
            result, error = answers.get(timeout=60)
            assert error is None, error
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
            found += result.as_numpy("output").tolist()
        say(*found)
        server.stop_stream()


def unsent(address: str, model: str, key: str) -> None:
    """The status of calls of which no message is sent."""
    import grpc

    never = threading.Event()
    with grpc.insecure_channel(address) as channel:
        for method in ("ModelInfer", "ModelStreamInfer", "ModelReady"):
            call = channel.stream_unary(f"/inference.GRPCInferenceService/{method}")
            with failures_said():
                call(iter(never.wait, None), metadata=with_key(key))
        never.set()


def foreign(address: str, path: str) -> None:
    """The status of a call of another service than ours."""
    import grpc

    with grpc.insecure_channel(address) as channel, failures_said():
        channel.unary_unary(path)(b"")


def framed(address: str) -> None:
    """The status of a call of no model, with a header that says how a body of HTTP comes."""
    infer(address, words_message("other", "a"), metadata=[("transfer-encoding", "gzip")])


def crowd(address: str, model: str, number: str, key: str) -> None:
    """The errors of so many requests in one stream."""
    requests = iter([words_message(model, "a")] * int(number))
    with inference(address) as service:
        answers = [*service.ModelStreamInfer(requests, metadata=with_key(key))]
        say(len(answers), *{each.error_message for each in answers})


def flood(address: str, model: str, text: str = "flood", number: str = "1000") -> None:
    """Send a stream of requests, and read no answer; cancel it when told to."""

    with inference(address) as service:
        asked = words_message(model, text)
        answers = service.ModelStreamInfer(asked for _ in range(int(number)))
        sys.stdin.readline()
        answers.cancel()


def health(address: str, *services: str) -> None:
    """Print the state of each service, and what reflection knows."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
        ProtoReflectionDescriptorDatabase,
    )

    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in services:
            status = stub.Check(health_pb2.HealthCheckRequest(service=name)).status
            say(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
        known = ProtoReflectionDescriptorDatabase(channel)
        say(*sorted(known.get_services()))
        file = known.FindFileContainingSymbol("inference.ModelInferRequest")
        say(file.package, len(file.message_type))
        assert known.FindFileContainingSymbol("grpc.health.v1.Health").package == "grpc.health.v1"


def watch_health(address: str) -> None:
    """Print each state of the server as it comes to be, until it ends."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            for each in stub.Watch(health_pb2.HealthCheckRequest(service="")):
                say(health_pb2.HealthCheckResponse.ServingStatus.Name(each.status))
        except grpc.RpcError:
            pass


def many_parts(address: str, model: str) -> None:
    """The status of a request with more inputs than one may have."""
    from tritonclient.grpc import service_pb2

    asked = service_pb2.ModelInferRequest(model_name=model)
    for number in range(1025):
        asked.inputs.add(name=str(number), datatype="BOOL", shape=[1])
    infer(address, asked)


def descriptors(address: str) -> None:
    """Compare the messages that reflection shows with those of Triton's client."""
    import grpc
    from google.protobuf.descriptor_pb2 import DescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
        ProtoReflectionDescriptorDatabase,
    )
    from tritonclient.grpc import model_config_pb2, service_pb2

    def definition(message: Any) -> DescriptorProto:
        found = DescriptorProto()
        message.CopyToProto(found)
        found.nested_type.sort(key=lambda each: each.name)  # their order means nothing
        return found

    theirs = {
        name: definition(message)
        for module in (service_pb2, model_config_pb2)
        for name, message in module.DESCRIPTOR.message_types_by_name.items()
    }
    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        service = pool.FindServiceByName("inference.GRPCInferenceService")
    for name, message in service.file.message_types_by_name.items():
        ours = definition(message)
        if name in ("ModelConfig", "ModelInput", "ModelOutput"):  # what is not known is left out
            assert all(field in theirs[name].field for field in ours.field)
        else:
            assert ours == theirs[name]
    [kinds] = service.file.enum_types_by_name.values()
    assert [*kinds.values_by_name] == [*model_config_pb2.DataType.keys()]
    for method in service.methods:
        other = service_pb2.DESCRIPTOR.services_by_name[service.name].methods_by_name[method.name]
        assert method.input_type.full_name == other.input_type.full_name
        assert method.output_type.full_name == other.output_type.full_name
        assert method.client_streaming == other.client_streaming
        assert method.server_streaming == other.server_streaming
    say(len(service.methods))


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def run(name: str, *arguments: str) -> None:
    found = globals()[name](*arguments)
    if asyncio.iscoroutine(found):
        asyncio.run(found)


def run_as_told() -> None:
    """One client for each line, of which the answer is a line: what was printed, and a failure."""
    for line in sys.stdin:
        failed = ""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                run(*json.loads(line))
            except Exception:
                failed = traceback.format_exc()
        say(json.dumps([printed.getvalue(), failed]))


if __name__ == "__main__":
    if sys.argv[1:]:
        run(*sys.argv[1:])
    else:
        run_as_told()
