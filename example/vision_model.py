"""Image classification: the bytes of a JPEG or PNG go in, what it shows and a score come out.

The model that is shipped is a toy: it knows the ten shapes that ``scripts/train_vision.py`` draws.
What is around it is what an image service needs: decoded, its items are 602 kB each.

There are two models for workers. ``ManagedVisionModel`` takes images as they came and decodes them
itself, while the GPU computes the batch before: little is sent. ``ManagedPixelModel`` takes what
``decode_image`` has returned in the web process, in as many threads as there are cores; a batch
comes as one array, in memory that both processes share. A bad image is not in any batch then.

The web process imports this file to name these, and perhaps to decode. So nothing here may import
torch at module level; numpy and Pillow are only for those who decode.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from service_streamer import InvalidInput, ManagedModel, OnHost, to_device, to_host, to_pinned

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from PIL import Image

DEFAULT_MODEL = Path(__file__).resolve().parent / "models" / "vision"
SAMPLE = Path(__file__).resolve().parent / "data" / "star.jpg"

#: The most that an image may have. It is decoded in memory, of 3 or 4 bytes for each of them, and a
#: file of a few kB can have thousands of millions of them.
MAX_PIXELS = 25_000_000


@dataclass(frozen=True)
class Config:
    """What a model takes and answers, as its ``config.json`` has it.

    Attributes:
        labels: what it tells apart, in the order of its outputs.
        image_size: the width and the height of its input, in pixels.
        mean: what is taken from red, green and blue, of 0 to 1, ...
        std: ... and what they are divided by then.
    """

    labels: tuple[str, ...]
    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def read_config(folder: str | os.PathLike[str] = DEFAULT_MODEL) -> Config:
    """Returns the configuration of the model in a folder.

    Raises:
        FileNotFoundError: there is none.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no model in {os.fspath(folder)!r}; give a folder with config.json and "
            "model.safetensors, as scripts/train_vision.py writes it"
        )
    fields = json.loads(file.read_text("utf-8"))
    return Config(
        tuple(fields["labels"]), fields["image_size"], tuple(fields["mean"]), tuple(fields["std"])
    )


@functools.cache
def _shipped_config() -> Config:
    return read_config()


def decode_image(data: bytes, config: Config | None = None) -> NDArray[np.float32]:
    """Decodes a JPEG or PNG to what the model takes, upright, whatever its size. Any thread.

    Args:
        config: of the model; None for that of the shipped one.

    Returns:
        Colours, rows and columns, normalised: of shape (3, 224, 224), 602 kB.

    Raises:
        InvalidInput: it is no such image, has been cut off, or has too many pixels.
    """
    import numpy as np

    config = config or _shipped_config()
    image = _open(data, config.image_size)
    std = np.array(config.std, np.float32)[:, None, None]
    shift = np.array(config.mean, np.float32)[:, None, None] / std
    pixels = np.empty((3, config.image_size, config.image_size), np.float32)
    np.multiply(np.asarray(image).transpose(2, 0, 1), 1 / (255 * std), out=pixels)
    pixels -= shift
    return pixels


def _open(data: bytes, size: int) -> Image.Image:
    """Returns an image as a square of red, green and blue."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not data:
        raise InvalidInput("image: is empty; send the bytes of a JPEG or PNG")
    try:
        # Only its head is read here.
        with Image.open(io.BytesIO(data), formats=["JPEG", "PNG"]) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise _too_large(f"has {width} x {height} pixels")
            # A JPEG can be decoded at a half, a quarter or an eighth, at a part of the cost.
            image.draft("RGB", (2 * size, 2 * size))
            is_transparent = image.has_transparency_data
            flat = _in_8_bits(image).convert("RGBA" if is_transparent else "RGB")
        # Small first: what comes after that costs little time and memory then.
        square = flat.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=2)
        with contextlib.suppress(Exception):  # many cameras' notes are broken; the pixels are not
            square = ImageOps.exif_transpose(square)
        if is_transparent:
            square = Image.alpha_composite(Image.new("RGBA", square.size, "white"), square)
        return square.convert("RGB")
    except (InvalidInput, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large("has far too many pixels") from None
    except UnidentifiedImageError:
        raise InvalidInput("image: is neither a JPEG nor a PNG; send the bytes of one") from None
    except Exception as error:  # a broken file makes Pillow raise errors of many kinds
        raise InvalidInput(
            f"image: cannot be decoded ({error}); send a whole JPEG or PNG"
        ) from None


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Returns an image as it is, but scaled if it is grey in 16 bits: Pillow would cut it off."""
    if not image.mode.startswith("I;16"):
        return image
    return image.point(lambda value: value / 256, "L")


def _too_large(text: str) -> InvalidInput:
    return InvalidInput(f"image: {text}, and the limit is {MAX_PIXELS:,}; send a smaller one")


def build_network(labels: int) -> torch.nn.Sequential:
    """Returns the network, untrained: from normalised images to a score for each label.

    Its first layer makes the image small, so that an image is a matter of a millisecond.
    """
    from torch import nn

    def layer(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    return nn.Sequential(
        nn.AvgPool2d(4),  # of 224 x 224 pixels 56 x 56 are left
        *layer(3, 16),
        nn.MaxPool2d(2),
        *layer(16, 32),
        nn.MaxPool2d(2),
        *layer(32, 64),
        nn.MaxPool2d(2),
        *layer(64, 128),
        nn.AdaptiveMaxPool2d(1),  # a shape may be anywhere
        nn.Flatten(),
        nn.Linear(128, labels),
    )


class Best(NamedTuple):
    """What a batch of images shows: two tensors with an entry for each image.

    Attributes:
        scores: of 0 to 1.
        numbers: of the labels.
    """

    scores: torch.Tensor
    numbers: torch.Tensor


class VisionModel:
    """A network that tells what an image shows.

    Args:
        model_path: a folder that ``scripts/train_vision.py`` wrote.
        device: where to run, such as ``"cpu"`` or ``"cuda"``; the GPU if there is one by default.

    Raises:
        FileNotFoundError: no model is found at ``model_path``.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str] = DEFAULT_MODEL,
        device: str | torch.device | None = None,
    ) -> None:
        self.config = read_config(model_path)

        import torch
        from safetensors.torch import load_file

        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.network = build_network(len(self.config.labels))
        self.network.load_state_dict(load_file(Path(model_path) / "model.safetensors"))
        self.network.to(self.device).eval()

    def predict(self, batch: list[bytes]) -> list[dict[str, Any]]:
        """Returns what each image shows, in order. Nothing is computed if one is bad.

        Raises:
            InvalidInput: an image is bad, as ``decode_image`` says.
        """
        if not batch:
            return []

        import numpy as np

        return self.classify(np.stack([decode_image(data, self.config) for data in batch]))

    def classify(self, pixels: NDArray[np.float32]) -> list[dict[str, Any]]:
        """Returns what each image shows, as a dict of its ``label`` and its ``score``, 0 to 1.

        Args:
            pixels: what ``decode_image`` returns, as the rows of one array.
        """
        return self.answers(self.compute(pixels))

    def compute(self, pixels: NDArray[np.float32] | torch.Tensor) -> Best:
        """Returns the best score of each image and the number of its label, on the device."""
        import torch

        with torch.inference_mode():
            # Without a copy: the tensor is the array's memory.
            tensor = torch.as_tensor(pixels).to(self.device)
            return Best(*self.network(tensor).softmax(-1).max(-1))

    def answers(self, best: Best) -> list[dict[str, Any]]:
        """Returns what ``classify`` returns, of what ``compute`` returned."""
        labels = self.config.labels
        return [
            {"label": labels[number], "score": score}
            for score, number in zip(best.scores.tolist(), best.numbers.tolist(), strict=True)
        ]


class ManagedVisionModel(ManagedModel):
    """The model in a worker process, which decodes the images, too.

    It decodes the next batch while the GPU computes, in as many threads as there are cores for this
    worker; or in ``preprocess_workers``. Of a bad image the answer is ``{"error": text}``. If that
    were raised, the streamer would compute the others again to find out whose it is, and give that
    up if many are bad.
    """

    def init_preprocess(self, model_path: str | os.PathLike[str] = DEFAULT_MODEL) -> None:
        """Loads what decoding needs; its errors are ``read_config``'s."""
        import torch

        self.config = read_config(model_path)
        self.threads = ThreadPoolExecutor(torch.get_num_threads())

    def init_model(self, model_path: str | os.PathLike[str] = DEFAULT_MODEL) -> None:
        """Loads the model; its arguments and errors are ``VisionModel``'s."""
        self.model = _load(model_path)

    def preprocess(self, items: list[bytes]) -> tuple[list[str], torch.Tensor]:
        """Returns the error of each image, or ``""``; and the good ones' pixels."""
        import torch

        decoded = list(self.threads.map(self._decode, items))
        size = self.config.image_size
        pixels = torch.empty(sum(not isinstance(each, str) for each in decoded), 3, size, size)
        good = (each for each in decoded if not isinstance(each, str))
        for row, each in zip(pixels.numpy(), good, strict=True):
            row[:] = each
        return [each if isinstance(each, str) else "" for each in decoded], to_pinned(pixels)

    def forward(
        self, batch: tuple[list[str], torch.Tensor]
    ) -> tuple[list[str], OnHost[Best] | None]:
        """Computes the good images."""
        model: VisionModel = self.model
        errors, pixels = batch
        if not len(pixels):
            return errors, None
        return errors, to_host(model.compute(to_device(pixels, model.device)))

    def postprocess(self, outputs: tuple[list[str], OnHost[Best] | None]) -> list[dict[str, Any]]:
        """Returns what each image shows, or why it is bad."""
        model: VisionModel = self.model
        errors, best = outputs
        shown = iter([] if best is None else model.answers(best.wait()))
        return [{"error": error} if error else next(shown) for error in errors]

    def _decode(self, data: bytes) -> NDArray[np.float32] | str:
        try:
            return decode_image(data, self.config)
        except InvalidInput as error:
            return str(error)


class ManagedPixelModel(ManagedModel):
    """The model in a worker process, for images that ``decode_image`` has decoded."""

    stack = True  # the images of a batch come as the rows of one array

    def init_model(self, model_path: str | os.PathLike[str] = DEFAULT_MODEL) -> None:
        """Loads the model; its arguments and errors are ``VisionModel``'s."""
        self.model = _load(model_path)

    def preprocess(self, items: NDArray[np.float32]) -> torch.Tensor:
        """Copies the images to where the GPU can copy them from by itself."""
        import torch

        return to_pinned(torch.from_numpy(items))

    def forward(self, batch: torch.Tensor) -> OnHost[Best]:
        """Computes the images."""
        model: VisionModel = self.model
        return to_host(model.compute(to_device(batch, model.device)))

    def postprocess(self, outputs: OnHost[Best]) -> list[dict[str, Any]]:
        """Returns what each image shows, as ``VisionModel.classify`` does."""
        model: VisionModel = self.model
        return model.answers(outputs.wait())


def _load(model_path: str | os.PathLike[str]) -> VisionModel:
    """Returns the model, which has computed for the first time: that is slow, and no user waits."""
    model = VisionModel(model_path)
    model.predict([SAMPLE.read_bytes()])
    return model


if __name__ == "__main__":
    print(VisionModel().predict([SAMPLE.read_bytes()]))
