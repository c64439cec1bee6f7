""" "predict" of the tasks on images and on sounds."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidInput
from .inputs import read_audio, read_image
from .requests import Request, call_pipeline

__all__ = ["AudioPredictor", "ImagePredictor"]


class ImagePredictor:
    """Images that end up in the same size share a batch. Belongs to one thread.

    Args:
        pipeline: a pipeline of transformers.
    """

    limit: int | None = None

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        processor = pipeline.image_processor
        size = dict(getattr(processor, "size", None) or {})
        self._has_one_size = {"height", "width"} <= {
            name for name, each in size.items() if each
        } or (bool(getattr(processor, "do_center_crop", False)))

    def prepare(self, request: Request) -> None:
        """Decode the image. Raises InvalidInput."""
        request.inputs = read_image(request.inputs)
        request.group_by(request.parameters, None if self._has_one_size else request.inputs.size)

    def run(self, requests: list[Request]) -> list[Any]:
        """Compute requests of one group, in one call of the pipeline."""
        inputs = [request.inputs for request in requests]
        return call_pipeline(self.pipeline, inputs, requests[0].parameters, len(inputs))


class AudioPredictor:
    """Sounds of the same length share a batch: padding would change some models' answers.

    Args:
        pipeline: a pipeline of transformers.
    """

    limit: int | None = None

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self.rate: int = pipeline.feature_extractor.sampling_rate

    def prepare(self, request: Request) -> None:
        """Decode the sound. Raises InvalidInput."""
        request.inputs = read_audio(request.inputs, self.rate)
        frames = getattr(self.pipeline.model, "_get_feat_extract_output_lengths", None)
        if frames is not None and self._frames(frames, len(request.inputs)) < 1:
            raise InvalidInput(
                f"inputs: the sound has {len(request.inputs)} samples, too few for the model; "
                "send a longer one"
            )
        request.group_by(request.parameters, len(request.inputs))

    def run(self, requests: list[Request]) -> list[Any]:
        """Compute requests of one group, in one call of the pipeline."""
        inputs = [request.inputs for request in requests]
        return call_pipeline(self.pipeline, inputs, requests[0].parameters, len(inputs))

    @staticmethod
    def _frames(count: Any, samples: int) -> int:
        import torch

        return int(count(torch.tensor([samples])))
