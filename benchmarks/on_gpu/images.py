"""Images of 602 kB to a device: in a list, in one array, from memory that is registered with CUDA;
and back again as tensors of the device."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from on_gpu.device import as_visible
from on_gpu.running import Row, answer
from on_gpu.streamed import PATIENCE, feed
from service_streamer import ManagedModel, Streamer

__all__ = ["Listed", "Returned", "Stacked"]

_SHAPE = 3, 224, 224
_COUNT = 64  # different ones
_BATCH = 32


class Listed(ManagedModel):
    """Means of images, computed on the device."""

    def init_model(self, device: str) -> None:
        import torch

        warnings.filterwarnings("ignore", message=".*not writable.*")
        self.torch: Any = torch
        self.device = device

    def predict(self, batch: Any) -> Any:
        return self.moved(batch).mean(dim=(1, 2, 3))

    def moved(self, batch: Any) -> Any:
        images = self.torch.stack([self.torch.from_numpy(image) for image in batch])
        return images.to(self.device)


class Stacked(Listed):
    """They come as one array."""

    stack = True

    def moved(self, batch: Any) -> Any:
        return self.torch.from_numpy(batch).to(self.device)


class Returned(Stacked):
    """The images themselves, from the device, twice as bright."""

    def predict(self, batch: Any) -> Any:
        return self.moved(batch) * 2


def measure(settings: Row) -> Iterator[Row]:
    import numpy as np

    images = [np.full(_SHAPE, number, np.float32) for number in range(_COUNT)]
    for model in (Listed, Stacked, Returned):
        if model.__name__ not in settings["models"]:
            continue
        with Streamer(
            model,
            batch_size=_BATCH,
            cuda_devices=[as_visible(settings["device"])],
            model_init_args=("cpu" if settings["device"] == "cpu" else "cuda",),
            batch_timeout=PATIENCE,
            start_timeout=PATIENCE,
        ) as streamer:
            streamer.wait_ready(PATIENCE)
            expected = itertools.cycle(range(_COUNT))
            seen = _Seen(expected, is_image=model is Returned)
            window = feed(
                streamer,
                itertools.cycle([[image] for image in images]),
                in_flight=4 * _BATCH,
                step=_BATCH,
                warm=settings["warm"],
                seconds=settings["seconds"],
                check=seen,
            )
            yield {
                "model": model.__name__,
                "images_per_s": window.rate,
                "gb_per_s": window.rate * images[0].nbytes / 1e9,
                "checked": seen.checked,
                "wrong": seen.wrong,
                "arrived_on": seen.arrived_on,
                "web_process_has_cuda": _has_cuda(),
            }


class _Seen:
    """Looks at results as they come: the means of the images, or the images."""

    def __init__(self, expected: Iterator[int], *, is_image: bool) -> None:
        self._expected = expected
        self._is_image = is_image
        self.checked = self.wrong = 0
        self.arrived_on = ""

    def __call__(self, results: list[Any]) -> None:
        (result,) = results
        self.arrived_on = str(result.device)
        self.checked += 1
        wanted = next(self._expected)
        if self._is_image:  # the corners, since to look at all of it takes its time
            self.wrong += tuple(result.shape) != _SHAPE or not (
                float(result[0, 0, 0]) == float(result[-1, -1, -1]) == 2 * wanted
            )
        else:
            self.wrong += abs(float(result) - wanted) > 1e-2


def _has_cuda() -> bool:
    """Whether this process, which got tensors of a device, has touched CUDA for them."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


if __name__ == "__main__":
    answer(measure)
