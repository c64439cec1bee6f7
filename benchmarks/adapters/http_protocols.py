"""How services are asked for one item over HTTP. Pure, and imports nothing of theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["DATATYPES", "PROTOCOLS", "V2_MODEL", "Protocol"]

#: What the model is called where it has to have a name.
V2_MODEL = "model"
#: The names that the Open Inference Protocol has for the types of our items.
DATATYPES = {int: "INT64", str: "BYTES"}


class Protocol(NamedTuple):
    """Attributes:
    path: of a request.
    body: of a request for an item.
    answer: what became of the item, of the JSON that came.
    """

    path: str
    body: Callable[[Any], str]
    answer: Callable[[Any], Any]


def _v2_body(item: Any) -> str:
    tensor = {"name": "input", "shape": [1, 1], "datatype": DATATYPES[type(item)], "data": [item]}
    return json.dumps({"inputs": [tensor]})


PROTOCOLS = {
    "plain": Protocol("/predict", lambda item: json.dumps({"inputs": item}), lambda told: told),
    "v2": Protocol(
        f"/v2/models/{V2_MODEL}/infer", _v2_body, lambda told: told["outputs"][0]["data"][0]
    ),
}
