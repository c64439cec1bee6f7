"""The simulated model of steps on LitServe's continuous batching loop.

POST /predict takes {"inputs": number of outputs}. Each output is a line: when its item began, by
the monotonic clock.
"""
# mypy: ignore-errors

from __future__ import annotations

import argparse
import time
from typing import Any

import litserve
from litserve.loops.continuous_batching_loop import ContinuousBatchingLoop, Output
from litserve.utils import LitAPIStatus

from adapters.steps import BASE, PER_ITEM, PLACES


class Steps(litserve.LitAPI):
    def setup(self, device: str) -> None:  # noqa: ARG002 - LitServe passes it by name
        self._running: dict[str, list[float]] = {}

    def add_request(self, uid: str, request: dict[str, Any]) -> None:
        self._running[uid] = [float(request["inputs"]), time.monotonic()]

    def has_capacity(self) -> bool:
        return len(self._running) < PLACES

    def has_active_requests(self) -> bool:
        return bool(self._running)

    def step(self, _: Any) -> list[Output]:
        running = list(self._running.items())  # others are added meanwhile, in another thread
        time.sleep(BASE + PER_ITEM * len(running))
        outputs = []
        for uid, state in running:
            state[0] -= 1
            outputs.append(Output(uid, state[1], LitAPIStatus.OK))
            if state[0] <= 0:  # what comes with the end is not sent
                outputs.append(Output(uid, 0.0, LitAPIStatus.FINISH_STREAMING))
                del self._running[uid]
        return outputs

    def encode_response(self, output: float) -> str:
        return f"{output}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    server = litserve.LitServer(
        Steps(max_batch_size=PLACES, stream=True, loop=ContinuousBatchingLoop()),
        accelerator="cpu",
        devices=1,
        workers_per_device=1,
        timeout=False,
    )
    server.run(
        host="127.0.0.1",
        port=args.port,
        log_level="error",  # no line per request
        generate_client_file=False,
    )
