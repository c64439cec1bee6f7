"""A workload on mosec: POST /predict takes {"inputs": ...} and answers the result."""
# mypy: ignore-errors

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import msgspec
from mosec import Server, Worker

from adapters.workloads import BATCH_SIZE, WORKLOADS

_parser = argparse.ArgumentParser(allow_abbrev=False)
_parser.add_argument("--workload", choices=WORKLOADS, required=True)
_parser.add_argument("--workers", type=int, default=1)
_parser.add_argument("--json", choices=["json", "msgspec"], default="json")
# The rest is mosec's own: --port, --wait (milliseconds; 0 cannot be said to append_worker),
# --capacity (requests that wait; then 429), --timeout (milliseconds; then 408).
_args, _ = _parser.parse_known_args()
sys.argv += ["--address", "127.0.0.1", "--log-level", "error"]


class Model(Worker):
    def __init__(self) -> None:
        super().__init__()
        self._model = WORKLOADS[_args.workload]()
        self._model.load()

    def forward(self, data: list[dict[str, Any]]) -> list[Any]:
        return self._model.predict([each["inputs"] for each in data])

    if _args.json == "msgspec":

        def deserialize(self, data: bytes) -> dict[str, Any]:
            return msgspec.json.decode(data)

        def serialize(self, data: Any) -> bytes:
            return msgspec.json.encode(data)

    else:

        def deserialize(self, data: bytes) -> dict[str, Any]:
            return json.loads(data)

        def serialize(self, data: Any) -> bytes:
            return json.dumps(data).encode()


if __name__ == "__main__":
    os.environ.setdefault("MOSEC_PATH", os.path.abspath("mosec"))
    server = Server()
    server.append_worker(Model, num=_args.workers, max_batch_size=BATCH_SIZE, route="/predict")
    server.run()
