"""Calls a second over gRPC, beside HTTP and the ideal of a simulated GPU.

    python benchmarks/rpc_rate.py [--streams 128] [--seconds 5]

A batch of n sleeps 5 ms + 0.1 ms × n, in batches of at most 64: at best 5,614 calls a second. The
client is a process of its own, which needs a core, as the service does.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MODEL = "rpc_rate:simulated"
IDEAL = 64 / (5e-3 + 64 * 1e-4)


def simulated(batch: list[Any]) -> list[Any]:
    """The model."""
    time.sleep(5e-3 + 1e-4 * len(batch))
    return [1] * len(batch)


async def over_rpc(address: str, streams: int, seconds: float) -> float:
    """Calls a second of so many that wait for their answer."""
    import grpc

    from service_streamer.serve.rpc.inference_messages import SERVICE, ModelInferRequest

    message = ModelInferRequest(model_name=MODEL)
    message.inputs.add(name="x", datatype="INT64", shape=[1]).contents.int64_contents.append(1)
    data = message.SerializeToString()
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        return await rate(lambda: call(data), streams, seconds)


async def over_http(address: str, path: str, body: bytes, streams: int, seconds: float) -> float:
    """The same over HTTP/1.1, a connection for each stream, without a library in between."""
    host, port = address.split(":")
    head = f"POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(streams)]

    async def call() -> None:
        reader, writer = connections.pop()
        writer.write(request)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer.decode())
        found = re.search(rb"content-length: (\d+)", answer)
        assert found is not None
        await reader.readexactly(int(found[1]))
        connections.append((reader, writer))

    try:
        return await rate(call, streams, seconds)
    finally:
        for _, writer in connections:
            writer.close()


async def rate(call: Any, streams: int, seconds: float) -> float:
    """Calls a second, after a second to become warm."""
    begin = time.perf_counter() + 1.0
    end = begin + seconds
    counted = 0

    async def caller() -> None:
        nonlocal counted
        while (now := time.perf_counter()) < end:
            await call()
            counted += now >= begin

    await asyncio.gather(*(caller() for _ in range(streams)))
    return counted / seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--client", nargs=3, metavar=("KIND", "HTTP", "GRPC"))
    return parser


def main() -> None:
    options = _parser().parse_args()
    if options.client:
        import uvloop

        kind, http, rpc = options.client
        size = options.streams, options.seconds
        v2 = b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT64","data":[1]}]}'
        runs = {
            "gRPC": lambda: over_rpc(rpc, *size),
            "HTTP, /v2": lambda: over_http(http, f"/v2/models/{MODEL}/infer", v2, *size),
            "HTTP, /predict": lambda: over_http(http, "/predict", b'{"inputs":1}', *size),
        }
        print(uvloop.run(runs[kind]()))
        return
    command = [sys.executable, "-m", "service_streamer", "serve", MODEL, "--port", "0"]
    command += ["--grpc-port", "0", "--batch-size", "64"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT / "benchmarks"
    ) as it:
        try:
            assert it.stdout is not None
            found = re.search(r"http://(\S+) .*gRPC on (\S+)", it.stdout.readline())
            assert found is not None
            for kind in ("gRPC", "HTTP, /v2", "HTTP, /predict"):
                again = [sys.executable, __file__, "--streams", str(options.streams)]
                again += ["--seconds", str(options.seconds), "--client", kind, *found.groups()]
                before = processor_seconds(it.pid)
                done = subprocess.run(again, check=True, capture_output=True, text=True, cwd=ROOT)
                calls = float(done.stdout)
                used = (processor_seconds(it.pid) - before) / calls / (options.seconds + 1)
                print(
                    f"{kind:16} {calls:7,.0f} calls/s, {calls / IDEAL:.2f} of the ideal; about "
                    f"{1e6 * used:.0f} µs of the web process for each"
                )
        finally:
            it.terminate()


def processor_seconds(pid: int) -> float:
    """What a process has used so far, with its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


if __name__ == "__main__":
    main()
