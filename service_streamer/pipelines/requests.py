"""The requests of a pipeline, their parameters and how those are checked."""

from __future__ import annotations

import itertools
import json
import math
import reprlib
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from ..errors import InvalidInput

_numbers = itertools.count()


class Request:
    """One item of a batch.

    Attributes:
        do: the operation.
        inputs: as sent; decoded by the handler's ``prepare``.
        parameters: checked.
        position: its index in the batch.
        encoded: the inputs' tokens, or the pixels of an image, if the handler keeps them.
        error: why it is invalid, if the handler found that out later than in ``prepare``.
        tokens: number of tokens of the inputs, or of samples, once counted.
        wants_arrays: whether many numbers may come as a numpy array, and not in lists.
        key: requests with the same key are computed together.
    """

    __slots__ = (
        "do", "encoded", "error", "inputs", "key", "parameters", "position", "tokens",
        "wants_arrays",
    )  # fmt: skip

    def __init__(self, do: str, inputs: Any, parameters: dict[str, Any], position: int = 0) -> None:
        self.do = do
        self.position = position
        self.encoded: Any = None
        self.error: InvalidInput | None = None
        self.inputs = inputs
        self.parameters = parameters
        self.tokens = 0
        self.wants_arrays = False
        self.key: Hashable = None

    def group_by(self, options: Mapping[str, Any], *more: Hashable) -> None:
        """Share a batch with requests that have the same options, and the same ``more``."""
        self.key = (self.do, tuple(sorted(options.items())), more)

    def be_alone(self) -> None:
        """Share a batch with no other request."""
        self.key = next(_numbers)


def call_pipeline(
    pipeline: Any, inputs: list[Any], options: Mapping[str, Any], batch_size: int
) -> list[Any]:
    """Call a transformers pipeline; one output per input.

    A single input is passed alone: pipelines return another form for it.
    """
    options = {
        name: list(value) if isinstance(value, tuple) else value for name, value in options.items()
    }
    if len(inputs) == 1:
        return [pipeline(inputs[0], batch_size=batch_size, **options)]
    return list(pipeline(inputs, batch_size=batch_size, **options))


def plain(value: Any) -> Any:
    """A result as JSON data: numpy and torch values become numbers and lists.

    Other values stay as they are.
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {plain(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        if value and type(value[0]) is float and type(value[-1]) is float:
            return value  # an embedding: already plain floats
        return [plain(each) for each in value]
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else tolist()


def has_arrays(value: object) -> bool:
    """Whether an input is an array or tensor, or a dict with one."""
    if isinstance(value, Mapping):
        return any(map(has_arrays, value.values()))
    return hasattr(value, "__array__")


def with_arrays(value: Any) -> Any:
    """A result as JSON data and numpy arrays: torch values become arrays.

    Who asks needs no torch then. Other values stay as they are.
    """
    if value is None or type(value) in (str, bytes, bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {plain(name): with_arrays(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        if value and type(value[0]) is float and type(value[-1]) is float:
            return value
        return [with_arrays(each) for each in value]
    detach = getattr(value, "detach", None)
    if detach is None:
        return value
    tensor = detach().cpu()
    # numpy has no such type; its values fit into the wider one.
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()


#: The most characters of one text. Arbitrary.
_LONGEST_TEXT = 2000

#: The most characters of an object, such as a JSON schema. Arbitrary.
_LONGEST_OBJECT = 20_000

#: The most tokens whose logits a request may change. Arbitrary.
_MOST_BIASES = 300

_brief = reprlib.Repr()  # cuts off before it writes a million samples
_brief.maxstring = _brief.maxother = 60


class Parameter(NamedTuple):
    """Type and range of one parameter.

    Attributes:
        type: "integer", "number", "boolean", "string" (one of ``choices`` if there are any),
            "strings" (one string, or a list of ``low``, else 1, to ``high``), "object" (kept as
            JSON), "biases" (numbers from ``low`` to ``high`` by token, kept as pairs).
        about: description for the API documentation.
        low, high: range of numbers, inclusive; ``above`` is an exclusive lower bound.
        null: the meaning of null, if it is not "not given".
    """

    type: str
    about: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    null: str = ""

    def schema(self) -> dict[str, Any]:
        """As JSON schema (2020-12)."""
        if self.type == "strings":
            text = {"type": "string", "minLength": 1, "maxLength": _LONGEST_TEXT}
            texts = {
                "type": "array",
                "items": text,
                "minItems": self._fewest,
                "maxItems": self.high,
            }
            return {"anyOf": [text, texts, {"type": "null"}], "description": self.about}
        if self.type == "biases":
            number = {"type": "number", "minimum": self.low, "maximum": self.high}
            return {
                "type": ["object", "null"],
                "additionalProperties": number,
                "maxProperties": _MOST_BIASES,
                "description": self.about,
            }
        schema: dict[str, Any] = {"type": [self.type, "null"], "description": self.about}
        if self.choices:
            schema["enum"] = [*self.choices, None]
        for name, bound in (
            ("minimum", self.low), ("maximum", self.high), ("exclusiveMinimum", self.above)
        ):  # fmt: skip
            if bound is not None:
                schema[name] = bound
        return schema

    def check(self, name: str, value: object) -> Any:
        """The value in a canonical form, so that equal values share a batch.

        Raises:
            InvalidInput: the type is wrong, or the value is out of range.
        """
        checked = getattr(self, f"_check_{self.type}")(value)
        if checked is None:
            raise InvalidInput(f"parameters.{name}: must be {self._wanted()}; not {quote(value)}")
        for text in checked if self.type == "strings" else ():
            check_unicode(f"parameters.{name}", text)
        return checked

    def _check_integer(self, value: object) -> int | None:
        return value if type(value) is int and self._is_within(value) else None

    def _check_number(self, value: object) -> float | None:
        if type(value) is int and abs(value) > 1e9:  # float() of a large one raises
            return None
        is_number = type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
        return float(value) if is_number and self._is_within(value) else None  # type: ignore[arg-type]

    def _check_boolean(self, value: object) -> bool | None:
        return value if isinstance(value, bool) else None

    def _check_string(self, value: object) -> str | None:
        if not isinstance(value, str) or not 1 <= len(value) <= _LONGEST_TEXT:
            return None
        return value if not self.choices or value in self.choices else None

    def _check_object(self, value: object) -> str | None:
        if not isinstance(value, Mapping):
            return None
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            return None
        return text if len(text) <= _LONGEST_OBJECT else None

    def _check_biases(self, value: object) -> tuple[tuple[int, float], ...] | None:
        if not isinstance(value, Mapping) or len(value) > _MOST_BIASES:
            return None
        biases: dict[int, float] = {}
        for token, each in value.items():
            name = str(token)
            number = self._check_number(each)
            if number is None or not (name.isascii() and name.isdecimal() and len(name) < 10):
                return None
            biases[int(name)] = number
        return tuple(sorted(biases.items()))

    def _check_strings(self, value: object) -> tuple[str, ...] | None:
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, (list, tuple)) or not (
            self._fewest <= len(texts) <= (self.high or 1)
        ):
            return None
        good = (isinstance(text, str) and 0 < len(text) <= _LONGEST_TEXT for text in texts)
        return tuple(texts) if all(good) else None

    @property
    def _fewest(self) -> float:
        return 1 if self.low is None else self.low

    def _is_within(self, value: Any) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )

    def _wanted(self) -> str:
        if self.type == "boolean":
            return "true or false"
        if self.choices:
            return "one of " + ", ".join(map(repr, self.choices))
        if self.type == "string":
            return f"a string of 1 to {_LONGEST_TEXT} characters"
        if self.type == "object":
            return f"a JSON object of at most {_LONGEST_OBJECT} characters"
        if self.type == "biases":
            return (
                f"an object of at most {_MOST_BIASES} numbers from {self.low} to {self.high}, each "
                "with the number of a token as its name"
            )
        if self.type == "strings":
            return (
                f"a string, or a list of {self._fewest} to {self.high} strings, "
                f"of 1 to {_LONGEST_TEXT} characters each"
            )
        noun = "a whole number" if self.type == "integer" else "a number"
        if self.above is not None:
            return f"{noun} above {self.above:g} and at most {self.high:g}"
        return f"{noun} from {self.low} to {self.high}" + (
            f", or null for {self.null}" if self.null else ""
        )


def check_unicode(field: str, text: str) -> None:
    """Refuse a lone surrogate, which JSON can carry ("\\ud83d") but tokenizers cannot take.

    Raises:
        InvalidInput: the text has one.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(
            f"{field}: {quote(text)} is not valid Unicode; remove its lone surrogate"
        ) from None


def quote(value: object) -> str:
    """A value shortened for a message."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    try:
        text = _brief.repr(value)
    except ValueError:  # an int of more digits than Python writes
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."
