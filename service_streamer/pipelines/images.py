"""The image tasks by tensors: decoding in threads, arithmetic on the device.

An image is decoded, resized and cropped on the CPU, as the model's image processor does it. It
travels to the device as bytes, a quarter of the size of float32 pixels, and is scaled and
normalised there. Only what is answered comes back. Answers are those of transformers' pipelines.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ..errors import InvalidInput
from ..workers.device import OnHost, to_device, to_host, to_pinned
from .handlers import Handler
from .inputs import read_image
from .labels import Labels
from .requests import Request

__all__ = ["IMAGE_HANDLERS", "ImageClassifier", "ImageFeatures", "ObjectDetector"]

logger = logging.getLogger(__name__)

#: Largest difference to the image processor's own float32 pixels: some roundings.
_TOLERANCE = 1e-5


class ImageFeatures(Handler):
    """ "predict" of image-feature-extraction, and what the image tasks share.

    Args:
        pipeline: a pipeline of transformers.
    """

    #: Parameters on which requests of a forward pass have to agree.
    agreed: tuple[str, ...] = ()

    def __init__(self, pipeline: Any) -> None:
        import torch

        self.pipeline = pipeline
        self.processor = pipeline.image_processor
        self.arithmetic = _arithmetic(self.processor, pipeline.device)
        # Pillow decodes and resizes without the interpreter's lock. torch's number of threads is
        # this worker's share of the processors.
        threads = torch.get_num_threads()
        self._threads = ThreadPoolExecutor(threads, "decode") if threads > 1 else None

    def prepare(self, request: Request) -> None:
        """Nothing: an image is decoded and checked in ``encode``."""

    def encode(self, requests: list[Request]) -> None:
        """Decode the images, and process them on the CPU. Those of one shape share a batch."""
        spread = map if self._threads is None or len(requests) == 1 else self._threads.map
        for request, _ in zip(requests, spread(self._read, requests), strict=True):
            if request.error is None:
                agreed = {name: request.parameters.get(name, "") for name in self.agreed}
                shapes = ((name, tuple(each.shape)) for name, each in request.encoded.items())
                request.group_by(agreed, *shapes)

    def collate(self, requests: list[Request]) -> Any:
        """The model's inputs: a dict of tensors with a row for each image."""
        import torch

        rows = [request.encoded for request in requests]
        for request in requests:
            request.encoded = None  # the rows are copies, and requests live until the answer
        return to_pinned({name: torch.stack([row[name] for row in rows]) for name in rows[0]})

    def forward(self, batch: Any) -> OnHost[Any]:
        """The first output of the model: features."""
        return to_host(self.run(batch)[0])

    def run(self, batch: Mapping[str, Any]) -> Any:
        """The outputs of the model, on the device."""
        import torch

        pipeline = self.pipeline
        with pipeline.device_placement(), torch.inference_mode():
            inputs = to_device(batch, pipeline.device)
            if self.arithmetic is not None:
                inputs = {"pixel_values": self.arithmetic(inputs["pixel_values"])}
            return pipeline.model(
                **{
                    name: each.to(pipeline.dtype) if each.is_floating_point() else each
                    for name, each in inputs.items()
                }
            )

    def finish(self, requests: list[Request], outputs: OnHost[Any]) -> list[Any]:
        """The features of each image, as a batch of one."""
        return [[row] for row, _ in zip(outputs.wait().tolist(), requests, strict=True)]

    def _read(self, request: Request) -> None:
        """Tensors of the image, without a dimension for batches. Called in several threads."""
        try:
            image = _upright(read_image(request.inputs))
        except InvalidInput as error:
            request.error = error
            return
        options = {} if self.arithmetic is None else _AS_BYTES
        features = self.processor(images=[image], return_tensors="pt", **options)
        request.encoded = {name: each[0] for name, each in features.items()}
        request.inputs = image.height, image.width


class ImageClassifier(ImageFeatures):
    """ "predict" of image-classification."""

    agreed = ("function_to_apply",)  # top_k may differ

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        config = pipeline.model.config
        self.labels = Labels(config, "sigmoid" if config.num_labels == 1 else "softmax")

    def collate(self, requests: list[Request]) -> Any:
        """The model's inputs, the function that makes scores, and the number of labels."""
        function = requests[0].parameters.get("function_to_apply")
        return super().collate(requests), function, self.labels.most(requests)

    def forward(self, batch: Any) -> OnHost[Any]:
        """Scores and numbers of the best labels."""
        inputs, function, most = batch
        return to_host(self.labels.rank(self.run(inputs)["logits"], function, most))

    def finish(self, requests: list[Request], outputs: OnHost[Any]) -> list[Any]:
        """The best labels of each image."""
        return self.labels.answers(requests, outputs.wait())


class ObjectDetector(ImageFeatures):
    """ "predict" of object-detection."""

    def forward(self, batch: Any) -> OnHost[dict[str, Any]]:
        """What the boxes are made of, not the hidden states."""
        outputs = self.run(batch)
        return to_host({name: outputs[name].float() for name in ("logits", "pred_boxes")})

    def finish(self, requests: list[Request], outputs: OnHost[dict[str, Any]]) -> list[Any]:
        """The objects in each image, in its own pixels."""
        import torch

        on_cpu = outputs.wait()
        labels = self.pipeline.model.config.id2label
        results = []
        for at, request in enumerate(requests):
            alone = _Outputs({name: each[at : at + 1] for name, each in on_cpu.items()})
            [found] = self.processor.post_process_object_detection(
                alone, request.parameters.get("threshold", 0.5), torch.tensor([request.inputs])
            )
            results.append(
                [
                    {
                        "score": score,
                        "label": labels[label],
                        "box": dict(zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)),
                    }
                    for score, label, box in zip(
                        found["scores"].tolist(), found["labels"].tolist(),
                        found["boxes"].int().tolist(), strict=True,
                    )
                ]
            )  # fmt: skip
        return results


IMAGE_HANDLERS: Mapping[str, Callable[[Any], Handler]] = {
    "image-classification": ImageClassifier,
    "image-feature-extraction": ImageFeatures,
    "object-detection": ObjectDetector,
}


class _Outputs(dict[str, Any]):
    """Outputs by name, as items and as attributes."""

    __getattr__ = dict.__getitem__


def _upright(image: Any) -> Any:
    """An image in red, green and blue, turned as its camera says."""
    from PIL import ImageOps  # type: ignore[import-not-found, unused-ignore]

    with contextlib.suppress(Exception):  # many cameras' notes are broken; the pixels are not
        image = ImageOps.exif_transpose(image)
    return image.convert("RGB")


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
        for size in ((61, 83), (640, 480)):  # to be made larger and smaller, high and wide
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
