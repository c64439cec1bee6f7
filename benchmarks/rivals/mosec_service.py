"""A simulated model on mosec; run by the interpreter of .rivals/mosec."""
# mypy: ignore-errors

from __future__ import annotations

import argparse
import json

import msgspec
from mosec import Server, Worker

import simulated

_parser = argparse.ArgumentParser(allow_abbrev=False)
_parser.add_argument("--model", required=True)
_parser.add_argument("--json", choices=["json", "msgspec"], default="json")
_args, _ = _parser.parse_known_args()  # the rest is mosec's own, which reads it itself


class Simulated(Worker):
    """Takes and answers {"inputs": ...}, as many as there are of them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = getattr(simulated, _args.model)(None)
        self.model.init_model()

    def forward(self, data: list[dict]) -> list[dict]:
        outputs = self.model.predict([each["inputs"] for each in data])
        return [{"outputs": each} for each in outputs]

    if _args.json == "msgspec":

        def deserialize(self, data: bytes) -> dict:
            return msgspec.json.decode(data)

        def serialize(self, data: dict) -> bytes:
            return msgspec.json.encode(data)

    else:

        def deserialize(self, data: bytes) -> dict:
            return json.loads(data)

        def serialize(self, data: dict) -> bytes:
            return json.dumps(data).encode()


if __name__ == "__main__":
    server = Server()
    # How long a batch waits for company is mosec's --wait: 0 cannot be said in another way.
    server.append_worker(Simulated, num=1, max_batch_size=64)
    server.run()
