"""Items that become tensors one by one, such as images and sounds, and share a forward pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import InvalidInput
from ..gpu.transfers import OnHost, to_device, to_host, to_pinned
from .handlers import Handler
from .requests import Request


class RowHandler(Handler):
    """Each item is a row of the model's inputs; rows of the same shapes share a forward pass.

    Parameters may differ within a batch.

    Args:
        pipeline: a pipeline of transformers, whose model and processor are used.
    """

    has_buckets = True

    def __init__(self, pipeline: Any) -> None:
        import torch

        self.pipeline = pipeline
        # Decoders and most arithmetic run without the interpreter's lock. torch's number of threads
        # is this worker's share of the processors.
        threads = torch.get_num_threads()
        self._threads = ThreadPoolExecutor(threads, "rows") if threads > 1 else None

    def prepare(self, request: Request) -> None:
        """Nothing: an item is checked in ``encode``, in several threads."""

    def encode(self, requests: list[Request]) -> None:
        spread = map if self._threads is None or len(requests) == 1 else self._threads.map
        for request, row in zip(requests, spread(self._try, requests), strict=True):
            if request.error is None:
                request.encoded = row
                request.group_by({}, *((name, tuple(each.shape)) for name, each in row.items()))

    def collate(self, requests: list[Request]) -> tuple[dict[str, Any], Any]:
        """The model's inputs, with a row for each item, and the plan."""
        import torch

        rows = [request.encoded for request in requests]
        for request in requests:
            request.encoded = None  # the batch has a copy, and requests live until the answer
        rows += rows[-1:] * (self.buckets.shape(len(rows))[0] - len(rows))
        inputs = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return to_pinned((inputs, self.plan(requests)))

    def forward(self, batch: tuple[dict[str, Any], Any]) -> OnHost[Any]:
        import torch

        with self.pipeline.device_placement(), torch.inference_mode():
            inputs, plan = to_device(batch, self.pipeline.device)
            return to_host(self.compute(inputs, plan))

    def finish(self, requests: list[Request], outputs: OnHost[Any]) -> list[Any]:
        return self.results(requests, outputs.wait())

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """The outputs of the model, for inputs on its device."""
        dtype = self.pipeline.dtype
        return self.pipeline.model(
            **{
                name: each.to(dtype) if each.is_floating_point() else each
                for name, each in inputs.items()
            }
        )

    def _try(self, request: Request) -> Mapping[str, Any]:
        try:
            return self.read(request)
        except InvalidInput as error:
            request.error = error
            return {}

    @abstractmethod
    def read(self, request: Request) -> Mapping[str, Any]:
        """The model's inputs for one item, on the CPU, without a dimension for batches.

        Called in several threads. Raises InvalidInput.
        """

    def plan(self, requests: list[Request]) -> Any:  # noqa: ARG002
        """What ``compute`` has to know of the requests."""
        return None

    @abstractmethod
    def compute(self, inputs: Mapping[str, Any], plan: Any) -> Any:
        """Run the model, and compute what is answered, on its device.

        Args:
            inputs: the model's, on its device. There may be more rows than requests; those behind
                are of no use.
            plan: of the requests.

        Returns:
            Tensors in any container.
        """

    @abstractmethod
    def results(self, requests: list[Request], outputs: Any) -> list[Any]:
        """One result per request, as JSON data, from what ``compute`` returned, on the host."""
