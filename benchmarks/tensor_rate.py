"""Arrays of 602 kB over HTTP and gRPC, beside calls in the program itself.

    python benchmarks/tensor_rate.py [--callers 16] [--seconds 5] [--model simulated|first]

``first`` returns one number of each array: what the way costs. ``simulated`` sleeps 5 ms + 0.1 ms
times n for a batch of n, as a GPU does. Clients are processes of their own: Triton's, and one that
sends the same bytes without making them anew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from rpc_rate import processor_seconds, rate

ROOT = Path(__file__).parent.parent
SHAPE = (3, 224, 224)


def first(batch: list[Any]) -> list[float]:
    return [float(item[0, 0, 0]) for item in batch]


def simulated(batch: list[Any]) -> list[float]:
    time.sleep(5e-3 + 1e-4 * len(batch))
    return first(batch)


def in_program(model: str, callers: int, seconds: float) -> float:
    """Calls a second of ``Streamer.predict``."""
    from service_streamer import Streamer

    array = np.ones(SHAPE, np.float32)
    counts = [0] * callers
    with Streamer(f"tensor_rate:{model}", batch_size=64) as streamer:
        streamer.predict([array])
        begin = time.perf_counter() + 1.0
        end = begin + seconds

        def call(number: int) -> None:
            while (now := time.perf_counter()) < end:
                streamer.predict([array])
                counts[number] += now >= begin

        threads = [threading.Thread(target=call, args=(number,)) for number in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return sum(counts) / seconds


async def of_triton(kind: str, address: str, name: str, callers: int, seconds: float) -> float:
    if kind == "http":
        import tritonclient.http.aio as triton

        client = triton.InferenceServerClient(address, conn_limit=callers)
    else:
        import tritonclient.grpc.aio as triton

        client = triton.InferenceServerClient(address)
    given = triton.InferInput("x", [1, *SHAPE], "FP32")
    given.set_data_from_numpy(np.ones((1, *SHAPE), np.float32))
    async with client:
        return await rate(lambda: client.infer(name, [given]), callers, seconds)


async def of_bytes(address: str, name: str, callers: int, seconds: float) -> float:
    data = np.ones((1, *SHAPE), np.float32).tobytes()
    tensor: dict[str, Any] = {"name": "x", "shape": [1, *SHAPE], "datatype": "FP32"}
    tensor["parameters"] = {"binary_data_size": len(data)}
    header = json.dumps({"inputs": [tensor]}).encode()
    lines = f"POST /v2/models/{name}/infer HTTP/1.1\r\nhost: {address}\r\n"
    lines += f"content-length: {len(header) + len(data)}\r\n"
    lines += f"inference-header-content-length: {len(header)}\r\n\r\n"
    request = lines.encode() + header + data
    host, port = address.split(":")
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(callers)]

    async def call() -> None:
        reader, writer = connections.pop()
        writer.write(request)
        answer = await reader.readuntil(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", answer)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert found is not None
        await reader.readexactly(int(found[1]))
        connections.append((reader, writer))

    try:
        return await rate(call, callers, seconds)
    finally:
        for _, writer in connections:
            writer.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--model", choices=["first", "simulated"], default="simulated")
    parser.add_argument("--client", nargs=3, metavar=("KIND", "HTTP", "GRPC"))
    return parser


def main() -> None:
    options = _parser().parse_args()
    name, size = f"tensor_rate:{options.model}", (options.callers, options.seconds)
    if options.client:
        kind, http, rpc = options.client
        if kind == "in the program":
            print(in_program(options.model, *size))
            return
        import uvloop

        runs: dict[str, Callable[[], Awaitable[float]]] = {
            "bytes, HTTP": lambda: of_bytes(http, name, *size),
            "tritonclient, HTTP": lambda: of_triton("http", http, name, *size),
            "tritonclient, gRPC": lambda: of_triton("grpc", rpc, name, *size),
        }
        print(uvloop.run(runs[kind]()))  # type: ignore[arg-type]
        return

    def measured(kind: str, *addresses: str) -> float:
        again = [sys.executable, __file__, "--callers", str(options.callers), "--model"]
        again += [options.model, "--seconds", str(options.seconds)]
        again += ["--client", kind, *addresses]
        done = subprocess.run(again, check=True, capture_output=True, text=True)
        return float(done.stdout)

    ideal = measured("in the program", "-", "-")
    print(f"{'in the program':20} {ideal:7,.0f} calls/s")
    command = [sys.executable, "-m", "service_streamer", "serve", name, "--port", "0"]
    command += ["--grpc-port", "0", "--batch-size", "64"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT / "benchmarks"
    ) as it:
        try:
            assert it.stdout is not None
            found = re.search(r"http://(\S+) .*gRPC on (\S+)", it.stdout.readline())
            assert found is not None
            for kind in ("bytes, HTTP", "tritonclient, HTTP", "tritonclient, gRPC"):
                before = processor_seconds(it.pid)
                calls = measured(kind, *found.groups())
                used = (processor_seconds(it.pid) - before) / calls / (options.seconds + 1)
                print(
                    f"{kind:20} {calls:7,.0f} calls/s, {calls / ideal:.2f} of those in the "
                    f"program; about {1e6 * used:.0f} µs of the web process for each"
                )
        finally:
            it.terminate()


if __name__ == "__main__":
    main()
