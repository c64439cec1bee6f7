"""What an item of ``PipelineModel`` costs, as far as that can be told without the model.

In the web process, for every item: so nothing is decoded, no tokenizer is loaded, and what is odd
costs what a small one does, since it is the model's part to refuse it. The unit is the byte of
UTF-8. Tokens would be better, but take 50 times as long to count; a batch is padded to its longest
text, and which one that is the bytes tell as well. They are alike for all scripts, some four to a
token, where characters are not: four in English, one in Chinese.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .tasks import MOST_NEW_TOKENS, parse_item

__all__ = ["USUAL_TOKENS", "input_length", "item_length", "length_of_inputs"]

#: Of what costs the same each time: images, which are made the same size, and what is odd.
_CONSTANT = 1.0

#: What a token that is generated costs, beside one that is read: it takes a pass of its own through
#: the model, as some ten do that are read at once, of four bytes each. Arbitrary.
_GENERATED = 40.0
#: So many are generated if a request does not say; the pipeline's own default.
USUAL_TOKENS = 256

#: With truncation no text costs more than this: the 512 tokens that most such models take.
_TRUNCATED = 2048.0

#: How encoded images begin; PNG, JPEG, GIF, WebP. Those of BMP have zeros behind their size.
_IMAGES = ("iVBORw0KGgo", "/9j/", "R0lGOD")
_BYTES_OF_SOUND = 2  # for a sample

_MOST_ROWS = 256  # of one item; what asks for more is refused


def item_length(item: object) -> float:
    """What an item costs: ``{"do", "inputs", "parameters"}``, or an input by itself.

    Never raises.
    """
    if type(item) is str:  # the usual one
        return _text(item)
    try:
        return _item_length(item)
    except Exception:  # it is odder than thought of here
        return _CONSTANT


def _item_length(item: object) -> float:
    do, inputs, parameters = parse_item(item)
    if do == "describe":
        return _CONSTANT
    length = input_length(inputs)
    if not isinstance(parameters, Mapping):
        return length
    if parameters.get("truncation") is True:
        length = min(length, _TRUNCATED)
    tokens = parameters.get("max_new_tokens", USUAL_TOKENS if do == "generate" else None)
    if type(tokens) is int:
        length += _GENERATED * min(max(0, tokens), MOST_NEW_TOKENS)
    # Each of them is a row of the batch.
    return length * _rows(
        parameters.get("candidate_labels"), parameters.get("num_return_sequences")
    )


def input_length(value: object) -> float:
    """What an input costs: a text or a pair of them, a chat, a sound, an image."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bytes):
        is_sound = value[:4] == b"RIFF" and value[8:12] == b"WAVE"
        return max(_CONSTANT, len(value) / _BYTES_OF_SOUND) if is_sound else _CONSTANT
    if isinstance(value, Mapping):
        raw = value.get("raw")
        if isinstance(raw, (list, tuple)):
            return max(_CONSTANT, len(raw))
        return max(_CONSTANT, sum(map(_part, value.values())))
    if isinstance(value, (list, tuple)):  # of messages
        contents = (each.get("content") for each in value if isinstance(each, Mapping))
        return max(_CONSTANT, sum(map(_part, contents)))
    return _CONSTANT


def length_of_inputs(length: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """For ``CustomModel``: the costs that a model of somebody's own gives its inputs.

    Args:
        length: of an input as that model sees it.
    """
    return partial(_length_of_inputs, length)  # unlike a closure it travels to workers


def _length_of_inputs(length: Callable[[Any], Any], item: object) -> Any:
    do, inputs, _ = parse_item(item)
    return _CONSTANT if do == "describe" else length(inputs)


def _part(value: object) -> float:
    return _text(value) if isinstance(value, str) else 0.0


def _text(text: str) -> float:
    """Of a text, or of an image or a sound in base64, which comes as one."""
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
        return (size - start) * 3 / 4 / _BYTES_OF_SOUND if is_sound else _CONSTANT
    is_image = head.startswith(_IMAGES) or (head.startswith("Qk") and head[8:12] == "AAAA")
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
