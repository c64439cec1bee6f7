"""A workload on LitServe: POST /predict takes {"inputs": ...} and answers the result."""
# mypy: ignore-errors

from __future__ import annotations

import argparse
from typing import Any

import litserve

from adapters.workloads import BATCH_SIZE, WORKLOADS


class Model(litserve.LitAPI):
    def __init__(self, workload: str, **options: Any) -> None:
        super().__init__(**options)
        self._workload = workload

    def setup(self, device: str) -> None:  # noqa: ARG002 - LitServe passes it by name
        self._model = WORKLOADS[self._workload]()
        self._model.load()

    def decode_request(self, request: dict) -> Any:  # LitServe reads this annotation
        return request["inputs"]

    def predict(self, batch: list[Any]) -> list[Any]:
        return self._model.predict(batch)

    def encode_response(self, output: Any) -> Any:
        return output


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--wait", type=float, default=0.0, help="for company, seconds")
    parser.add_argument("--api-servers", type=int, default=1)
    parser.add_argument("--queue", choices=["default", "fast"], default="default")
    parser.add_argument("--timeout", type=float, default=30, help="seconds in the queue; then 504")
    args = parser.parse_args()
    server = litserve.LitServer(
        Model(args.workload, max_batch_size=BATCH_SIZE, batch_timeout=args.wait),
        accelerator="cpu",
        devices=1,
        workers_per_device=args.workers,
        timeout=args.timeout,
        fast_queue=args.queue == "fast",
        restart_workers=True,  # not the default, which ends the whole service with a worker
    )
    server.run(
        host="127.0.0.1",
        port=args.port,
        num_api_servers=args.api_servers,
        log_level="error",  # no line per request
        generate_client_file=False,
    )
