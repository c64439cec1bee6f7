"""What the inputs of a request decode to, as far as their headers tell. Pure.

A file of 10 kB may be an image of 60 million pixels: what a request costs is not what it weighs.
The web process reads some dozen bytes of each input here, before anything is decoded there or in
a worker. A worker refuses an image that is larger than its header says here (``read_image``), so
that nobody gains by an odd header.
"""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .lengths import USUAL_TOKENS
from .tasks import TASKS, parse_item

__all__ = ["LARGE", "UNREADABLE", "Sizes", "image_pixels", "sizes_of", "sound_seconds"]

#: From how many pixels on an image counts as large. Arbitrary: its decoding takes longer than most
#: models do.
LARGE = 1_000_000

#: What an image counts whose header cannot be read here: it may be that large, in a worker.
UNREADABLE = 1_000_000

#: How far the header of a sound is looked for, bytes; and the least bytes a second of one whose
#: header is not there.
_WAVE_HEAD = 4096
_LEAST_RATE = 8000

#: How many segments of a JPEG are looked at for the one that has the size. Photos have some ten.
_MOST_SEGMENTS = 64


class Sizes(NamedTuple):
    """Of the inputs of a request, all together.

    Attributes:
        pixels: of images, decoded.
        large: of those of them that are ``LARGE``.
        seconds: of sounds.
        characters: of texts, each time that the model reads them.
        tokens: that may be generated.
    """

    pixels: int = 0
    large: int = 0
    seconds: float = 0.0
    characters: int = 0
    tokens: int = 0


def sizes_of(task: object, items: Iterable[Any]) -> Sizes | None:
    """Of the items of a request; None for a task that is none of ours. Never raises."""
    known = TASKS.get(task) if isinstance(task, str) else None
    if known is None:
        return None
    if known.takes == "image":
        pixels = [image_pixels(parse_item(item)[1]) for item in items]
        return Sizes(sum(pixels), sum(each for each in pixels if each > LARGE))
    if known.takes == "audio":
        return Sizes(seconds=sum(sound_seconds(parse_item(item)[1]) for item in items))
    characters = tokens = 0
    usual = USUAL_TOKENS if task == "text-generation" else 0
    for item in items:
        if type(item) is str:  # the usual one
            characters += len(item)
            tokens += usual
            continue
        _, inputs, parameters = parse_item(item)
        length = _characters(inputs)
        if isinstance(parameters, Mapping):
            characters += length * _labels(parameters.get("candidate_labels"))
            if usual:
                answers = _number(parameters.get("num_return_sequences"), 1)
                tokens += answers * _number(parameters.get("max_new_tokens"), usual)
        else:
            characters += length
    return Sizes(characters=characters, tokens=tokens)


def _characters(value: object) -> int:
    """Of a text, a pair of them, or a chat."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(each) for each in value.values() if isinstance(each, str))
    if isinstance(value, (list, tuple)):
        return sum(_characters(each) for each in value if isinstance(each, Mapping))
    return 0


def _labels(value: object) -> int:
    if isinstance(value, str):
        return 1 + value.count(",")
    return max(1, len(value)) if isinstance(value, (list, tuple)) else 1


def _number(value: object, usual: int) -> int:
    return value if type(value) is int and value > 0 else usual


# -- files, as bytes or in base64

Read = Callable[[int, int], bytes]


def _content(value: object) -> tuple[Read, int]:
    """How to read some bytes of a file at a place, and about how many it has."""
    if isinstance(value, bytes):
        return lambda at, count: value[at : at + count], len(value)
    if not isinstance(value, str):
        return lambda _at, _count: b"", 0
    start = 0
    if value[:5].lower() == "data:":
        start = value.find(",", 0, 256) + 1
    text = value
    if any(space in text for space in " \n\r\t"):
        start, text = 0, "".join(value[start:].split())

    def read(at: int, count: int) -> bytes:
        first = at // 3
        chunk = text[start + 4 * first : start + 4 * ((at + count + 2) // 3)]
        try:
            decoded = base64.b64decode(chunk + "=" * (-len(chunk) % 4))
        except ValueError:
            return b""
        return decoded[at - 3 * first :][:count]

    return read, (len(text) - start) * 3 // 4


def image_pixels(value: object) -> int:
    """Width times height of an image, by its header. Never raises."""
    try:
        read, _ = _content(value)
        width, height = _image_size(read)
    except Exception:  # what is odd is for the worker to refuse
        return UNREADABLE
    return width * height or UNREADABLE


def _image_size(read: Read) -> tuple[int, int]:
    head = read(0, 32)
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return _big(head[16:20]), _big(head[20:24])
    if head.startswith(b"GIF8"):
        return _little(head[6:8]), _little(head[8:10])
    if head.startswith(b"BM"):
        if _little(head[14:18]) == 12:  # of OS/2
            return _little(head[18:20]), _little(head[20:22])
        # A negative height is that of an image from top to bottom.
        height = int.from_bytes(head[22:26], "little", signed=True)
        return _little(head[18:22]), abs(height)
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        if head[12:16] == b"VP8X":
            return _little(head[24:27]) + 1, _little(head[27:30]) + 1
        if head[12:16] == b"VP8L":
            bits = _little(head[21:25])
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        return _little(head[26:28]) & 0x3FFF, _little(head[28:30]) & 0x3FFF
    if head.startswith(b"\xff\xd8"):
        return _jpeg_size(read)
    return 0, 0


def _jpeg_size(read: Read) -> tuple[int, int]:
    at = 2
    for _ in range(_MOST_SEGMENTS):
        segment = read(at, 9)
        if segment[0] != 0xFF:
            break
        kind = segment[1]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            return _big(segment[7:9]), _big(segment[5:7])
        if kind == 0xFF:
            at += 1
        elif kind in (0x00, 0x01) or 0xD0 <= kind <= 0xD8:
            at += 2
        else:
            at += 2 + _big(segment[2:4])
    return 0, 0


def _big(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")


def sound_seconds(value: object) -> float:
    """How long a sound is, by its header or by its samples. Never raises."""
    if isinstance(value, Mapping):
        raw, rate = value.get("raw"), value.get("sampling_rate")
        if isinstance(raw, (list, tuple)) and isinstance(rate, int) and rate > 0:
            return len(raw) / rate
        return 0.0
    read, size = _content(value)
    try:
        with wave.open(io.BytesIO(read(0, _WAVE_HEAD))) as file:
            width = file.getnchannels() * file.getsampwidth()
            # What is written as it comes does not know its length, and says 4 GB.
            return float(min(file.getnframes(), size // width) / file.getframerate())
    except Exception:  # no sound, or one whose header is long
        return size / _LEAST_RATE
