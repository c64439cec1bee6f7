"""A simulated model on LitServe; run by the interpreter of .rivals/litserve."""
# mypy: ignore-errors

from __future__ import annotations

import argparse

import litserve

import simulated


class Simulated(litserve.LitAPI):
    """Takes {"input": ...} and answers {"output": ...}, as LitServe's own examples do."""

    def __init__(self, name: str, **options: object) -> None:
        super().__init__(**options)
        self._name = name

    def setup(self, device: str) -> None:  # noqa: ARG002 - LitServe passes it by name
        self._model = getattr(simulated, self._name)(None)
        self._model.init_model()

    def decode_request(self, request: dict) -> str:
        return request["input"]

    def predict(self, batch: list[str]) -> list[str]:
        return self._model.predict(batch)

    def encode_response(self, output: str) -> dict:
        return {"output": output}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--wait", type=float, required=True, help="milliseconds")
    parser.add_argument("--api-servers", type=int, required=True)
    parser.add_argument("--queue", choices=["default", "fast"], required=True)
    args = parser.parse_args()
    server = litserve.LitServer(
        Simulated(args.model, max_batch_size=64, batch_timeout=args.wait / 1000),
        accelerator="cpu",
        devices=1,
        workers_per_device=1,
        fast_queue=args.queue == "fast",
    )
    server.run(
        host="127.0.0.1",
        port=args.port,
        num_api_servers=args.api_servers,
        log_level="error",  # no line per request
        generate_client_file=False,
    )
