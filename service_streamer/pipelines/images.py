"""The image tasks on tensors: decoding in threads, arithmetic on the device.

An image is decoded, resized and cropped on the CPU, as the model's image processor does it. It
travels to the device as bytes, a quarter of the size of float32 pixels, and is scaled and
normalised there. Only what is answered comes back. Answers are those of transformers' pipelines.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .inputs import read_image
from .requests import Request
from .rows import LabelHandler, RowHandler, default_function

logger = logging.getLogger(__name__)

#: Largest difference to the image processor's own float32 pixels: some roundings.
_TOLERANCE = 1e-5


class ImageFeatures(RowHandler):
    """ "predict" of image-feature-extraction, and what the image tasks share.

    Args:
        pipeline: a pipeline of transformers.
    """

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        self.processor = pipeline.image_processor
        self.arithmetic = _arithmetic(self.processor, pipeline.device)
        # A compiled model needs images of one shape.
        shapes = [
            {name: each.shape for name, each in self._processed(_noise(*size)).items()}
            for size in _EXAMPLES
        ]
        self.has_buckets = shapes[0] == shapes[1]

    def read(self, request: Request) -> Mapping[str, Any]:
        """Decode an image, and process it as far as the device does not."""
        image = upright(read_image(request.inputs))
        request.inputs = image.height, image.width  # for the boxes in it
        return {name: each[0] for name, each in self._processed(image).items()}

    def compute(self, inputs: Mapping[str, Any], plan: Any) -> Any:  # noqa: ARG002
        """Features, as the model's first output."""
        return self.run(inputs)[0]

    def run(self, inputs: Mapping[str, Any]) -> Any:
        if self.arithmetic is not None:
            inputs = {"pixel_values": self.arithmetic(inputs["pixel_values"])}
        return super().run(inputs)

    def results(self, requests: list[Request], outputs: Any) -> list[Any]:
        """The features of each image, as a batch of one."""
        return [[row] for row in outputs[: len(requests)].tolist()]

    def _processed(self, image: Any) -> Mapping[str, Any]:
        options = {} if self.arithmetic is None else _AS_BYTES
        features: Mapping[str, Any] = self.processor(images=[image], return_tensors="pt", **options)
        return features


class ImageClassifier(LabelHandler, ImageFeatures):
    """ "predict" of image-classification."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        self.function = default_function(pipeline.model.config)


class ObjectDetector(ImageFeatures):
    """ "predict" of object-detection."""

    def compute(self, inputs: Mapping[str, Any], plan: Any) -> Any:  # noqa: ARG002
        """What the boxes are made of; not the hidden states."""
        outputs = self.run(inputs)
        return {name: outputs[name].float() for name in ("logits", "pred_boxes")}

    def results(self, requests: list[Request], outputs: Any) -> list[Any]:
        """The objects in each image, in its own pixels."""
        import torch

        labels = self.pipeline.model.config.id2label
        results = []
        for at, request in enumerate(requests):
            alone = _Outputs({name: each[at : at + 1] for name, each in outputs.items()})
            [found] = self.processor.post_process_object_detection(
                alone, request.parameters.get("threshold", 0.5), torch.tensor([request.inputs])
            )
            columns = (found["scores"], found["labels"], found["boxes"].int())
            results.append(
                [
                    {
                        "score": score,
                        "label": labels[label],
                        "box": dict(zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)),
                    }
                    for score, label, box in zip(*(each.tolist() for each in columns), strict=True)
                ]
            )
        return results


class _Outputs(dict[str, Any]):
    """Outputs by name, as items and as attributes."""

    __getattr__ = dict.__getitem__


def upright(image: Any) -> Any:
    """An image in red, green and blue, turned as its camera says."""
    from PIL import ImageOps  # type: ignore[import-not-found, unused-ignore]

    # Many cameras' notes are broken. The pixels are not, and are turned before the rest is read.
    with contextlib.suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)
    return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it


#: Sizes of images to try a processor with: to be made larger and smaller, high and wide.
_EXAMPLES = ((61, 183), (640, 480))

#: What leaves pixels of 8 bits to ``_arithmetic``.
_AS_BYTES = {"do_rescale": False, "do_normalize": False}


def _arithmetic(processor: Any, device: Any) -> Callable[[Any], Any] | None:
    """A function that scales and normalises a batch of bytes on the device.

    None for an image processor that does more than that to pixels, as trying it out shows: it is
    left to make them on the CPU.
    """
    import torch

    if getattr(processor, "do_pad", False):  # what it adds is not normalised
        return None
    try:
        scale = float(processor.rescale_factor) if processor.do_rescale else 1.0
        mean, std = (
            (processor.image_mean, processor.image_std) if processor.do_normalize else (0, 1)
        )
        # (pixel * scale - mean) / std, with one multiplication and one addition.
        factor = scale / torch.tensor(std, dtype=torch.float64).reshape(-1, 1, 1)
        shift = torch.tensor(mean, dtype=torch.float64).reshape(-1, 1, 1) * factor / -scale
        on_cpu, on_device = (
            partial(_normalised, factor=factor.to(where, torch.float32),
                    shift=shift.to(where, torch.float32))
            for where in ("cpu", device)
        )  # fmt: skip
        for size in _EXAMPLES:
            images = [_noise(*size)]
            wanted = processor(images=images, return_tensors="pt")
            pixels = processor(images=images, return_tensors="pt", **_AS_BYTES)
            is_same = (
                wanted.keys() == pixels.keys() == {"pixel_values"}
                and pixels["pixel_values"].dtype == torch.uint8
                and torch.allclose(
                    on_cpu(pixels["pixel_values"]), wanted["pixel_values"], 0, _TOLERANCE
                )
            )
            if not is_same:
                return None
    except Exception:  # a processor without these settings, or with others
        logger.debug("pixels are normalised on the CPU", exc_info=True)
        return None
    return on_device


def _normalised(pixels: Any, *, factor: Any, shift: Any) -> Any:
    import torch

    return pixels.to(torch.float32).mul_(factor).add_(shift)


def _noise(width: int, height: int) -> Any:
    from PIL import Image

    numbers = random.Random(width).randbytes(width * height * 3)
    return Image.frombytes("RGB", (width, height), numbers)
