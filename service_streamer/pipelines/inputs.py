"""Read and check inputs: texts, images, sounds.

Nothing here opens a path or a URL from a request. Pipelines would: to them a string is a file on
the server or an address in its network. So they only get decoded images and samples. The decoders
follow no references: no ffmpeg, whose playlists name further files, and only image formats that
Pillow decodes by itself.
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
import re
import wave
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidInput
from .requests import check_unicode, quote
from .sizes import UNREADABLE, image_pixels, plain_wave

_DATA_URL = re.compile(r"data:(?P<type>[\w.+/;=-]*?);base64,", re.IGNORECASE)
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)

#: Formats that Pillow decodes itself, unlike EPS (Ghostscript).
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")

#: Maximum size of an image. Arbitrary: 192 MB decoded; small files may decode to far more.
_MOST_PIXELS = 64_000_000

#: Maximum seconds of a sound. Arbitrary: speech models' memory grows with its square.
_LONGEST_SOUND = 600


def read_text(value: object, *, field: str = "inputs", may_be_blank: bool = False) -> str:
    """Check that a value is a text.

    Args:
        may_be_blank: accept white space.

    Raises:
        InvalidInput: it is not a string, is empty, or is not valid Unicode.
    """
    if not isinstance(value, str):
        raise InvalidInput(f"{field}: must be a string; not {quote(value)}")
    if not value or not (may_be_blank or value.strip()):
        raise InvalidInput(f"{field}: {quote(value)} is empty; send a text")
    check_unicode(field, value)
    return value


def are_tokens(value: object) -> bool:
    """Whether a value is meant as a list of tokens."""
    return isinstance(value, (list, tuple)) and bool(value) and type(value[0]) is int


def read_tokens(value: Sequence[object], size: int, *, field: str = "inputs") -> list[int]:
    """Check a list of a model's tokens.

    Args:
        size: number of tokens that the model has.

    Raises:
        InvalidInput: it is empty, or one of them is not a token of the model.
    """
    if not value:
        raise InvalidInput(f"{field}: the list of tokens is empty; send at least one")
    for token in value:
        if type(token) is not int or not 0 <= token < size:
            raise InvalidInput(
                f"{field}: {quote(token)} is not a token of the model; its tokens are whole "
                f"numbers from 0 to {size - 1}"
            )
    return list(value)  # type: ignore[arg-type]


def read_image(value: object) -> Any:
    """Decode an image from base64, a ``data:`` URL or bytes to a Pillow image.

    Raises:
        InvalidInput: it is not an image, or is too large.
    """
    from PIL import Image  # type: ignore[import-not-found, unused-ignore]

    what = "an image (PNG, JPEG, WebP, GIF or BMP)"
    content = _content(value, what)
    try:
        image = Image.open(io.BytesIO(content), formats=_IMAGE_FORMATS)
        width, height = image.size
        # Admission counted these pixels (sizes.py): a form that looks smaller must not get in.
        is_as_counted = width * height <= max(UNREADABLE, image_pixels(value))
        if is_as_counted and width * height <= _MOST_PIXELS:
            image.load()
    except Image.DecompressionBombError:
        raise InvalidInput(f"inputs: the image is too large; {_most_pixels()}") from None
    except Exception:  # a broken file makes decoders raise anything, SyntaxError included
        raise InvalidInput(f"inputs: {quote(value)} is not {what} that can be read") from None
    if width * height > _MOST_PIXELS:
        raise InvalidInput(
            f"inputs: the image has {width} x {height} pixels, which is too large; {_most_pixels()}"
        )
    if not is_as_counted:
        raise InvalidInput(
            f"inputs: the image has {width} x {height} pixels, but its header has another size; "
            "save it again"
        )
    return image


def _most_pixels() -> str:
    return f"send one of at most {_MOST_PIXELS:,} pixels"


def read_audio(value: object, rate: int) -> Any:
    """The samples of a WAV file or of ``{"sampling_rate", "raw"}``, as a float32 array.

    Args:
        value: the file as base64, ``data:`` URL or bytes; or the samples.
        rate: sampling rate of the model, in Hz.

    Raises:
        InvalidInput: it is neither, is empty or too long, or has another sampling rate.
    """
    if isinstance(value, Mapping):
        samples, found = _raw_samples(value)
    else:
        samples, found = _wave_samples(_content(value, "a WAV file"), value)
    if found != rate:
        raise InvalidInput(
            f"inputs: the sound has {found} samples per second, but the model takes {rate}; "
            "convert it first"
        )
    if not len(samples):
        raise InvalidInput("inputs: the sound is empty; send one with samples")
    if len(samples) > _LONGEST_SOUND * rate:
        raise InvalidInput(
            f"inputs: the sound is {len(samples) / rate:.0f} seconds long, and the limit is "
            f"{_LONGEST_SOUND}; send it in parts"
        )
    return samples


def _content(value: object, what: str) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidInput(f"inputs: must be {what} as a string of base64; not {quote(value)}")
    data_url = _DATA_URL.match(value)
    if data_url is None and _ADDRESS.match(value.lstrip()):
        raise InvalidInput(
            f"inputs: {quote(value)} is an address, and addresses are not fetched; "
            f"send {what} itself, as base64 or as a data: URL"
        )
    encoded = value[data_url.end() :] if data_url else value
    with contextlib.suppress(ValueError):
        return base64.b64decode(encoded, validate=True)
    try:  # white space is rare, and it is slow to remove
        return base64.b64decode("".join(encoded.split()), validate=True)
    except ValueError:
        raise InvalidInput(
            f"inputs: {quote(value)} is not base64; send {what} itself, as base64 or as a data: "
            "URL (paths and addresses are not opened)"
        ) from None


def _raw_samples(value: Mapping[Any, Any]) -> tuple[Any, object]:
    import numpy as np

    wanted = 'inputs: must be {"sampling_rate": 16000, "raw": [samples from -1 to 1]}'
    raw, rate = value.get("raw"), value.get("sampling_rate")
    if value.keys() != {"raw", "sampling_rate"} or type(rate) is not int:
        raise InvalidInput(f"{wanted}; not {quote(dict(value))}")
    is_list = isinstance(raw, Sequence) and not isinstance(raw, (str, bytes))
    if not is_list or not all(type(number) in (int, float) for number in raw or ()):
        raise InvalidInput(f"{wanted}; 'raw' is not a list of numbers")
    if not all(abs(number) <= 1e6 and math.isfinite(number) for number in raw or ()):
        raise InvalidInput(f"{wanted}; a sample is out of range")
    return np.asarray(raw, dtype=np.float32), rate


def _wave_samples(content: bytes, value: object) -> tuple[Any, int]:
    import numpy as np

    try:
        content, is_float = plain_wave(content)
        with wave.open(io.BytesIO(content)) as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError, ValueError, RuntimeError):
        raise InvalidInput(
            f"inputs: {quote(value)} is not a WAV file of PCM or float samples; convert it first"
        ) from None
    frames = frames[: len(frames) - len(frames) % (channels * width)]
    if is_float and width in (4, 8):
        samples: Any = np.frombuffer(frames, f"<f{width}")
        if not (np.abs(samples) <= 1e6).all():
            raise InvalidInput("inputs: a sample of the WAV file is out of range (1,000,000)")
        samples = samples.astype(np.float32)
    elif width == 1:  # unsigned, unlike wider samples
        samples = np.frombuffer(frames, np.uint8).astype(np.float32) / 128 - 1
    elif width == 3:
        wide = np.zeros((len(frames) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(frames, np.uint8).reshape(-1, 3)
        samples = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    elif width in (2, 4) and not is_float:
        samples = np.frombuffer(frames, f"<i{width}").astype(np.float32) / 2 ** (8 * width - 1)
    else:
        kind, best = ("float samples", 4) if is_float else ("samples", 2)
        raise InvalidInput(f"inputs: the WAV file has {kind} of {width} bytes; send {best}")
    return samples.reshape(-1, channels).mean(axis=1, dtype=np.float32), rate
