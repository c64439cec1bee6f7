"""A workload on MLServer: POST /v2/models/model/infer takes one item, see ``http_protocols``."""
# mypy: ignore-errors

from __future__ import annotations

import argparse
import asyncio

from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.settings import ModelParameters
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput

from adapters.http_protocols import DATATYPES, V2_MODEL
from adapters.workloads import BATCH_SIZE, WORKLOADS


class Model(MLModel):
    async def load(self) -> bool:
        self._model = WORKLOADS[self.settings.parameters.extra["workload"]]()
        self._model.load()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        outputs = self._model.predict(list(payload.inputs[0].data))
        kind = DATATYPES[type(outputs[0])]
        output = ResponseOutput(name="output", shape=[len(outputs), 1], datatype=kind, data=outputs)
        return InferenceResponse(model_name=self.name, outputs=[output])


async def serve(args: argparse.Namespace) -> None:
    server = MLServer(
        Settings(
            host="127.0.0.1",
            http_port=args.port,
            grpc_port=args.grpc_port,
            metrics_endpoint=None,
            parallel_workers=args.workers,
            debug=False,
        )
    )
    model = ModelSettings(
        name=V2_MODEL,
        implementation="adapters.mlserver_service.Model",  # workers import it by this name
        max_batch_size=BATCH_SIZE,
        max_batch_time=args.wait,
        parameters=ModelParameters(extra={"workload": args.workload}),
    )
    await server.start([model])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--grpc-port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--wait", type=float, default=0.001, help="for company, seconds")
    asyncio.run(serve(parser.parse_args()))
