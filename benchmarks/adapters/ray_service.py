"""A workload on Ray Serve: POST /predict takes {"inputs": ...} and answers the result."""
# mypy: ignore-errors

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import tempfile
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from adapters.workloads import BATCH_SIZE, WORKLOADS


def application(args: argparse.Namespace) -> Any:
    @serve.deployment(
        num_replicas=args.workers,
        # Of which it makes its batches: one is computed while the next one gathers, and more.
        max_ongoing_requests=args.max_ongoing_requests,
        max_queued_requests=args.max_queued_requests,
        ray_actor_options={"num_cpus": 0},  # or there would be no more workers than cores
    )
    class Model:
        def __init__(self) -> None:
            self._model = WORKLOADS[args.workload]()
            self._model.load()

        @serve.batch(max_batch_size=BATCH_SIZE, batch_wait_timeout_s=args.batch_wait_timeout_s)
        async def compute(self, batch: list[Any]) -> list[Any]:
            if args.in_thread == "True":
                return await asyncio.to_thread(self._model.predict, batch)
            return self._model.predict(batch)

        async def __call__(self, request: Request) -> JSONResponse:
            return JSONResponse(await self.compute((await request.json())["inputs"]))

    return Model.bind()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batch-wait-timeout-s", type=float, default=0.01)
    parser.add_argument("--in-thread", choices=["True", "False"], default="True")
    parser.add_argument("--max-ongoing-requests", type=int, default=4 * BATCH_SIZE)
    parser.add_argument("--max-queued-requests", type=int, default=-1, help="then 503")
    parser.add_argument("--timeout", type=float, help="of a request, seconds; then 408")
    args = parser.parse_args()
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=True,
        object_store_memory=80 * 2**20,  # nothing is put there
        _temp_dir=tempfile.gettempdir(),
        runtime_env={
            "env_vars": {
                name: os.environ[name]
                for name in ("PYTHONPATH", "YARDSTICK_PIDS", "YARDSTICK_PACKAGES")
                if name in os.environ
            }
        },
    )
    serve.start(
        http_options={
            "host": "127.0.0.1",
            "port": args.port,
            "request_timeout_s": args.timeout,
        },
        logging_config={"enable_access_log": False, "log_level": "ERROR"},
    )
    serve.run(
        application(args),
        route_prefix="/predict",
        logging_config={"enable_access_log": False, "log_level": "ERROR"},
    )
    signal.pause()


if __name__ == "__main__":
    main()
