"""Sizes and lengths of a request's items, estimated in the web process without the model. Pure.

``sizes_of``: decoded sizes, read from file headers. A file of 10 kB may be an image of 60 million
pixels, so its weight says little about its cost. A worker refuses an image that is larger than its
header says here (``read_image``).

``item_length``: the length of an item for batching. It runs for every item, so nothing is decoded
and no tokenizer is loaded. Malformed items count like small ones; the model refuses them later. The
unit is the UTF-8 byte. Counting tokens takes 50 times as long, and a batch is padded to its longest
text, which bytes find as well. Bytes per token are similar in all scripts, about four. Characters
per token are not: four in English, one in Chinese.
"""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from .tasks import GENERATING, MOST_NEW_TOKENS, TASKS, TOKEN_OPERATIONS, parse_item

#: An image with more pixels is large. Arbitrary: decoding it takes longer than most models do.
LARGE = 1_000_000

#: Pixels assumed for an image whose header cannot be read here.
UNREADABLE = 1_000_000

#: Bytes of a sound that are searched for its header; bytes per second assumed without a header.
_WAVE_HEAD = 4096
_LEAST_RATE = 8000

#: Formats of WAV files beside 1, PCM: the format is written further on, and floats.
_EXTENSIBLE, _FLOAT = 0xFFFE, 3

#: Segments of a JPEG that are searched for its size. Photos have about ten.
_MOST_SEGMENTS = 64


class Sizes(NamedTuple):
    """Total sizes of a request's inputs.

    Attributes:
        pixels: decoded pixels of all images.
        large: decoded pixels of the images above ``LARGE``.
        seconds: duration of all sounds.
        longest: duration of the longest sound, of those whose headers can be read.
        characters: characters of all texts, times how often the model reads them.
        tokens: tokens that may be generated.
        answer: bytes of the numbers that are answered, about; 0 if they are few, or not known.
    """

    pixels: int = 0
    large: int = 0
    seconds: float = 0.0
    characters: int = 0
    tokens: int = 0
    answer: int = 0
    longest: float = 0.0


def sizes_of(description: Mapping[str, Any], items: Iterable[Any]) -> Sizes | None:
    """Sizes of a request's items; None for an unknown task. Never raises.

    Args:
        description: the model's.
    """
    task, most_tokens = description.get("task"), description.get("max_tokens")
    known = TASKS.get(task) if isinstance(task, str) else None
    if known is None:
        return None
    if known.takes == "image":
        pixels = [image_pixels(parse_item(item)[1]) for item in items]
        return Sizes(sum(pixels), sum(each for each in pixels if each > LARGE))
    if known.takes == "audio":
        sounds = [parse_item(item)[1] for item in items]
        longest = max((stated_seconds(each) or 0.0 for each in sounds), default=0.0)
        return Sizes(seconds=sum(map(sound_seconds, sounds)), longest=longest)
    characters = tokens = vectors = 0
    embeds = task == "feature-extraction"
    usual = USUAL_TOKENS if task in GENERATING else 0
    for item in items:
        if type(item) is str:  # the usual one
            characters += len(item)
            tokens += usual
            if embeds:
                vectors += _vectors(item, most_tokens)
            continue
        do, inputs, parameters = parse_item(item)
        length = _characters(inputs)
        if embeds:
            of_tokens = do in ("predict", "embed_all")
            vectors += _vectors(inputs, most_tokens) if of_tokens else do == "embed"
        if isinstance(parameters, Mapping):
            characters += length * _labels(parameters.get("candidate_labels"))
            if usual and do in ("predict", "generate"):
                answers = _number(parameters.get("num_return_sequences"), 1)
                tokens += answers * _number(parameters.get("max_new_tokens"), usual)
        else:
            characters += length
    answer = vectors * (description.get("vector_size") or 0) * _BYTES_PER_NUMBER
    return Sizes(characters=characters, tokens=tokens, answer=answer)


def _vectors(inputs: object, most: int | None) -> int:
    """Tokens of an input, each of which has a vector."""
    tokens = int(input_length(inputs)) // BYTES_PER_TOKEN + _SPECIAL_TOKENS
    return tokens if most is None else min(tokens, most)


def _characters(value: object) -> int:
    """Number of characters of a text, a text pair or a chat; of tokens about as many."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(each) for each in value.values() if isinstance(each, str))
    if isinstance(value, (list, tuple)):
        if value and type(value[0]) is int:
            return BYTES_PER_TOKEN * len(value)
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


def _reader(value: object) -> tuple[Read, int]:
    """A function that reads bytes at an offset of a file, and the file's approximate size."""
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
    """Width times height of an image, read from its header. Never raises."""
    try:
        read, _ = _reader(value)
        width, height = _image_size(read)
    except Exception:  # the worker refuses malformed images
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


def plain_wave(content: bytes) -> tuple[bytes, bool]:
    """A WAV file whose header has a format that ``wave`` reads, and whether samples are floats."""
    at = content.find(b"fmt ", 12) + 8
    kind = _little(content[at : at + 2])
    if kind == _EXTENSIBLE:
        kind = _little(content[at + 24 : at + 26])
    elif kind != _FLOAT:
        return content, False
    known = b"\1\0" if kind in (1, _FLOAT) else content[at : at + 2]
    return content[:at] + known + content[at + 2 :], kind == _FLOAT


def sound_seconds(value: object) -> float:
    """Duration of a sound, from its header or its samples. Never raises."""
    stated = stated_seconds(value)
    return _reader(value)[1] / _LEAST_RATE if stated is None else stated


def stated_seconds(value: object) -> float | None:
    """Duration of a sound; None if its header is malformed, or too long. Never raises."""
    if isinstance(value, Mapping):
        raw, rate = value.get("raw"), value.get("sampling_rate")
        if isinstance(raw, (list, tuple)) and isinstance(rate, int) and rate > 0:
            return len(raw) / rate
        return 0.0
    read, size = _reader(value)
    try:
        with wave.open(io.BytesIO(plain_wave(read(0, _WAVE_HEAD))[0])) as file:
            width = file.getnchannels() * file.getsampwidth()
            # A streamed file does not know its length, and says 4 GB.
            return float(min(file.getnframes(), size // width) / file.getframerate())
    except Exception:
        return None


#: Length of items of constant cost: images, which are resized alike, and malformed items.
_CONSTANT = 1.0

#: Bytes of a token, about the same in all scripts.
BYTES_PER_TOKEN = 4

#: Of an answer, as workers send it: float32.
_BYTES_PER_NUMBER = 4

#: Tokens that a tokenizer adds to a text, as a rule.
_SPECIAL_TOKENS = 2

#: Length of a generated token: one forward pass, like about ten input tokens of four bytes each.
#: Arbitrary.
_GENERATED = 40.0
#: Tokens generated by default, as in transformers' pipeline.
USUAL_TOKENS = 256

#: Maximum length with truncation: the 512 tokens that most such models take.
_TRUNCATED = 2048.0

#: Prefixes of PNG, JPEG and GIF images in base64. See ``_text_length`` for WebP and BMP.
_IMAGE_HEADS = ("iVBORw0KGgo", "/9j/", "R0lGOD")
_BYTES_PER_SAMPLE = 2

_MOST_ROWS = 256  # of one item; more are refused


def item_length(item: object) -> float:
    """Length of an item: ``{"do", "inputs", "parameters"}``, or a bare input. Never raises."""
    if type(item) is str:  # the usual one
        return _text_length(item)
    try:
        return _item_length(item)
    except Exception:  # malformed in an unforeseen way
        return _CONSTANT


def _item_length(item: object) -> float:
    do, inputs, parameters = parse_item(item)
    if do == "describe" or do in TOKEN_OPERATIONS:  # the model does not compute them
        return _CONSTANT
    length = input_length(inputs)
    if not isinstance(parameters, Mapping):
        return length
    if parameters.get("truncation") is True:
        length = min(length, _TRUNCATED)
    tokens = parameters.get("max_new_tokens", USUAL_TOKENS if do == "generate" else None)
    if type(tokens) is int:
        length += _GENERATED * min(max(0, tokens), MOST_NEW_TOKENS)
    # Each label or sequence is a row of the batch.
    return length * _rows(
        parameters.get("candidate_labels"), parameters.get("num_return_sequences")
    )


def input_length(value: object) -> float:
    """Length of an input: a text, a text pair, a chat, a sound or an image."""
    if isinstance(value, str):
        return _text_length(value)
    if isinstance(value, bytes):
        is_sound = value[:4] == b"RIFF" and value[8:12] == b"WAVE"
        return max(_CONSTANT, len(value) / _BYTES_PER_SAMPLE) if is_sound else _CONSTANT
    if isinstance(value, Mapping):
        raw = value.get("raw")
        if isinstance(raw, (list, tuple)):
            return max(_CONSTANT, len(raw))
        return max(_CONSTANT, sum(map(_part_length, value.values())))
    if isinstance(value, (list, tuple)):  # of tokens, or of messages
        if value and type(value[0]) is int:
            return float(BYTES_PER_TOKEN * len(value))
        contents = (each.get("content") for each in value if isinstance(each, Mapping))
        return max(_CONSTANT, sum(map(_part_length, contents)))
    return _CONSTANT


def length_of_inputs(length: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A length function of ``CustomModel``'s items from one of the user's inputs.

    Args:
        length: length of an input, as the user's model sees it.
    """
    return partial(_length_of_inputs, length)  # a closure could not be pickled


def _length_of_inputs(length: Callable[[Any], Any], item: object) -> Any:
    do, inputs, _ = parse_item(item)
    return _CONSTANT if do == "describe" else length(inputs)


def _part_length(value: object) -> float:
    return _text_length(value) if isinstance(value, str) else 0.0


def _text_length(text: str) -> float:
    """Length of a text, or of an image or a sound in base64."""
    if not text.isascii():
        return float(len(text.encode("utf-8", "surrogatepass")))
    size = len(text)
    if size < 64:
        return max(_CONSTANT, size)
    start = 0
    if text[:5].lower() == "data:":
        comma = text.find(";base64,", 0, 256) + 7
        start = comma + 1 if comma >= 7 else 0
    head = text[start : start + 16]
    if head.startswith("UklGR"):  # RIFF
        is_sound = head[12:] == "QVZF"  # of WAVE; else it is WebP
        return (size - start) * 3 / 4 / _BYTES_PER_SAMPLE if is_sound else _CONSTANT
    is_image = head.startswith(_IMAGE_HEADS) or (head.startswith("Qk") and head[8:12] == "AAAA")
    return _CONSTANT if is_image or start else size


def _rows(labels: object, sequences: object) -> int:
    rows = 1
    if isinstance(labels, str):
        rows = 1 + labels.count(",")
    elif isinstance(labels, (list, tuple)):
        rows = len(labels)
    elif type(sequences) is int:
        rows = sequences
    return min(max(1, rows), _MOST_ROWS)
